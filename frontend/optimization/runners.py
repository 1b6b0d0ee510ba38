"""Graphs that run for outputs and times: in sessions, as training steps, in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.optimization.check import Arrays, inputs_of, median_us, taking
from soapstone.frontend.optimization.training import Ground, StepRunner
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph


@dataclass(frozen=True)
class Side:
    """A graph, ready to run: on a target, or as a training step on a ground."""

    graph: Graph
    weights: Arrays
    layouts: Layouts | None = None
    target: str = "soapstone"
    threads: int | None = None
    ground: Ground | None = None


class Runner(Protocol):
    """A side that runs."""

    def run(self, given: Arrays) -> Arrays | None:
        """Return outputs, of a step the parameters after it too; None where it refuses."""

    def state(self) -> Arrays:
        """Return the parameters with which a step begins."""

    def round(self) -> float:
        """Return the median time of a run, in microseconds."""

    def close(self) -> None:
        """Free what it holds."""


def here(side: Side) -> Runner:
    """Return a side that runs in this process."""
    if side.ground is not None:
        return StepRunner(side.graph, side.ground)
    if side.target == "soapstone":
        session = InferenceSession(
            side.graph, side.weights, threads=side.threads, layouts=side.layouts, tune="now"
        )
        return _Inference(side.graph, session.run, session.close)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = side.threads or 0
    peer = onnxruntime.InferenceSession(
        exported(side.graph, side.weights), options, providers=["CPUExecutionProvider"]
    )
    names = side.graph.outputs
    return _Inference(side.graph, lambda given: dict(zip(names, peer.run(None, dict(given)))))


class _Inference:
    """A graph of inference, which a session runs."""

    def __init__(
        self,
        graph: Graph,
        run: Callable[[Arrays], Arrays],
        close: Callable[[], None] = lambda: None,
    ) -> None:
        given = inputs_of(graph)
        self.run = taking(run)
        self.round = partial(median_us, lambda: run(given))
        self.close = close

    def state(self) -> Arrays:
        return {}


def exported(graph: Graph, weights: Arrays) -> bytes:
    """Return a graph and its weights as the bytes of an ONNX file."""
    from soapstone.frontend.onnx.export.write import onnx_graph
    from soapstone.frontend.onnx.file.tensors import as_tensor

    model, held = onnx_graph(graph, weights)
    model.graph.initializer.extend(as_tensor(array, name) for name, array in held.items())
    return bytes(model.SerializeToString())
