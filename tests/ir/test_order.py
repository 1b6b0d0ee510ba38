"""Whether results depend on the order of elements: what is said, and what reordering them does."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.ir.analysis.order import where_order_matters
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

RANDOM = np.random.default_rng(0)
KEYS = {"k": 1, "v": 1, "mask": 1}  # the axes along which they are reordered


def attending(bias: Array, causal: bool = False, fused: bool = False) -> Graph:
    """Return attention of one query over six keys, with a mask and a constant bias on scores."""
    b = GraphBuilder("attending")
    q, k, v = (b.input(n, (2, t, 3, 4)) for n, t in (("q", 1), ("k", 6), ("v", 6)))
    mask = b.input("mask", (2, 6))
    constant = b.input("bias", bias.shape, role=Role.PARAMETER)
    (spread,) = b.apply("reshape", mask, shape=(12,))  # there and back again
    (spread,) = b.apply("reshape", spread, shape=(2, 1, 1, 6))
    (spread,) = b.apply("add", spread, constant)
    if fused:
        b.output(b.apply("attention", q, k, v, spread, causal=causal)[0])
        return b.build()
    order = (0, 2, 1, 3)
    q, k, v = (b.apply("transpose", each, permutation=order)[0] for each in (q, k, v))
    (scores,) = b.apply("matmul", q, k, transpose_b=True)
    (scores,) = b.apply("add", scores, spread)
    if causal:
        (scores,) = b.apply("hide_later", scores)
    (weights,) = b.apply("softmax", scores, axis=3)
    b.output(b.apply("matmul", weights, v)[0])
    return b.build()


@pytest.mark.parametrize("fused", [False, True])
def test_attention_does_not_depend_on_the_order_of_keys(fused: bool) -> None:
    bias = np.full((1, 6), 0.5, np.float32)
    graph = attending(bias, fused=fused)
    assert where_order_matters(graph, KEYS, {"bias": bias}) == ""
    given = {n: RANDOM.standard_normal(s.shape, np.float32) for n, s in graph.tensors.items()}
    given = {name: given[name] for name in graph.roles} | {"bias": bias}
    order = RANDOM.permutation(6)
    moved = given | {name: given[name][:, order] for name in KEYS}
    (name,) = graph.outputs
    assert np.allclose(interpret(graph, given)[name], interpret(graph, moved)[name], atol=1e-5)


def test_what_depends_on_it_is_named() -> None:
    flat, steps = np.zeros((1, 6), np.float32), np.arange(6, dtype=np.float32)[None]
    assert where_order_matters(attending(steps), KEYS, {"bias": steps}) == "add 'add'"
    hidden = attending(flat, causal=True)
    assert where_order_matters(hidden, KEYS, {"bias": flat}) == "hide_later 'hide_later'"
    fused = attending(flat, causal=True, fused=True)
    assert "hide_later" in where_order_matters(fused, KEYS, {"bias": flat})
    apart = attending(flat)  # the mask is not reordered with the keys
    assert where_order_matters(apart, {"k": 1, "v": 1}, {"bias": flat}) == "add 'add_1'"
    assert where_order_matters(apart, {"mask": 1}, {"bias": flat}) == "add 'add_1'"
    b = GraphBuilder("sorted")
    b.output(*b.apply("cumsum", b.input("x", (2, 3)), axis=1))
    assert where_order_matters(b.build(), {"x": 1}, {}) == "cumsum 'cumsum'"
    b = GraphBuilder("kept")
    b.output(*b.apply("relu", b.input("x", (2, 3))))
    assert where_order_matters(b.build(), {"x": 1}, {}) == "output 'relu'"
