"""What a dynamic session records: values that are computed later, and the calls that make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.frontend.arithmetic import Arithmetic
from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.dynamic.rows import Rows
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.record import Recorder


RESULTS = 1 << 16  # of one call, at most


class Lazy(Arithmetic):
    """A value of one sample, computed when it is looked at, or when a step ends.

    Attributes:
        model: the session. call: what makes it; None for what was given.
        rows: the array that it becomes a row of, and `row` which. step: that it belongs to.
        code: the number of its call times `RESULTS`, and which result of that it is; -1 of what
            was given.
    """

    from_array = "session.value(array)"
    __slots__ = ("call", "code", "model", "row", "rows", "step")

    def __init__(
        self, model: Recorder, call: Occurrence | None, rows: Rows, code: int = -1
    ) -> None:
        self.model = model
        self.call = call
        self.rows = rows
        self.row = -1
        self.step = model.moment
        self.code = code

    @property
    def shape(self) -> tuple[int, ...]:
        """The extents; the first is 1."""
        return (1, *self.rows.spec.shape)

    @property
    def dtype(self) -> str:
        """The element type, such as "float32"."""
        return self.rows.spec.dtype

    def numpy(self) -> Array:
        """Return a copy of the contents, of `shape`; all that was recorded is computed first."""
        contents: Array = self.model.values([self])
        return contents

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        contents: Array = self.numpy().astype(dtype or self.dtype, copy=False)
        return contents

    def __float__(self) -> float:
        return float(self.numpy().item())

    def __bool__(self) -> bool:
        return bool(self.numpy().item())

    def __repr__(self) -> str:
        return f"Lazy({self.rows.spec})"


class Occurrence:
    """One call of a cell.

    Attributes:
        number: by order of recording in a step. done: whether its outputs have contents.
        level: see `schedule`, which sets it.
    """

    __slots__ = ("cell", "done", "level", "number", "operands", "outputs")

    def __init__(self, cell: Cell, operands: Sequence[Lazy], number: int) -> None:
        self.cell = cell
        self.number = number
        self.operands = operands
        self.outputs: tuple[Lazy, ...] = ()
        self.done = False
        self.level: int


class Parameter(Arithmetic):
    """A trained tensor of a session, an operand of layers; not a value of samples."""

    __slots__ = ("initial", "model", "name", "shape")

    def __init__(
        self, model: Recorder, name: str, shape: tuple[int, ...], initial: Initial | None
    ) -> None:
        self.model = model
        self.name = name
        self.shape = shape
        self.initial = initial

    def __repr__(self) -> str:
        return f"Parameter({self.name}: {self.shape})"


__all__ = ["RESULTS", "Lazy", "Occurrence", "Parameter"]
