"""Splits, slices and concatenations that take no launch, and biases found behind broadcasts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from helpers.session_runs import assert_near, ran

from soapstone.engine.lower import (
    channels_last,
    fold_weights,
    launched,
    lower,
    split_constants,
    views,
)
from soapstone.engine.mapper import GraphMapper
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.model import Model
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load
from soapstone.runtime import Machine

PARAMETER = Role.PARAMETER
MACHINES = (Machine.local(cpus=2), Machine.local(cpus=3, memories=3), Machine.local(threads=2))


def drawn(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Return random contents of every input."""
    random = np.random.default_rng(seed)
    return {
        name: (random.standard_normal(graph.tensors[name].shape) * 0.5).astype(np.float32)
        for name in graph.roles
    }


def fixed_of(graph: Graph, values: Mapping[str, Array]) -> dict[str, Array]:
    """Return the contents of the inputs that never change."""
    return {name: values[name] for name, role in graph.roles.items() if role is not Role.INPUT}


def lowered_of(graph: Graph) -> tuple[list[Node], Graph]:
    """Return the nodes launched for a graph with constant weights, and the lowered graph."""
    weights = fixed_of(graph, drawn(graph))
    _, rest = split_constants(fold_weights(graph, weights), weights.keys())
    strategy = load("sequential").strategy(rest, Machine.local(cpus=1))
    lowered = lower(rest, strategy)
    seen = views(lowered, strategy)
    return [node for node in lowered.nodes if launched(node, seen)], lowered


def operators(graph: Graph) -> list[str]:
    """Return the operators launched for a graph with constant weights, in order."""
    return [str(n.attributes.get("operator", n.operator)) for n in lowered_of(graph)[0]]


def check(graph: Graph, tolerance: float = 2e-5) -> None:
    """Compare sessions of one and two threads with the sequential run."""
    values = drawn(graph)
    weights = fixed_of(graph, values)
    given = {n: v for n, v in values.items() if graph.roles[n] is Role.INPUT}
    expected = interpret(graph, values)
    for threads in (1, 2):
        with InferenceSession(graph, weights, threads=threads) as session:
            found = session.run(given)
            assert list(found) == list(graph.outputs)
            assert_near(found, expected, tolerance, least=1.0)


def merged_block(size: int = 9) -> Graph:
    """Four 1x1 convolutions as one, split for what reads them: a block of Inception."""
    model = Model("block")
    x = model.input("image", (1, 24, size, size))
    x = model.conv2d(x, 24, kernel=3, padding=1, activation="relu")
    a, b, c, d = model.split(model.relu(model.conv2d(x, 48, kernel=1)), (16, 8, 12, 12), axis=1)
    b = model.relu(model.conv2d(b, 16, kernel=5, padding=2))
    c = model.relu(model.conv2d(c, 16, kernel=3, padding=1))
    d = model.avg_pool2d(d, 3, stride=1, padding=1)
    y = model.concat([a, b, c, d], axis=1)
    model.output(model.relu(model.conv2d(y, 8, kernel=1)))
    return model.graph


def test_parts_of_a_convolution_are_read_where_they_are() -> None:
    graph = merged_block()
    found = operators(graph)
    assert "split" not in found and "concat" not in found
    # One copy: the part that the concatenation takes as it is.
    assert found.count("broadcast") == 1 and len(found) == 7
    check(graph)


def channels(kind: str, builder: GraphBuilder, value: str, axis: int) -> str:
    """Return a constant over one axis of a value's shape, spelled in one of many ways."""
    shape = builder.spec(value).shape
    extent, rank = shape[axis], len(shape)

    def column(name: str, size: int) -> str:
        own = tuple(size if i == axis else 1 for i in range(rank))
        return builder.input(builder.unique(name), own, role=PARAMETER)

    def spread(name: str, size: int) -> str:
        full = tuple(size if i == axis else e for i, e in enumerate(shape))
        return builder.apply("broadcast", column(name, size), shape=full)[0]

    if kind == "column":
        return column("b", extent)
    if kind == "broadcast":
        return spread("b", extent)
    if kind == "concat":
        parts = [spread("b1", extent - 3), spread("b2", 3)]
        return builder.apply("concat", *parts, axis=axis)[0]
    if kind == "split":
        full = tuple(extent + 2 if i == axis else e for i, e in enumerate(shape))
        whole = builder.apply("broadcast", column("b", extent + 2), shape=full)[0]
        return builder.apply("split", whole, axis=axis, sizes=(2, extent))[1]
    if kind == "sum":
        return builder.apply("add", spread("b1", extent), column("b2", extent))[0]
    return builder.apply("full", shape=shape, value=0.75)[0]


