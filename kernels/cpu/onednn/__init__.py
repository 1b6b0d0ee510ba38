"""Variants of operators served by oneDNN; importing this package registers them, loading nothing.

`available()` loads the library, and tells whether the variants can be used.
"""

from soapstone.kernels.cpu.onednn import (
    convolution,
    eltwise,
    linear_grad,
    matmul,
    normalization,
    pooling,
    reorder,
    softmax,
)
from soapstone.kernels.cpu.onednn.library import OneDnnError, available, version

__all__ = [
    "OneDnnError",
    "available",
    "convolution",
    "eltwise",
    "linear_grad",
    "matmul",
    "normalization",
    "pooling",
    "reorder",
    "softmax",
    "version",
]
