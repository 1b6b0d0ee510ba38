"""A training graph, its values, and edits of files, for tests of what is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Initial
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.autodiff import gradients

MACHINE = {
    "version": 1,
    "name": "two",
    "processors": [
        {"name": "cpu0", "kind": "cpu", "threads": 1, "memory": "system", "flops": None},
        {"name": "cpu1", "kind": "cpu", "threads": 1, "memory": "system", "flops": None},
    ],
    "memories": [],
    "links": [],
}
Data = dict[str, Any]


def training() -> Graph:
    """A two-layer classifier with its gradients and updates."""
    builder = GraphBuilder("classifier")
    builder.input("x", (8, 6))
    builder.input("labels", (8,), "int64")
    uniform = Initial("uniform", 0.25)
    for name, shape in (("w1", (6, 4)), ("b1", (4,)), ("w2", (4, 3)), ("b2", (3,))):
        builder.input(name, shape, role=Role.PARAMETER, initial=uniform)
    builder.input("v", (6, 4), role=Role.STATE, initial=Initial())
    builder.input("lr", (), role=Role.SCALAR, initial=Initial("constant", 0.1))
    (hidden,) = builder.apply("linear", "x", "w1", "b1", name="fc1", activation="relu")
    (logits,) = builder.apply("linear", hidden, "w2", "b2", name="fc2")
    loss, _ = builder.apply("cross_entropy", logits, "labels", name="loss")
    weights = ["w1", "b1", "w2", "b2"]
    grads = gradients(builder, loss, weights)
    (ok,) = builder.apply("is_finite", loss, name="ok")
    for name in weights:
        momentum, state = (0.9, ["v"]) if name == "w1" else (0.0, [])
        operands = (name, grads[name], *state, "lr", ok)
        made = builder.apply("sgd", *operands, name=f"{name}.sgd", momentum=momentum)
        builder.update(name, made[0])
        if state:
            builder.update("v", made[1])
    builder.output(loss, logits)
    return builder.build()


GRAPH = training()
FORWARD = [n.name for n in GRAPH.nodes if n.origin is None and not n.spec.updates]


def values_of(graph: Graph) -> dict[str, Array]:
    generator = np.random.default_rng(0)
    return {
        name: np.asarray(generator.standard_normal(graph.tensors[name].shape), np.float32)
        for role in (Role.PARAMETER, Role.STATE)
        for name in graph.inputs(role)
    }


def edited(data: Data, edit: Callable[[Data], object]) -> Data:
    result = copy.deepcopy(data)
    edit(result)
    return result
