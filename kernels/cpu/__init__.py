"""Kernels for CPUs: importing this package registers its variants with `kernels.registry`.

The first variant that serves a call is taken unless a later one is measured to be clearly faster;
panels come first, since measured warm they tie with what they beat on cold weights, then oneDNN's.
Numba's compile, or load from its cache, when a call is bound.
"""

from __future__ import annotations

import importlib

from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.openblas import library as openblas
from soapstone.kernels.fallback import report

_FAMILIES = (
    "panels",
    "onednn",
    "openblas",
    "epilogue",
    "recurrent",
    "recurrent_cells",
    "recurrent_gru",
    "attention",
    "winograd",
    "elementwise",
    "reduce",
    "layer_norm",
    "batch_norm",
    "group_norm",
    "pooling",
    "response",
    "resize",
    "rms_norm",
    "movement",
    "depthwise",
    "dropout",
    "embedding",
    "embedding_bag",
    "embedding_grad",
    "indexing",
    "elements",
    "selection",
    "scan",
    "reduce_grad",
    "updates",
    "cross_entropy",
    "losses",
    "softmax",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")

if not onednn.available() and not onednn.disabled():
    report(
        f"oneDNN not found (looked in {', '.join(onednn.candidates())})",
        "products and convolutions by OpenBLAS, slower; see `soapstone doctor`"
        if openblas.available()
        else "nor is OpenBLAS, so products and convolutions are NumPy's, many times slower; "
        "pip install scipy-openblas32",
    )
