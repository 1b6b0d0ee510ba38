"""Nodes at the edges of what ONNX allows: empty tensors, large integers, broadcast scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper

import soapstone
from soapstone.ir.tensor import Array

ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")

BIG = (1 << 31) - 5  # of int32; float32 holds its neighbours only


def form(
    kind: str,
    *inputs: Array | None,
    known: tuple[int, ...] = (),
    opset: int = 17,
    **attributes: Any,
) -> tuple[bytes, dict[str, Array]]:
    """Return a model of one node, and its inputs; known: those whose contents the file has."""
    outputs = attributes.pop("outputs", 1)
    names = [f"x{place}" if array is not None else "" for place, array in enumerate(inputs)]
    given = {n: a for n, a in zip(names, inputs) if a is not None and int(n[1:]) not in known}
    node = helper.make_node(kind, names, [f"y{n}" for n in range(outputs)], **attributes)
    graph = helper.make_graph(
        [node],
        kind,
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in given.items()
        ],
        [helper.make_empty_tensor_value_info(name) for name in node.output],
        [onnx.numpy_helper.from_array(a, n) for n, a in zip(names, inputs) if n and n not in given],
    )
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    model = onnx.shape_inference.infer_shapes(model)
    for output in model.graph.output:
        if not output.type.HasField("tensor_type"):  # what ONNX does not infer is of x0's type
            output.type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(given["x0"].dtype)
    return model.SerializeToString(), given


def as_onnxruntime(model: bytes, given: dict[str, Array]) -> list[Array]:
    """Return what a session gives, which is what ONNX Runtime gives."""
    needed = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, given)
    found = list(soapstone.InferenceSession(model, threads=1).run(given).values())
    for one, other in zip(found, needed, strict=True):
        assert one.dtype == other.dtype
        tolerance = 1e-5 if one.dtype.kind == "f" else 0
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    return found


def ones(*shape: int, dtype: str = "float32") -> Array:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(("start", "end"), [(-3, -1000), (-2, -1000), (-1, -1000), (0, -3), (9, 0)])
@pytest.mark.parametrize("extent", [0, 1, 2, 5])
def test_a_slice_backwards_begins_inside(extent: int, start: int, end: int) -> None:
    ends = (np.array([each]) for each in (start, end, 0, -1))
    x = np.arange(extent, dtype=np.float32)
    as_onnxruntime(*form("Slice", x, *ends, known=(1, 2, 3, 4)))


@pytest.mark.parametrize("kind", ["AveragePool", "MaxPool", "LpPool"])
def test_no_window_of_a_pool_fits(kind: str) -> None:
    pooled = as_onnxruntime(*form(kind, ones(2, 3, 2, 8), kernel_shape=[3, 1]))
    assert pooled[0].shape == (2, 3, 0, 8)
    if kind == "MaxPool":
        as_onnxruntime(*form(kind, ones(1, 1, 1), kernel_shape=[4], strides=[3], outputs=2))
        wide = {"kernel_shape": [2, 2], "strides": [2, 3], "dilations": [2, 1], "ceil_mode": 1}
        as_onnxruntime(*form(kind, ones(1, 3, 1, 6), **wide))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_product_of_no_depth_is_zero(dtype: str) -> None:
    rows, columns = ones(5, 0, dtype=dtype), ones(0, 3, dtype=dtype)
    assert not as_onnxruntime(*form("MatMul", rows, columns, known=(1,)))[0].any()


@pytest.mark.parametrize("value", [-1742990605515074689, (1 << 63) - 1, 5])
def test_large_integers_around_a_tensor(value: int) -> None:
    pads = np.array([0, 1, 1, 0])
    as_onnxruntime(*form("Pad", ones(2, 2, dtype="int64"), pads, np.array(value), known=(1, 2)))


@pytest.mark.parametrize("mode", ["half_pixel", "tf_crop_and_resize"])
def test_large_integers_are_resized_as_they_are(mode: str) -> None:
    x = np.array([[BIG, BIG - 1], [7, -BIG]], np.int32)
    region = np.array([0, -0.5, 1, 1.5], np.float32)
    common = {"mode": "nearest", "coordinate_transformation_mode": mode, "known": (1, 3)}
    sizes = np.array([3, 5])
    as_onnxruntime(*form("Resize", x, region, None, sizes, extrapolation_value=3.0, **common))


@pytest.mark.parametrize("kind", ["LayerNormalization", "RMSNormalization"])
def test_a_scale_of_a_norm_is_broadcast(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    shift = () if kind == "RMSNormalization" else (x[1, :1],)
    as_onnxruntime(*form(kind, x, x[0], *shift, axis=0, opset=23))


def test_statistics_of_a_norm_of_doubles_are_single() -> None:
    x = np.random.default_rng(1).standard_normal((3, 4))
    found = as_onnxruntime(*form("LayerNormalization", x, x[0], outputs=3))
    assert [each.dtype.name for each in found] == ["float64", "float32", "float32"]


def test_norms_of_groups_as_of_opset_18() -> None:
    """ONNX calls them deprecated, and still gives them a body."""
    x = np.random.default_rng(2).standard_normal((2, 6, 3)).astype(np.float32)
    scales = np.array([1, 2, 3], np.float32)
    as_onnxruntime(*form("GroupNormalization", x, scales, -scales, num_groups=3, opset=18))


@pytest.mark.parametrize("kind", ["ReduceL2", "ReduceLogSum", "ReduceLogSumExp"])
def test_roots_and_logarithms_of_integers_are_cut(kind: str) -> None:
    x = np.array([[1, 5, 7], [20, 3, 2]])
    as_onnxruntime(*form(kind, x, np.array([1]), known=(1,), opset=18))


@pytest.mark.parametrize("number", [3.0, -0.1, 1e-5, 2.0**-40, 1e38, 2.0**-140])
def test_a_quotient_by_a_number_is_rounded_once(number: float) -> None:
    """So it is what a folded quotient is, from which a file may subtract it."""
    x = np.random.default_rng(0).standard_normal((64, 9)).astype(np.float32)
    x[0, :3] = 0, np.inf, np.nan
    divisor = np.array([number], np.float32)
    model, given = form("Div", x, divisor, known=(1,))
    (found,) = soapstone.InferenceSession(model, threads=1).run(given).values()
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, x / divisor)


def test_a_range_of_bytes_is_divided() -> None:
    """255 is no power of two: a product with its inverse is another number."""
    x = np.array([-1.5, 0.5, 1.5, -0.5], np.float32)
    scale = as_onnxruntime(*form("DynamicQuantizeLinear", x, outputs=3, opset=11))[1]
    assert scale == np.float32(3) / np.float32(255)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    "kind, more",
    [
        ("RNN", {"clip": 0.4}),
        ("RNN", {"activations": ["Sigmoid"]}),
        ("GRU", {"clip": 0.4}),
        ("GRU", {"clip": 0.4, "linear_before_reset": 1, "activations": ["Sigmoid", "Relu"]}),
        ("LSTM", {"clip": 0.4}),
        ("LSTM", {"input_forget": 1}),
        ("LSTM", {"activations": ["Sigmoid", "Relu", "Sigmoid"]}),
    ],
)
def test_layers_that_no_one_recurrent_operator_says(
    kind: str, more: dict[str, Any], direction: str
) -> None:
    """Clipped gates, joined gates and other activations, of sequences of several lengths."""
    directions, gates = 1 + (direction == "bidirectional"), {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    if "activations" in more:
        more = {**more, "activations": more["activations"] * directions}
    draw = np.random.default_rng(3)
    shapes = [(5, 3, 4), (directions, gates * 6, 4), (directions, gates * 6, 6)]
    shapes += [(directions, 2 * gates * 6), (), (directions, 3, 6)]
    if kind == "LSTM":  # with a cell's state, and peepholes
        shapes += [(directions, 3, 6), (directions, 18)]
    inputs = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]
    inputs[4] = np.array([5, 2, 3], np.int32)
    outputs = 3 if kind == "LSTM" else 2
    model = form(
        kind, *inputs, known=(1, 2, 3), outputs=outputs, hidden_size=6, direction=direction, **more
    )
    as_onnxruntime(*model)


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 16])
def test_determinants_of_many_rows_are_those_of_elimination_by_pivots(rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((3, 2, rows, rows)).astype(np.float32)
    x[0, 0, 0, 0] = 0  # what comes first is no pivot
    x[1, 0, :, 0] = 0  # none is there: the determinant is 0
    x[2, 1] = np.roll(np.eye(rows), 1, 0)  # permutations have signs
    (found,) = soapstone.InferenceSession(form("Det", x)[0]).run({"x0": x}).values()
    exact = np.linalg.det(x.astype(np.float64))
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4 * np.abs(exact).max())
    assert found[1, 0] == 0 and found[2, 1] == (-1) ** (rows - 1)


def test_a_shape_is_cut_by_attributes_as_of_opset_9() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 6, opset_import: ["" : 9]>
        g (float[n, t, 6] x) => (float[n, t, 2, 3] y) {
            s = Shape(x)  a = Slice<starts = [0], ends = [2], axes = [0]>(s)
            b = Constant<value = int64[2] {2, 3}>()  z = Concat<axis = 0>(a, b)
            y = Reshape(x, z)
        }"""
    )
    as_onnxruntime(model.SerializeToString(), {"x": np.ones((2, 5, 6), np.float32)})


