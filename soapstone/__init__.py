"""soapstone: deep learning where everything about how a model runs is searched, proved or measured.

The public names; each is imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.cli import run_app
    from soapstone.frontend.checkpoint import CheckpointError
    from soapstone.frontend.data import DataError, digits
    from soapstone.frontend.inference import InferenceSession
    from soapstone.frontend.model import Model, Tensor
    from soapstone.frontend.onnx import from_onnx, to_onnx
    from soapstone.frontend.optimize import OptimizeResult, optimize
    from soapstone.frontend.optimizers import SGD, Adam, AdamW
    from soapstone.frontend.training import NonFiniteLoss
    from soapstone.ir.errors import GraphError, ShapeError, StrategyError
    from soapstone.ir.files import load_graph, load_layouts, save_graph
    from soapstone.ir.graph import Graph, GraphBuilder
    from soapstone.ir.strategy import Configuration, Strategy
    from soapstone.runtime.machine import Machine

__version__ = "0.1.0"

_HOMES = {
    "Adam": "soapstone.frontend.optimizers",
    "AdamW": "soapstone.frontend.optimizers",
    "CheckpointError": "soapstone.frontend.checkpoint",
    "Configuration": "soapstone.ir.strategy",
    "DataError": "soapstone.frontend.data",
    "Graph": "soapstone.ir.graph",
    "GraphBuilder": "soapstone.ir.graph",
    "GraphError": "soapstone.ir.errors",
    "InferenceSession": "soapstone.frontend.inference",
    "Machine": "soapstone.runtime.machine",
    "Model": "soapstone.frontend.model",
    "NonFiniteLoss": "soapstone.frontend.training",
    "OptimizeResult": "soapstone.frontend.optimize",
    "SGD": "soapstone.frontend.optimizers",
    "ShapeError": "soapstone.ir.errors",
    "Strategy": "soapstone.ir.strategy",
    "StrategyError": "soapstone.ir.errors",
    "Tensor": "soapstone.frontend.model",
    "digits": "soapstone.frontend.data",
    "from_onnx": "soapstone.frontend.onnx",
    "load_graph": "soapstone.ir.files",
    "load_layouts": "soapstone.ir.files",
    "optimize": "soapstone.frontend.optimize",
    "run_app": "soapstone.cli",
    "save_graph": "soapstone.ir.files",
    "to_onnx": "soapstone.frontend.onnx",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'soapstone' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])


__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "CheckpointError",
    "Configuration",
    "DataError",
    "Graph",
    "GraphBuilder",
    "GraphError",
    "InferenceSession",
    "Machine",
    "Model",
    "NonFiniteLoss",
    "OptimizeResult",
    "ShapeError",
    "Strategy",
    "StrategyError",
    "Tensor",
    "digits",
    "from_onnx",
    "load_graph",
    "load_layouts",
    "optimize",
    "run_app",
    "save_graph",
    "to_onnx",
]
