"""Sequences and optional values as inputs and outputs of sessions, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from typer.testing import CliRunner

import soapstone.onnxruntime as facade
from soapstone import DataError, InferenceSession, from_onnx
from soapstone.cli.main import app
from soapstone.frontend.onnx import OnnxError, UnboundError
from soapstone.frontend.onnx.check import check_onnx

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
RANDOM = np.random.default_rng(0)


def model_of(text: str) -> bytes:
    header = '<ir_version: 9, opset_import: ["": 18]>'
    model: bytes = onnx.parser.parse_model(f"{header}\ng {text}").SerializeToString()
    return model


def reals(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


LIST = [reals(2, 3), reals(1, 3), reals(4, 3)]
MODELS: dict[str, str] = {
    "at": """(seq(float[k, 3]) s, int64 i) => (float[k, 3] y) {
        x = SequenceAt(s, i)  y = Relu(x) }""",
    "inserted": """(seq(float[k, 3]) s, int64 i, float[n, 3] x) => (seq(float[k, 3]) y, int64 c) {
        h = Exp(x)  y = SequenceInsert(s, h, i)  c = SequenceLength(y) }""",
    "erased": """(seq(float[k, 3]) s, int64 i) => (seq(float[k, 3]) y) {
        y = SequenceErase(s, i) }""",
    "joined": """(seq(float[k, 3]) s) => (float[m, 3] y) {
        t = ConcatFromSequence<axis = 0>(s)  y = Tanh(t) }""",
    "split": """(float[n, 3] x) => (seq(float[k, 3]) y) {
        two = Constant<value = int64 {2}>()  h = Relu(x)
        y = SplitToSequence<axis = 0>(h, two) }""",
    "split as computed": """(float[n, 3] x) => (seq(float[k, 3]) y) {
        places = NonZero(x)  rows = Transpose(places)  size = Shape<start = 0, end = 1>(rows)
        half = Constant<value = int64[1] {2}>()  one = Div(size, size)  two = Mul(one, half)
        flat = Squeeze(two)  y = SplitToSequence<axis = 0>(x, flat) }""",
    "loop": """(float[n, 3] x, int64 i) => (seq(float[k, 3]) y) {
        none = SequenceEmpty<dtype = 1>()  yes = Constant<value = bool {1}>()
        y = Loop(i, yes, none) <body = b (int64 j, bool c, seq(float[k, 3]) before)
            => (bool d, seq(float[k, 3]) after) {
                d = Identity(c)  f = Cast<to = 1>(j)  h = Add(x, f)
                after = SequenceInsert(before, h) }> }""",
    "mapped": """(seq(float[k, 3]) s, float[n, 3] x) => (seq(float[k, 3]) y) {
        y = SequenceMap(s, x)
        <body = b (float[k, 3] each, float[n, 3] other) => (float[m, 3] made) {
            made = Concat<axis = 0>(each, other) }> }""",
}


@pytest.mark.parametrize("name", MODELS)
def test_sequences_are_as_onnx_runtime_has_them(name: str) -> None:
    model = model_of(MODELS[name])
    reference = theirs.InferenceSession(model, providers=["CPUExecutionProvider"])
    with InferenceSession(from_onnx(model), threads=1) as session:
        for count in (3, 2, 3):
            feeds = {"s": LIST[:count], "i": np.array(count - 2), "x": LIST[count - 1]}
            given = {field.name: feeds[field.name] for field in session.inputs}
            found = session.run(given)
            for mine, other in zip(found.values(), reference.run(None, given), strict=True):
                assert isinstance(mine, list) == isinstance(other, list)
                parts = (mine, other) if isinstance(mine, list) else ([mine], [other])
                for one, wanted in zip(*parts, strict=True):
                    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-6)


MAYBE = """(optional(float[n]) x) => (float[n] y, bool has) {
    has = OptionalHasElement(x)
    y = If(has) <then_branch = t () => (float[n] a) { v = OptionalGetElement(x)  a = Relu(v) },
                 else_branch = e () => (float[n] b) {
                    b = Constant<value = float[1] {-1.0}>() }> }"""


def test_optional_inputs_are_given_or_none() -> None:
    with InferenceSession(from_onnx(model_of(MAYBE)), threads=1) as session:
        x = reals(3)
        for _ in range(2):
            found = session.run({"x": x})
            np.testing.assert_array_equal(found["y"], np.maximum(x, 0))
            assert found["has"].item() is True
            found = session.run({"x": None})
            assert (found["y"].tolist(), found["has"].item()) == ([-1.0], False)


def test_optional_outputs_are_given_or_none() -> None:
    text = """(float[n] x, bool[1] c) => (optional(float[n]) y) {
        y = If(c) <then_branch = t () => (optional(float[n]) a) { a = Optional(x) },
                   else_branch = e () => (optional(float[n]) b) {
                       b = Optional<type = float[n]>() }> }"""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 18]>\ng {text}')
    with InferenceSession(from_onnx(model), threads=1) as session:
        x = reals(3)
        np.testing.assert_array_equal(session.run({"x": x, "c": np.array([True])})["y"], x)
        assert session.run({"x": x, "c": np.array([False])})["y"] is None


def test_scans_with_a_cut_inside() -> None:
    text = """(float[n, 3] x) => (int64[1] most, float[n] sums) {
        zero = Constant<value = int64[1] {0}>()
        most, sums = Scan(zero, x) <num_scan_inputs = 1, body = b (int64[1] before, float[3] row)
            => (int64[1] after, float sum) {
                places = NonZero(row)  count = Shape<start = 1, end = 2>(places)
                after = Max(before, count)
                last = Constant<value = int64[1] {-1}>()
                flat = Reshape(places, last)  some = Gather<axis = 0>(row, flat)
                sum = ReduceSum<keepdims = 0>(some) }> }"""
    model = model_of(text)
    reference = theirs.InferenceSession(model, providers=["CPUExecutionProvider"])
    with InferenceSession(from_onnx(model), threads=1) as session:
        for rows in (4, 2):
            x = np.maximum(reals(rows, 3), 0)
            for mine, other in zip(session.run(x).values(), reference.run(None, {"x": x})):
                np.testing.assert_allclose(mine, other, rtol=1e-5)


def test_wrong_sequences_are_named() -> None:
    model = from_onnx(model_of(MODELS["joined"]))
    with InferenceSession(model, threads=1) as session:
        assert str(session.inputs[0]) == "s: sequence float32[...]"
        with pytest.raises(DataError, match="input 's': ndarray found, a list of arrays needed"):
            session.run(LIST[0])
        with pytest.raises(
            DataError, match=r"input 's'\[1\]: int64\[\] found, s: sequence float32"
        ):
            session.run({"s": [LIST[0], np.array(3)]})
        with pytest.raises(OnnxError, match="an empty sequence found"):
            session.run({"s": []})
    with pytest.raises(UnboundError, match="input 's': sequence found, and a graph has tensors"):
        model.graph()


def test_a_sequence_where_a_tensor_is_needed_is_refused() -> None:
    text = """(float[n] x) => (float[n] y) { s = SequenceConstruct(x)
        y = MeanVarianceNormalization(s) }"""
    with pytest.raises(OnnxError, match="input 0 is a sequence; a tensor needed"):
        from_onnx(model_of(text)).graph({"n": 2})


def test_a_check_of_sequences_says_supported(tmp_path: Any) -> None:
    path = tmp_path / "list.onnx"
    path.write_bytes(model_of(MODELS["joined"]))
    report = check_onnx(path)
    assert (report.problem, report.unsupported) == (None, ())


def test_sequences_are_written_to_no_array() -> None:
    session = InferenceSession(from_onnx(model_of(MODELS["split"])), threads=1)
    with pytest.raises(DataError, match="out 'y': it is no array"):
        session.run(LIST[2], out={"y": LIST[2]})
    ours = facade.InferenceSession(model_of(MODELS["split"]))
    assert (ours.get_outputs()[0].type, ours.get_outputs()[0].shape) == ("seq(tensor(float))", [])
    assert [part.shape for part in ours.run(None, {"x": LIST[2]})[0]] == [(2, 3), (2, 3)]
    with pytest.raises(facade.InvalidArgument, match="output 'y' is no tensor"):
        ours.run_with_ort_values(None, {"x": facade.OrtValue.ortvalue_from_numpy(LIST[2])})


def test_the_command_writes_each_tensor_of_a_sequence(tmp_path: Any) -> None:
    path, given, made = (tmp_path / name for name in ("s.onnx", "x.npz", "y.npz"))
    path.write_bytes(model_of(MODELS["split"]))
    np.savez(given, x=LIST[2])
    told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given), "-o", str(made)])
    assert told.exit_code == 0, told.output
    assert "y: [float32[2, 3], float32[2, 3]]" in told.output
    with np.load(made) as arrays:
        both = np.concatenate([arrays["y.0"], arrays["y.1"]])
    np.testing.assert_array_equal(both, np.maximum(LIST[2], 0))


def test_the_command_reads_each_tensor_of_a_sequence(tmp_path: Any) -> None:
    path, given, made = (tmp_path / name for name in ("s.onnx", "x.npz", "y.npz"))
    path.write_bytes(model_of(MODELS["joined"]))
    np.savez(given, **{f"s.{place}": each for place, each in enumerate(LIST)})
    told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given), "-o", str(made)])
    assert told.exit_code == 0, told.output
    with np.load(made) as arrays:
        np.testing.assert_allclose(arrays["y"], np.tanh(np.concatenate(LIST)), rtol=1e-5)
    told = CliRunner().invoke(
        app, ["predict", str(path), "-i", str(given), "--benchmark", "--runs", "2"]
    )
    assert "s: [float32[2, 3], float32[1, 3], float32[4, 3]]" in told.output, told.output
    np.savez(given, **{"s.0": LIST[0], "s.2": LIST[2]})
    told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given)])
    assert "unknown input 's.2'; inputs are s: sequence float32[...]" in told.output


def test_the_command_takes_an_optional_input_that_is_not_there_as_none(tmp_path: Any) -> None:
    path, given = tmp_path / "s.onnx", tmp_path / "x.npz"
    path.write_bytes(model_of(MAYBE))
    for arrays, shape in (({}, 1), ({"x": reals(3)}, 3)):
        np.savez(given, **arrays)
        told = CliRunner().invoke(app, ["predict", str(path), "-i", str(given)])
        assert f"y: float32[{shape}]" in told.output, told.output
