"""Training where strategies recompute, reshard or offload, against training where all is kept.

carried_training.py EXECUTOR [WAY...]: prints how many ways gave the same bits; see test_carry.py.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from helpers.processes import say

from soapstone import Adam, Model
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Configuration, Copies, Keep, Reshard, Step, Strategy
from soapstone.ir.tensor import Array
from soapstone.ir.training.backward import backward
from soapstone.runtime import Machine, Trace
from soapstone.runtime.machines.start import machine_of

Change = Callable[[Graph, Strategy], Strategy]
SAMPLES = 24


def network() -> Model:
    """Return a network with running statistics, dropout, a residual and parts of a value."""
    model = Model("net", seed=1)
    x = model.input("image", (8, 3, 8, 8))
    x = model.conv2d(x, 8, kernel=3, padding=1, activation="relu", name="conv1")
    y = model.batch_norm(x, name="norm1")
    y = model.relu(model.conv2d(y, 8, kernel=3, padding=1, name="conv2"), name="relu2")
    y = model.dropout(y, 0.3, name="dropout")
    x = model.add(x, y, name="sum")
    left, right = model.split(x, (4, 4), axis=1, name="parts")
    x = model.concat((model.tanh(left), right), axis=1, name="joined")
    x = model.flatten(model.max_pool2d(x, 2, name="pool"))
    x = model.gelu(model.dense(x, 12, name="inner"), name="gelu")
    model.output(model.dense(x, 5, name="head"))
    return model


def forward_values(graph: Graph) -> list[str]:
    """Return the values of the forward pass that may be recomputed, in program order."""
    back = backward(graph)
    return [
        value
        for node in graph.nodes
        for value in node.outputs
        if node.name not in back and value not in node.overwrites and value not in graph.results
    ]


def kept(graph: Graph, strategy: Strategy) -> Strategy:
    """Keep everything."""
    return strategy


def all_recomputed(graph: Graph, strategy: Strategy) -> Strategy:
    """Recompute whatever may be."""
    return replace(strategy, tensors=dict.fromkeys(forward_values(graph), Keep.RECOMPUTE))


def first_recomputed(graph: Graph, strategy: Strategy) -> Strategy:
    """Recompute what is before the pooling: the backward pass comes to it last."""
    names = forward_values(graph)
    names = names[: names.index("joined")]
    return replace(strategy, tensors=dict.fromkeys(names, Keep.RECOMPUTE))


def every_other(graph: Graph, strategy: Strategy) -> Strategy:
    """Recompute every other value."""
    return replace(strategy, tensors=dict.fromkeys(forward_values(graph)[::2], Keep.RECOMPUTE))


EDGES = (("conv1", "norm1"), ("norm1", "conv2"), ("dropout", "sum"), ("inner", "gelu"))


def routed(kept: Copies) -> Change:
    """Send some values to their consumers by way of the other processor, and their gradients."""

    def change(graph: Graph, strategy: Strategy) -> Strategy:
        there = Configuration({"d0": 2}, (1, 0))
        path = (Step("permute", there), Step("all_to_all", Configuration({"d1": 2}, (0, 1))))
        edges = [(value_of(graph, maker), reader) for maker, reader in EDGES]
        paths = {edge: Reshard((*path, Step("all_gather")), kept) for edge in edges}
        back = next(node for node in graph.nodes if node.origin == "conv2" and "grad" in node.name)
        paths[back.inputs[0], back.name] = Reshard((path[0], Step("permute")))
        return replace(strategy, reshards=paths)

    return change


def moved_again(graph: Graph, strategy: Strategy) -> Strategy:
    """Keep what was made, and move it to its consumers once more for the backward pass."""
    edges = [(value_of(graph, maker), reader) for maker, reader in EDGES]
    path = Reshard((Step("all_gather"),), Copies.BEFORE)
    return replace(strategy, reshards=dict.fromkeys(edges, path))


def value_of(graph: Graph, name: str) -> str:
    """Return the first result of a node."""
    return graph.by_name[name].outputs[0]


def both(graph: Graph, strategy: Strategy) -> Strategy:
    """Recompute whatever may be, and send some values by other ways too."""
    return replace(
        routed(Copies.AFTER)(graph, strategy), tensors=all_recomputed(graph, strategy).tensors
    )


def offloaded(graph: Graph, strategy: Strategy) -> Strategy:
    """Offload some values, recompute others, and send some by other ways: each in its turn."""
    names = forward_values(graph)
    turns = dict(zip(names, itertools.cycle((Keep.OFFLOAD, Keep.OFFLOAD, Keep.RECOMPUTE))))
    return replace(routed(Copies.BEFORE)(graph, strategy), tensors={**turns, "image": Keep.OFFLOAD})


WAYS: Mapping[str, Change] = {
    "all": all_recomputed,
    "every other": every_other,
    "moved again": moved_again,
    "routed, before": routed(Copies.BEFORE),
    "routed, after": routed(Copies.AFTER),
    "routed, both": routed(Copies.BOTH),
    "routed and recomputed": both,
}


def compiled(
    change: Change,
    executor: str = "local",
    cpus: int = 1,
    mapper: object = "data_parallel",
    machine: Machine | None = None,
    **options: Any,
) -> Model:
    """Return the network, compiled with a changed strategy and further options."""
    given = {"executor": executor, "cpus": None if machine else cpus, "machine": machine}
    with network() as model:
        model.compile(Adam(1e-2), loss="cross_entropy", mapper=mapper, **given)
        strategy = change(model.training_graph, model.strategy)
    model = network()
    model.compile(Adam(1e-2), loss="cross_entropy", strategy=strategy, **given, **options)
    return model


def data() -> tuple[Array, Array]:
    random = np.random.default_rng(0)
    return random.standard_normal((SAMPLES, 3, 8, 8), np.float32), random.integers(0, 5, SAMPLES)


def trained(model: Model) -> dict[str, Array]:
    """Train for some steps, evaluate; return parameters, states and the loss."""
    images, labels = data()
    with model:
        model.fit(images, labels, epochs=2, progress=False)
        found = model.trainer.state()
        return found | {"loss": np.array(model.evaluate(images, labels)["loss"])}


def trace_of(model: Model) -> Trace:
    """Return the trace of a training step."""
    return model.trainer.bound("train", model.batch_size).trace


def same(found: Mapping[str, Array], wanted: Mapping[str, Array]) -> None:
    """Raise an error unless training gave the same bits.

    Evaluation, which recomputes nothing, has kernels of more steps where no way cuts them.
    """
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        most = 1e-6 if name == "loss" else 0
        np.testing.assert_allclose(found[name], array, rtol=most, atol=0, err_msg=name)


def check_order(model: Model) -> None:
    """Raise an error where a worker recomputes before it has begun the backward pass.

    Order by list scheduling (`patient`) lets a rank that would wait for a message run what it can.
    """
    trace = trace_of(model)
    begun: set[int] = set()  # processors
    recomputed = 0
    for number in trace.order:
        operation = next(each for each in trace.operations if each.id == number)
        if ".recomputed" in operation.launch.name and operation.kind == "task":
            assert operation.processor in begun, operation.launch.name
            recomputed += 1
        elif ".grad." in operation.launch.name:
            begun.add(operation.processor)
    assert recomputed > 5


def main() -> None:
    executor, *names = sys.argv[1:]
    ways = [WAYS[name] for name in names or WAYS]
    cpus = 1 if executor == "mpi" else 2  # of each process
    if executor != "legate":
        with compiled(first_recomputed, executor, cpus) as model:
            check_order(model)
    wanted = trained(compiled(kept, executor, cpus))
    for change in ways:
        same(trained(compiled(change, executor, cpus)), wanted)
    if executor != "legate":  # its memories are its own
        machine = machine_of(executor, cpus).bounded(1 << 24)
        wanted = trained(compiled(kept, executor, machine=machine))
        same(trained(compiled(offloaded, executor, machine=machine)), wanted)
    say(f"{len(ways)} ways equal")


if __name__ == "__main__":
    main()
