"""Models whose shapes depend on computed values, run in pieces, against ONNX Runtime."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import soapstone.onnxruntime as ours
from soapstone import DataError, InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError, UnboundError
from soapstone.frontend.onnx.check import check_onnx
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
Feeds = dict[str, Array]
RANDOM = np.random.default_rng(0)


def reals(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model_of(text: str, opset: int = 18) -> bytes:
    header = f'<ir_version: 9, opset_import: ["" : {opset}, "local" : 1]>'
    model: bytes = onnx.parser.parse_model(f"{header}\n{text}").SerializeToString()
    return model


def equal_runtime(model: bytes, *runs: Feeds) -> InferenceSession:
    """Compare the outputs of all runs of one session with ONNX Runtime's; return the session."""
    reference = theirs.InferenceSession(model)
    session = InferenceSession(from_onnx(model), threads=1)
    for feeds in runs:
        found = session.run(feeds)
        for name, expected in zip(session.outputs, reference.run(None, feeds)):
            assert found[name].dtype == expected.dtype
            np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    return session


POINTS = """g (float[n, 3] x) => (int64[2, k] places, float[k] values)
{ h = Relu(x)  places = NonZero(h)  rows = Transpose(places)  some = GatherND(h, rows)
  values = Exp(some) }"""

DETECTOR = """g (float[1, n, 4] b, float[1, 3, n] s)
=> (float[k, 4] boxes, float[j] top, int64[j] at)
<int64[1] most = {5}, float[1] iou = {0.4}, float[1] least = {0.5}, int64[1] two = {2},
 int64[1] one = {1}, int64[1] three = {3}, int64[1] none = {0}, int64[1] ten = {10}>
{ raw = Exp(b)  scores = Sigmoid(s)
  chosen = NonMaxSuppression<center_point_box = 1>(raw, scores, most, iou, least)
  of = Gather<axis = 1>(chosen, two)  flat = Squeeze(raw, none)  boxes = GatherND(flat, of)
  classes = Squeeze(scores, none)  where = Slice(chosen, one, three, one)
  score = GatherND(classes, where)  size = Shape(score)  both = Concat<axis = 0>(size, ten)
  k = ReduceMin<keepdims = 1>(both)  top, at = TopK(score, k) }"""


def boxes(count: int) -> Feeds:
    return {"b": reals(1, count, 4) / 2, "s": reals(1, 3, count)}


def test_operators_whose_results_have_shapes_of_their_own() -> None:
    x = reals(5, 3)
    with equal_runtime(model_of(POINTS), {"x": x}, {"x": reals(2, 3)}, {"x": -abs(x)}):
        pass
    with equal_runtime(model_of(DETECTOR), boxes(60), boxes(60), boxes(7), boxes(1)):
        pass


def test_equal_shapes_are_bound_once_and_the_caches_are_bounded() -> None:
    with InferenceSession(from_onnx(model_of(POINTS)), threads=1, bound_shapes=2) as session:
        x = reals(5, 3)
        session.run(x)
        pieces = session.serial.pieces
        assert pieces is not None
        before = dict(pieces._pieces)
        session.run(-x[::-1] if (x > 0).sum() * 2 == x.size else x[::-1].copy())
        assert dict(pieces._pieces) == before
        for positive in range(12):
            session.run(np.where(np.arange(15) < positive, 1, -1).reshape(5, 3).astype("f4"))
        assert len(pieces._pieces) <= 4
        assert len(session.serial.bounds.held) <= 4


def test_a_session_that_ran_in_pieces_is_gone_once_nobody_has_it() -> None:
    session = InferenceSession(from_onnx(model_of(POINTS)), threads=1)
    gc.collect()
    gc.disable()
    try:
        session.run(reals(5, 3))
        assert session.serial.pieces is not None
        there = weakref.ref(session.serial)
        del session
        assert there() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<sorted = 0>"])
