"""What programs use of the package onnxruntime, by the same names (docs/inference.md)."""

from soapstone.frontend.onnxruntime.errors import InvalidArgument
from soapstone.frontend.onnxruntime.options import (
    ExecutionMode,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
)
from soapstone.frontend.onnxruntime.session import (
    InferenceSession,
    IOBinding,
    get_available_providers,
    get_device,
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
    "get_available_providers",
    "get_device",
]
