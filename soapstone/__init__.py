"""soapstone: deep learning where everything about how a model runs is searched, proved or measured.

The public names; each is imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.cli.main import run_app
    from soapstone.errors import DataError
    from soapstone.frontend.data.sets import digits
    from soapstone.frontend.dynamic.session import DynamicSession
    from soapstone.frontend.inference.batcher import Batcher, BatcherStatistics
    from soapstone.frontend.inference.session import InferenceSession
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import from_onnx, to_onnx
    from soapstone.frontend.optimization.optimize import optimize
    from soapstone.frontend.optimization.result import OptimizeResult
    from soapstone.frontend.quantization.quantize import Quantized, quantize
    from soapstone.frontend.recording import Tensor
    from soapstone.frontend.strategies.preferences import find_strategy
    from soapstone.frontend.training.checkpoint import CheckpointError
    from soapstone.frontend.training.models import load
    from soapstone.frontend.training.optimizers import SGD, Adam, AdamW
    from soapstone.frontend.training.trainer import NonFiniteLoss
    from soapstone.ir.builder import GraphBuilder
    from soapstone.ir.errors import GraphError, ShapeError, StrategyError
    from soapstone.ir.files.graphs import load_graph, load_layouts, save_graph
    from soapstone.ir.graph import Graph
    from soapstone.ir.strategy import Configuration, Strategy
    from soapstone.runtime.machines.machine import Machine

__version__ = "0.1.0"

_NAMES = {
    "soapstone.cli.main": ("run_app",),
    "soapstone.errors": ("DataError",),
    "soapstone.frontend.inference.batcher": ("Batcher", "BatcherStatistics"),
    "soapstone.frontend.data.sets": ("digits",),
    "soapstone.frontend.dynamic.session": ("DynamicSession",),
    "soapstone.frontend.inference.session": ("InferenceSession",),
    "soapstone.frontend.model": ("Model",),
    "soapstone.frontend.onnx": ("from_onnx", "to_onnx"),
    "soapstone.frontend.optimization.optimize": ("optimize",),
    "soapstone.frontend.optimization.result": ("OptimizeResult",),
    "soapstone.frontend.quantization.quantize": ("Quantized", "quantize"),
    "soapstone.frontend.recording": ("Tensor",),
    "soapstone.frontend.strategies.preferences": ("find_strategy",),
    "soapstone.frontend.training.checkpoint": ("CheckpointError",),
    "soapstone.frontend.training.models": ("load",),
    "soapstone.frontend.training.optimizers": ("SGD", "Adam", "AdamW"),
    "soapstone.frontend.training.trainer": ("NonFiniteLoss",),
    "soapstone.ir.builder": ("GraphBuilder",),
    "soapstone.ir.errors": ("GraphError", "ShapeError", "StrategyError"),
    "soapstone.ir.files.graphs": ("load_graph", "load_layouts", "save_graph"),
    "soapstone.ir.graph": ("Graph",),
    "soapstone.ir.strategy": ("Configuration", "Strategy"),
    "soapstone.runtime.machines.machine": ("Machine",),
}
_MODULES = (
    "callbacks",
    "data",
    "decoding",
    "losses",
    "metrics",
    "onnxruntime",
    "optimizers",
    "schedules",
    "torch",
)
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:  # of which `torch` alone imports PyTorch
        return importlib.import_module(f"soapstone.{name}")
    home = _HOMES.get(name)
    if home is None:
        from soapstone.errors import hint

        elsewhere = "; soapstone.Model has the layers as methods (docs/equivalents.md)"
        near = "" if name.startswith("_") else hint(name, (*_HOMES, *_MODULES)) or elsewhere
        raise AttributeError(f"module 'soapstone' has no attribute {name!r}{near}")
    from soapstone.garbage_collection import paused

    with paused():
        return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, *_MODULES, "__version__"])


__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Batcher",
    "BatcherStatistics",
    "CheckpointError",
    "Configuration",
    "DataError",
    "DynamicSession",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "InferenceSession",
    "Machine",
    "Model",
    "NonFiniteLoss",
    "OptimizeResult",
    "Quantized",
    "ShapeError",
    "Strategy",
    "StrategyError",
    "Tensor",
    "digits",
    "find_strategy",
    "from_onnx",
    "load",
    "load_graph",
    "load_layouts",
    "optimize",
    "quantize",
    "run_app",
    "save_graph",
    "to_onnx",
]
