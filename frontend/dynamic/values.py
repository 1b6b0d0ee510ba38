"""The values that a dynamic session records, which are computed later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from soapstone.frontend.arithmetic import Arithmetic
from soapstone.frontend.dynamic.rows import Rows
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.record import Recorder


class Column:
    """What all values of one type in one step have in common.

    Attributes:
        model: the session.
        rows: the array of which the values are rows.
        live: whether the step has not ended.
    """

    __slots__ = ("live", "model", "rows")

    def __init__(self, model: Recorder, rows: Rows) -> None:
        self.model = model
        self.rows = rows
        self.live = True


class Lazy(Arithmetic):
    """A value of one sample, computed when it is read or when the step ends.

    Attributes:
        column: its session, step and type.
        code: the number of the call that makes it times `RESULTS`, plus which of the call's results
            it is; or a code of `tape.code_of` if no call makes it.
    """

    from_array = "session.value(array)"
    __slots__ = ("code", "column")

    def __init__(self, column: Column, code: int) -> None:
        self.column = column
        self.code = code

    @property
    def model(self) -> Recorder:
        """The session."""
        return self.column.model

    @property
    def rows(self) -> Rows:
        """The array that it becomes a row of."""
        return self.column.rows

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