def test_unique(axis: str) -> None:
    model = model_of(
        f"""g (int64[n, 2] x) => (int64[k, l] y, int64[m] first, int64[o] back, int64[p] counts)
        {{ d = Add(x, x)  u, first, back, counts = Unique{axis}(d)  y = Neg(u) }}"""
    )
    x = np.array([[2, 1], [3, 0], [2, 1], [-1, 5]])
    with equal_runtime(model, {"x": x}, {"x": x[:3]}):
        pass


@pytest.mark.parametrize("axis", ["", "<axis = 0>", "<axis = 1>"])
def test_compress(axis: str) -> None:
    rank = "k" if not axis else "a, b"
    model = model_of(
        f"""g (float[n, 3] x, float[3] c) => (float[{rank}] y)
        {{ zero = Constant<value_float = 0.0>()  keep = Greater(c, zero)  h = Exp(x)
           part = Compress{axis}(h, keep)  y = Neg(part) }}"""
    )
    c = np.array([1, -1, 1], np.float32)
    with equal_runtime(model, {"x": reals(4, 3), "c": c}, {"x": reals(4, 3), "c": -c}):
        pass


def test_shapes_that_are_computed() -> None:
    model = model_of(
        """g (float[n] x) => (float[a] some, float[b, n] rows, int64[c] range, float[d] top)
        <float zero = {0.0}, int64 none = {0}, int64 one = {1}, int64[1] first = {0},
         int64[1] last = {0}, int64[2] like = {1, -1}>
        { up = Greater(x, zero)  ones = Cast<to = 7>(up)  k = ReduceSum<keepdims = 0>(ones)
          shape = Unsqueeze(k, first)  some = Slice(x, first, shape)
          range = Range(none, k, one)  row = Reshape(x, like)
          size = Concat<axis = 0>(shape, one_row)  rows = Expand(row, size)
          top, at = TopK(x, shape) }""".replace("int64[1] last = {0}", "int64[1] one_row = {1}")
    )
    x = np.array([1, -1, 2, 3, -2], np.float32)
    with equal_runtime(model, {"x": x}, {"x": -x}, {"x": x + 3}):
        pass


def test_loops_of_computed_counts() -> None:
    model = model_of(
        """g (float[3] x) => (float[3] y, float[k, 3] each, int64 steps)
        <float zero = {0.0}, int64 none = {0}>
        { up = Greater(x, zero)  ones = Cast<to = 7>(up)  k = ReduceSum<keepdims = 0>(ones)
          start = Exp(x)  true = Constant<value_int = 1>()  go = Cast<to = 9>(true)
          y, steps, each = Loop(k, go, start, none) <body = b
            (int64 i, bool c, float[3] s, int64 n) => (bool on, float[3] t, int64 m, float[3] e)
            <float half = {0.5}>
            { on = Identity(c)  t = Mul(s, half)  m = Add(n, i)  e = Add(t, x) } > }"""
    )
    x = np.array([1, -1, 2], np.float32)
    with equal_runtime(model, {"x": x}, {"x": -x}, {"x": -abs(x)}) as session:
        assert session.serial.pieces is not None
        assert len(session.serial.pieces._pieces) < 8  # the body is bound once for all trips


def test_while_loops_and_values_that_grow() -> None:
    model = model_of(
        """g (float x) => (float y, float[k] all)
        <float most = {100.0}, float two = {2.0}, int64[1] first = {0}>
        { go = Less(x, most)  begin = Unsqueeze(x, first)
          y, all = Loop(, go, x, begin) <body = b
            (int64 i, bool c, float s, float[n] past) => (bool on, float t, float[m] more)
            { t = Mul(s, two)  on = Less(t, most)  row = Unsqueeze(t, first)
              more = Concat<axis = 0>(past, row) } > }"""
    )
    with equal_runtime(model, *({"x": np.asarray(x, "f4")} for x in (1, 30, 200, 1.5))):
        pass


