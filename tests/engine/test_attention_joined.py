"""Attention that graphs spell out becomes one launch where that computes the same."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret

T = 70


def spelled(
    *,
    heads: int | None = 3,
    queries: int = T,
    scale: float | None = None,
    turned: bool = True,
    mask: bool = False,
    shown: bool = False,
    axis: int = -1,
) -> Graph:
    """Attention of two samples; without heads, matrices of each sample.

    turned: keys are transposed before the product, not by it. shown: the weights are an output.
    """
    builder = GraphBuilder("spelled")
    before = (2,) if heads is None else (2, heads)
    q = builder.input("q", (*before, queries, 16))
    k = builder.input("k", (*before, T, 16))
    v = builder.input("v", (*before, T, 24))
    rank = len(before) + 2
    if turned:
        order = (*range(rank - 2), rank - 1, rank - 2)
        (k,) = builder.apply("transpose", k, permutation=order)
    (made,) = builder.apply("matmul", q, k, transpose_b=not turned)
    if scale is not None:
        (made,) = builder.apply("affine", made, scale=scale)
    if mask:
        (made,) = builder.apply("add", made, builder.input("mask", (queries, T)))
    (weights,) = builder.apply("softmax", made, axis=axis % rank)
    builder.output(*builder.apply("matmul", weights, v), *([weights] if shown else []))
    return builder.build()


def operators(graph: Graph) -> list[str]:
    return [node.operator for node in fold_weights(graph, {}).nodes]


def check(graph: Graph, tolerance: float = 2e-6) -> None:
    random = np.random.default_rng(0)
    given = {
        name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        for name in graph.roles
    }
    expected = interpret(graph, given)
    with InferenceSession(graph, {}, threads=2) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], atol=tolerance, rtol=1e-5)


@pytest.mark.parametrize("heads", [None, 1, 3])
@pytest.mark.parametrize("scale", [None, 0.25])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("queries", [T, 2 * T + 3])
def test_a_product_a_softmax_and_a_product_are_attention(
    heads: int | None, scale: float | None, turned: bool, queries: int
) -> None:
    graph = spelled(heads=heads, scale=scale, turned=turned, queries=queries)
    made = operators(graph)
    assert made.count("attention") == 1
    assert not {"softmax", "matmul", "affine"} & {*made}
    check(graph)


def test_its_launch_does_the_work_of_all_of_them() -> None:
    graph = spelled(scale=0.5)
    joined = fold_weights(graph, {})
    (node,) = (node for node in joined.nodes if node.operator == "attention")
    done = {n.name for n in graph.nodes if n.operator in ("matmul", "affine", "softmax")}
    assert {*node.work_of} == done


@pytest.mark.parametrize(
    "graph",
    [
        spelled(mask=True),
        spelled(shown=True),
        spelled(scale=-1.0),
        spelled(axis=-2),
        spelled(queries=8),
    ],
    ids=["mask", "weights are read", "negative scale", "other axis", "few queries"],
)
def test_what_is_not_attention_or_too_small_stays(graph: Graph) -> None:
    assert "attention" not in operators(graph)
    check(graph)


def test_shared_keys_of_all_heads_stay_products() -> None:
    builder = GraphBuilder("shared")
    q, k, v = (builder.input(n, (1, h, T, 16)) for n, h in (("q", 4), ("k", 1), ("v", 1)))
    (scores,) = builder.apply("matmul", q, k, transpose_b=True)
    (weights,) = builder.apply("softmax", scores, axis=3)
    builder.output(*builder.apply("matmul", weights, v))
    graph = builder.build()
    assert "attention" not in operators(graph)
    check(graph)


def test_a_row_of_many_equal_scores_and_one_far_above() -> None:
    graph = spelled()
    random = np.random.default_rng(1)
    given = {
        name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        for name in graph.roles
    }
    given["q"][0, 0] = 0.0
    given["q"][1, 1] *= 300.0
    expected = interpret(graph, given)
    with InferenceSession(graph, {}) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], atol=2e-5, rtol=1e-4)
