"""Indices, labels and lengths, of 32 bits or 64: what kernels ask of them, and read."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.entry import Array
from soapstone.native.entries import helper
from soapstone.native.intrinsics import i32p, i64p


def is_integer(array: Array) -> bool:
    """Return whether the array holds aligned int32 or int64."""
    return array.dtype in (np.int32, np.int64) and bool(array.flags.aligned)


@helper
def integer_at(place: int, wide: int) -> Any:
    """The int64 at an address, or where it is not wide the int32."""
    return i64p(place)[0] if wide != 0 else np.int64(i32p(place)[0])
