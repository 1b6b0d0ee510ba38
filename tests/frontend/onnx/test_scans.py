"""Scans whose trips need nothing of one another, as converters write distances to neighbours."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import UnsupportedError
from soapstone.ir.tensor import Array

ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")

DISTANCES = {  # of each row of x to each row of w; all but the last by skl2onnx
    "euclidean": "s = ReduceSumSquare<axes = [1], keepdims = 0>(d)",
    "manhattan": "a = Abs(d) s = ReduceSum<keepdims = 0>(a, one)",
    "minkowski": "a = Abs(d) p = Pow(a, three) s = ReduceSum<keepdims = 0>(p, one)",
    "largest": "a = Abs(d) m = ReduceMax<axes = [-1], keepdims = 1>(a) s = Squeeze(m, one)",
}


def text(body: str, rows: int, columns: int, attributes: str = "") -> str:
    """Return a model that scans the rows of a weight `w`, and its state `x` stays."""
    return f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[n, {columns}] x) => (float[a, b] y)
    <float[{rows}, {columns}] w = {{}}> {{
        last, y = Scan<num_scan_inputs = 1{attributes}, body = b (float[n, k] x_in, float[k] row)
            => (float[n, k] x_out, float[n] s) <int64[1] one = {{1}}, float[1] three = {{3}}> {{
            {body}
        }}>(x, w)
    }}"""


def filled(text: str) -> bytes:
    """Return the bytes of a model with normal numbers for its weight."""
    model = parser.parse_model(text)
    (weight,) = model.graph.initializer
    found = np.random.default_rng(0).standard_normal(weight.dims).astype(np.float32)
    weight.CopyFrom(onnx.numpy_helper.from_array(found, weight.name))
    return model.SerializeToString()


def some(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("attributes", ["", ", scan_output_axes = [1]"])
@pytest.mark.parametrize("metric", list(DISTANCES))
def test_distances_of_rows_take_few_nodes(metric: str, attributes: str) -> None:
    body = f"d = Sub(x_in, row) {DISTANCES[metric]} x_out = Identity(x_in)"
    model = filled(text(body, 5000, 3, attributes))  # more trips than are unrolled
    x = some(70, 3)
    assert len(from_onnx(model).graph({"n": 70}).nodes) < 60
    theirs = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    with InferenceSession(model, threads=1) as session:
        for each in (x, x[:1]):
            (found,) = session.run(each).values()
            (needed,) = theirs.run(["y"], {"x": each})
            np.testing.assert_allclose(found, needed, rtol=2e-6)


STAYS = "x_out = Identity(x_in)"
BODIES = {
    "lower ranks first": (
        f"m = Mul(row, row) d = Add(x_in, m) s = ReduceMean<axes = [1], keepdims = 0>(d) {STAYS}"
    ),
    "axis from the end": (
        "d = Mul(x_in, row) f = Softmax<axis = -1>(d) s = ReduceMax<axes = [1], keepdims = 0>(f)"
        f" {STAYS}"
    ),
    "a product": (f"c = Unsqueeze(row, one) p = MatMul(x_in, c) s = Squeeze(p, one) {STAYS}"),
    "order of axes": (
        "d = Mul(x_in, row) t = Transpose<perm = [1, 0]>(d)"
        f" s = ReduceSumSquare<axes = [0], keepdims = 0>(t) {STAYS}"
    ),
    "a state that changes": (
        "x_out = Mul(x_in, row) s = ReduceSumSquare<axes = [1], keepdims = 0>(x_out)"
    ),
    "nothing of the row": f"{STAYS} s = ReduceSumSquare<axes = [1], keepdims = 0>(x_in)",
}


@pytest.mark.parametrize("directions", ["", ", scan_input_directions = [1]"])
@pytest.mark.parametrize("body", list(BODIES))
def test_other_bodies_give_what_onnxruntime_gives(body: str, directions: str) -> None:
    model, x = filled(text(BODIES[body], 7, 4, directions)), some(3, 4)
    (needed,) = ort.InferenceSession(model).run(["y"], {"x": x})
    with InferenceSession(model, threads=1) as session:
        np.testing.assert_allclose(session.run(x)["y"], needed, rtol=1e-5, atol=1e-6)


def test_too_many_trips_that_need_one_another_are_refused() -> None:
    body = "x_out = Mul(x_in, row) s = ReduceSumSquare<axes = [1], keepdims = 0>(x_out)"
    with pytest.raises(UnsupportedError, match="5000 trips found, of which each needs the one bef"):
        from_onnx(filled(text(body, 5000, 3))).graph({"n": 2})


def test_an_operator_whose_axes_have_places_is_applied_to_each_trip() -> None:
    """Behind an axis of trips, channels would be taken for images."""
    model = parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
        g (float[5, 2, 6, 3, 3] x) => (float[a, b, c, d, e] y) {
            y = Scan<num_scan_inputs = 1, body = b (float[n, c, h, w] row) => (float[n, c, h, w] r)
                { r = LRN<size = 3, alpha = 0.5>(row) }>(x)
        }""").SerializeToString()
    x = some(5, 2, 6, 3, 3)
    (needed,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(["y"], {"x": x})
    with InferenceSession(model, threads=1) as session:
        np.testing.assert_allclose(session.run(x)["y"], needed, rtol=1e-5)
