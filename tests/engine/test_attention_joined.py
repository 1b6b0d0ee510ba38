"""Attention that graphs spell out becomes one launch where that computes the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import parser

from soapstone import InferenceSession, from_onnx
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Role
from soapstone.kernels.registry import variants

T = 70


def spelled(
    *,
    heads: int | None = 3,
    queries: int = T,
    keys: int = T,
    scale: float | None = None,
    turned: bool = True,
    mask: tuple[int, ...] | None = None,
    chosen: float | None = None,
    guarded: bool = False,
    split: bool = False,
    shown: bool = False,
    axis: int = -1,
) -> Graph:
    """Attention of two samples; without heads, matrices of each sample.

    turned: keys are transposed before the product, not by it. mask: the shape of one; it is added,
    or, where a number is given, chooses that instead of scores. guarded: weights which are not
    numbers become 0. split: queries and keys are scaled, not scores. shown: weights are an output.
    """
    builder = GraphBuilder("spelled")
    before = (2,) if heads is None else (2, heads)
    q = builder.input("q", (*before, queries, 16))
    k = builder.input("k", (*before, keys, 16))
    v = builder.input("v", (*before, keys, 24))
    rank = len(before) + 2
    if split:
        q, k = (builder.apply("affine", side, scale=0.6)[0] for side in (q, k))
    if turned:
        order = (*range(rank - 2), rank - 1, rank - 2)
        (k,) = builder.apply("transpose", k, permutation=order)
    (made,) = builder.apply("matmul", q, k, transpose_b=not turned)
    if scale is not None:
        (made,) = builder.apply("affine", made, scale=scale)
    if mask is not None and chosen is None:
        (made,) = builder.apply("add", made, builder.input("mask", mask))
    elif mask is not None:
        fill = builder.input("fill", (), role=Role.PARAMETER)
        (hidden,) = builder.apply("is_nan", builder.input("mask", mask))
        (made,) = builder.apply("where", hidden, fill, made)
    (weights,) = builder.apply("softmax", made, axis=axis % rank)
    if guarded:
        (lost,) = builder.apply("is_nan", weights)
        zero = builder.input("zero", (), role=Role.PARAMETER)
        (weights,) = builder.apply("where", lost, zero, weights)
    builder.output(*builder.apply("matmul", weights, v), *([weights] if shown else []))
    return builder.build()


NUMBERS = {"zero": np.zeros((), np.float32), "fill": np.full((), -np.inf, np.float32)}


def joined(graph: Graph, **known: np.ndarray) -> Graph:
    constants = {n: NUMBERS[n] for n in graph.roles if n in NUMBERS} | known
    return fold_weights(graph, constants)


def operators(graph: Graph, **known: np.ndarray) -> list[str]:
    return [node.operator for node in joined(graph, **known).nodes]


def check(graph: Graph, tolerance: float = 2e-6, **given: np.ndarray) -> None:
    random = np.random.default_rng(0)
    for name in graph.roles:
        drawn = random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        given[name] = given.get(name, NUMBERS.get(name, drawn))
    expected = interpret(graph, given)
    weights = {n: given.pop(n) for n, role in graph.roles.items() if role is not Role.INPUT}
    with InferenceSession(graph, weights, threads=2) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], atol=tolerance, rtol=1e-5)


def hiding(shape: tuple[int, ...], by: float, row: int | None = 3) -> np.ndarray:
    """A mask which hides some keys by a number, and all of one row."""
    random = np.random.default_rng(2)
    mask = np.where(random.random(shape) < 0.3, by, 0).astype(np.float32)
    if row is not None:
        mask[..., row % shape[-2], :] = by
    return mask


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


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("by", [-np.inf, np.finfo(np.float32).min], ids=["infinite", "least"])
@pytest.mark.parametrize(
    ("heads", "shape"),
    [
        *((3, shape) for shape in ((2, 1, T, T), (T, T), (2, 3, 1, T))),
        *((None, shape) for shape in ((2, T, T), (2, 1, T), (1, T, T), (1, 1, T))),
    ],
)
def test_a_mask_that_is_added_is_the_operators_mask(
    heads: int | None, shape: tuple[int, ...], by: float, guarded: bool
) -> None:
    graph = spelled(heads=heads, mask=shape, guarded=guarded, split=True)
    assert not {"softmax", "matmul", "affine", "is_nan"} & {*operators(graph)}
    check(graph, mask=hiding(shape, by))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("fill", [-np.inf, np.finfo(np.float32).min], ids=["infinite", "least"])
def test_a_mask_that_chooses_is_one_that_is_added(fill: float, guarded: bool) -> None:
    graph = spelled(mask=(2, 1, T, T), chosen=fill, guarded=guarded, scale=0.3)
    known = {"fill": np.asarray(fill, np.float32)}
    assert operators(graph, **known).count("attention") == 1
    check(graph, mask=hiding((2, 1, T, T), np.nan), **known)


def test_a_mask_that_chooses_a_number_near_scores_stays() -> None:
    graph = spelled(mask=(2, 1, T, T), chosen=-100.0)
    assert "attention" not in operators(graph, fill=np.asarray(-100, np.float32))


def test_constant_masks_that_hide_nothing_or_what_follows_are_no_operands() -> None:
    for queries, later in ((T, 1), (T, T), (2 * T, 1)):
        graph = spelled(mask=(1, 1, queries, T), queries=queries)
        mask = np.triu(np.full((1, 1, queries, T), -np.inf, np.float32), later)
        (node,) = (n for n in joined(graph, mask=mask).nodes if n.operator == "attention")
        assert len(node.inputs) == 3
        assert node.attributes["causal"] == (later == 1)
        check(graph, mask=mask)
    other = np.triu(np.full((1, 1, T, T), -np.inf, np.float32), 2)
    (node,) = (
        n for n in joined(spelled(mask=(1, 1, T, T)), mask=other).nodes if n.operator == "attention"
    )
    assert len(node.inputs) == 4


@pytest.mark.parametrize("mask", [None, (T, 0)])
def test_queries_without_keys_are_sums_of_nothing(mask: tuple[int, ...] | None) -> None:
    graph = spelled(keys=0, mask=mask)
    assert "attention" in operators(graph)
    check(graph)


def test_weights_read_before_they_are_guarded_stay() -> None:
    graph = spelled(guarded=True)
    (guard,) = (node for node in graph.nodes if node.operator == "is_nan")
    shown = replace(graph, outputs=(*graph.outputs, guard.inputs[0]))
    assert "attention" not in operators(shown)
    check(shown)


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("boolean", [False, True])
def test_masks_as_exporters_write_them_agree_with_onnx_runtime(
    boolean: bool, guarded: bool
) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    model = parser.parse_model(_exported(boolean, guarded))
    random = np.random.default_rng(3)
    given = {n: random.standard_normal((2, T, 48)).astype(np.float32) for n in "qkv"}
    given["seen"] = random.integers(0, 2, (2, T))
    given["seen"][1] = 0  # every key of a sample is hidden
    session = runtime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (expected,) = session.run(None, given)
    assert np.isnan(expected).any() == (boolean and not guarded)
    with InferenceSession(from_onnx(model.SerializeToString())) as ours:
        (found,) = ours.run(given).values()
    np.testing.assert_allclose(found, expected, atol=2e-6, rtol=1e-5)


def _exported(boolean: bool, guarded: bool) -> str:
    """Attention of three heads as exporters write it, its mask made of which keys are seen."""
    hides = "-inf" if boolean else "-3.4028234663852886e38"
    mask = (
        "mask = Where(shown, zero, fill)"
        if boolean
        else "apart = Cast<to = 1>(hidden)  mask = Mul(apart, fill)"
    )
    end = "lost = IsNaN(p)  w = Where(lost, zero, p)" if guarded else "w = Identity(p)"
    heads = "\n".join(
        f"{n}s = Reshape({n}, apart4)  {n}h = Transpose<perm = [0, 2, 1, 3]>({n}s)" for n in "qkv"
    )
    return f"""<ir_version: 8, opset_import: ["" : 18]>
        spelled (float[2, {T}, 48] q, float[2, {T}, 48] k, float[2, {T}, 48] v, int64[2, {T}] seen)
            => (float[2, {T}, 48] y)
        <float zero = {{0.0}}, float fill = {{{hides}}}, int64[2] axes = {{1, 2}},
         int64[4] apart4 = {{2, {T}, 3, 16}}, int64[3] flat = {{6, {T}, 16}},
         int64[4] back = {{2, 3, 16, {T}}}, int64[3] whole = {{2, {T}, 48}}, float root = {{0.5}}>
        {{
            {heads}
            shown0 = Cast<to = 9>(seen)
            shown = Unsqueeze(shown0, axes)
            hidden = Not(shown)
            {mask}
            rows = Reshape(kh, flat)
            turned = Transpose<perm = [0, 2, 1]>(rows)
            kt = Reshape(turned, back)
            qr = Mul(qh, root)
            kr = Mul(kt, root)
            scores = MatMul(qr, kr)
            masked = Add(scores, mask)
            p = Softmax<axis = -1>(masked)
            {end}
            mixed = MatMul(w, vh)
            together = Transpose<perm = [0, 2, 1, 3]>(mixed)
            y = Reshape(together, whole)
        }}"""


def test_its_launch_does_the_work_of_all_of_them() -> None:
    graph = spelled(scale=0.5)
    (node,) = (node for node in joined(graph).nodes if node.operator == "attention")
    done = {n.name for n in graph.nodes if n.operator in ("matmul", "affine", "softmax")}
    assert {*node.work_of} == done


@pytest.mark.parametrize(
    "graph",
    [
        spelled(shown=True),
        spelled(scale=-1.0),
        spelled(axis=-2),
    ],
    ids=["weights are read", "negative scale", "other axis"],
)
def test_what_is_not_attention_stays(graph: Graph) -> None:
    assert "attention" not in operators(graph)
    check(graph)


def test_attention_of_few_scores_is_joined_where_there_are_kernels_of_its_own() -> None:
    """A library's product of each head takes longer than one of all heads."""
    graph = spelled(queries=3)
    own = any(each.name == "blocks" for each in variants("attention", "cpu"))
    assert ("attention" in operators(graph)) == own
    check(graph)