def test_branches_that_differ_in_shape_or_hold_such_operators() -> None:
    model = model_of(
        """g (float[n] x) => (float[k] y, int64[1, m] at)
        <float zero = {0.0}, int64[1] first = {0}, int64[1] two = {2}>
        { total = ReduceSum<keepdims = 0>(x)  c = Greater(total, zero)  h = Exp(x)
          y = If(c) <then_branch = t () => (float[a] p) { p = Slice(h, first, two) },
                     else_branch = e () => (float[b] q) { q = Neg(h) }>
          at = If(c) <then_branch = t2 () => (int64[1, d] r) { u = Relu(x)  r = NonZero(u) },
                      else_branch = e2 () => (int64[1, f] v)
                        { w = Neg(x)  z = Relu(w)  v = NonZero(z) }> }"""
    )
    x = np.array([1, -1, 2, 3], np.float32)
    with equal_runtime(model, {"x": x}, {"x": -x}, {"x": x}):
        pass


def test_functions_and_loop_bodies_that_hold_such_operators() -> None:
    header = """g (float[n, 3] x) => (int64 count, float[n, 3] y)
        <int64 trips = {3}, int64 none = {0}>
        { y = Exp(x)  true = Constant<value_int = 1>()  go = Cast<to = 9>(true)
          count = Loop(trips, go, none) <body = b
            (int64 i, bool c, int64 s) => (bool on, int64 t)
            { on = Identity(c)  at = Cast<to = 1>(i)  low = Sub(x, at)
              k = local.positive(low)  t = Add(s, k) } > }
        <domain: "local", opset_import: ["" : 18]> positive (a) => (k)
        { h = Relu(a)  p = NonZero(h)  size = Shape(p)
          one = Constant<value_int = 1>()  k = Gather(size, one) }"""
    with equal_runtime(model_of(header), {"x": reals(4, 3) + 1}, {"x": reals(2, 3)}):
        pass


def test_sequences_between_pieces() -> None:
    model = model_of(
        """g (float[n] x) => (float[k] y)
        <float zero = {0.0}, int64 one = {1}>
        { e = Exp(x)  s = SequenceConstruct(x, e)  r = Relu(x)  p = NonZero(r)  size = Shape(p)
          part = Gather(size, one)  q = Squeeze(p)  f = Cast<to = 1>(q)
          t = SequenceInsert(s, f)  y = ConcatFromSequence<axis = 0>(t) }"""
    )
    with equal_runtime(model, {"x": np.array([1, -1, 2], np.float32)}):
        pass


def test_such_a_model_has_no_graph_but_runs_where_sessions_do() -> None:
    model, feeds = model_of(DETECTOR), boxes(20)
    with pytest.raises(UnboundError, match="an InferenceSession runs such a model in pieces"):
        from_onnx(model).graph({"n": 20})
    (expected, *_) = theirs.InferenceSession(model).run(None, feeds)
    session = ours.InferenceSession(model)
    assert session.get_outputs()[0].shape == ["k", 4]
    np.testing.assert_allclose(session.run(["boxes"], feeds)[0], expected, rtol=1e-5)
    inner = session.session
    assert inner.variants(feeds)
    assert inner.meeting_samples(feeds) == "shapes that depend on computed values"
    out = np.zeros_like(expected)
    assert inner.run(feeds, out={"boxes": out})["boxes"] is out
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    with pytest.raises(DataError, match=r"out 'boxes': .* needed"):
        inner.run(feeds, out={"boxes": np.zeros((99, 4), np.float32)})


def test_check_says_where_a_model_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "detector.onnx"
    path.write_bytes(model_of(DETECTOR))
    for dims in ({"n": 20}, {}):
        report: Any = check_onnx(path, dims)
        assert report.problem is None
        assert report.cuts == ("node 2 (NonMaxSuppression)",)
        assert "run in pieces, first cut at node 2 (NonMaxSuppression)" in str(report)


def test_errors_name_the_node() -> None:
    model = model_of(
        """g (float[2, 3, 4] b, float[1, 1, 3] s) => (int64[k, 3] y)
        { c = Exp(b)  y = NonMaxSuppression(c, s) }"""
    )
    with (
        InferenceSession(from_onnx(model), threads=1) as session,
        pytest.raises(OnnxError, match=r"node 1 \(NonMaxSuppression\): boxes .* needed"),
    ):
        session.run({"b": reals(2, 3, 4), "s": reals(1, 1, 3)})
