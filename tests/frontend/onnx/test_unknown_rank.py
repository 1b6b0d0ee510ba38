"""Inputs of which a file gives neither extents nor rank, as converters from TensorFlow write."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from soapstone import DataError, InferenceSession, from_onnx
from soapstone.frontend.inference.latency import measure
from soapstone.frontend.onnx import OnnxError, UnboundError
from soapstone.frontend.onnx.check import check_onnx
from soapstone.frontend.optimization.optimize import optimize
from soapstone.ir.tensor import Array

ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")


def model() -> bytes:
    """Return a product, and its shape, of an input of any rank."""
    weight = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"]),
        helper.make_node("Shape", ["m"], ["s"]),
        helper.make_node("Tanh", ["m"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "anyrank",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None)],
        [
            helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None),
            helper.make_tensor_value_info("s", onnx.TensorProto.INT64, None),
        ],
        [numpy_helper.from_array(weight, "w")],
    )
    imports = [helper.make_opsetid("", 18)]
    made = helper.make_model(graph, opset_imports=imports, ir_version=9)
    return made.SerializeToString()


def some(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_each_run_may_have_another_rank(tmp_path: Path) -> None:
    path = tmp_path / "anyrank.onnx"
    path.write_bytes(model())
    theirs = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    shapes = [(2, 5), (5,), (3, 2, 5), (7, 5), (9, 5), (3, 7, 5), (11, 5), (2, 9, 5), (0, 5)]
    for opened in range(2):  # the second session may answer from what the first one left
        with InferenceSession(path, threads=1) as session:
            assert str(session.inputs[0]) == "x: float32[...]"
            for shape in shapes[opened:]:
                x = some(*shape)
                for found, needed in zip(session.run(x).values(), theirs.run(None, {"x": x})):
                    assert found.shape == needed.shape
                    np.testing.assert_allclose(found, needed, rtol=1e-5, atol=1e-6)
            with pytest.raises(OnnxError, match=r"MatMul"):
                session.run(some(2, 6))
            with pytest.raises(DataError, match=r"float64\[2, 5\] found, x: float32\[...\] needed"):
                session.run(some(2, 5).astype(np.float64))
            session.settle()


def test_a_graph_is_made_once_the_rank_is_given() -> None:
    net = from_onnx(model())
    assert net.symbolic == ("x.rank",)
    with pytest.raises(UnboundError, match=r"rank is not known; it is needed in dims as .x\.rank"):
        net.graph()
    with pytest.raises(UnboundError, match=r"axis 0 is the symbolic dim .x\.0"):
        net.graph({"x.rank": 2})
    graph = net.graph({"x.rank": 3, "x.0": 2, "x.1": 4, "x.2": 5})
    assert graph.tensors["x"].shape == (2, 4, 5)
    assert net.bind({"x": (4, 5)}) == {"x.rank": 2, "x.0": 4, "x.1": 5}
    plane = from_onnx(model(), dims={"x.rank": 2, "x.1": 5})
    assert (plane.symbolic, plane.inputs[0].shape) == (("x.0",), ("x.0", 5))
    with pytest.raises(OnnxError, match=r"'x.7' found; symbolic dims are x.rank, x.0, x.1"):
        from_onnx(model(), dims={"x.rank": 2, "x.7": 5})


def test_tools_ask_for_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "anyrank.onnx"
    path.write_bytes(model())
    dims = {"x.rank": 2, "x.0": 4, "x.1": 5}
    report = check_onnx(path)
    assert (report.problem, report.inputs) == (None, ("x: float32[...]",))
    assert check_onnx(path, dims).inputs == ("x: float32[4, 5]",)
    assert check_onnx(path, dims).flops is not None
    with pytest.raises(DataError, match=r"its rank is needed, as --dim x.rank=N"):
        measure(str(path), runs=1)
    assert measure(str(path), dims=dims, runs=1).inputs == {"x": "float32[4, 5]"}
    with pytest.raises(DataError, match=r"its rank is needed, from dims \(--dim x.rank=N\)"):
        optimize(path, seconds=0.1)
    made = optimize(path, seconds=0.1, dims=dims)
    assert made.graph.tensors["x"].shape == (4, 5)