def test_keys_of_one_head_are_shared_by_all() -> None:
    builder = GraphBuilder("shared")
    q, k, v = (builder.input(n, (2, h, T, 16)) for n, h in (("q", 4), ("k", 1), ("v", 1)))
    (scores,) = builder.apply("matmul", q, k, transpose_b=True)
    (weights,) = builder.apply("softmax", scores, axis=3)
    builder.output(*builder.apply("matmul", weights, v))
    graph = builder.build()
    (node,) = (node for node in joined(graph).nodes if node.operator == "attention")
    assert [graph_heads(joined(graph), name) for name in node.inputs] == [4, 1, 1]
    check(graph)


def graph_heads(graph: Graph, value: str) -> int:
    return graph.tensors[value].shape[2]


def repeated(builder: GraphBuilder, x: str, how: str, times: int) -> str:
    """Return x (b, heads, t, d) with each head so often, or with all of them so often."""
    b, heads, t, d = builder.spec(x).shape
    one, axis = ((b, heads, 1, t, d), 2) if how != "beside" else ((b, 1, heads, t, d), 1)
    (x,) = builder.apply("reshape", x, shape=one)
    if how == "concat":
        (x,) = builder.apply("concat", *[x] * times, axis=axis)
    else:
        wide = (*one[:axis], times, *one[axis + 1 :])
        (x,) = builder.apply("broadcast", x, shape=wide)
    return builder.apply("reshape", x, shape=(b, heads * times, t, d))[0]


