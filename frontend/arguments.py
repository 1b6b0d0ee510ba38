"""Arguments of the public functions, checked against their annotations before anything is done.

What an annotation says is the one declaration: `int` takes integers (of NumPy too, and a float that
is one), `float` takes numbers, `Tensor` takes tensors of a model. Errors name the function, the
argument, what was found and what was needed.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from soapstone.ir.errors import GraphError

F = TypeVar("F", bound=Callable[..., Any])


def integer(value: Any) -> int:
    """Return an integer; a float that is one counts.

    Raises:
        TypeError: anything else, a bool included.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def count(where: str, value: Any, least: int = 1, error: type[ValueError] = GraphError) -> int:
    """Return an integer of at least `least`.

    Raises:
        error: another value; `where` is what it calls it.
    """
    try:
        whole = integer(value)
    except TypeError:
        whole = None
    if whole is None or whole < least:
        raise error(f"{where}: {value!r} found, an integer of {least} or more needed")
    return whole


def number(where: str, value: Any, error: type[ValueError] = GraphError) -> float:
    """Return a finite number.

    Raises:
        error: another value; `where` is what it calls it.
    """
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise error(f"{where}: {value!r} found, a number needed")
    real = float(value)
    if not math.isfinite(real):
        raise error(f"{where}: {value!r} found, a finite number needed")
    return real


def _integer(where: str, value: Any) -> Any:
    try:
        return integer(value)
    except TypeError:
        raise GraphError(f"{where}: {_shown(value)} found, an integer needed") from None


def _number(where: str, value: Any) -> Any:
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise GraphError(f"{where}: {_shown(value)} found, a number needed")
    return value


def _text(where: str, value: Any) -> Any:
    if not isinstance(value, str):
        raise GraphError(f"{where}: {_shown(value)} found, a string needed")
    return value


def _tensor(where: str, value: Any) -> Any:
    from soapstone.frontend.recording import Tensor

    if not isinstance(value, Tensor):
        raise GraphError(f"{where}: {_shown(value)} found, a tensor of the model needed")
    return value


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"{type(value).__name__} {value!r}"


_RULES: dict[str, Callable[[str, Any], Any]] = {
    "int": _integer,
    "float": _number,
    "str": _text,
    "Tensor": _tensor,
}


def checked(function: F) -> F:
    """Return a method whose arguments are checked against its annotations."""
    signature = inspect.signature(function)
    rules = {}
    for name, parameter in signature.parameters.items():
        kind = str(parameter.annotation).removesuffix(" | None")
        if kind in _RULES and parameter.kind is not parameter.VAR_KEYWORD:
            rules[name] = (_RULES[kind], kind != str(parameter.annotation), parameter.kind)
    label = function.__name__
    parameters = list(signature.parameters.values())[1:]
    needed = ", ".join(map(_plain, parameters))
    any_name = any(item.kind is item.VAR_KEYWORD for item in parameters)

    @wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError as error:
            unknown = [] if any_name else sorted(kwargs.keys() - signature.parameters.keys())
            what = f"unknown argument {unknown[0]!r}" if unknown else str(error)
            raise TypeError(f"{label}: {what}; {label}({needed}) needed") from None
        given = bound.arguments
        for name in rules.keys() & given.keys():
            rule, optional, kind = rules[name]
            where = f"{label}: {name}"
            if kind is inspect.Parameter.VAR_POSITIONAL:
                given[name] = tuple(rule(where, item) for item in given[name])
            elif not (optional and given[name] is None):
                given[name] = rule(where, given[name])
        script = getattr(self, "script", None)  # of a recording, which keeps what was called
        if script is None:
            return function(*bound.args, **bound.kwargs)
        return script.run(self, function, bound.args, bound.kwargs)

    return call  # type: ignore[return-value]


def _plain(parameter: inspect.Parameter) -> str:
    """A parameter as an error shows it: its name, `=` before what may be left out."""
    stars = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else stars
    by_name = parameter.kind is parameter.KEYWORD_ONLY
    return f"{stars}{parameter.name}{'=…' if by_name else ''}"


class Checked:
    """A class whose public methods have their arguments checked; see `checked`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name, value in list(vars(cls).items()):
            if inspect.isfunction(value) and not name.startswith("_"):
                setattr(cls, name, checked(value))
