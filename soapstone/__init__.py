"""soapstone: deep learning where everything about how a model runs is searched, proved or measured.

The public names; each is imported on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soapstone.cli.main import run_app
    from soapstone.frontend.data.sets import DataError, digits
    from soapstone.frontend.inference import InferenceSession
    from soapstone.frontend.model import Model, Tensor
    from soapstone.frontend.onnx import from_onnx, to_onnx
    from soapstone.frontend.optimization.optimize import OptimizeResult, optimize
    from soapstone.frontend.training.checkpoint import CheckpointError
    from soapstone.frontend.training.optimizers import SGD, Adam, AdamW
    from soapstone.frontend.training.trainer import NonFiniteLoss
    from soapstone.ir.errors import GraphError, ShapeError, StrategyError
    from soapstone.ir.graph import Graph, GraphBuilder
    from soapstone.ir.graph_files import load_graph, load_layouts, save_graph
    from soapstone.ir.strategy import Configuration, Strategy
    from soapstone.runtime.machines.machine import Machine

__version__ = "0.1.0"

_HOMES = {
    "Adam": "soapstone.frontend.training.optimizers",
    "AdamW": "soapstone.frontend.training.optimizers",
    "CheckpointError": "soapstone.frontend.training.checkpoint",
    "Configuration": "soapstone.ir.strategy",
    "DataError": "soapstone.frontend.data.sets",
    "Graph": "soapstone.ir.graph",
    "GraphBuilder": "soapstone.ir.graph",
    "GraphError": "soapstone.ir.errors",
    "InferenceSession": "soapstone.frontend.inference",
    "Machine": "soapstone.runtime.machines.machine",
    "Model": "soapstone.frontend.model",
    "NonFiniteLoss": "soapstone.frontend.training.trainer",
    "OptimizeResult": "soapstone.frontend.optimization.optimize",
    "SGD": "soapstone.frontend.training.optimizers",
    "ShapeError": "soapstone.ir.errors",
    "Strategy": "soapstone.ir.strategy",
    "StrategyError": "soapstone.ir.errors",
    "Tensor": "soapstone.frontend.model",
    "digits": "soapstone.frontend.data.sets",
    "from_onnx": "soapstone.frontend.onnx",
    "load_graph": "soapstone.ir.graph_files",
    "load_layouts": "soapstone.ir.graph_files",
    "optimize": "soapstone.frontend.optimization.optimize",
    "run_app": "soapstone.cli.main",
    "save_graph": "soapstone.ir.graph_files",
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