@pytest.mark.parametrize("step", ["add", "mul"])
@pytest.mark.parametrize("product", ["conv2d", "matmul"])
@pytest.mark.parametrize("kind", ["column", "broadcast", "concat", "split", "sum", "full"])
def test_constants_over_channels_join_the_product(kind: str, product: str, step: str) -> None:
    builder = GraphBuilder()
    image = product == "conv2d"
    x = builder.input("x", (1, 4, 6, 6) if image else (3, 4))
    shapes = [(3, 4, 3, 3), (2, 4, 3, 3)] if image else [(4, 3), (4, 2)]
    pieces = [builder.input(f"w{i}", shape, role=PARAMETER) for i, shape in enumerate(shapes)]
    w = builder.apply("concat", *pieces, axis=0 if image else 1)[0]
    attributes = {"padding": (1, 1, 1, 1), "bias": False} if image else {}
    y = builder.apply(product, x, w, **attributes)[0]
    builder.output(builder.apply(step, y, channels(kind, builder, y, axis=1))[0])
    graph = builder.build()
    assert operators(graph) == ["conv2d" if image else "linear"]
    check(graph)


def test_constants_are_known_by_their_contents() -> None:
    builder = GraphBuilder()
    x = builder.input("x", (1, 4, 6, 6))
    w = builder.input("w", (5, 4, 1, 1), role=PARAMETER)
    values = [builder.input(name, (1, 5, 6, 6), role=PARAMETER) for name in ("even", "uneven")]
    y = builder.apply("conv2d", x, w, bias=False)[0]
    for value in values:
        y = builder.apply("add", y, value)[0]
    builder.output(y)
    graph = builder.build()
    values = drawn(graph)
    values["even"][...] = values["even"][:, :, :1, :1]
    weights = fixed_of(graph, values)
    folded = fold_weights(graph, weights)
    _, rest = split_constants(folded, weights.keys())
    adds = [node for node in rest.nodes if node.operator == "add"]
    assert len(adds) == 1 and "uneven" in adds[0].inputs
    (found,), (expected,) = (interpret(g, values) for g in (folded, graph))
    np.testing.assert_allclose(
        interpret(folded, values)[found], interpret(graph, values)[expected], atol=1e-5
    )


def gates(builder: GraphBuilder, count: int = 8) -> None:
    """A cell of gates whose products are one a source, as NasRNN's once they are merged."""
    x, h = builder.input("x", (2, 6)), builder.input("h", (2, 5))
    w = builder.input("w", (6, 5 * count), role=PARAMETER)
    u = builder.input("u", (5, 5 * count), role=PARAMETER)
    sizes = (5,) * count
    a = builder.apply("split", builder.apply("matmul", x, w)[0], axis=1, sizes=sizes)
    b = builder.apply("split", builder.apply("matmul", h, u)[0], axis=1, sizes=sizes)
    sums = [builder.apply("add", *pair)[0] for pair in zip(a, b)]
    found = [builder.apply(("tanh", "sigmoid")[i % 2], value)[0] for i, value in enumerate(sums)]
    while len(found) > 1:
        found = [builder.apply("mul", *found[i : i + 2])[0] for i in range(0, len(found), 2)]
    builder.output(*found)


def test_gates_are_two_products_and_one_pass() -> None:
    builder = GraphBuilder()
    gates(builder)
    graph = builder.build()
    assert operators(graph) == ["linear", "linear", "fused_elementwise"]
    check(graph)


