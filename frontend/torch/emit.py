"""What rules of ATen's operators (`aten.py`) write graphs with: values, and an emitter of nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from soapstone.dtypes import kind_of
from soapstone.frontend.torch.operators import NoRule
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.tensor import Array, Role, TensorSpec

_TYPES = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 bool"
DTYPES: dict[Any, str] = {getattr(torch, name): name for name in _TYPES.split()}


@dataclass(frozen=True)
class Value:
    """A tensor of a graph under construction: its name and its type."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return kind_of(self.dtype) == "f"


class Emit:
    """Emits operators into a graph.

    Attributes:
        builder: of the graph.
        constants: the contents of the constants that rules made, by name.
        wanted: the types of the operator's results in PyTorch.
        used: which of the results are read.
    """

    def __init__(self, builder: GraphBuilder, constants: dict[str, Array]) -> None:
        self.builder = builder
        self.constants = constants
        self.wanted: tuple[TensorSpec, ...] = ()
        self.used: frozenset[int] = frozenset((0,))

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> Value:
        """Emit an operator and return its first output."""
        return self.all(operator, *inputs, **attributes)[0]

    def all(self, operator: str, *inputs: Value, **attributes: Any) -> tuple[Value, ...]:
        """Emit an operator and return its outputs."""
        names = self.builder.apply(operator, *(each.name for each in inputs), **attributes)
        return tuple(self.value(name) for name in names)

    def value(self, name: str) -> Value:
        """Return a value of the graph."""
        spec = self.builder.spec(name)
        return Value(name, spec.shape, spec.dtype)

    def known(self, contents: Any, dtype: str) -> Value:
        """Return a value whose contents are known."""
        array = np.array(contents, dtype)
        role = Role.PARAMETER if kind_of(array.dtype) == "f" else Role.STATE
        name = self.builder.input(self.builder.unique("known"), array.shape, dtype, role)
        self.constants[name] = array
        return self.value(name)

    def cast(self, x: Any, dtype: str) -> Value:
        """Return a tensor or number in an element type."""
        if not isinstance(x, Value):
            return self.known(x, dtype)
        return x if x.dtype == dtype else self("cast", x, to=dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Return a tensor in another shape."""
        return x if x.shape == tuple(shape) else self("reshape", x, shape=tuple(shape))

    @property
    def out(self) -> TensorSpec:
        """The type of the first result."""
        return self.wanted[0]


Rule = Callable[..., Any]


def axis_of(axis: int, rank: int) -> int:
    """Return an axis counted from the front, of one that may be negative."""
    return axis + rank if axis < 0 else axis


def axes_of(axes: Any, rank: int) -> tuple[int, ...]:
    """Return axes in ascending order, of one or several that may be negative; None or (): all."""
    given = [axes] if isinstance(axes, int) else list(axes or range(rank))
    return tuple(sorted(axis_of(axis, rank) for axis in given))


def needs(holds: bool, what: str) -> None:
    """Raise NoRule, saying what is needed, unless a condition holds."""
    if not holds:
        raise NoRule(f"{what} needed")


def pairs(values: Any, count: int) -> tuple[int, ...]:
    """Return `count` integers, of as many or of a single one that counts for all."""
    found = [values] * count if isinstance(values, int) else list(values)
    return tuple(int(v) for v in (found * count if len(found) == 1 else found))
