"""`soapstone.onnxruntime` beside onnxruntime: one program, run with either, answers the same."""

from __future__ import annotations

import json
import pickle
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import soapstone.onnxruntime as ours
from soapstone import Model, to_onnx
from soapstone.errors import DataError

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
Proto = onnx.ModelProto


def proto_of(nodes: list[Any], inputs: list[Any], outputs: list[Any], weights: Any = ()) -> Proto:
    """Return a model of a file: inputs and outputs are (name, type, shape)."""
    values = [[helper.make_tensor_value_info(*each) for each in side] for side in (inputs, outputs)]
    held = [numpy_helper.from_array(array, name) for name, array in dict(weights).items()]
    graph = helper.make_graph(nodes, "net", *values, held, doc_string="of a test")
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 18)],
        producer_name="tests",
        domain="com.example",
        model_version=3,
        ir_version=10,
    )


def classifier() -> Proto:
    random = np.random.default_rng(0)
    weights = {"w": random.standard_normal((8, 5)).astype(np.float32), "b": np.ones(5, np.float32)}
    nodes = [
        helper.make_node("Gemm", ["x", "w", "b"], ["h"]),
        helper.make_node("Relu", ["h"], ["y"]),
        helper.make_node("ReduceMean", ["y"], ["mean"], keepdims=0),
        helper.make_node("ArgMax", ["y"], ["class"], axis=1, keepdims=0),
    ]
    outputs = [
        ("y", FLOAT, ["batch", 5]),
        ("mean", FLOAT, []),
        ("class", INT64, ["batch"]),
    ]
    proto = proto_of(nodes, [("x", FLOAT, ["batch", 8])], outputs, weights)
    proto.metadata_props.add(key="author", value="a test")
    return proto


def two_inputs() -> Proto:
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["rows"]),
        helper.make_node("Mul", ["rows", "scale"], ["y"]),
    ]
    table = np.arange(12, dtype=np.float32).reshape(4, 3)
    inputs = [("ids", INT64, ["batch", None]), ("scale", FLOAT, [3])]
    return proto_of(nodes, inputs, [("y", FLOAT, ["batch", None, 3])], {"table": table})


def written(model: Model) -> Proto:
    with tempfile.TemporaryDirectory() as folder:
        to_onnx(model, None, Path(folder) / "model.onnx")
        return onnx.load(Path(folder) / "model.onnx")


def convolutions() -> Proto:
    model = Model("convolutions", seed=0)
    x = model.input("image", (2, 3, 12, 12))
    x = model.relu(model.batch_norm(model.conv2d(x, 8, kernel=3, padding=1)))
    x = model.max_pool2d(x, 2)
    model.output(model.softmax(model.dense(model.flatten(x), 5)))
    return written(model)


def attention() -> Proto:
    model = Model("attention", seed=0)
    x = model.input("tokens", (2, 6, 16))
    model.output(model.layer_norm(x + model.multi_head_attention(x, x, x, 4)))
    return written(model)


CASES: dict[str, tuple[Callable[[], Proto], dict[str, Any]]] = {
    "classifier": (classifier, {"x": ("float32", (3, 8))}),
    "two_inputs": (two_inputs, {"ids": ("int64", (2, 7)), "scale": ("float32", (3,))}),
    "convolutions": (convolutions, {"image": ("float32", (2, 3, 12, 12))}),
    "attention": (attention, {"tokens": ("float32", (2, 6, 16))}),
}


def feeds_of(case: str) -> dict[str, Any]:
    random = np.random.default_rng(1)
    return {
        name: random.integers(0, 4, shape)
        if dtype == "int64"
        else random.standard_normal(shape).astype(dtype)
        for name, (dtype, shape) in CASES[case][1].items()
    }


