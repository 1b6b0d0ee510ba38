"""Translations of operators that ONNX Runtime declares, as its tools and optimiser write them."""

from soapstone.frontend.onnx.rules.microsoft import (  # noqa: F401
    attention,
    attention_grouped,
    attention_packed,
    contrib,
    earlier,
    experts,
    fused,
    linear_attention,
    nchwc,
    quantized,
)
