"""Messages read without ONNX against ONNX's own, and what is kept of ONNX's declarations."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.file.messages import as_onnx, attribute_value, function_in, model_of
from soapstone.frontend.onnx.file.tensors import array_of


def _tensors() -> list[TensorProto]:
    """Return tensors of every type, with raw data and element by element."""
    numbers = np.array([[0, 1], [2, 120]])
    made = []
    unsigned = ("uint8", "uint16", "uint32", "uint64")
    for name in ("float64", "float32", "float16", "int8", "int16", "int32", "int64", *unsigned):
        array = numbers.astype(name) - (0 if name.startswith("u") else 1)
        made.append(numpy_helper.from_array(array, f"raw {name}"))
        code = helper.np_dtype_to_tensor_dtype(array.dtype)
        made.append(helper.make_tensor(f"listed {name}", code, array.shape, array.ravel()))
    made.append(helper.make_tensor("truth", TensorProto.BOOL, (3,), [True, False, True]))
    made.append(numpy_helper.from_array(np.arange(900, dtype=np.float32), "big"))
    many = [-(3**k) for k in range(39)] + [2**62] * 60
    made.append(helper.make_tensor("many", TensorProto.INT64, (99,), many))
    made.append(TensorProto(name="elsewhere", dims=(2,), data_type=1, data_location=1))
    made[-1].external_data.add(key="location", value="weights.bin")
    return made


def _model() -> onnx.ModelProto:
    inner = helper.make_graph(
        [helper.make_node("Neg", ["x"], ["z"])],
        "inner",
        [],
        [helper.make_tensor_value_info("z", 1, ["n", None, 3])],
    )
    every = {
        "f": -0.5,
        "i": -(2**40),
        "s": "text",
        "t": numpy_helper.from_array(np.eye(2, dtype=np.float32)),
        "g": inner,
        "floats": [0.25, float("inf")],
        "ints": [1, -1, 2**62],
        "strings": ["a", "ü"],
        "tensors": _tensors()[:2],
        "graphs": [inner, inner],
    }
    node = helper.make_node("Any", ["x", "", "w"], ["y", ""], "first", domain="d", **every)
    named = helper.make_node("Any", ["y"], ["q"])
    named.attribute.append(AttributeProto(name="a", ref_attr_name="b", type=AttributeProto.INT))
    body = helper.make_function(
        "d", "F", ["x"], ["y"], [named], [helper.make_opsetid("", 18)], ["b"]
    )
    sequence = helper.make_sequence_type_proto(helper.make_tensor_type_proto(7, None))
    graph = helper.make_graph(
        [node, named],
        "graph",
        [helper.make_tensor_value_info("x", 1, [1, "batch"])],
        [helper.make_value_info("q", sequence), onnx.ValueInfoProto(name="bare")],
        _tensors(),
    )
    model = helper.make_model(graph, functions=[body], producer_name="tests")
    model.opset_import.add(domain="d", version=2**33)
    helper.set_model_props(model, {"key": "value"})
    return model


def test_messages_are_those_of_onnx() -> None:
    proto = _model()
    made = model_of(memoryview(proto.SerializeToString()))
    assert as_onnx(made, onnx.ModelProto()) == proto
    for attribute, expected in zip(made.graph.node[0].attribute, proto.graph.node[0].attribute):
        found, needed = attribute_value(attribute), helper.get_attribute_value(expected)
        if attribute.name in ("f", "i", "s", "floats", "ints", "strings"):
            assert found == needed and type(found) is type(needed)
        else:
            assert len(found) == len(needed) if attribute.name.endswith("s") else found is not None
    function = function_in(proto.functions[0].SerializeToString())
    assert as_onnx(function, onnx.FunctionProto()) == proto.functions[0]
    named = {attribute.name: attribute for attribute in made.graph.node[0].attribute}
    assert named["f"].HasField("f") and not named["f"].HasField("g")
    assert named["g"].g.node[0].attribute == () == named["f"].g.node
    assert made.graph.output[0].type.WhichOneof("value") == "sequence_type"
    assert made.graph.output[1].type.WhichOneof("value") is None
    shape = named["g"].g.output[0].type.tensor_type.shape
    assert [dim.WhichOneof("value") for dim in shape.dim] == ["dim_param", None, "dim_value"]


def test_tensors_are_those_of_onnx() -> None:
    proto = _model()
    made = model_of(memoryview(proto.SerializeToString()))
    for found, expected in zip(made.graph.initializer, proto.graph.initializer):
        if found.external_data:
            continue
        array, needed = array_of(found), numpy_helper.to_array(expected)
        assert array.dtype == needed.dtype and array.shape == needed.shape, found.name
        np.testing.assert_array_equal(array, needed, found.name)
        np.testing.assert_array_equal(array_of(expected), needed, found.name)


def test_what_stands_twice_is_merged_and_the_last_of_a_choice_counts() -> None:
    proto = _model()
    halves = onnx.ModelProto(), onnx.ModelProto()
    halves[0].graph.node.extend(proto.graph.node)
    halves[1].graph.initializer.extend(proto.graph.initializer[:2])
    halves[1].graph.name = "later"
    data = b"".join(each.SerializeToString() for each in halves)
    data += onnx.ModelProto(domain="one").SerializeToString()
    data += onnx.ModelProto(domain="two").SerializeToString()
    together = onnx.ModelProto()
    together.ParseFromString(data)
    assert as_onnx(model_of(memoryview(data)), onnx.ModelProto()) == together
    dimension = onnx.TensorShapeProto.Dimension
    dims = dimension(dim_value=3), dimension(dim_param="n")
    for order in (dims, dims[::-1]):
        whole = b"".join(each.SerializeToString() for each in order)
        value = onnx.ValueInfoProto(name="x")
        value.type.tensor_type.shape.dim.add().ParseFromString(whole)
        expected = onnx.ModelProto(graph=onnx.GraphProto(input=[value]))
        found = model_of(memoryview(expected.SerializeToString()))
        assert as_onnx(found, onnx.ModelProto()) == expected


def test_what_is_merged_with_a_type_that_others_share_leaves_theirs_alone() -> None:
    value = helper.make_tensor_value_info("x", 1, ["n"])
    more = onnx.ValueInfoProto()
    more.type.tensor_type.shape.dim.add(dim_value=5)
    both = onnx.ValueInfoProto()
    both.ParseFromString(value.SerializeToString() + more.SerializeToString())
    graph = b"".join(
        b"\x5a" + bytes([len(data)]) + data  # an input
        for data in (
            value.SerializeToString(),
            value.SerializeToString() + more.SerializeToString(),
            value.SerializeToString(),
        )
    )
    data = b"\x3a" + bytes([len(graph)]) + graph
    expected = onnx.ModelProto(graph=onnx.GraphProto(input=[value, both, value]))
    assert as_onnx(model_of(memoryview(data)), onnx.ModelProto()) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 50, 51, 52, 127, 1000, 30_000])
def test_long_lists_that_are_not_packed(count: int) -> None:
    random = np.random.default_rng(count)
    ints = (random.integers(-(2**62), 2**62, count) >> random.integers(0, 62, count)).tolist()
    floats = random.standard_normal(count).astype(np.float32).tolist()
    node = helper.make_node("Any", ["x"], ["y"])
    node.attribute.extend(
        [
            AttributeProto(name="ints", type=AttributeProto.INTS, ints=ints),
            AttributeProto(name="floats", type=AttributeProto.FLOATS, floats=floats),
        ]
    )
    tensor = TensorProto(name="t", dims=ints[:70], data_type=7, raw_data=b"x" * 5000)
    proto = onnx.ModelProto(graph=onnx.GraphProto(node=[node], initializer=[tensor]))
    made = model_of(memoryview(proto.SerializeToString()))
    assert as_onnx(made, onnx.ModelProto()) == proto
    assert [attribute_value(each) for each in made.graph.node[0].attribute] == [ints, floats]


@pytest.mark.parametrize("cut", range(1, 40))
def test_what_is_cut_short_is_an_error_or_what_onnx_reads(cut: int) -> None:
    data = _model().SerializeToString()[:-cut]
    expected = onnx.ModelProto()
    try:
        expected.ParseFromString(data)
    except Exception:  # the class depends on the implementation of Protocol Buffers
        with pytest.raises(OnnxError, match=r"byte|no ONNX model"):
            model_of(memoryview(data))
    else:
        assert as_onnx(model_of(memoryview(data)), onnx.ModelProto()) == expected
