"""Kernels for CPUs: importing this package registers its variants with `kernels.registry`.

The first variant that serves a call is taken unless a later one is measured to be clearly faster;
panels come first, since measured warm they tie with what they beat on cold weights, then oneDNN's.
Numba's compile, or load from its cache, when a call is bound.
"""

from __future__ import annotations

import importlib

_FAMILIES = (
    "panels",
    "onednn",
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
