"""Kernels for NVIDIA GPUs, written in Numba CUDA: importing this package registers its variants.

It is imported when kernels of a CUDA processor are asked for, never before. A variant is declared
with `variant(operator, name, processor="cuda")`; its call's arrays are Numba's device arrays, of a
GPU or of Numba's CUDA simulator (`NUMBA_ENABLE_CUDASIM=1`), of any strides. What it returns is a
`DeviceEntry` (`entry.py`), or None for a call that it does not serve.
"""

from __future__ import annotations

import importlib

_FAMILIES = (
    "libraries.products",
    "libraries.convolutions",
    "libraries.attention",
    "attention.fused",
    "products.matmul",
    "products.convolution",
    "products.nbits",
    "products.quantized",
    "elementwise.chains",
    "reduction.reduce",
    "normalization.softmax",
    "normalization.norms",
    "normalization.batch_norm",
    "normalization.dropout",
    "normalization.response",
    "normalization.coupling",
    "movement.copies",
    "pooling.windows",
    "pooling.regions",
    "indexing.rows",
    "indexing.scatters",
    "indexing.bags",
    "indexing.taps",
    "indexing.lines",
    "indexing.cumulative",
    "indexing.trees",
    "indexing.writing",
    "graphs.rows",
    "graphs.attention",
    "training.updates",
    "training.losses",
    "training.ctc",
    "reduction.argument",
    "reduction.gradients",
    "composites",
)

for _family in _FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")
