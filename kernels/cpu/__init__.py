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
    "products.panels",
    "products.nbits",
    "onednn",
    "openblas",
    "elementwise.epilogue",
    "recurrent.layers",
    "recurrent.cells",
    "recurrent.gru",
    "attention.variants",
    "attention.few",
    "winograd.variants",
    "elementwise.machine",
    "reduction.reduce",
    "reduction.byte_scale",
    "normalization.layer_norm",
    "normalization.batch_norm",
    "normalization.group_norm",
    "pooling.variants",
    "normalization.response",
    "movement.resize",
    "normalization.rms_norm",
    "movement.variants",
    "products.depthwise",
    "normalization.dropout",
    "graphs.spmm",
    "graphs.attention",
    "graphs.segments",
    "indexing.embedding",
    "indexing.embedding_bag",
    "indexing.embedding_grad",
    "indexing.slices",
    "indexing.writing",
    "indexing.elements",
    "indexing.selection",
    "indexing.trees",
    "indexing.scan",
    "reduction.reduce_grad",
    "training.updates",
    "training.cross_entropy",
    "training.ctc",
    "training.labels",
    "training.losses",
    "normalization.softmax",
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
