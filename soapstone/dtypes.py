"""Element types by name: NumPy's own, and narrower ones that the package `ml_dtypes` adds to it.

NumPy knows the narrower ones by name once `ml_dtypes` is imported. That waits until one is met
(`learn`), since few models have any.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

DType = np.dtype[Any] | str

_OWN = {
    **dict.fromkeys(("float32", "float64", "float16"), "f"),
    **dict.fromkeys(("int8", "int16", "int32", "int64"), "i"),
    **dict.fromkeys(("uint8", "uint16", "uint32", "uint64"), "u"),
    "bool": "b",
}
_FLOATS = (
    "bfloat16",
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    "float4_e2m1fn",
)
# Of those that NumPy lacks, by how many bits an element has where many are packed.
BITS = {
    "bfloat16": 16,
    **{name: 8 for name in _FLOATS if name.startswith("float8")},
    "float4_e2m1fn": 4,
    "int4": 4,
    "uint4": 4,
    "int2": 2,
    "uint2": 2,
}
_KINDS = {
    **_OWN,
    **dict.fromkeys(_FLOATS, "f"),
    "int4": "i",
    "int2": "i",
    "uint4": "u",
    "uint2": "u",
}
DTYPES = tuple(_KINDS)
BYTES = ("uint8", "int8")  # of which products are sums of whole numbers
_BYTE_PRODUCT, _EXACT = 255 * 255, 1 << 24  # the largest; what float32 counts up to
HALVES = ("float16", "bfloat16")

# The type in which operators compute what they are given in a narrower one (`OpSpec.run`).
WIDE = {
    "float16": "float32",
    **dict.fromkeys(_FLOATS, "float32"),
    "int4": "int8",
    "int2": "int8",
    "uint4": "uint8",
    "uint2": "uint8",
}


def learn(name: str) -> str:
    """Return the name of an element type, which NumPy knows from then on."""
    if name in BITS:
        import ml_dtypes  # noqa: F401
    return name


@cache
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a dtype; NumPy puts it together each time it is asked."""
    return str(dtype.name)


def kind_of(dtype: DType) -> str:
    """Return NumPy's letter: b bool, i and u integers, f floating-point, narrow ones among them."""
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    return _KINDS.get(name) or np.dtype(dtype).kind


def code_of(dtype: np.dtype[Any]) -> str:
    """Return what tells dtypes apart, byte order too; of those that NumPy lacks, the name."""
    return name_of(dtype) if name_of(dtype) in BITS else dtype.str


def integers(dtype: DType) -> Any:
    """Return the limits of an integer type, as `numpy.iinfo` does: `min`, `max`, `bits`."""
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    if name not in BITS:
        return np.iinfo(dtype)
    import ml_dtypes

    return ml_dtypes.iinfo(name)


def floats(dtype: DType) -> Any:
    """Return the limits of a floating-point type, as `numpy.finfo` does: `min`, `max`, `eps`."""
    name = dtype if isinstance(dtype, str) else name_of(dtype)
    if name not in BITS:
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(name)


def exact_sums(terms: int) -> str:
    """Return the type in which sums of so many products of bytes, less their zeros, are exact."""
    return "float32" if terms * _BYTE_PRODUCT < _EXACT else "float64"
