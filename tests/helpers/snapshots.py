"""Models whose sessions are kept, and processes that run them (frontend/inference/snapshots.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from soapstone.cache.places import root
from soapstone.kernels.cpu.onednn import library
from soapstone.native.threads import teams

Weights = dict[str, np.ndarray[Any, Any]]
needs_snapshots = pytest.mark.skipif(
    not (library.available() and teams.supported() and sys.platform == "linux"),
    reason="bound entries are kept where oneDNN's and teams are",
)


def settings_of(folder: Path) -> dict[str, str]:
    """Return variables of a process that keeps sessions in a folder, and finds compiled code."""
    cache = {"SOAPSTONE_CACHE": str(folder / "cache"), "NUMBA_CACHE_DIR": str(root())}
    return {**os.environ, **cache}


def write_model(folder: Path, scale: float = 1.0, halves: bool = False) -> Weights:
    """Write m.onnx, with a convolution, a pooling, a product and an element-wise step.

    halves: whether it has its result as bfloat16, too.
    """
    rng = np.random.default_rng(0)
    w = (scale * rng.standard_normal((4, 3, 3, 3))).astype(np.float32)
    b = rng.standard_normal((4, 5)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Tanh", ["c"], ["t"]),
        helper.make_node("GlobalAveragePool", ["t"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "b"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5]),
    ]
    weights = [numpy_helper.from_array(w, "w"), numpy_helper.from_array(b, "b")]
    if halves:
        nodes.append(helper.make_node("Cast", ["y"], ["h"], to=TensorProto.BFLOAT16))
        values.append(helper.make_tensor_value_info("h", TensorProto.BFLOAT16, ["n", 5]))
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], weights)
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "m.onnx")
    return {"w": w, "b": b}


def expected(weights: Weights, x: np.ndarray[Any, Any]) -> Any:
    """Return what the model computes of images (n, 3, 8, 8): (n, 5) float64."""
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    pooled = np.tanh(np.einsum("nchwij,ocij->nohw", windows, weights["w"])).mean((2, 3))
    return pooled @ weights["b"]


def ran(
    folder: Path, program: str, *arguments: str, settings: Mapping[str, str] | None = None
) -> str:
    """Return what a process of its own prints that runs a program in a folder."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=settings_of(folder) | dict(settings or {}),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
