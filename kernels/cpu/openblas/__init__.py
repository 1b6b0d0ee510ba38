"""Products and convolutions by OpenBLAS, registered on import where oneDNN is not there."""

from __future__ import annotations

import importlib

from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.openblas import library

_FAMILIES = ("matmul", "convolution")

if not onednn.available() and library.available():  # it is loaded only then
    for _family in _FAMILIES:
        importlib.import_module(f"{__name__}.{_family}")
