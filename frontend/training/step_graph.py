"""The graphs of training: a step (forward, backward and updates), and an evaluation."""

from __future__ import annotations

from dataclasses import replace

from soapstone.frontend.training.losses import add_loss, add_metrics
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.ir.autodiff import gradients
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.guard import LEARNING_RATE, STEP, guarded
from soapstone.ir.tensor import Role


def training_graph(forward: Graph, loss: str, chosen: Optimizer, metrics: tuple[str, ...]) -> Graph:
    """Return forward, backward and update operators; outputs are loss, finiteness and metrics."""
    builder = GraphBuilder(base=replace(forward, outputs=()))
    output = forward.outputs[0]
    value = add_loss(builder, output, loss)
    counts = add_metrics(builder, output, metrics)
    builder.input(LEARNING_RATE, (), role=Role.SCALAR)
    if not builder.has(STEP):
        builder.input(STEP, (), "int64", Role.SCALAR)
    finite = builder.apply("is_finite", value, name="finite")[0]
    trained = forward.inputs(Role.PARAMETER)
    if trained:
        grads = gradients(builder, value, trained)
        for name in reversed(trained):
            chosen.emit(builder, name, grads[name], finite)
    builder.output(value, finite, *counts.values())
    return guarded(builder.build(), finite).pruned()


def evaluation_graph(forward: Graph, loss: str, metrics: tuple[str, ...]) -> Graph:
    """Return forward operators, loss and metrics."""
    builder = GraphBuilder(base=replace(forward, outputs=()))
    value = add_loss(builder, forward.outputs[0], loss)
    counts = add_metrics(builder, forward.outputs[0], metrics)
    builder.output(value, *counts.values())
    return builder.build().pruned()


__all__ = ["evaluation_graph", "training_graph"]
