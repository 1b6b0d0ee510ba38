"""Regions and moved windows of images, against ONNX Runtime and by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array
from soapstone.runtime import TaskError

RANDOM = np.random.default_rng(0)


def model_of(kind: str, opset: int, feeds: dict[str, Array], **attributes: Any) -> bytes:
    """Return a model of one node, of inputs of these shapes."""
    types = {
        "float32": TensorProto.FLOAT,
        "float64": TensorProto.DOUBLE,
        "int64": TensorProto.INT64,
    }
    declared = [
        helper.make_tensor_value_info(name, types[each.dtype.name], each.shape)
        for name, each in feeds.items()
    ]
    dtype = types[next(iter(feeds.values())).dtype.name]
    node = helper.make_node(kind, list(feeds), ["y"], **attributes)
    made = [helper.make_tensor_value_info("y", dtype, ["a", "b", "c", "d"])]
    graph = helper.make_graph([node], "one", declared, made)
    imports = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=imports, ir_version=8).SerializeToString())


def both(model: bytes, feeds: dict[str, Array]) -> tuple[Array, Array]:
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    (theirs,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feeds)
    with InferenceSession(from_onnx(model), threads=1) as session:
        return session.run(feeds)["y"], theirs


def regions(count: int, dtype: str = "float32") -> dict[str, Array]:
    """Return images and regions of them, some of which lie beyond the borders or are empty."""
    corners = RANDOM.uniform(-8, 40, (count, 2))
    rois = np.concatenate([corners, corners + RANDOM.uniform(0, 30, (count, 2))], axis=1)
    rois[:2] = [[3, 4, 3, 4], [-50, -50, -40, -40]]
    return {
        "x": RANDOM.standard_normal((2, 3, 15, 17)).astype(dtype),
        "rois": rois.astype(dtype),
        "images": RANDOM.integers(0, 2, count),
    }


@pytest.mark.parametrize("opset", [10, 16])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 2])
def test_regions_are_as_onnx_runtime_reads_them(mode: str, ratio: int, opset: int) -> None:
    feeds = regions(20)
    options = {"output_height": 4, "output_width": 3, "spatial_scale": 0.4}
    model = model_of("RoiAlign", opset, feeds, mode=mode, sampling_ratio=ratio, **options)
    mine, theirs = both(model, feeds)
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_regions_in_double_precision() -> None:
    feeds = regions(6, "float64")
    model = model_of("RoiAlign", 16, feeds, output_height=2, output_width=2)
    mine, theirs = both(model, feeds)
    np.testing.assert_allclose(mine, theirs, rtol=1e-9)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"images": np.array([0, 5])}, "image 5 found, 0 to 1 needed"),
        ({"rois": np.full((2, 4), np.nan, np.float32)}, "a region from nan that is nan long"),
        ({"rois": np.array([[0, 0, 1, 1], [0, 0, 1e9, 1]], np.float32)}, "pixels found; 4096 at"),
    ],
)
def test_wrong_regions_are_named(changed: dict[str, Array], message: str) -> None:
    feeds = regions(2) | changed
    model = from_onnx(model_of("RoiAlign", 16, feeds, output_height=2, output_width=2))
    with InferenceSession(model, threads=1) as session, pytest.raises(TaskError, match=message):
        session.run(feeds)


def moved(feeds: dict[str, Array], w: Array, attributes: dict[str, Any]) -> Array:
    """Return a deformed convolution, tap by tap."""
    x, offset = feeds["x"], feeds["offset"]
    group, parts = attributes.get("group", 1), attributes.get("offset_group", 1)
    pads = attributes.get("pads", (0, 0, 0, 0))
    stride, dilation = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    taps = list(itertools.product(range(w.shape[2]), range(w.shape[3])))
    moves = offset.reshape(len(x), parts, len(taps), 2, *offset.shape[2:])
    masks = feeds["mask"].reshape(len(x), parts, len(taps), *offset.shape[2:])
    y = np.zeros((len(x), len(w), *offset.shape[2:])) + feeds["b"][:, None, None]

    def pixel(n: int, c: int, h: int, v: int) -> float:
        inside = 0 <= h < x.shape[2] and 0 <= v < x.shape[3]
        return float(x[n, c, h, v]) if inside else 0.0

    for n, m, i, j in np.ndindex(*y.shape):
        for k, c in itertools.product(range(len(taps)), range(w.shape[1])):
            channel = m // (len(w) // group) * w.shape[1] + c
            part = channel // (x.shape[1] // parts)
            at = [
                place * stride[d] - pads[d] + taps[k][d] * dilation[d] + moves[n, part, k, d, i, j]
                for d, place in enumerate((i, j))
            ]
            low = [int(np.floor(each)) for each in at]
            total = 0.0
            for down, right in itertools.product((0, 1), (0, 1)):
                weight = 1 - abs(at[0] - low[0] - down), 1 - abs(at[1] - low[1] - right)
                total += weight[0] * weight[1] * pixel(n, channel, low[0] + down, low[1] + right)
            y[n, m, i, j] += w[m, c, *taps[k]] * total * masks[n, part, k, i, j]
    return y


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"pads": [1, 1, 1, 1], "strides": [2, 1]},
        {"group": 2, "offset_group": 2, "dilations": [1, 2]},
        {"offset_group": 4},
    ],
)
def test_windows_are_moved(attributes: dict[str, Any]) -> None:
    kernel, size = (2, 3), (6, 7)
    pads = attributes.get("pads", (0, 0, 0, 0))
    stride, dilation = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    made = [
        (size[d] + pads[d] + pads[d + 2] - (kernel[d] - 1) * dilation[d] - 1) // stride[d] + 1
        for d in range(2)
    ]
    parts, group = attributes.get("offset_group", 1), attributes.get("group", 1)
    feeds = {
        "x": RANDOM.standard_normal((2, 4, *size)).astype(np.float32),
        "w": RANDOM.standard_normal((4, 4 // group, *kernel)).astype(np.float32),
        "offset": RANDOM.uniform(-2, 2, (2, parts * 12, *made)).astype(np.float32),
        "b": RANDOM.standard_normal(4).astype(np.float32),
        "mask": RANDOM.random((2, parts * 6, *made)).astype(np.float32),
    }
    model = model_of("DeformConv", 19, feeds, **attributes)
    with InferenceSession(from_onnx(model), threads=1) as session:
        found = session.run(feeds)["y"]
    np.testing.assert_allclose(found, moved(feeds, feeds["w"], attributes), rtol=1e-3, atol=1e-4)


def test_offsets_that_do_not_fit_are_refused() -> None:
    shapes = {"x": (1, 2, 5, 5), "w": (2, 2, 3, 3), "offset": (1, 18, 4, 3)}
    feeds = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    with pytest.raises(OnnxError, match="4 offsets along axis 2 found, 3 needed"):
        from_onnx(model_of("DeformConv", 19, feeds)).graph()
    feeds["offset"] = np.zeros((1, 17, 3, 3), np.float32)
    with pytest.raises(OnnxError, match="do not fit image"):
        from_onnx(onnx.load_from_string(model_of("DeformConv", 19, feeds))).graph()


def test_pixels_of_regions_are_pooled_as_onnx_runtime_pools_them() -> None:
    given = regions(20)
    rois = np.concatenate([given["images"][:, None].astype(np.float32), given["rois"]], axis=1)
    feeds = {"x": given["x"], "rois": rois}
    model = model_of("MaxRoiPool", 16, feeds, pooled_shape=[3, 4], spatial_scale=0.4)
    mine, theirs = both(model, feeds)
    np.testing.assert_array_equal(mine, theirs)
