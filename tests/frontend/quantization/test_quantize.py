"""`soapstone.quantize`: QDQ models that any runtime runs, and what they cost and gain."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import soapstone
from soapstone.cli.main import app
from soapstone.errors import DataError
from soapstone.frontend.onnx import OnnxError
from soapstone.frontend.quantization.choice import choose
from soapstone.frontend.quantization.network import Network
from soapstone.frontend.quantization.ranges import entropy, scale_of
from soapstone.ir.tensor import Array

random = np.random.default_rng(0)


def floats(*shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def network(opset: int = 17) -> bytes:
    """Return a residual network with a norm, a pool, an average and a matrix, for any batch."""
    held = {
        "w": floats(8, 3, 3, 3) / 4,
        "gamma": 1 + floats(8) / 9,
        "var": np.ones(8, np.float32),
        "v": floats(8, 8, 3, 3) / 8,
        "u": floats(5, 8),
        "c": floats(1, 5),
        **{name: floats(8) for name in ("beta", "mean", "b")},
    }
    norm = ["a", "gamma", "beta", "mean", "var"]
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], "first", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", norm, ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "relu"),
        helper.make_node("MaxPool", ["r"], ["p"], "pool", kernel_shape=[2, 2], strides=[2, 2]),
        helper.make_node("Conv", ["p", "v", "b"], ["d"], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["d", "p"], ["e"], "sum"),
        helper.make_node("Relu", ["e"], ["f"], "relu2"),
        helper.make_node("GlobalAveragePool", ["f"], ["g"], "mean"),
        helper.make_node("Flatten", ["g"], ["h"], "flat"),
        helper.make_node("Gemm", ["h", "u", "c"], ["y"], "last", transB=1),
    ]
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)]
        for name, shape in (("x", ["n", 3, 8, 8]), ("y", ["n", 5]))
    ]
    weights = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "net", *values, weights)
    opsets = [helper.make_opsetid("", opset)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


MODEL, SAMPLES = network(), floats(32, 3, 8, 8)
quantize = partial(soapstone.quantize, seconds=0.0)


@pytest.fixture(scope="module")
def made() -> soapstone.Quantized:
    return quantize(MODEL, {"x": SAMPLES})


def test_a_network_becomes_bytes_and_says_what_it_costs(made: soapstone.Quantized) -> None:
    assert made.products == 3
    assert made.samples == 32
    assert made.outputs["y"].snr_db > 25
    assert made.outputs["y"].agreement is not None
    assert made.outputs["y"].agreement > 0.9
    kinds = [node.op_type for node in onnx.load_from_string(made.model).graph.node]
    assert "BatchNormalization" not in kinds
    assert kinds.count("QuantizeLinear") == made.values == 7
    for word in ("signal to noise", "same class", "ms a run before", "bytes before"):
        assert word in str(made)


def test_the_error_that_is_told_is_that_of_its_file(made: soapstone.Quantized) -> None:
    answers = []
    for model in (MODEL, made.model):
        with soapstone.InferenceSession(soapstone.from_onnx(model)) as session:
            answers.append(session.run(SAMPLES)["y"].astype(np.float64))
    error = 10 * np.log10((answers[0] ** 2).sum() / ((answers[1] - answers[0]) ** 2).sum())
    assert made.outputs["y"].snr_db == pytest.approx(error, abs=0.5)


def test_another_runtime_runs_the_file(made: soapstone.Quantized) -> None:
    """As it is written: without VNNI, its fused operators end sums of two products at 16 bits."""
    theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
    with soapstone.InferenceSession(soapstone.from_onnx(made.model)) as session:
        ours = session.run(SAMPLES)["y"]
    options = theirs.SessionOptions()
    options.graph_optimization_level = theirs.GraphOptimizationLevel.ORT_DISABLE_ALL
    other = theirs.InferenceSession(made.model, options, providers=["CPUExecutionProvider"])
    (wanted,) = other.run(None, {"x": SAMPLES})
    np.testing.assert_allclose(ours, wanted, atol=0.02 * np.abs(wanted).max())


def test_weights_have_a_scale_a_channel_and_moves_share_theirs(made: soapstone.Quantized) -> None:
    graph = onnx.load_from_string(made.model).graph
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    channels = [a.shape for n, a in held.items() if a.dtype == np.int8 and n.endswith("zero")]
    assert sorted(channels) == [(5,), (8,), (8,)]
    assert held["u.bytes"].dtype == np.int8
    read = {n.input[0]: n.input[1] for n in graph.node if n.op_type == "QuantizeLinear"}
    assert read["r"] == read["p"]  # a pool moves bytes
    assert read["d"] != read["p"]
    one = quantize(MODEL, SAMPLES, per_channel=False)
    assert one.outputs["y"].snr_db <= made.outputs["y"].snr_db + 1


def test_signed_bytes_and_percentiles() -> None:
    signed = quantize(MODEL, SAMPLES, activations="int8")
    held = onnx.load_from_string(signed.model).graph.initializer
    zeros = [numpy_helper.to_array(t) for t in held if t.name.endswith(".zero")]
    assert all(zero.dtype == np.int8 and not zero.any() for zero in zeros)
    wild = SAMPLES.copy()
    wild[0, 0, 0, 0] = 1000  # one value that would make all steps coarse
    usual = quantize(MODEL, wild)
    clipped = quantize(MODEL, wild, method="percentile", percentile=99.9)

    def scale(result: soapstone.Quantized) -> float:
        held = onnx.load_from_string(result.model).graph.initializer
        return next(float(numpy_helper.to_array(t)) for t in held if t.name == "x.scale")

    assert scale(clipped) < 0.1 * scale(usual)
    assert quantize(MODEL, SAMPLES, method="entropy").outputs["y"].snr_db > 20


def test_entropy_clips_what_is_rare_and_far() -> None:
    values = np.concatenate([random.standard_normal(100_000), [40.0, -20.0]])
    counts, _ = np.histogram(values, 4096, (-20.0, 40.0))
    low, high = entropy(counts, (-20.0, 40.0))
    assert high < 20
    assert low == pytest.approx(-high / 2)
    flat = np.full(4096, 10)
    assert entropy(flat, (0.0, 8.0)) == (0.0, 8.0)


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_a_scale_reaches_both_ends_and_has_a_zero(dtype: str) -> None:
    for low, high in ((-1.0, 3.0), (0.0, 2.0), (-5.0, 0.0), (0.0, 0.0)):
        scale, zero = scale_of((low, high), dtype)
        limits = np.iinfo(dtype)
        ends = (np.array([limits.min, limits.max]) - int(zero)) * float(scale)
        assert ends[0] <= low + scale
        assert ends[1] >= high - scale


def test_a_node_can_be_left_out_and_old_opsets_are_converted() -> None:
    left = quantize(MODEL, SAMPLES, exclude=["first"])
    assert left.products == 2
    old = network(11)
    assert quantize(old, SAMPLES).products == 3


def test_products_of_values_and_other_operators_stay() -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Softmax", ["a"], ["s"]),
        helper.make_node("MatMul", ["s", "a"], ["y"]),
    ]
    shape = [2, 4, 4]
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, shape)] for n in "xy"]
    weights = [numpy_helper.from_array(floats(4, 4), "w")]
    model = helper.make_model(
        helper.make_graph(nodes, "net", *values, weights),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    choice = choose(Network(model))
    assert list(choice.values) == ["x"]
    assert choice.readers == {"a"}


ERRORS: dict[str, dict[str, Any]] = {
    "no input 'image' found; inputs are x: float32": {"calibration": {"image": SAMPLES}},
    "input 'x' is missing": {"calibration": {}},
    "input 'x': float64.* found, x: float32": {"calibration": SAMPLES.astype(float)},
    r"input 'x' has shape \(3, 8\)": {"calibration": floats(3, 8)},
    r"input 'x': float32\[8, 3, 9, 8\] found": {"calibration": floats(9, 3, 9, 8)},
    "zeros alone found": {"calibration": np.zeros((8, 3, 8, 8), np.float32)},
    "0 samples found, 1 or more": {"calibration": floats(0, 3, 8, 8)},
    "method: 'entropi' found, one of minmax, percentile, entropy": {"method": "entropi"},
    "percentile: 20 found": {"percentile": 20},
    "percentile: 90 found with method 'minmax'": {"percentile": 90},
    "batch_size: 0 found, 1 or more": {"batch_size": 0},
    "exclude: 'first' found, a list": {"exclude": "first"},
    "activations: 'int4' found": {"activations": "int4"},
    "no node 'frist' found.*first": {"exclude": ["frist"]},
    "is nan to nan|nan": {"calibration": np.full((8, 3, 8, 8), np.nan, np.float32)},
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_say_what_was_found_and_needed(message: str) -> None:
    with pytest.raises(DataError, match=message):
        quantize(MODEL, **{"calibration": SAMPLES, **ERRORS[message]})


def test_models_without_products_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    values = [[helper.make_tensor_value_info(n, TensorProto.FLOAT, [2])] for n in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "net", *values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    with pytest.raises(DataError, match="no Conv, MatMul or Gemm"):
        quantize(model, floats(2))
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(MODEL[: len(MODEL) // 2])
    with pytest.raises(OnnxError, match=r"file '.*cut.onnx': .*at byte"):
        quantize(cut, floats(2))
    with pytest.raises(OnnxError, match="int found; a path"):
        quantize(3, floats(2))  # type: ignore[arg-type]


def test_a_model_that_was_read_is_quantised_as_its_file_is() -> None:
    ours, theirs = quantize(soapstone.from_onnx(MODEL), SAMPLES), quantize(MODEL, SAMPLES)
    assert (ours.products, ours.values) == (theirs.products, theirs.values)
    with soapstone.InferenceSession(soapstone.from_onnx(ours.model)) as session:
        found = session.run(SAMPLES)["y"]
    with soapstone.InferenceSession(soapstone.from_onnx(theirs.model)) as session:
        np.testing.assert_array_equal(found, session.run(SAMPLES)["y"])


def test_a_model_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(MODEL)
    with pytest.raises(DataError, match="it is read too; another file to write needed"):
        quantize(path, floats(2), tmp_path / "." / "net.onnx")
    assert path.read_bytes() == MODEL


def test_the_command_writes_a_file_and_shows_error_and_gain(tmp_path: Path) -> None:
    model, samples, target = (tmp_path / name for name in ("m.onnx", "x.npz", "q.onnx"))
    model.write_bytes(MODEL)
    np.savez(samples, x=SAMPLES)
    given = ["quantize", str(model), "--calibration", str(samples), "-o", str(target)]
    given += ["--seconds", "0"]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 0, told.output
    assert "output 'y': signal to noise" in told.output
    assert f"wrote {target}" in told.output
    with soapstone.InferenceSession(target) as session:
        assert session.run(SAMPLES)["y"].shape == (32, 5)
    told = CliRunner().invoke(app, [*given, "--json", "--exclude", "last"])
    found = json.loads(told.stdout)
    assert found["products"] == 2
    assert set(found["run_ms"]) == {"original", "quantized"}
    wrong = CliRunner().invoke(app, [*given, "--method", "mean"])
    assert wrong.exit_code == 1
    assert "method: 'mean' found" in wrong.output
