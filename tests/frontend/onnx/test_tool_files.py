"""Files that ONNX's checker refuses, though ONNX Runtime reads them: its own tools write such."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")

BRANCHES = """
< ir_version: 9, opset_import: ["" : 20] >
g (float[n, 3] x, bool c) => (float[n, 3] y) {
    y = Add (b, a)
    b = If (c) <
        then_branch = g1 () => (float[n, 3] t) { s = Neg (a)  t = Exp (s) },
        else_branch = g2 () => (float[n, 3] e) { u = Abs (x)  e = Sub (u, a) }
    >
    a = Sin (x)
}
"""


def compare(model: Any, feeds: dict[str, Array]) -> None:
    needed = ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    ).run(None, feeds)
    for given in (model, model.SerializeToString()):
        with soapstone.InferenceSession(given, threads=1) as session:
            found = list(session.run(feeds).values())
        for one, other in zip(found, needed, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("condition", [False, True])
def test_nodes_stand_before_those_that_make_what_they_read(condition: bool) -> None:
    model = onnx.parser.parse_model(BRANCHES)
    before = model.SerializeToString(deterministic=True)
    x = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    compare(model, {"x": x, "c": np.array(condition)})
    assert model.SerializeToString(deterministic=True) == before  # a message is its owner's


def test_a_cycle_beside_nodes_out_of_order_is_named() -> None:
    text = "{ y = Relu(b)  b = Add(a, d)  d = Exp(b)  a = Sin(x) }"
    model = onnx.parser.parse_model(
        f'< ir_version: 9, opset_import: ["" : 20] > g (float[2] x) => (float[2] y) {text}'
    )
    with pytest.raises(OnnxError, match=r"is not made before it is used: .*in a cycle"):
        soapstone.from_onnx(model.SerializeToString()).graph()


def test_operators_of_onnx_runtime_need_no_import() -> None:
    model = onnx.parser.parse_model(
        '< ir_version: 9, opset_import: ["" : 20] > g (float[2] x) => (float[2] y)'
        "{ y = com.microsoft.QuickGelu(x) }"
    )
    compare(model, {"x": np.array([-1, 2], np.float32)})


def test_a_file_of_weights_that_is_gone_is_named(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '< ir_version: 9, opset_import: ["" : 20] > g (float[2] x) => (float[2] y){ y = Add(x, w) }'
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([1, 2]), "w"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    (tmp_path / "w.bin").unlink()
    with pytest.raises(OnnxError, match=r"initializer 'w': external data: no file 'w.bin'"):
        soapstone.from_onnx(path)
