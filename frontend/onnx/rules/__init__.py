"""Imports every file of translations, so that their rules are registered."""

from soapstone.frontend.onnx.rules import (  # noqa: F401
    attention,
    contrib,
    control,
    detection,
    elementwise,
    indexing,
    kernel_machines,
    learned,
    movement,
    normalization,
    products,
    quantized,
    quantized_microsoft,
    recurrent,
    reduction,
    sampling,
    signal,
    text,
    trees,
    windows,
)
