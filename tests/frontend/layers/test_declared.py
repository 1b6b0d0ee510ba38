"""What follows from an operator's declaration: its layer, and its translation to and from ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from programs.layer_stub import STUB, stub

import soapstone.frontend.onnx.rules  # noqa: F401  (registers them)
from soapstone import GraphError, Model, from_onnx, to_onnx
from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.frontend.onnx import OnnxError
from soapstone.frontend.onnx.check import check_onnx
from soapstone.frontend.onnx.export.write import OPSET
from soapstone.frontend.onnx.file.schema import schema
from soapstone.frontend.onnx.values import RULES
from soapstone.ir import spec as registry
from soapstone.ir.attributes import Attribute
from soapstone.ir.interpret import interpret
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.elementwise.pointwise import declare
from soapstone.ir.spec import OpSpec, operators


@pytest.fixture
def scaled() -> Iterator[OpSpec]:
    """An operator of a plugin, with a counterpart in a custom domain of ONNX."""
    entry = Onnx("Scaled", "com.example", 3, {"by": "factor"})
    yield declare(
        "scaled",
        lambda x, by=2.0: x * by,
        attributes={"sign": Attribute("bool", False)},
        onnx=entry,
        doc="x by a number",
    )
    del registry._REGISTRY["scaled"], registry._OF_ONNX["com.example", "Scaled"]
    delattr(DeclaredLayers, "scaled")


def test_the_stub_has_the_layers() -> None:
    assert STUB.read_text() == stub(), "run `python tests/programs/layer_stub.py`"


def test_a_layer_has_signature_and_docstring() -> None:
    shown = str(inspect.signature(Model.leaky_relu)).replace("'", "")
    assert shown == "(self, x: Tensor, alpha: float = 0.01, *, name: str | None = None) -> Tensor"
    text = inspect.getdoc(Model.leaky_relu)
    assert text is not None and text.startswith("Return x where positive, alpha x elsewhere.\n")
    assert "\n    alpha: a number; 0.01 by default.\n" in text and text.endswith("LeakyRelu.")
    assert "\nx: any shape, which is also the result's.\n" in text
    documented = [spec.name for spec in operators() if spec.gradient and spec.layer is not None]
    assert all(getattr(Model, name).__doc__.startswith("Return ") for name in documented)


def test_a_layer_checks_its_arguments() -> None:
    model = Model()
    x = model.input("x", (2, 3))
    with pytest.raises(TypeError, match=r"unknown argument 'axs'; reduce_sum\(x, axes, keepdims"):
        model.reduce_sum(x, axs=1)
    with pytest.raises(GraphError, match="gather: ids: int 3 found, a tensor of the model needed"):
        model.gather(x, 3)
    assert model.reduce_sum(x, -1).shape == (2,) and model.reduce_sum(x).shape == ()
    assert model.top_k(x, 2)[1].dtype == "int64"


def test_every_counterpart_has_one_translation() -> None:
    """ONNX names several operators only where a rule says which of them is meant."""
    names: dict[tuple[str, str], list[str]] = {}
    for spec in operators():
        if spec.onnx_entry is not None:
            entry = spec.onnx_entry
            names.setdefault((entry.domain, entry.name), []).append(spec.name)
            assert schema("", entry.name, onnx.defs.onnx_opset_version()), spec.name
    assert [key for key, found in names.items() if len(found) > 1 and key not in RULES] == []


def test_an_operator_of_a_plugin_goes_both_ways(scaled: OpSpec, tmp_path: Path) -> None:
    model = Model("net")
    x = model.input("x", (2, 3))
    model.output(model.relu(model.scaled(x, by=3.0)))
    path = tmp_path / "net.onnx"
    to_onnx(model, None, path)
    node = onnx.load(path).graph.node[0]
    assert (node.op_type, node.domain) == ("Scaled", "com.example")
    assert {attribute.name for attribute in node.attribute} == {"factor", "sign"}
    assert {o.domain: o.version for o in onnx.load(path).opset_import}["com.example"] == 3
    graph = from_onnx(path).graph()
    assert graph.structural_hash == model.graph.structural_hash
    values = np.float32([[1, -2, 3], [0, 5, -6]])
    made = interpret(graph, {"x": values})[graph.outputs[0]]
    np.testing.assert_array_equal(made, np.maximum(values * 3, 0))
    assert check_onnx(path).problem is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: setattr(p.opset_import[1], "version", 4), "opset 4 is not supported"),
        (lambda p: setattr(p.graph.node[0], "op_type", "Scalded"), "'Scalded' of domain"),
        (lambda p: p.graph.node[0].attribute.add(name="x", f=1, type=1), "'x' is not supported"),
        (lambda p: p.graph.node[0].input.append("x"), "input 1 is not supported"),
        (lambda p: setattr(p.graph.node[0].attribute[1], "i", 2), "attribute sign: 2 found, bool"),
    ],
)
def test_what_does_not_fit_the_declaration_is_refused(
    scaled: OpSpec, tmp_path: Path, change: object, message: str
) -> None:
    model = Model("net")
    model.output(model.scaled(model.input("x", (2, 3))))
    to_onnx(model, None, tmp_path / "net.onnx", opset=OPSET)
    proto = onnx.load(tmp_path / "net.onnx")
    change(proto)  # type: ignore[operator]
    with pytest.raises(OnnxError, match=message):
        from_onnx(proto).graph()
