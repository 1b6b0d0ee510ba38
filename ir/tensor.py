"""Tensor specs: the shape and element type of a value, with no place and no data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import numpy as np

from soapstone.dtypes import DTYPES, WIDE, DType, kind_of, learn, name_of
from soapstone.ir.errors import ShapeError
from soapstone.records import dataclass

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, Array]  # by name
NOTHING: Arrays = MappingProxyType({})
_LARGEST = 2**63 - 1  # extent that counters of the system hold


class Role(StrEnum):
    """What a graph input is: where its contents come from, and whether it outlives a step."""

    INPUT = "input"  # given anew each step: samples, labels
    PARAMETER = "parameter"  # trained: its next value is an output
    STATE = "state"  # carried from step to step: momentum, running statistics, counters
    SCALAR = "scalar"  # set by the host between steps: the learning rate
    CONSTANT = "constant"  # given with the model, and never another: the edges of a graph


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and element type of a tensor.

    Attributes:
        shape: the extents, each 0 or more. dtype: one of `DTYPES`, such as "float32".

    Raises:
        ShapeError: a negative extent, one of 2^63 or more, or an element type outside `DTYPES`.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        if min(self.shape, default=0) < 0:
            raise ShapeError(f"shape {self.shape} has a negative extent; extents are 0 or more")
        if max(self.shape, default=0) > _LARGEST:
            raise ShapeError(f"shape {self.shape} found; extents of at most {_LARGEST:,} needed")
        if self.dtype not in DTYPES:
            raise ShapeError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        learn(self.dtype)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return self.size * np.dtype(self.dtype).itemsize

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return kind_of(self.dtype) == "f"

    @property
    def is_half(self) -> bool:
        """Whether its elements are computed in a wider type (`WIDE`)."""
        return is_half(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


def is_half(dtype: DType) -> bool:
    """Return whether an element type (dtype) is computed in a wider one."""
    return (dtype if isinstance(dtype, str) else name_of(dtype)) in WIDE


def spec_of(array: Array | Sequence[Any]) -> TensorSpec:
    """Return the spec of an array."""
    data = np.asarray(array)
    return TensorSpec(data.shape, name_of(data.dtype))


def rounded(array: Array, dtype: DType) -> Array:
    """Return the array in a narrower type (dtype); what is beyond its range becomes infinite."""
    if array.dtype == dtype:
        return array
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(dtype)
