"""ONNX in and out: `from_onnx`, `to_onnx`, and what a file holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
    from soapstone.frontend.onnx.export.write import to_onnx
    from soapstone.frontend.onnx.model import OnnxModel, from_onnx

_HOMES = {
    "OnnxError": "errors",
    "OnnxModel": "model",
    "UnboundError": "errors",
    "UnsupportedError": "errors",
    "from_onnx": "model",
    "to_onnx": "export.write",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


__all__ = [
    "OnnxError",
    "OnnxModel",
    "UnboundError",
    "UnsupportedError",
    "from_onnx",
    "to_onnx",
]
