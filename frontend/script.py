"""The layer calls of a model as text: what a saved model is built again from.

A recording keeps functions that emit operators, which no file can hold. So it also keeps which of
its methods were called, with which arguments: the architecture is that list, for any batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.recording import Recording


@dataclass(frozen=True)
class Written:
    """A call of a layer method, as it was made.

    again: kinds and names of what it records, and the number of calls before, where the layer is
    shared and was called before.
    """

    method: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    again: tuple[tuple[tuple[str, str], ...], int] | None = None


@dataclass
class Script:
    """The calls of a recording that recorded something, each once however it is made."""

    calls: list[Written] = field(default_factory=list)
    _inside: bool = False

    def run(
        self, recording: Recording, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a method of a recording, and keep the call if it has recorded layers."""
        if self._inside:
            return function(*args, **kwargs)
        before, self._inside = len(recording.calls), True
        given = recording.given
        named = 0 if given is None else len(given.names)
        try:
            made = function(*args, **kwargs)
        finally:
            self._inside = False
        if len(recording.calls) > before:
            again = None
            if given is not None and given.calls:
                again = tuple(given.names[named:]), given.calls
            self.calls.append(Written(function.__name__, tuple(args[1:]), dict(kwargs), again))
        return made


def to_json(recording: Recording) -> tuple[list[Any], dict[str, Array]]:
    """Return the calls of a recording for JSON, and the arrays that they were given, by name.

    Raises:
        GraphError: an argument that no file can have, such as a function; names the layer.
    """
    arrays: dict[str, Array] = {}

    def kept(array: Array) -> str:
        name = f"argument.{len(arrays)}"
        arrays[name] = array
        return name

    def said(value: Any, call: Written) -> Any:
        from soapstone.frontend.recording import Tensor

        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": value.index}
        if isinstance(value, tuple | list):
            return {type(value).__name__: [said(each, call) for each in value]}
        if isinstance(value, Initial):
            return {"initial": [value.kind, value.scale]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray):
            return {"array": kept(value)}
        if call.method == "onnx":
            from soapstone.frontend.onnx.trained import written

            chosen = {name: call.kwargs.get(name) for name in ("outputs", "name")}
            file, weights = written(value, recording.graph.roles, **chosen)
            return {"onnx": [kept(file), weights]}
        raise GraphError(
            f"save: layer {call.method!r} was given a {type(value).__name__}, which no file can"
            " have; save_checkpoint writes the weights alone"
        )

    calls = []
    for call in recording.script.calls:
        args = [said(each, call) for each in call.args]
        kwargs = {name: said(each, call) for name, each in call.kwargs.items()}
        calls.append([call.method, args, kwargs, *([call.again] if call.again else [])])
    return calls, arrays


def _called_again(
    recording: Recording, method: str, again: Any = None
) -> AbstractContextManager[Any]:
    """Return what a call of a shared layer is made in: names of its first call, calls before."""
    if again is None:
        return nullcontext()
    names, calls = again
    return recording.naming(tuple((kind, name) for kind, name in names), calls, method)


def replay(recording: Recording, calls: Any, arrays: Mapping[str, Array], where: str) -> None:
    """Make calls of a file on a new recording.

    Raises:
        GraphError: they are no calls of layers; `where` is what it calls the file.
    """
    from soapstone.frontend.layers import Layers

    def meant(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, held),) = value.items()
        if kind == "tensor":
            return recording.tensors[held]
        if kind in ("tuple", "list"):
            made = [meant(each) for each in held]
            return tuple(made) if kind == "tuple" else made
        if kind == "initial":
            return Initial(*held)
        if kind == "onnx":
            from soapstone.frontend.onnx.trained import restored

            file, weights = held
            return restored(arrays[file], {own: arrays[name] for own, name in weights.items()})
        return arrays[held]

    for number, call in enumerate(calls):
        try:
            method, args, kwargs, *again = call
            known = hasattr(Layers, method) and not method.startswith("_")
            if not known and method not in ("input", "onnx"):
                raise ValueError("no such layer")
            with _called_again(recording, method, *again):
                getattr(recording, method)(
                    *map(meant, args), **{name: meant(each) for name, each in kwargs.items()}
                )
        except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
            raise GraphError(f"{where}: layer {number}, {call!r:.80}: {error}") from None
