"""Imports every file of translations, so that their rules are registered."""

from soapstone.frontend.onnx.rules import (
    attention,
    control,
    elementwise,
    indexing,
    movement,
    normalization,
    products,
    quantized,
    recurrent,
    reduction,
    signal,
    windows,
)

__all__ = [
    "attention",
    "control",
    "elementwise",
    "indexing",
    "movement",
    "normalization",
    "products",
    "quantized",
    "recurrent",
    "reduction",
    "signal",
    "windows",
]