# A program of onnxruntime as users write it; `ort` is either package.
PROGRAM = """
options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.graph_optimization_level = ort.GraphOptimizationLevel.LEVEL
options.log_severity_level = 3
session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
described = [(each.name, each.type, each.shape) for each in session.get_inputs()]
described += [(each.name, each.type, each.shape) for each in session.get_outputs()]
meta = session.get_modelmeta()
said = meta.producer_name, meta.graph_name, meta.domain, meta.graph_description
said += (meta.custom_metadata_map, session.get_providers(), session.get_provider_options())
all_outputs = session.run(None, feeds)
last = session.run([session.get_outputs()[-1].name], feeds, ort.RunOptions())
binding = session.io_binding()
for name, array in feeds.items():
    binding.bind_cpu_input(name, array)
for each in session.get_outputs():
    binding.bind_output(each.name)
session.run_with_iobinding(binding)
bound = binding.copy_outputs_to_cpu()
out = np.zeros_like(all_outputs[0])
binding = session.io_binding()
for name, array in feeds.items():
    binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
value = ort.OrtValue.ortvalue_from_numpy(out)
binding.bind_output(session.get_outputs()[0].name, "cpu", 0, out.dtype.type, out.shape, value.data_ptr())
session.run_with_iobinding(binding)
into = value.numpy()
values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
told = [(v.shape(), v.data_type(), v.element_type(), v.device_name()) for v in values.values()]
of_values = [value.numpy() for value in session.run_with_ort_values(None, values)]
"""  # noqa: E501
NUMBERS = ("all_outputs", "last", "bound", "into", "of_values")


@pytest.mark.parametrize("level", ["ORT_ENABLE_ALL", "ORT_DISABLE_ALL"])
@pytest.mark.parametrize("case", CASES)
def test_a_program_answers_the_same(case: str, level: str, tmp_path: Path) -> None:
    proto, found = CASES[case][0](), []
    onnx.save(proto, tmp_path / "model.onnx")
    for ort in (theirs, ours):
        for model in (str(tmp_path / "model.onnx"), proto.SerializeToString()):
            space = {"ort": ort, "np": np, "model": model, "feeds": feeds_of(case)}
            exec(PROGRAM.replace("LEVEL", level), space)
            found.append(space)
    expected = found[0]
    for space in found[1:]:
        for name in ("described", "said", "told"):
            assert space[name] == expected[name], name
        for name in NUMBERS:
            of, needed = space[name], expected[name]
            assert len(of) == len(needed)
            for one, other in zip(of, needed):
                assert (one.dtype, one.shape) == (other.dtype, other.shape)
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "feeds", "message"),
    [
        (None, {}, r"input 'x' is missing; x: float32\[batch, 8\] needed"),
        (None, {"z": np.ones((1, 8), np.float32)}, "unknown input 'z'; inputs are x"),
        (None, {"x": np.ones((1, 8))}, r"float64\[1, 8\] found, x: float32\[batch, 8\] needed"),
        (None, {"x": np.ones((1, 7), np.float32)}, r"float32\[1, 7\] found"),
        (None, {"x": np.ones(8, np.float32)}, r"float32\[8\] found"),
        (["q"], {"x": np.ones((1, 8), np.float32)}, "unknown output 'q'; outputs are y, mean"),
    ],
)
def test_what_does_not_fit_is_one_error_in_both(names: Any, feeds: Any, message: str) -> None:
    data = classifier().SerializeToString()
    refused = theirs.capi.onnxruntime_pybind11_state.InvalidArgument
    with pytest.raises((ValueError, refused)):
        theirs.InferenceSession(data).run(names, feeds)
    session = ours.InferenceSession(data)
    with pytest.raises(ours.InvalidArgument, match=message) as raised:
        session.run(names, feeds)
    assert isinstance(raised.value, ValueError)


