"""Long chains are taken in and bound in linear time: calls are counted, not seconds."""

from __future__ import annotations

import sys

import numpy as np
import onnx
import pytest

import soapstone
from soapstone.frontend.onnx import from_onnx

KINDS = {
    "Relu": {},
    "Transpose": {"perm": [1, 0]},
    "Softmax": {"axis": 1},
    "Identity": {},
}


def chain(kind: str, count: int) -> bytes:
    """Return a model of so many nodes, each of which reads the one before."""
    values = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4])
        for name in ("v0", f"v{count}")
    ]
    nodes = [
        onnx.helper.make_node(kind, [f"v{i}"], [f"v{i + 1}"], **KINDS[kind]) for i in range(count)
    ]
    graph = onnx.helper.make_graph(nodes, "chain", values[:1], values[1:])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())


def calls(data: bytes) -> int:
    """Return how many calls it takes to import a model, bind it and run it."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        with soapstone.InferenceSession(from_onnx(data), threads=1) as session:
            session.run(np.ones((4, 4), np.float32))
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("kind", KINDS)
def test_four_times_the_nodes_take_four_times_the_calls(kind: str) -> None:
    calls(chain(kind, 8))  # what is imported and compiled once
    small, large = calls(chain(kind, 200)), calls(chain(kind, 800))
    assert large < 5 * small