def test_frames_of_a_signal_without_an_axis_of_parts() -> None:
    signal = np.linspace(-1, 1, 80, dtype=np.float32).reshape(2, 40)
    window = np.hanning(16).astype(np.float32)
    as_onnxruntime(*form("STFT", signal, np.array(4), window, np.array(16), known=(1, 2, 3)))


@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel", "pytorch_half_pixel"])
@pytest.mark.parametrize(("extent", "made"), [(6, 5), (6, 4), (14, 2), (14, 9), (22, 12), (3, 28)])
def test_an_image_is_resized_by_scales_of_single_precision(
    extent: int, made: int, coordinates: str
) -> None:
    x = np.arange(extent * 3, dtype=np.float32).reshape(1, extent, 3)
    scales = np.array([1, made / extent, 1], np.float32)  # whose double may be below the ratio
    at = {"coordinate_transformation_mode": coordinates, "known": (2,)}
    for mode, nearest in (("nearest", "floor"), ("nearest", "round_prefer_ceil"), ("linear", "")):
        more = {"nearest_mode": nearest} if nearest else {}
        model = form("Resize", x, None, scales, mode=mode, opset=13, **at, **more)
        assert as_onnxruntime(*model)[0].shape == (1, made, 3)
        sizes = np.array([1, made, 3])
        as_onnxruntime(*form("Resize", x, None, None, sizes, **{**at, "known": (3,)}, **more))


