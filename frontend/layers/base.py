"""What every layer is recorded with: names, parameters, pairs and padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from soapstone.frontend.arguments import Checked, meant
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.recording import Emit, Tensor

Pair = int | tuple[int, int]
Padding = int | tuple[int, ...] | str
Parameters = dict[str, tuple[tuple[int, ...], Initial]]  # shape and first contents, by name


def spread(name: str, value: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """Return one integer for each of `rank` axes, from one number or as many.

    Raises:
        GraphError: anything else; names the argument.
    """
    result = (value,) * rank if isinstance(value, int) else tuple(value)
    if len(result) != rank or not all(
        isinstance(v, int) and not isinstance(v, bool) for v in result
    ):
        raise GraphError(f"{name}: {value!r} found, one integer or {rank} needed")
    return result


def pads(value: Padding, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    """Return the padding before each axis, then after each; "same" keeps the extent at stride 1.

    Raises:
        GraphError: not "same", "valid", one integer, one an axis or two an axis.
    """
    rank = len(kernel)
    if value == "same":
        total = [(k - 1) * d for k, d in zip(kernel, dilation)]
        return (*(t // 2 for t in total), *(t - t // 2 for t in total))
    if value == "valid":
        return (0,) * (2 * rank)
    if isinstance(value, int):
        return (value,) * (2 * rank)
    if isinstance(value, tuple | list) and len(value) == rank:
        return (*value, *value)
    if isinstance(value, tuple | list) and len(value) == 2 * rank:
        return tuple(value)
    raise GraphError(
        f'padding: {value!r} found; "same", "valid", 1, {rank} or {2 * rank} integers needed'
    )


def initials(label: str, kind: str, fan: int) -> tuple[Initial, Initial]:
    """Return the first contents of a layer's weight and bias, for `fan` inputs to each output.

    "uniform": both in [-1/sqrt(fan), 1/sqrt(fan)); "he": a normal weight of deviation
    sqrt(2/fan) and no bias, which keeps the size of values through deep chains of rectifiers.

    Raises:
        GraphError: another kind; names the layer.

    Source: He, Zhang, Ren and Sun, Delving deep into rectifiers, ICCV 2015.
    """
    if kind == "uniform":
        bound = 1 / math.sqrt(max(fan, 1))
        return Initial("uniform", bound), Initial("uniform", bound)
    if kind == "he":
        return Initial("normal", math.sqrt(2 / max(fan, 1))), Initial()
    raise GraphError(f'{label}: initial {kind!r} found, "uniform" or "he" needed')


@dataclass
class Naming:
    """The names that a layer which may be called again gives to what it records.

    Attributes:
        label: what errors call it. known: kinds and names of its first call; None in that. names:
            those of this call so far. calls: how many there were before.
    """

    label: str
    known: tuple[tuple[str, str], ...] | None
    calls: int
    names: list[tuple[str, str]] = field(default_factory=list)

    def next(self, kind: str, name: str | None) -> str:
        """Return the name that the first call gave here.

        Raises:
            GraphError: it recorded something else.
        """
        known, place = self.known or (), len(self.names)
        first = known[place] if place < len(known) else ("nothing", None)
        if first[0] != kind or name not in (None, first[1]):
            raise GraphError(
                f"shared layer {self.label!r}: {kind} {name or ''} found, {first[0]} as in its"
                " first call needed".replace("  ", " ")
            )
        self.names.append(known[place])
        return known[place][1]


FROM_INPUT = ("gelu",)  # activations whose gradient needs what they are applied to


class LayerBase(Checked):
    """Recording of operators; `record`, the seed and the builder are the model's."""

    _builder: GraphBuilder
    seed: int
    constants: dict[str, Array]
    naming: Callable[..., AbstractContextManager[list[tuple[str, str]]]]
    given: Naming | None = None  # of a layer that may be called again, while it is called
    record: Callable[[Emit, Sequence[Tensor]], tuple[Tensor, ...]]
    all_or_nothing: Callable[[], AbstractContextManager[None]]

    if not TYPE_CHECKING:  # which would take any name for a layer

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name, name=name, obj=self)
            known = [each for each in dir(type(self)) if not each.startswith("_")]
            raise AttributeError(f"{type(self).__name__} has no {name!r}{meant(name, known)}")

    def _name(self, kind: str, name: str | None) -> str:
        if self.given is not None and self.given.known is not None:
            return self.given.next(kind, name)
        name = self._new_name(kind, name)
        if self.given is not None:
            self.given.names.append((kind, name))
        return name

    def _new_name(self, kind: str, name: str | None) -> str:
        if name is not None:
            if name in {node.name for node in self._builder.nodes}:
                raise GraphError(f"{kind} {name!r}: the name is taken")
            return name
        return self._builder.unique(kind)

    def _drawn(self, node: str) -> str:
        """Return what the seed of a layer's draws is made of: other ones for each of its calls."""
        calls = 0 if self.given is None else self.given.calls
        return f"{node}#{calls}" if calls else node

    def draws(self) -> tuple[Tensor, ...]:
        """Return what tells drawn numbers apart besides the step: a number a row, in a cell."""
        return ()

    def apply(
        self, operator: str, *inputs: Tensor, name: str | None = None, **attributes: Any
    ) -> Tensor:
        """Record any declared operator of one output (`soapstone ops` lists them), and return it.

        Args:
            operator: its name; inputs: its operands, in order; attributes: those that differ from
                their defaults.

        Raises:
            GraphError: no such operator or attribute, or a taken name.
            ShapeError: inputs that do not fit; names the dim.
        """
        return self.apply_all(operator, *inputs, name=name, **attributes)[0]

    def apply_all(
        self, operator: str, *inputs: Tensor, name: str | None = None, **attributes: Any
    ) -> tuple[Tensor, ...]:
        """Record any declared operator and return all its outputs.

        operator, inputs, attributes and errors are as of `apply`.
        """
        node = self._name(operator, name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return builder.apply(operator, *values, name=node, **attributes)

        return self.record(emit, inputs)

    def _layer(
        self,
        operator: str,
        x: Tensor,
        parameters: Parameters,
        node: str,
        **attributes: Any,
    ) -> Tensor:
        """Record an operator of x and of new parameters; return its first output.

        An activation whose gradient needs its input is an operator of its own, so that backward
        finds that input; where nothing reads it, lowering joins the two.
        """
        after = attributes.get("activation")
        if after in FROM_INPUT:
            attributes = {**attributes, "activation": None}

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            names = declare(builder, node, parameters)
            made = builder.apply(operator, *values, *names, name=node, **attributes)[:1]
            if after in FROM_INPUT:
                made = builder.apply(after, *made, name=f"{node}.{after}")
            return made

        return self.record(emit, (x,))[0]

    def _filled(self, layer: str, operands: Sequence[Tensor | float]) -> list[Tensor]:
        """Return operands with a constant of the last tensor's element type for each number."""
        kinds = [each.dtype for each in operands if not isinstance(each, int | float)]
        if not kinds:
            raise GraphError(f"{layer}: numbers alone found, a tensor of the model needed")
        dtype = "float32" if kinds[-1] == "bool" else kinds[-1]
        return [
            self.apply("full", shape=(), value=float(each), dtype=dtype)
            if isinstance(each, int | float)
            else each
            for each in operands
        ]

    def _axis(self, layer: str, x: Tensor, axis: int) -> int:
        rank = len(x.shape)
        if not -rank <= axis < rank:
            raise ShapeError(
                f"{layer}: axis {axis} found, {-rank} to {rank - 1} needed for {x.spec}"
            )
        return axis % rank


def declare(
    builder: GraphBuilder, node: str, parameters: Parameters, role: Role = Role.PARAMETER
) -> list[str]:
    """Return a layer's parameters or states, declared as `node.name`, in order."""
    return [
        builder.input(f"{node}.{name}", shape, role=role, initial=initial)
        for name, (shape, initial) in parameters.items()
    ]


def layer_seed(seed: int, node: str) -> int:
    """Return a layer's own seed, from the model's seed and the layer's name."""
    import hashlib

    digest = hashlib.sha256(f"{seed}:{node}".encode()).digest()
    return int.from_bytes(digest[:4], "little")
