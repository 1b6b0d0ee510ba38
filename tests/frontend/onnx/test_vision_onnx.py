"""The references of windows and resize, against ONNX Runtime or ONNX's own.

What the cases of the registry show of them is in test_onnx_export.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def run(name: str, *arrays: Array, **attributes: Any) -> Array:
    """Return the first output of the reference, after the checks of the declaration."""
    from soapstone.ir.tensor import spec_of

    spec = operator(name)
    given = spec.normalise(attributes)
    signature = spec.bind([spec_of(array) for array in arrays], given)
    made = spec.run(given, *arrays)[0]
    assert made.shape == signature.outputs[0].shape
    return made


def model(kind: str, arrays: Sequence[Array | None], opset: int, attributes: dict[str, Any]) -> Any:
    names = ["" if array is None else f"x{i}" for i, array in enumerate(arrays)]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
        for name, a in zip(names, arrays)
        if a is not None
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node(kind, names, ["y"], **attributes)
    graph = helper.make_graph([node], "one", inputs, [output])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    made.ir_version = 10
    return made


def theirs(
    kind: str, *arrays: Array | None, opset: int = 21, reference: bool = False, **attributes: Any
) -> Array:
    """Return what ONNX Runtime, or ONNX's reference, makes of one node."""
    made = model(kind, arrays, opset, attributes)
    feeds = {f"x{i}": array for i, array in enumerate(arrays) if array is not None}
    if reference:
        return np.asarray(ReferenceEvaluator(made).run(None, feeds)[0])
    session = onnxruntime.InferenceSession(
        made.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return np.asarray(session.run(None, feeds)[0])


def close(made: Array, expected: Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(made, expected, rtol=tolerance, atol=tolerance)


WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 11), {"kernel": (3,), "stride": (2,), "padding": (1, 0)}),
    ((1, 2, 9), {"kernel": (2,), "stride": (3,), "padding": (0, 1), "ceil_mode": True}),
    ((2, 3, 9, 8), {"kernel": (3, 2), "stride": (2, 3), "padding": (1, 0, 0, 1)}),
    ((1, 2, 6, 6), {"kernel": (3, 3), "stride": (2, 2), "ceil_mode": True}),
    (
        (1, 1, 4, 4),
        {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1), "ceil_mode": True},
    ),
    ((1, 2, 9, 9), {"kernel": (2, 3), "dilation": (3, 2), "stride": (1, 2)}),
    ((1, 2, 5, 6, 7), {"kernel": (2, 3, 2), "stride": (2, 1, 3), "padding": (1, 1, 0, 0, 1, 1)}),
    ((1, 1, 5, 5, 5), {"kernel": (2, 2, 2), "stride": (2, 2, 2), "ceil_mode": True}),
]


@pytest.mark.parametrize(("shape", "window"), WINDOWS)
def test_pooling(shape: tuple[int, ...], window: dict[str, Any]) -> None:
    x, rank = random(*shape), len(shape) - 2
    names = {"kernel": "kernel_shape", "stride": "strides", "padding": "pads"}
    names |= {"dilation": "dilations", "ceil_mode": "ceil_mode"}
    given = {names[name]: value for name, value in window.items()}
    np.testing.assert_array_equal(
        run(f"max_pool{rank}d", x, **window), theirs("MaxPool", x, **given)
    )
    for count in (False, True):
        expected = theirs("AveragePool", x, count_include_pad=int(count), **given)
        close(run(f"avg_pool{rank}d", x, include_pad=count, **window), expected)
    for p in (1, 2, 3) if "ceil_mode" not in window else ():
        close(run("lp_pool", x, p=p, **window), theirs("LpPool", x, p=p, **given))


def test_integers_are_pooled_by_maximum() -> None:
    x = np.arange(25, dtype=np.uint8).reshape(1, 1, 5, 5)
    window = {"kernel": (3, 3), "padding": (1, 1, 1, 1)}
    made = run("max_pool2d", x, **window)
    assert made.dtype == np.uint8
    np.testing.assert_array_equal(made[0, 0, 0], [6, 7, 8, 9, 9])


def test_an_even_window_of_local_responses_reaches_further_up() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 6, 1)
    made = run("lrn", x, size=4, alpha=4.0, beta=1.0, bias=0.0)
    squares = [sum(v * v for v in range(max(1, c - 1), min(6, c + 2) + 1)) for c in range(1, 7)]
    np.testing.assert_allclose(made[0, :, 0], np.arange(1, 7) / squares)


def test_a_row_of_zeros_has_a_norm_of_zeros() -> None:
    x = np.zeros((2, 3))
    np.testing.assert_array_equal(run("lp_norm", x), x)


SIZES = [(1, 2, 8, 6), (1, 2, 3, 9), (1, 2, 4, 4), (1, 2, 1, 5)]
COORDINATES = [
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners"),
    "asymmetric",
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize(mode: str, coordinates: str, sizes: tuple[int, ...]) -> None:
    x = random(1, 2, 4, 5)
    at = {"mode": mode, "coordinate_transformation_mode": coordinates}
    made = run("resize", x, sizes=sizes, **at)
    given = np.asarray(sizes, np.int64)
    # The reference takes -0.5 for a single output, where the specification and others take 0.
    reference = coordinates != "pytorch_half_pixel"
    close(made, theirs("Resize", x, None, None, given, reference=reference, **at))


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
@pytest.mark.parametrize("scale", [0.5, 0.8, 1.6, 2.0])
def test_resize_to_the_nearest_by_scale(scale: float, nearest: str) -> None:
    x = random(1, 1, 5, 6)
    scales = np.asarray([1, 1, scale, 2.0], np.float32)
    expected = theirs("Resize", x, None, scales, mode="nearest", nearest_mode=nearest)
    made = run(
        "resize", x, sizes=expected.shape, scales=scales, mode="nearest", nearest_mode=nearest
    )
    np.testing.assert_array_equal(made, expected)


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("exclude", [False, True])
def test_resize_by_antialiasing(mode: str, exclude: bool) -> None:
    x = random(1, 1, 9, 8)
    scales = np.asarray([1, 1, 0.6, 0.4], np.float32)
    at = {"mode": mode, "antialias": 1, "exclude_outside": int(exclude)}
    expected = theirs("Resize", x, None, scales, reference=True, **at)
    close(run("resize", x, sizes=expected.shape, scales=scales, **at), expected)


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_resize_of_a_region(mode: str) -> None:
    x = random(1, 1, 4, 4)
    region = np.asarray([0, 0, 0.4, 0.6, 1, 1, 1.2, 1.7], np.float32)
    at = {
        "mode": mode,
        "coordinate_transformation_mode": "tf_crop_and_resize",
        "extrapolation_value": 10.0,
    }
    sizes = (1, 1, 3, 3)
    expected = theirs("Resize", x, region, None, np.asarray(sizes, np.int64), reference=True, **at)
    close(run("resize", x, sizes=sizes, roi=region, **at), expected)
