"""What holds of a graph after each pass, and that the verifier says so of one that was broken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from random_graphs import degrees_of, draw

from soapstone.engine.lower import channels_last, fold_weights, lower, split_constants, views
from soapstone.engine.lower.passes import NAMES, PASSES, verifier
from soapstone.engine.lower.verify import check_aliases, check_graph, check_sources, check_views
from soapstone.frontend.app import load_app
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.mappers import load
from soapstone.runtime import Machine

WHOLE = Strategy({DEFAULT: Configuration()})
MACHINES = (Machine.local(cpus=1), Machine.local(cpus=2), Machine.local(cpus=3, memories=3))


def verified(graph: Graph, strategy: Strategy) -> Graph:
    """Return the graph lowered, which was verified after each pass and at the end."""
    lowered = lower(graph, strategy, watch=verifier(graph))
    check_aliases(lowered)
    check_views(lowered, strategy, views(lowered, strategy))
    return lowered


def verified_inference(graph: Graph, constants: dict[str, Array]) -> Graph:
    """Return a graph with constants, lowered and verified alike."""
    graph = replace(graph, updates={}).pruned()
    known = fold_weights(graph, constants, watch=verifier(graph, whole=False))
    first, rest = split_constants(known, constants.keys())
    for part in (first, rest):
        check_graph(part)
        check_sources(part, graph, whole=False)
    return verified(rest, replace(WHOLE, layouts=channels_last(rest)))


@pytest.mark.parametrize("app", ["lenet", "squeezenet", "rnnlm", "dlrm", "bert"])
def test_apps_are_sound_after_every_pass(app: str) -> None:
    graph = graph_of(app, 4)
    for machine in MACHINES:
        verified(graph, load("data_parallel").strategy(graph, machine))
    forward = load_app(app).build(1).build(1)
    constants = {
        name: np.broadcast_to(np.ones((), spec.dtype), spec.shape)
        for name, spec in forward.tensors.items()
        if forward.roles.get(name, Role.INPUT) is not Role.INPUT
    }
    lowered = verified_inference(forward, constants)
    assert {name for node in lowered.nodes for name in node.work_of} <= forward.by_name.keys()


@pytest.mark.parametrize("first", range(0, 80, 40))
def test_random_graphs_are_sound_after_every_pass(first: int) -> None:
    for seed in range(first, first + 40):
        sample = draw(seed)
        graph, random = sample.graph, np.random.default_rng(seed)
        split = {n.name: Configuration(degrees_of(graph.signature(n), random)) for n in graph.nodes}
        verified(graph, Strategy(split))
        verified(graph, replace(WHOLE, layouts=channels_last(graph)))
        fixed = [name for name, role in graph.roles.items() if role is not Role.INPUT]
        verified_inference(graph, {name: sample.values[name] for name in fixed})


def small() -> Graph:
    """A product, its bias and activation, and an update of a state."""
    builder = GraphBuilder("small")
    x, w = builder.input("x", (4, 3)), builder.input("w", (3, 2), role=Role.PARAMETER)
    bias = builder.input("b", (2,), role=Role.PARAMETER)
    builder.input("s", (4, 2), role=Role.STATE)
    y = builder.apply("add", builder.apply("matmul", x, w)[0], bias)[0]
    builder.update("s", builder.apply("relu", y)[0])
    builder.output(builder.apply("exp", "s")[0])
    return builder.build()


def test_a_fused_launch_names_its_operators_and_the_store_what_it_stores() -> None:
    nodes = {node.name: node for node in verified(small(), WHOLE).nodes}
    assert nodes["matmul"].operator == "with_epilogue"
    assert nodes["matmul"].work_of == ("matmul", "add", "relu")
    assert nodes["s.next"].work_of == ("relu",) and nodes["exp"].work_of == ("exp",)
    split = {"matmul": Configuration({"k": 3}), DEFAULT: Configuration()}
    assert verified(small(), Strategy(split)).by_name["matmul"].work_of == ("matmul",)


def _at(number: int, **changes: object) -> Callable[[Graph], Graph]:
    """Return what changes a node of a graph."""

    def change(graph: Graph) -> Graph:
        nodes = list(graph.nodes)
        nodes[number] = replace(nodes[number], **changes)  # type: ignore[arg-type]
        return replace(graph, nodes=tuple(nodes))

    return change


def _typed(name: str, spec: TensorSpec | None) -> Callable[[Graph], Graph]:
    def change(graph: Graph) -> Graph:
        kept = {value: known for value, known in graph.tensors.items() if value != name}
        return replace(graph, tensors=kept if spec is None else {**kept, name: spec})

    return change


def _without(graph: Graph) -> Graph:
    return graph.with_nodes(node for node in graph.nodes if node.name != "exp")


FAULTS: dict[str, Callable[[Graph], Graph]] = {
    "read before it is made": lambda g: replace(g, nodes=g.nodes[::-1]),
    "another node has its name": _at(1, name="matmul"),
    "exists already": _at(1, outputs=("matmul",)),
    "outputs .* found, .* needed": _typed("add", TensorSpec((2, 4))),
    "a type and no maker": _typed("nothing", TensorSpec((1,))),
    "not in their frozen form": _at(0, items=()),
    "unknown attribute": _at(2, items=(("colour", 1),)),
    "update of 's'": lambda g: replace(g, updates={"s": "w"}),
    "output 'exp' is never made": _without,
    "updates .* as before": lambda g: replace(g, updates={}),
    "outputs .* as before": lambda g: replace(g, outputs=("add", "exp")),
    "inputs .* as before": lambda g: replace(g, roles={**g.roles, "x": Role.SCALAR}),
    "'who', no node": _at(1, sources=("who",)),
    "relu 'relu' is done by none": _at(2, sources=("add",)),
}


@pytest.mark.parametrize("error", FAULTS)
def test_a_broken_graph_is_refused(error: str) -> None:
    graph = small()
    verifier(graph)("no pass", graph, graph)
    with pytest.raises(GraphError, match=f"pass 'wrong': .*{error}"):
        verifier(graph)("wrong", graph, FAULTS[error](graph))


def test_old_contents_are_not_read_after_the_update() -> None:
    lowered = lower(small(), WHOLE)
    order = sorted(lowered.nodes, key=lambda node: node.operator == "exp")
    with pytest.raises(GraphError, match="exp 'exp': reads 's' after store"):
        check_aliases(replace(lowered, nodes=tuple(order)))


def test_views_that_overlap_or_have_no_memory_are_refused() -> None:
    builder = GraphBuilder("parts")
    x = builder.input("x", (4, 6))
    parts = [builder.apply("relu", builder.apply("exp", x)[0])[0], builder.apply("neg", x)[0]]
    builder.output(builder.apply("exp", builder.apply("concat", *parts, axis=1)[0])[0])
    lowered = lower(builder.build(), WHOLE)
    seen = views(lowered, WHOLE)
    check_views(lowered, WHOLE, seen)
    (one, first), (other, second) = seen.items()
    for wrong, error in (
        ({one: first, other: replace(second, box=first.box)}, "overlap"),
        ({one: first, other: replace(second, root=one)}, "no memory of its own"),
        ({one: first, other: second.then("transpose", (1, 0))}, r"shape \(6, 4\) found"),
    ):
        with pytest.raises(GraphError, match=error):
            check_views(lowered, WHOLE, wrong)


def test_passes_have_names_of_their_own_and_run_in_the_order_of_the_list() -> None:
    ran: list[str] = []
    lower(small(), WHOLE, watch=lambda name, before, after: ran.append(name))
    assert ran == [each.name for each in PASSES] == list(NAMES[-len(PASSES) :])
    assert len(set(NAMES)) == len(NAMES)
    ran.clear()
    lower(small(), WHOLE, fuse=False, watch=lambda name, before, after: ran.append(name))
    assert ran == [each.name for each in PASSES if not each.fuses]
