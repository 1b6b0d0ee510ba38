"""Inputs that are dictionaries, as of scikit-learn's DictVectorizer, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import soapstone.onnxruntime as facade
from soapstone import DataError, InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError, UnboundError

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")

FLOAT, INT64, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


def model_of(kind: str, key: int, value: int, made: int, **attributes: Any) -> bytes:
    """Return a model of one operator on a map, whose result is doubled where it is numbers."""
    x = onnx.ValueInfoProto(name="x")
    x.type.map_type.key_type = key
    x.type.map_type.value_type.tensor_type.elem_type = value
    nodes = [helper.make_node(kind, ["x"], ["z"], domain="ai.onnx.ml", **attributes)]
    twice = ["z"] if made == STRING else ["z", "z"]
    nodes.append(helper.make_node("Identity" if made == STRING else "Add", twice, ["y"]))
    y = helper.make_tensor_value_info("y", made, None)
    graph = helper.make_graph(nodes, "map", [x], [y])
    imports = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    return bytes(model.SerializeToString())


WORDS = model_of("DictVectorizer", STRING, FLOAT, FLOAT, string_vocabulary=["b", "a", "c"])
NUMBERS = model_of("DictVectorizer", INT64, FLOAT, FLOAT, int64_vocabulary=[3, 1])


@pytest.mark.parametrize(
    ("model", "given"),
    [(WORDS, {"a": 1.5, "zz": 3.0}), (WORDS, {"c": 2, "b": 0.5}), (NUMBERS, {1: 1.5, 9: 3.0})],
)
def test_a_dictionary_is_a_row(model: bytes, given: dict[Any, float]) -> None:
    (needed,) = theirs.InferenceSession(model).run(None, {"x": given})
    with InferenceSession(from_onnx(model), threads=1) as session:
        np.testing.assert_array_equal(session.run({"x": given})["y"], needed)
        assert not session.run({"x": {}})["y"].any()
    opened = facade.InferenceSession(model)
    assert opened.get_inputs()[0].type.startswith("map(")
    np.testing.assert_array_equal(opened.run(None, {"x": given})[0], needed)


@pytest.mark.parametrize(
    "form", [{}, {"map_form": "SPARSE", "max_map": 6}, {"map_form": "SPARSE", "max_map": 2}]
)
@pytest.mark.parametrize(
    ("to", "made"), [("TO_FLOAT", FLOAT), ("TO_INT64", INT64), ("TO_STRING", STRING)]
)
def test_values_of_a_map_are_cast(to: str, made: int, form: dict[str, Any]) -> None:
    model, given = model_of("CastMap", INT64, FLOAT, made, cast_to=to, **form), {3: 1.5, 0: -7.0}
    (needed,) = theirs.InferenceSession(model).run(None, {"x": given})
    with InferenceSession(from_onnx(model), threads=1) as session:
        (found,) = session.run({"x": given}).values()
    assert found.dtype == needed.dtype
    np.testing.assert_array_equal(found, needed)
    texts = model_of("CastMap", INT64, STRING, made, cast_to=to, **form)
    with InferenceSession(from_onnx(texts), threads=1) as session:
        words = session.run({"x": {1: "2", 0: "-7"}})["y"][0, :2].tolist()
    assert words == {"TO_STRING": ["-7", "2"]}.get(to, [-14, 4])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([{"a": 1.0}], "list found, a dict whose keys are all str or all int needed"),
        ({"a": 1.0, 2: 1.0}, "dict found, a dict whose keys are all str or all int needed"),
        ({"a": "1"}, r"values of <U1 found, x: map float32\[...\] needed"),
        ({"a": [1.0]}, r"values of shape \(1,\) found, numbers or texts needed"),
    ],
)
def test_what_is_no_such_dictionary_is_named(given: Any, message: str) -> None:
    with (
        InferenceSession(from_onnx(WORDS), threads=1) as session,
        pytest.raises(DataError, match=message),
    ):
        session.run({"x": given})


def test_keys_are_those_that_the_file_wants() -> None:
    with (
        InferenceSession(from_onnx(WORDS), threads=1) as session,
        pytest.raises(OnnxError, match="keys are integers; texts needed"),
    ):
        session.run({"x": {1: 1.0}})
    with pytest.raises(UnboundError, match="map found, and a graph has tensors alone"):
        from_onnx(WORDS).graph()
