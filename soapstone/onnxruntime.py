"""What programs use of the package onnxruntime, by the same names (docs/inference.md)."""

from soapstone.frontend.onnxruntime.errors import InvalidArgument
from soapstone.frontend.onnxruntime.options import (
    ExecutionMode,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from soapstone.frontend.onnxruntime.providers import get_available_providers, get_device
from soapstone.frontend.onnxruntime.session import (
    InferenceSession,
    IOBinding,
    disable_telemetry_events,
    set_default_logger_severity,
    set_default_logger_verbosity,
)
from soapstone.frontend.onnxruntime.values import ModelMetadata, NodeArg, OrtValue

__all__ = [
    "ExecutionMode",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "InvalidArgument",
    "ModelMetadata",
    "NodeArg",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "disable_telemetry_events",
    "get_available_providers",
    "get_device",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
]


def __getattr__(name: str) -> object:
    raise AttributeError(
        f"soapstone.onnxruntime has no {name!r}; what it has: {', '.join(__all__)}"
    )
