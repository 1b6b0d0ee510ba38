"""Logical regions: a shape and a dtype, with no place (Legion's regions, dense)."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.records import dataclass
from soapstone.runtime.errors import BoundsError


@dataclass(frozen=True, eq=False)
class Region:
    """A logical array of `shape` and `dtype`, equal only to itself.

    A region has no address: instances of it live in memories, made and kept coherent by the
    runtime. A persistent region that was never written reads as zeros. A transient region lives
    inside one step: its contents need not survive the step, and its bytes come from the arena.

    Raises: BoundsError for a negative extent; TypeError for a dtype that holds Python objects.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    name: str = ""
    transient: bool = False

    def __init__(
        self, shape: Sequence[int] | int, dtype: Any, name: str = "", transient: bool = False
    ) -> None:
        raw = (shape,) if isinstance(shape, int) else tuple(shape)
        extents = tuple(operator.index(extent) for extent in raw)
        if any(extent < 0 for extent in extents):
            raise BoundsError(f"region {name!r}: shape {extents} has a negative extent")
        kind = np.dtype(dtype)
        if kind.hasobject:
            raise TypeError(f"region {name!r}: dtype {kind} holds Python objects; numbers needed")
        object.__setattr__(self, "shape", extents)
        object.__setattr__(self, "dtype", kind)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "transient", bool(transient))

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of one whole instance."""
        return self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        extents = "x".join(str(extent) for extent in self.shape) or "scalar"
        kind = ", transient" if self.transient else ""
        return f"Region({self.name or '?'}: {self.dtype} {extents}{kind})"
