"""Convolutions of a split's parts that are joined again become one of groups where that is it."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Role


def branched(
    *,
    rank: int = 2,
    groups: int = 1,
    bias: bool = False,
    activation: str | None = None,
    order: tuple[int, ...] = (0, 1, 2),
    strides: tuple[int, ...] = (1, 1, 1),
    widths: tuple[int, ...] = (4, 4, 4),
    axis: int = 1,
    constant: bool = True,
    seen: bool = False,
) -> Graph:
    """Paths of a value of 12 channels. seen: one path's result is an output too."""
    builder = GraphBuilder("branched")
    x = builder.input("x", (2, 12, *(9, 8)[:rank]))
    parts = builder.apply("split", x, axis=1, sizes=(4, 4, 4))
    role = Role.PARAMETER if constant else Role.INPUT
    paths = []
    for number, (stride, width) in enumerate(zip(strides, widths)):
        shape = (width, 4 // groups, *(3,) * rank)
        operands = [builder.input(f"w{number}", shape, role=role)]
        if bias:
            operands.append(builder.input(f"b{number}", (width,), role=role))
        at = {"groups": groups, "stride": (stride,) * rank, "bias": bias, "activation": activation}
        at["padding"] = (1,) * 2 * rank
        (path,) = builder.apply(f"conv{rank}d", parts[number], *operands, **at)
        paths.append(path)
    (joined,) = builder.apply("concat", *(paths[i] for i in order), axis=axis)
    builder.output(builder.apply("relu", joined)[0], *(paths[:1] if seen else []))
    return builder.build()


def folded_and_right(graph: Graph) -> list[int]:
    """Check a session's numbers; return the groups of the convolutions that are left."""
    random = np.random.default_rng(3)
    given, weights = (
        {
            name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
            for name in graph.inputs(role)
        }
        for role in (Role.INPUT, Role.PARAMETER)
    )
    expected = interpret(graph, {**given, **weights})
    with InferenceSession(graph, weights, threads=1) as session:
        found = session.run(given)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)
    nodes = fold_weights(graph, weights).nodes
    return [node.attributes["groups"] for node in nodes if node.operator.startswith("conv")]


@pytest.mark.parametrize(
    ("case", "groups"),
    [
        ({}, 3),
        ({"rank": 1}, 3),
        ({"bias": True, "activation": "relu"}, 3),
        ({"groups": 2}, 6),
        ({"strides": (2, 2, 2), "widths": (8, 8, 8)}, 3),
    ],
)
def test_paths_become_groups(case: dict[str, object], groups: int) -> None:
    assert folded_and_right(branched(**case)) == [groups]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "case",
    [
        {"order": (1, 0, 2)},
        {"order": (0, 1)},
        {"widths": (4, 8, 4)},
        {"axis": 0},
        {"constant": False},
        {"seen": True},
    ],
)
def test_other_paths_stay(case: dict[str, object]) -> None:
    assert len(folded_and_right(branched(**case))) == 3 - (case == {"order": (0, 1)})  # type: ignore[arg-type]