def test_options_mean_what_they_say_or_are_refused_by_name(tmp_path: Path) -> None:
    options = ours.SessionOptions()
    with pytest.raises(AttributeError, match="intra_op_threads: no such option; did you mean"):
        options.intra_op_threads = 3
    with pytest.raises(TypeError, match=r"intra_op_num_threads: str '3' found, int needed"):
        options.intra_op_num_threads = "3"
    with pytest.raises(ours.InvalidArgument, match=r"optimized_model_filepath.*soapstone optimize"):
        options.optimized_model_filepath = "better.onnx"
    with pytest.raises(AttributeError, match="register_custom_ops_library is not supported"):
        options.register_custom_ops_library("ops.so")
    with pytest.warns(UserWarning, match="inter_op_num_threads = 2 changes nothing: operators"):
        options.inter_op_num_threads = 2
    with pytest.warns(UserWarning, match="'session.intra_op.allow_spinning' is kept"):
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    run = ours.RunOptions()
    with pytest.raises(ours.InvalidArgument, match="terminate"):
        run.terminate = True
    with pytest.raises(TypeError, match="soapstone's SessionOptions needed"):
        ours.InferenceSession(classifier().SerializeToString(), theirs.SessionOptions())
    with pytest.warns(UserWarning, match="'TensorrtExecutionProvider' is not available"):
        session = ours.InferenceSession(
            classifier().SerializeToString(), providers=["TensorrtExecutionProvider"]
        )
    assert session.get_providers() == ["CPUExecutionProvider"]
    with (
        pytest.warns(UserWarning, match="options of CPUExecutionProvider change nothing: arena"),
        pytest.raises(ours.InvalidArgument, match="precision: 'half' found, 'float32'"),
    ):
        ours.InferenceSession(
            classifier().SerializeToString(),
            providers=["CPUExecutionProvider"],
            provider_options=[{"arena": 1, "precision": "half"}],
        )
    options = ours.SessionOptions()
    options.add_free_dimension_override_by_name("batch", 4)
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "timeline")
    session = ours.InferenceSession(classifier().SerializeToString(), options)
    session.run(None, {"x": np.ones((4, 8), np.float32)})
    written = session.end_profiling()
    assert any(event["ph"] == "X" for event in json.loads(Path(written).read_text())["traceEvents"])
    assert session.end_profiling() == ""