def grouped(how: str, queries: int, known: bool, mask: tuple[int, ...] = ()) -> Graph:
    """Attention of six heads of queries by two of keys. known: it is one operator already."""
    builder = GraphBuilder("grouped")
    q = builder.input("q", (2, 6, queries, 16))
    k, v = (builder.input(name, (2, 2, T, d)) for name, d in (("k", 16), ("v", 24)))
    hides = [builder.input("mask", mask)] if mask else []
    k, v = (repeated(builder, x, how, 3) for x in (k, v))
    if known:
        each = [builder.apply("transpose", x, permutation=(0, 2, 1, 3))[0] for x in (q, k, v)]
        y, _ = builder.apply("attention", *each, *hides)
        builder.output(y)
        return builder.build()
    (k,) = builder.apply("affine", k, scale=0.5)
    (k,) = builder.apply("transpose", k, permutation=(0, 1, 3, 2))
    (scores,) = builder.apply("matmul", q, k)
    if hides:
        (scores,) = builder.apply("add", scores, *hides)
    (weights,) = builder.apply("softmax", scores, axis=3)
    builder.output(*builder.apply("matmul", weights, v))
    return builder.build()


@pytest.mark.parametrize(("known", "queries"), [(False, T), (True, 1), (True, 9), (True, T)])
@pytest.mark.parametrize("how", ["broadcast", "concat"])
@pytest.mark.parametrize("mask", [(), (1, 1, 1, T), (2, 6, 1, T)])
def test_heads_that_share_keys_read_them_where_they_are(
    known: bool, how: str, queries: int, mask: tuple[int, ...]
) -> None:
    graph = grouped(how, queries, known, mask)
    made = joined(graph)
    (node,) = (node for node in made.nodes if node.operator == "attention")
    assert [graph_heads(made, name) for name in node.inputs[:3]] == [6, 2, 2]
    assert not {"broadcast", "concat"} & {node.operator for node in made.nodes}
    check(graph)


def test_heads_that_are_repeated_beside_each_other_are_copied() -> None:
    graph = grouped("beside", T, known=True)
    (node,) = (node for node in joined(graph).nodes if node.operator == "attention")
    assert graph_heads(joined(graph), node.inputs[1]) == 6
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


def test_products_that_a_mask_repeats_stay() -> None:
    builder = GraphBuilder("repeated")
    q, k = (builder.input(name, (1, 2, T, 16)) for name in "qk")
    (scores,) = builder.apply("matmul", q, k, transpose_b=True)
    (scores,) = builder.apply("add", scores, builder.input("mask", (3, 1, T, T)))
    (weights,) = builder.apply("softmax", scores, axis=3)
    builder.output(*builder.apply("matmul", weights, builder.input("v", (1, 2, T, 24))))
    graph = builder.build()
    assert fold_weights(graph, {}).nodes == graph.nodes
