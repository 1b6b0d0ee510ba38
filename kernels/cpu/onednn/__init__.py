"""Variants of operators served by oneDNN, registered on import where the library is found."""

from __future__ import annotations

import importlib

from soapstone.kernels.cpu.onednn.library import OneDnnError, available, version

_FAMILIES = (
    "convolution",
    "epilogue",
    "linear_grad",
    "matmul",
    "normalization",
    "pointwise",
    "pooling",
    "quantized",
    "reorder",
    "sequences",
)

if available():
    for _family in _FAMILIES:
        importlib.import_module(f"{__name__}.{_family}")

__all__ = ["OneDnnError", "available", "version"]