@pytest.mark.parametrize("returned", [False, True])
def test_what_one_chain_alone_reads_twice_joins_it(returned: bool) -> None:
    builder = GraphBuilder()
    x = builder.input("x", (4, 6))
    (y,) = builder.apply("tanh", x)
    (z,) = builder.apply("mul", y, *builder.apply("exp", y))
    builder.output(z, *((y,) if returned else ()))
    graph = builder.build()
    assert operators(graph) == ["tanh"] * returned + ["fused_elementwise"]
    check(graph)


def test_nested_concatenations_and_splits_are_one() -> None:
    builder = GraphBuilder()
    x = builder.input("x", (1, 4, 6, 6))
    parts = []
    for index in range(4):
        w = builder.input(f"w{index}", (3 + index, 4, 3, 3), role=PARAMETER)
        parts.append(builder.apply("conv2d", x, w, bias=False)[0])
    joined = parts[0]
    for part in parts[1:]:
        joined = builder.apply("concat", joined, part, axis=1)[0]
    w = builder.input("w", (6, 18, 3, 3), role=PARAMETER)
    y = builder.apply("conv2d", joined, w, bias=False)[0]
    first, rest = builder.apply("split", y, axis=1, sizes=(2, 4))
    second, third = builder.apply("split", rest, axis=1, sizes=(2, 2))
    builder.output(
        *(builder.apply("exp", value)[0] for value in (second, first)),
        builder.apply("tanh", third)[0],
    )
    graph = builder.build()
    nodes, lowered = lowered_of(graph)
    assert [len(node.inputs) for node in lowered.nodes if node.operator == "concat"] == [4]
    assert [len(node.outputs) for node in lowered.nodes if node.operator == "split"] == [3]
    assert not {"concat", "split", "broadcast"} & {node.operator for node in nodes}
    check(graph)


def test_what_is_split_and_joined_again_is_neither() -> None:
    builder = GraphBuilder()
    x = builder.input("x", (2, 6, 4))
    y = builder.apply("exp", x)[0]
    a, b, c = builder.apply("split", y, axis=1, sizes=(1, 2, 3))
    again = builder.apply("concat", a, b, c, axis=1)[0]
    swapped = builder.apply("concat", c, a, b, axis=1)[0]
    one, two = builder.apply("split", swapped, axis=1, sizes=(3, 3))
    three, four = builder.apply("split", swapped, axis=1, sizes=(4, 2))
    builder.output(*(builder.apply("tanh", v)[0] for v in (again, one, two, three, four)))
    graph = builder.build()
    _, lowered = lowered_of(graph)
    assert sum(node.operator == "concat" for node in lowered.nodes) == 1
    check(graph)


def test_a_part_that_is_joined_and_split_again_stays() -> None:
    """The same part by two ways, one of which splits it further."""
    builder = GraphBuilder()
    x = builder.apply("exp", builder.input("x", (2, 8)))[0]
    a, b = builder.apply("split", x, axis=1, sizes=(5, 3))
    other = builder.apply("tanh", x)[0]
    again, rest = builder.apply(
        "split", builder.apply("concat", a, other, axis=1)[0], axis=1, sizes=(5, 8)
    )
    parts = builder.apply("split", again, axis=1, sizes=(2, 3))
    builder.output(*(builder.apply("tanh", v)[0] for v in (b, again, rest, *parts)))
    check(builder.build())


def test_a_part_that_must_have_memory_is_copied_alone() -> None:
    """A graph output, a part that two windows read, a single channel; the rest stay in place."""
    model = Model("kept")
    x = model.conv2d(model.input("image", (1, 4, 8, 8)), 15, kernel=3, padding=1)
    kept, twice, single, free = model.split(x, (4, 4, 1, 6), axis=1)
    left = model.conv2d(twice, 3, kernel=3, padding=1, stride=2)
    right = model.conv2d(twice, 3, kernel=5, padding=2, stride=2)
    model.output(kept, model.add(left, right), model.conv2d(model.relu(free), 3, kernel=1))
    model.output(model.conv2d(single, 3, kernel=3))
    nodes, _ = lowered_of(model.graph)
    assert [node.operator for node in nodes].count("broadcast") == 3
    assert "split" not in {node.operator for node in nodes}
    check(model.graph)