def test_bindings_that_do_not_fit_are_refused() -> None:
    session = ours.InferenceSession(classifier().SerializeToString())
    binding = session.io_binding()
    with pytest.raises(ours.InvalidArgument, match="'cuda', 0 found; 'cpu', 0 needed"):
        binding.bind_output("y", "cuda")
    with pytest.raises(ours.InvalidArgument, match="unknown input 'q'"):
        binding.bind_cpu_input("q", np.ones(1))
    with pytest.raises(ours.InvalidArgument, match="element_type and shape needed too"):
        binding.bind_output("y", buffer_ptr=1)
    binding.bind_cpu_input("x", np.ones((2, 8), np.float32))
    binding.bind_ortvalue_output("y", ours.OrtValue(np.zeros((3, 5), np.float32)))
    with pytest.raises(ours.InvalidArgument, match=r"out 'y': float32.* found, float32.* needed"):
        session.run_with_iobinding(binding)
    frozen = np.zeros((2, 5), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(DataError, match="read-only array found"):
        session.session.run(np.ones((2, 8), np.float32), out={"y": frozen})


def test_lists_of_numbers_are_of_the_declared_type() -> None:
    data = classifier().SerializeToString()
    rows = np.random.default_rng(3).standard_normal((2, 8)).round(2).tolist()
    for given in (rows, [[1] * 8, [True] + [0] * 7]):
        (needed,) = theirs.InferenceSession(data).run(["y"], {"x": given})
        (found,) = ours.InferenceSession(data).run(["y"], {"x": given})
        np.testing.assert_allclose(found, needed, rtol=1e-5, atol=1e-5)
    session = ours.InferenceSession(two_inputs().SerializeToString())
    for wrong in ([[0.5]], [["a"]], [[1], [2, 3]]):  # nothing is cut, or read as a number
        with pytest.raises(ours.InvalidArgument, match="input 'ids'"):
            session.run(None, {"ids": wrong, "scale": [1.0, 2.0, 3.0]})
    with pytest.raises(ours.InvalidArgument, match="input_feed: list found, a dict"):
        session.run(None, [[1]])  # type: ignore[arg-type]
    with pytest.raises(ours.InvalidArgument, match="output_names: 'y' found, a list"):
        session.run("y", {"ids": [[1]], "scale": [1.0, 2.0, 3.0]})


def test_an_optional_input_may_be_absent() -> None:
    tensor = helper.make_tensor_type_proto(FLOAT, [2])
    graph = helper.make_graph(
        [helper.make_node("OptionalHasElement", ["o"], ["has"])],
        "net",
        [helper.make_value_info("o", helper.make_optional_type_proto(tensor))],
        [helper.make_tensor_value_info("has", TensorProto.BOOL, [])],
    )
    opset = [helper.make_opsetid("", 18)]
    data = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    for module in (ours, theirs):
        assert module.InferenceSession(data).run(None, {}) == [False]


def test_extents_that_options_give_are_held_to() -> None:
    data = classifier().SerializeToString()
    for module in (ours, theirs):
        options = module.SessionOptions()
        options.add_free_dimension_override_by_name("batch", 2)
        session = module.InferenceSession(data, options)
        assert [each.shape for each in session.get_inputs()] == [[2, 8]]
        assert session.get_outputs()[0].shape == [2, 5]
        assert session.run(["y"], {"x": np.ones((2, 8), np.float32)})[0].shape == (2, 5)
        with pytest.raises(Exception, match=r"for input: x|input 'x'"):
            session.run(None, {"x": np.ones((3, 8), np.float32)})
    options = ours.SessionOptions()
    options.add_free_dimension_override_by_name("length", 2)
    with pytest.warns(UserWarning, match="'length' is no symbolic dim"):
        ours.InferenceSession(data, options)
    with pytest.raises(ours.InvalidArgument, match="extent -1 found"):
        options.add_free_dimension_override_by_name("batch", -1)


def test_what_programs_ask_for_besides() -> None:
    data = classifier().SerializeToString()
    ours.set_default_logger_severity(3)
    options = ours.SessionOptions()
    options.inter_op_num_threads = 1  # as it is
    session = ours.InferenceSession(data, options, enable_fallback=0)
    session.disable_fallback()
    session.set_providers(["CPUExecutionProvider"])
    with pytest.warns(UserWarning, match="disabled_optimizers changes nothing"):
        ours.InferenceSession(data, disabled_optimizers=["ConstantFolding"])
    with pytest.raises(TypeError, match="unknown argument 'session_options'"):
        ours.InferenceSession(data, session_options=options)
    with pytest.raises(ours.InvalidArgument, match="a name or a pair needed"):
        ours.InferenceSession(data, providers=[("CPUExecutionProvider",)])  # type: ignore[list-item]
    with pytest.raises(AttributeError, match="has no 'quantization'; what it has: Execution"):
        ours.quantization  # noqa: B018
    value = ours.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32))
    assert np.asarray(value).dtype == np.float32
    for each in (session, session.session):
        with pytest.raises(TypeError, match="cannot be pickled or copied: make one in each"):
            pickle.dumps(each)
    binding = session.io_binding()
    binding.bind_cpu_input("x", np.ones((2, 8), np.float32))
    with pytest.raises(ours.InvalidArgument, match="no outputs bound"):
        session.run_with_iobinding(binding)


def test_answers_come_back_by_call() -> None:
    session = ours.InferenceSession(classifier().SerializeToString())
    x = np.random.default_rng(2).standard_normal((3, 8)).astype(np.float32)
    done, got = threading.Event(), []

    def callback(results: Any, user_data: Any, error: str) -> None:
        got.append((results, user_data, error))
        done.set()

    session.run_async(["class", "y"], {"x": x}, callback, "mine")
    assert done.wait(60)
    (results, user_data, error) = got[0]
    assert (user_data, error) == ("mine", "")
    for one, other in zip(results, session.run(["class", "y"], {"x": x})):
        np.testing.assert_array_equal(one, other)
