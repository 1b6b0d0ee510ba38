"""The operator declarations, one file per family; importing this package registers them all."""

from soapstone.ir.ops import (
    convolution,
    elementwise,
    matmul,
    pooling,
)

__all__ = [
    "convolution",
    "elementwise",
    "matmul",
    "pooling",
]