@pytest.mark.parametrize("mode", ["linear", "cubic", "nearest"])
@pytest.mark.parametrize("scales", [(1.7, 0.6), (0.5, 2.3)])
def test_corners_are_aligned_by_whole_numbers_of_results(
    mode: str, scales: tuple[float, float]
) -> None:
    x = np.random.default_rng(0).standard_normal((1, 1, 11, 13)).astype(np.float32)
    given = np.array([1, 1, *scales], np.float32)  # as PyTorch writes `Upsample(scale_factor=1.7)`
    at = {"coordinate_transformation_mode": "align_corners", "known": (2,)}
    as_onnxruntime(*form("Resize", x, None, given, mode=mode, opset=13, **at))


@pytest.mark.parametrize("trips", ["three", "many"])
def test_the_number_of_a_trip_has_the_shape_that_a_body_declares(trips: str) -> None:
    given = "" if trips == "three" else "int64 many, "
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 13]>
        g ({given}float[n, 2] x) => (float[a, b, c] y) <int64 three = {{3}}, bool yes = {{1}}> {{
            y = Loop({trips}, yes) <body = b (int64[1] i, bool c) => (bool go, float[d, 2] z)
                <int64[1] one = {{1}}, int64[1] axis = {{0}}> {{
                j = Add(i, one)  z = Slice(x, i, j, axis)
                go = Identity(c)
            }}>
        }}"""
    )
    many = {"many": np.array(4)} if given else {}
    as_onnxruntime(model.SerializeToString(), {"x": np.eye(5, 2, dtype=np.float32), **many})


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3,), (1,), (8,)])
@pytest.mark.parametrize("axis", [None, 1])
def test_a_condition_of_any_rank_chooses_elements(axis: int | None, shape: tuple[int, ...]) -> None:
    keep = (np.arange(np.prod(shape)) % 2 == 0).reshape(shape)  # as Paddle's masked_select
    at = {} if axis is None else {"axis": axis}
    model, given = form("Compress", np.arange(6, dtype=np.float32).reshape(2, 3), keep, **at)
    named = onnx.load_from_string(model)
    named.graph.output[0].type.tensor_type.ClearField("shape")
    as_onnxruntime(named.SerializeToString(), given)
