"""Grids that sample images give what ONNX Runtime and torch give."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError

MODES = ("linear", "nearest", "cubic")
PADDINGS = ("zeros", "border", "reflection")


def model_of(image: tuple[int, ...], grid: tuple[int, ...], **attributes: object) -> bytes:
    """Return a model of one GridSample."""
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], **attributes)
    shapes = {"x": image, "grid": grid}
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", inputs, [output])
    opset = [helper.make_opsetid("", 20)]
    return bytes(helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString())


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("mode", "padding", "extents"),
    [
        *itertools.product(MODES, PADDINGS, [(5, 7)]),
        *itertools.product(MODES[:2], PADDINGS, [(4, 3, 5)]),
        ("linear", "reflection", (1, 6)),
    ],
)
def test_images_are_sampled(
    mode: str, padding: str, extents: tuple[int, ...], aligned: bool
) -> None:
    """Beyond their borders too; of three dims as well, and of one row."""
    ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    random = np.random.default_rng(0)
    x = random.standard_normal((2, 3, *extents)).astype(np.float32)
    shape = (2, *(4, 6, 3)[: len(extents)], len(extents))
    grid = random.uniform(-2.4, 2.4, shape).astype(np.float32)
    options = {"mode": mode, "padding_mode": padding, "align_corners": int(aligned)}
    model = model_of(x.shape, grid.shape, **options)
    given = {"x": x, "grid": grid}
    (wanted,) = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, given)
    with InferenceSession(from_onnx(model)) as session:
        np.testing.assert_allclose(session.run(given)["y"], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aligned", [False, True])
def test_they_equal_those_of_torch(aligned: bool) -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((1, 2, 6, 5)).astype(np.float32)
    grid = random.uniform(-1.5, 1.5, (1, 3, 4, 2)).astype(np.float32)
    wanted = torch.nn.functional.grid_sample(
        torch.from_numpy(x), torch.from_numpy(grid), "bicubic", "border", aligned
    )
    options = {"mode": "cubic", "padding_mode": "border", "align_corners": int(aligned)}
    with InferenceSession(from_onnx(model_of(x.shape, grid.shape, **options))) as session:
        found = session.run({"x": x, "grid": grid})["y"]
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("image", "grid", "options", "message"),
    [
        ((1, 2, 4, 4), (1, 3, 3, 3), {}, r"\(n, …, 2\) needed"),
        ((1, 2, 4, 4, 4), (1, 3, 3, 3, 3), {"mode": "cubic"}, "'cubic' for 3 dims"),
        ((1, 2, 4, 4), (1, 3, 3, 2), {"padding_mode": "wrap"}, "'padding_mode' is 'wrap'"),
    ],
)
def test_wrong_grids_are_refused(
    image: tuple[int, ...], grid: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(OnnxError, match=message):
        from_onnx(model_of(image, grid, **options)).graph({})
