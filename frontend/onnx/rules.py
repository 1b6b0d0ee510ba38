"""Imports every file of translations, so that their rules are registered."""

from soapstone.frontend.onnx import (
    rules_attention,
    rules_control,
    rules_elementwise,
    rules_indexing,
    rules_movement,
    rules_normalization,
    rules_products,
    rules_quantized,
    rules_recurrent,
    rules_reduction,
    rules_signal,
    rules_windows,
)

__all__ = [
    "rules_attention",
    "rules_control",
    "rules_elementwise",
    "rules_indexing",
    "rules_movement",
    "rules_normalization",
    "rules_products",
    "rules_quantized",
    "rules_recurrent",
    "rules_reduction",
    "rules_signal",
    "rules_windows",
]