def test_a_part_joins_the_epilogue_of_another_product() -> None:
    builder = GraphBuilder()
    x = builder.input("x", (1, 4, 6, 6))
    w = builder.input("w", (12, 4, 3, 3), role=PARAMETER)
    u = builder.input("u", (6, 6, 3, 3), role=PARAMETER)
    y = builder.apply("conv2d", x, w, bias=False, padding=(1, 1, 1, 1))[0]
    a, b = builder.apply("split", y, axis=1, sizes=(6, 6))
    z = builder.apply("conv2d", a, u, bias=False, padding=(1, 1, 1, 1))[0]
    builder.output(builder.apply("relu", builder.apply("add", z, b)[0])[0])
    graph = builder.build()
    assert operators(graph) == ["conv2d", "conv2d"]
    check(graph)


def test_a_split_with_an_empty_part_is_launched() -> None:
    builder = GraphBuilder()
    x = builder.input("x", (2, 6))
    y = builder.apply("exp", x)[0]
    parts = builder.apply("split", y, axis=1, sizes=(0, 2, 4))
    builder.output(*(builder.apply("tanh", part)[0] for part in parts))
    graph = builder.build()
    assert operators(graph).count("split") == 1
    check(graph)


SLICES = [
    ((0, 1, 0, 0), (2, 4, 6, 5), (1, 1, 1, 1)),
    ((1, 0, 0, 0), (2, 8, 6, 5), (1, 1, 1, 1)),
    ((0, 0, 1, 1), (2, 8, 5, 4), (1, 1, 1, 1)),
    ((0, 0, 0, 1), (2, 8, 6, 5), (1, 1, 2, 2)),
    ((0, 1, 0, 0), (2, 8, 6, 5), (1, 3, 1, 1)),
    ((1, 7, 5, 0), (-1, -1, -1, 5), (-1, -2, -1, 1)),
]


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize(("starts", "stops", "steps"), SLICES)
def test_slices_of_slices(
    starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...], image: bool
) -> None:
    """Boxes of boxes, and steps, seen through transposes and reshapes, of images or not."""
    builder = GraphBuilder()
    y = builder.input("x", (2, 8, 6, 5))
    if image:
        w = builder.input("w", (8, 8, 3, 3), role=PARAMETER)
        y = builder.apply("conv2d", y, w, bias=False, padding=(1, 1, 1, 1))[0]
    y = builder.apply("exp", y)[0]
    cut = builder.apply("slice", y, starts=starts, stops=stops, steps=steps)[0]
    shape = builder.spec(cut).shape
    more = builder.apply("slice", cut, starts=(0, 0, 0, 1), stops=shape, steps=(1, 1, 1, 1))[0]
    turned = builder.apply("transpose", more, permutation=(0, 2, 3, 1))[0]
    size = builder.spec(turned).size
    flat = builder.apply("reshape", turned, shape=(shape[0], size // shape[0]))[0]
    half = builder.apply("split", flat, axis=1, sizes=(1, size // shape[0] - 1))[1]
    builder.output(*(builder.apply("tanh", v)[0] for v in (cut, more, turned, half)), more)
    check(builder.build())


def test_heads_of_a_merged_projection_are_views() -> None:
    """Queries, keys and values made by one product: split, then reshaped and transposed."""
    builder = GraphBuilder()
    x = builder.input("x", (2, 6, 8))
    w = builder.input("w", (8, 24), role=PARAMETER)
    parts = builder.apply("split", builder.apply("matmul", x, w)[0], axis=2, sizes=(8, 8, 8))
    orders = ((0, 2, 1, 3), (0, 2, 3, 1), (0, 2, 1, 3))
    q, k, v = (
        builder.apply(
            "transpose", builder.apply("reshape", part, shape=(2, 6, 2, 4))[0], permutation=order
        )[0]
        for part, order in zip(parts, orders)
    )
    scores = builder.apply("softmax", builder.apply("matmul", q, k)[0])[0]
    builder.output(builder.apply("matmul", scores, v)[0])
    graph = builder.build()
    assert operators(graph) == ["linear", "matmul", "softmax", "matmul"]
    check(graph)


def tangle(seed: int) -> Graph:
    """Return a random graph of products, chains, splits, slices and concatenations."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"tangle{seed}")
    live = [builder.input("x", (2, 8, 6, 6))]

    def pick() -> str:
        return live[int(random.integers(len(live)))]

    for index in range(14):
        kind = ("conv", "point", "chain", "split", "split", "join", "slice", "add")[
            random.integers(8)
        ]
        value = pick()
        n, c, h, w = builder.spec(value).shape
        if kind in ("conv", "point"):
            k = 3 if kind == "conv" else 1
            weights = builder.input(f"w{index}", (8, c, k, k), role=PARAMETER)
            live += builder.apply("conv2d", value, weights, bias=False, padding=(k // 2,) * 4)
        elif kind == "chain":
            live += builder.apply(("tanh", "relu")[random.integers(2)], value)
        elif kind == "split" and c > 2:
            cuts = sorted(random.choice(np.arange(1, c), 2, replace=False).tolist())
            sizes = np.diff([0, *cuts, c]).tolist()
            live += builder.apply("split", value, axis=1, sizes=tuple(sizes))
        elif kind == "join":
            live += builder.apply("concat", value, pick(), pick(), axis=1)
        elif kind == "slice":
            low = int(random.integers(c))
            stops = (n, int(random.integers(low, c)) + 1, h, w)
            live += builder.apply(
                "slice", value, starts=(0, low, 0, 0), stops=stops, steps=(1, 1, 1, 1)
            )
        elif kind == "add":
            same = [v for v in live if builder.spec(v) == builder.spec(value)]
            live += builder.apply("add", value, same[random.integers(len(same))])
    graph = builder.build()
    ends = [name for name in live[1:] if not graph.consumers[name]]
    builder.output(*dict.fromkeys((*ends, live[len(live) // 2])))
    return builder.build()


@pytest.mark.parametrize("seed", range(24))
def test_tangles_equal_the_sequential_run(seed: int) -> None:
    check(tangle(seed), tolerance=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_tangles_under_random_strategies(seed: int) -> None:
    graph = tangle(seed)
    random = np.random.default_rng(seed)
    configurations = {}
    for node in graph.nodes:
        choices = list(graph.signature(node).configurations(3))
        configurations[node.name] = Configuration(choices[random.integers(len(choices))])
    layouts = {} if seed % 2 else channels_last(graph)
    values, machine = drawn(graph), MACHINES[seed % len(MACHINES)]
    strategy = Strategy(configurations=configurations, layouts=layouts)
    found, _ = ran(graph, values, strategy, machine, GraphMapper(), runs=2)
    assert_near(found, interpret(graph, values), 1e-4, least=1.0)


@pytest.mark.parametrize("look", ["transpose", "slice", "split", "reshape"])
def test_an_update_waits_for_the_readers_of_views(look: str) -> None:
    """The product reads a view of the old weights, though it comes after the update."""
    builder = GraphBuilder()
    x, slope = builder.input("x", (3, 4)), builder.input("g", (4, 4))
    rate, fine = builder.input("rate", ()), builder.input("ok", (), "bool")
    w = builder.input("w", (4, 4), role=PARAMETER)
    attributes = {
        "transpose": {"permutation": (1, 0)},
        "slice": {"starts": (0, 1), "stops": (4, 3), "steps": (1, 1)},
        "split": {"axis": 1, "sizes": (2, 2)},
        "reshape": {"shape": (4, 4)},
    }
    seen = builder.apply(look, w, **attributes[look])[-1]
    builder.update(w, builder.apply("sgd", w, slope, rate, fine)[0])
    builder.output(builder.apply("matmul", x, seen)[0])
    graph = builder.build()
    values = drawn(graph) | {"ok": np.array(True)}
    found, _ = ran(graph, values, Strategy())
    assert_near(found, interpret(graph, values), 1e-5, least=1.0)
