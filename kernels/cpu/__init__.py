"""Kernels for CPUs. Importing this package registers its variants with `kernels.registry`.

Numba's kernels compile on first use. oneDNN's are registered where its library is found, and first,
so that they are the ones tried where no measurement says otherwise.
"""

from __future__ import annotations

import importlib
import importlib.util

_MODULES = (
    "elementwise",
)

if importlib.util.find_spec("soapstone.kernels.cpu.onednn") is not None:
    _onednn = importlib.import_module("soapstone.kernels.cpu.onednn")
    if not hasattr(_onednn, "available") or _onednn.available():
        pass
for _name in _MODULES:
    importlib.import_module(f"soapstone.kernels.cpu.{_name}")
