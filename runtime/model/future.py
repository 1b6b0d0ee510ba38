"""Futures: what a task returns, before it has returned it (Legion's futures and future maps).

The values of a launch are a small region that its points write, one row a point. Passing a future
on is reading that region, so dependences, copies and traces need no special case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.errors import LaunchError, StoppedError
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import identity


class Host(Protocol):
    """Who a future asks: a runtime, or the scope of a task that launches tasks."""

    def read(self, region: Region) -> Array: ...
    def combine(self, values: FutureMap, reduction: str) -> Future: ...


class Result:
    """The values of one launch: a region, and its contents once they are known for good.

    steady: whether they stay what they are once written; those of a capture are written by every
    replay. held: whether the region holds them: a step that traces itself uses its regions anew in
    every run, and so tells its results what it wrote (`settle`) after each.
    """

    __slots__ = ("_value", "held", "host", "pending", "region", "steady")

    def __init__(self, host: Host, region: Region, steady: bool, pending: bool = False) -> None:
        self.host = host
        self.region = region
        self.steady = steady
        self.pending = pending
        self.held = True
        self._value: Array | None = None

    @property
    def known(self) -> Array | None:
        """The contents, if they are known and stay so."""
        return self._value

    def settle(self, value: Array) -> None:
        """Keep what the step this result belongs to has written; its region is the next run's."""
        self._value = value
        self.pending = False
        self.held = False
        self.steady = True
        self.region = Region(value.shape, value.dtype, self.region.name)

    def array(self) -> Array:
        """The contents, waiting for them.

        Raises: TaskError when a task failed; StoppedError inside or before the step it is from.
        """
        if self._value is not None:
            return self._value
        if self.pending:
            raise StoppedError(
                f"future {self.region.name!r}: the step it belongs to has not been run"
            )
        found = self.host.read(self.region)
        if self.steady:
            self._value = found
        return found


class Future:
    """One value that a task has returned or will return.

    Given to a launch in place of a scalar, or of a region that is read, it is waited for by the
    tasks that need it and by nobody else.

    result: the values of its launch. row: which of them it is.
    """

    __slots__ = ("result", "row")

    def __init__(self, result: Result, row: int) -> None:
        self.result = result
        self.row = row

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value; () is a scalar."""
        return self.result.region.shape[1:]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the value."""
        return self.result.region.dtype

    def get(self) -> Any:
        """The value: a NumPy scalar, or an array of `shape`. Waits for it.

        That of a captured launch is what the last replay returned.

        Raises: TaskError when a task failed; StoppedError inside a capture.
        """
        value = self.result.array()[self.row, ...]
        return value.copy() if value.ndim else value[()]

    def __repr__(self) -> str:
        return f"Future({self.result.region.name}: {self.dtype} {self.shape or 'scalar'})"


class FutureMap:
    """The values of the points of an index launch.

    Given to a launch over the same grid in place of a scalar, each point gets its own value.

    result: the values, a row a point.
    """

    __slots__ = ("grid", "result")

    def __init__(self, result: Result, grid: tuple[int, ...]) -> None:
        self.result = result
        self.grid = grid

    @property
    def points(self) -> int:
        """The number of values."""
        return self.result.region.shape[0]

    def __getitem__(self, point: int | Sequence[int]) -> Future:
        """The future of one point: its number, or its coordinates in the grid.

        Raises: LaunchError for a point outside the grid.
        """
        shape: tuple[int, ...] = (self.points,)
        index: tuple[int, ...] = (point,) if isinstance(point, int) else tuple(point)
        if not isinstance(point, int):
            shape = self.grid
        if len(index) != len(shape) or not all(0 <= i < n for i, n in zip(index, shape)):
            raise LaunchError(
                f"future map {self.result.region.name!r}: point {point!r} found, "
                f"one within {shape} needed"
            )
        return Future(self.result, int(np.ravel_multi_index(index, shape)))

    def get(self) -> Array:
        """All values, shape (*grid, *shape of one). Waits for them.

        Raises: TaskError when a task failed; StoppedError inside a capture.
        """
        found = self.result.array()
        return found.reshape(self.grid + found.shape[1:]).copy()

    def sum(self) -> Future:
        """The sum over the points, element by element, in the order of points."""
        return self.reduce("sum")

    def min(self) -> Future:
        """The minimum over the points, element by element."""
        return self.reduce("min")

    def max(self) -> Future:
        """The maximum over the points, element by element."""
        return self.reduce("max")

    def reduce(self, reduction: str) -> Future:
        """The values combined in the order of points, without waiting for them.

        reduction: "sum", "max", "min" or "prod".

        Raises: LaunchError for a reduction that the dtype does not have.
        """
        identity(reduction, self.result.region.dtype)
        return self.result.host.combine(self, reduction)

    def __repr__(self) -> str:
        region = self.result.region
        return f"FutureMap({region.name}: grid {self.grid}, {region.dtype} {region.shape[1:]})"
