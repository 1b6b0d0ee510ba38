"""Quantised ONNX models: the numbers of ONNX Runtime within one step, by products of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import soapstone
from soapstone.engine.lower.integers import multiplies_bytes
from soapstone.engine.prepare import folded
from soapstone.frontend.onnx.file.tensors import ONNX_OF
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
able = pytest.mark.skipif(
    not multiplies_bytes("cpu"), reason="neither oneDNN nor a processor that multiplies bytes"
)
random = np.random.default_rng(0)


def numbers(*shape: int) -> Array:
    return random.standard_normal(shape).astype(np.float32)


def signed(*shape: int) -> Array:
    """Of seven bits: without VNNI, ONNX Runtime's sums of two products end at 16 bits."""
    return random.integers(-64, 64, shape).astype(np.int8)


def unsigned(*shape: int) -> Array:
    return random.integers(0, 256, shape).astype(np.uint8)


def real(value: float) -> Array:
    return np.asarray(value, np.float32)


def byte(value: int) -> Array:
    return np.asarray(value, np.uint8)


def model(
    nodes: Sequence[onnx.NodeProto], feeds: dict[str, Array], held: dict[str, Array], out: str
) -> bytes:
    """Return a model of nodes, its inputs and weights as given, with the output y of a type."""

    def info(name: str, array: Array) -> Any:
        return helper.make_tensor_value_info(name, ONNX_OF[array.dtype.name], array.shape)

    outputs = [helper.make_tensor_value_info("y", ONNX_OF[out], None)]
    weights = [numpy_helper.from_array(np.asarray(array), name) for name, array in held.items()]
    inputs = [info(name, array) for name, array in feeds.items()]
    graph = helper.make_graph(list(nodes), "quantised", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def both(file: bytes, feeds: dict[str, Array]) -> tuple[Array, Array]:
    """Return what soapstone and ONNX Runtime make of a model."""
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        ours = session.run(feeds)["y"]
    served = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    return ours, served.run(["y"], feeds)[0]


def split(file: bytes, feeds: dict[str, Array], processor: str) -> tuple[Graph, Array]:
    """Return the rest of a model's graph as a kind of processor runs it, and what it computes."""
    source = soapstone.from_onnx(file)
    graph, _ = source.graph_for(feeds)
    first, rest = folded(graph, source.weights, processor=processor)
    held = {**source.weights}
    held |= interpret(first, {name: held[name] for name in first.roles})
    values = {name: feeds[name] if name in feeds else held[name] for name in rest.roles}
    return rest, next(iter(interpret(rest, values).values()))


def within_a_step(ours: Array, wanted: Array) -> None:
    assert ours.dtype == wanted.dtype
    apart = np.abs(ours.astype(int) - wanted.astype(int))
    assert apart.max() <= 1
    assert (apart > 0).mean() < 0.01


def rounded(x: str, name: str, number: int) -> list[onnx.NodeProto]:
    """Return the nodes that round a value to bytes and back, by scale and zero of a number."""
    parameters = [f"s{number}", f"z{number}"]
    return [
        helper.make_node("QuantizeLinear", [x, *parameters], [f"{name}.q"]),
        helper.make_node("DequantizeLinear", [f"{name}.q", *parameters], [name]),
    ]


def network(
    channels_signed: bool, middle: float = 0.09, groups: int = 4, values: str = "uint8"
) -> tuple[bytes, dict[str, Array]]:
    """Return a residual network of convolutions, a pool, a reshape and a product, as QDQ.

    middle: the scale of a sum's operand. groups: of the second convolution. values: their type.
    """
    held: dict[str, Array] = {}
    nodes: list[onnx.NodeProto] = []
    for number, (scale, zero) in enumerate(((0.03, 120), (0.05, 0), (middle, 128), (0.1, 100))):
        whole = byte(zero) if values == "uint8" else np.asarray(zero - 128, np.int8)
        held |= {f"s{number}": real(scale), f"z{number}": whole}

    def weights(name: str, array: Array, axis: int) -> str:
        count = array.shape[axis]
        zero = np.zeros(count, np.int8)
        if not channels_signed:
            array, zero = (array.astype(int) + 128).astype(np.uint8), np.full(count, 128, np.uint8)
        scales = (random.uniform(0.5, 1.5, count) / 500).astype(np.float32)
        held.update({name: array, f"{name}.s": scales, f"{name}.z": zero})
        parts = [name, f"{name}.s", f"{name}.z"]
        nodes.append(helper.make_node("DequantizeLinear", parts, [f"{name}.r"], axis=axis))
        return f"{name}.r"

    held["b"] = numbers(8)
    nodes += rounded("x", "x.r", 0)
    first = weights("w", signed(8, 3, 3, 3), 0)
    nodes.append(helper.make_node("Conv", ["x.r", first, "b"], ["c"], pads=[1, 1, 1, 1]))
    nodes += [helper.make_node("Relu", ["c"], ["a"]), *rounded("a", "a.r", 1)]
    nodes.append(helper.make_node("MaxPool", ["a.r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]))
    nodes += rounded("p", "p.r", 1)
    second = weights("v", signed(8, 8 // groups, 3, 3), 0)
    pads = [1, 1, 1, 1]
    nodes.append(helper.make_node("Conv", ["p.r", second], ["d"], pads=pads, group=groups))
    nodes += rounded("d", "d.r", 2)
    nodes.append(helper.make_node("Add", ["d.r", "p.r"], ["e"]))
    nodes += [helper.make_node("Relu", ["e"], ["f"]), *rounded("f", "f.r", 1)]
    nodes += [helper.make_node("Flatten", ["f.r"], ["g"]), *rounded("g", "g.r", 1)]
    third = weights("u", signed(8 * 3 * 3, 5), 1)
    nodes.append(helper.make_node("MatMul", ["g.r", third], ["h"]))
    held["t"] = numbers(5)
    nodes.append(helper.make_node("Add", ["h", "t"], ["i"]))
    nodes += rounded("i", "y", 3)
    nodes[-2].output[0], nodes[-1].input[0] = "y.q", "y.q"
    feeds = {"x": numbers(2, 3, 6, 6)}
    nodes.pop()
    nodes[-1].output[0] = "y"
    return model(nodes, feeds, held, values), feeds


@pytest.mark.parametrize("values", ["uint8", "int8"])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("channels_signed", [True, False])
def test_a_network_has_the_runtimes_bytes(channels_signed: bool, groups: int, values: str) -> None:
    file, feeds = network(channels_signed, groups=groups, values=values)
    within_a_step(*both(file, feeds))


def test_a_scale_of_zero_is_no_error() -> None:
    file, feeds = network(True, middle=0.0)
    with (
        soapstone.InferenceSession(soapstone.from_onnx(file)) as session,
        np.errstate(all="ignore"),
    ):
        assert session.run(feeds)["y"].shape == (2, 5)


@able
@pytest.mark.parametrize("values", ["uint8", "int8"])
def test_a_network_runs_in_bytes_whose_values_have_no_sign(values: str) -> None:
    file, feeds = network(True, groups=1, values=values)
    graph, _ = split(file, feeds, "cpu")
    operators = [node.operator for node in graph.nodes]
    assert not {"conv2d", "linear", "matmul"} & set(operators)
    assert operators.count("quantized_conv2d") == 2
    for node in graph.nodes:
        if node.operator in ("max_pool2d", "reshape"):
            assert graph.tensors[node.outputs[0]].dtype == "uint8"
        if node.operator.startswith("quantized_"):
            assert graph.tensors[node.inputs[0]].dtype == "uint8"
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        assert "reference" not in session.variants(feeds).values()


def test_where_no_kernel_multiplies_bytes_numbers_are_the_same() -> None:
    file, feeds = network(True)
    graph, plain = split(file, feeds, "none")
    assert not any(node.operator.startswith("quantized") for node in graph.nodes)
    within_a_step(both(file, feeds)[0], plain)


@pytest.mark.parametrize("case", ["QLinearMatMul", "MatMulInteger of any zero", "ConvInteger"])
def test_operators_of_bytes_are_exact_in_floating_point_too(case: str) -> None:
    file, feeds, _ = of_case(case)
    graph, plain = split(file, feeds, "none")
    assert not any(node.operator.startswith("quantized") for node in graph.nodes)
    np.testing.assert_array_equal(both(file, feeds)[1], plain)


S, Z, T = real(0.02), byte(130), real(0.0371)
_A, _B = unsigned(3, 8), signed(8, 4)
_WIDE = (random.uniform(0.5, 1.5, 4) / 100).astype(np.float32)
_BIAS = random.integers(-900, 900, 4).astype(np.int32)
# Operators of bytes: domain, name, attributes, inputs that are given, inputs that are weights.
CASES: dict[str, tuple[str, dict[str, Any], list[Array | None], int]] = {
    "QLinearConv": (
        *("", {"pads": [1, 1, 1, 1]}),
        [unsigned(1, 4, 5, 5), S, Z, signed(4, 4, 3, 3), _WIDE, np.zeros(4, np.int8), T, Z, _BIAS],
        0,
    ),
    "QLinearMatMul": ("", {}, [_A, S, Z, _B, S, np.int8(0), T, Z], 0),
    "ConvInteger": ("", {}, [unsigned(1, 4, 5, 5), unsigned(4, 4, 3, 3), Z, byte(128)], 0),
    "MatMulInteger": ("", {}, [_A, _B, Z], 0),
    "MatMulInteger of any zero": ("", {}, [_A, unsigned(8, 4), Z, byte(77)], 0),
    "QLinearAdd": ("com.microsoft", {}, [_A, S, Z, unsigned(3, 8), T, Z, T, Z], 0),
    "QLinearMul": ("com.microsoft", {}, [_A, S, Z, unsigned(3, 8), T, Z, T, Z], 0),
    "QLinearSigmoid": ("com.microsoft", {}, [_A, S, Z, real(1 / 256), byte(0)], 0),
    "QLinearLeakyRelu": ("com.microsoft", {"alpha": 0.1}, [_A, S, Z, S, Z], 0),
    "QLinearSoftmax": (
        *("com.microsoft", {"axis": -1, "opset": 13}),
        [_A, S, Z, real(1 / 256), byte(0)],
        0,
    ),
    "QLinearGlobalAveragePool": ("com.microsoft", {}, [unsigned(1, 4, 5, 5), S, Z, S, Z], 0),
    "QLinearAveragePool": (
        *("com.microsoft", {"kernel_shape": [2, 2]}),
        [unsigned(1, 4, 5, 5), S, Z, real(0.0171), Z],
        0,
    ),
    "QLinearConv with channels last": (
        *("com.microsoft", {"pads": [1, 1, 1, 1], "channels_last": 1, "group": 2}),
        [unsigned(1, 5, 6, 8), S, Z, signed(4, 4, 3, 3), _WIDE, np.zeros(4, np.int8), T, Z, _BIAS],
        0,
    ),
    "QLinearConv with channels first": (
        *("com.microsoft", {"strides": [2, 1], "channels_last": 0}),
        [unsigned(1, 4, 5, 5), S, Z, signed(4, 4, 3, 3), S, np.int8(0), T, Z],
        0,
    ),
    "QLinearSoftmax over several axes": (
        *("com.microsoft", {"axis": 1, "opset": 12}),
        [unsigned(2, 3, 5), S, Z, real(1 / 256), byte(0)],
        0,
    ),
    "QLinearWhere": (
        *("com.microsoft", {}),
        [np.array([[True], [False], [True]]), _A, S, Z, unsigned(3, 8), T, Z, T, byte(99)],
        0,
    ),
    "QLinearGlobalAveragePool with channels last": (
        *("com.microsoft", {"channels_last": 1}),
        [unsigned(2, 5, 6, 4), S, Z, S, Z],
        0,
    ),
    "QLinearAveragePool with channels last": (
        *("com.microsoft", {"kernel_shape": [2, 2], "strides": [1, 2], "channels_last": 1}),
        [unsigned(2, 5, 6, 4), S, Z, real(0.0171), Z],
        0,
    ),
    "QLinearConcat": (
        *("com.microsoft", {"axis": 1}),
        [T, Z, _A, S, Z, unsigned(3, 2), T, Z],
        2,
    ),
    "QGemm": (
        *("com.microsoft", {"transB": 1, "alpha": 2.0}),
        [_A, S, Z, signed(4, 8), S, np.int8(0), _BIAS, T, Z],
        0,
    ),
    "QGemm without a scale": (
        *("com.microsoft", {}),
        [_A, S, Z, _B, _WIDE, np.zeros(4, np.int8)],
        0,
    ),
    "MatMulIntegerToFloat": ("com.microsoft", {}, [_A, _B, S, _WIDE, Z, None, numbers(4)], 0),
    "DynamicQuantizeMatMul": ("com.microsoft", {}, [numbers(3, 8), _B, S, None, numbers(4)], 1),
}


def of_case(case: str) -> tuple[bytes, dict[str, Array], str]:
    """Return a model of one operator, its input, and the type of its output."""
    domain, attributes, inputs, given = CASES[case]
    names = ["" if array is None else f"i{number}" for number, array in enumerate(inputs)]
    arrays = {name: np.asarray(a) for name, a in zip(names, inputs) if a is not None}
    feeds = {names[given]: arrays[names[given]]}
    held = {name: array for name, array in arrays.items() if name not in feeds}
    node = helper.make_node(case.split()[0], names, ["y"], domain=domain, **attributes)
    out = "uint8"
    if case.startswith(("MatMulIntegerToFloat", "DynamicQ", "QGemm without")):
        out = "float32"
    elif "Integer" in case:
        out = "int32"
    return model([node], feeds, held, out), feeds, out


@pytest.mark.parametrize("case", CASES)
def test_operators_of_bytes_have_the_runtimes_numbers(case: str) -> None:
    file, feeds, out = of_case(case)
    ours, wanted = both(file, feeds)
    if out == "uint8":
        within_a_step(ours, wanted)
    elif out == "int32":
        np.testing.assert_array_equal(ours, wanted)
    else:
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-5)


def test_a_dynamic_product_is_one_of_bytes() -> None:
    """As quantize_dynamic writes it, with a scale that is known when it runs."""
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
        helper.make_node("MatMulInteger", ["q", "w", "z"], ["i"]),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["s", "ws"], ["t"]),
        helper.make_node("Mul", ["f", "t"], ["g"]),
        helper.make_node("Add", ["g", "b"], ["y"]),
    ]
    feeds = {"x": numbers(2, 3, 8)}
    file = model(nodes, feeds, {"w": _B, "ws": _WIDE, "b": numbers(4)}, "float32")
    np.testing.assert_allclose(*both(file, feeds), rtol=1e-5, atol=1e-5)
    if multiplies_bytes("cpu"):
        graph, _ = split(file, feeds, "cpu")
        (product,) = [n for n in graph.nodes if n.operator == "quantized_linear"]
        assert product.attributes["to"] == "float" and product.attributes["bias"]
        with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
            assert "reference" not in session.variants(feeds).values()


@pytest.mark.parametrize("weights", [unsigned(8, 4), signed(8, 4)])
def test_weights_that_do_not_fit_less_their_zero_have_it_in_the_product(weights: Array) -> None:
    """As quantize_dynamic wrote them for long: bytes from their least to their greatest value."""
    zero = np.asarray(77, weights.dtype)
    nodes = [
        *rounded("x", "r", 0),
        helper.make_node("DequantizeLinear", ["w", "s0", "wz"], ["v"]),
        helper.make_node("Transpose", ["v"], ["u"], perm=[1, 0]),
        helper.make_node("Gemm", ["r", "u"], ["y"], transB=1),
    ]
    held = {"w": weights, "wz": zero, "s0": S, "z0": Z}
    feeds = {"x": numbers(3, 8)}
    file = model(nodes, feeds, held, "float32")
    np.testing.assert_allclose(*both(file, feeds), rtol=1e-5, atol=1e-5)
    if multiplies_bytes("cpu"):
        graph, _ = split(file, feeds, "cpu")
        (product,) = [n for n in graph.nodes if n.operator == "quantized_linear"]
        assert product.attributes["w_zero"] == (77 if weights.dtype == np.int8 else 77 - 128)


def recurrent_model(
    kind: str, held: dict[str, Array | None], steps: int, **attributes: Any
) -> bytes:
    """Return a layer of a kind whose inputs are x (steps, 2, 5) and what is held, None for none."""
    names = ["x", *(name if array is not None else "" for name, array in held.items())]
    made = ["y", "h", "c"]
    domain = "" if kind == "LSTM" else "com.microsoft"
    node = helper.make_node(kind, names, made, domain=domain, **attributes)
    weights = {name: array for name, array in held.items() if array is not None}
    file = onnx.load_model_from_string(
        model([node], {"x": np.zeros((steps, 2, 5), np.float32)}, weights, "float32")
    )
    for name in made[1:]:
        file.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return bytes(file.SerializeToString())


@pytest.mark.parametrize("seed", range(12))
def test_lstms_of_bytes_are_those_of_the_weights_that_they_stand_for(seed: int) -> None:
    """ONNX Runtime rounds what is multiplied as well, so its own numbers are near by."""
    own = np.random.default_rng(seed)
    direction = ("forward", "reverse", "bidirectional")[seed % 3]
    count, hidden, steps = 1 + (seed % 3 == 2), int(own.integers(2, 7)), int(own.integers(1, 6))
    dtype = np.dtype((np.int8, np.uint8)[seed % 2])
    columns = 4 * hidden

    def some(*shape: int) -> Array | None:
        drawn = own.standard_normal(shape).astype(np.float32) / 4
        return drawn if own.random() < 0.5 else None

    bytes_, plain = [], []
    for features in (5, hidden):
        low = -64 if dtype == np.int8 else 64
        w = own.integers(low, low + 128, (count, features, columns)).astype(dtype)
        shape = (count, columns) if own.random() < 0.5 else (count,)
        scale = own.uniform(0.005, 0.02, shape).astype(np.float32)
        zero = np.full(shape, low + 64, dtype)
        wide = [part.reshape(count, 1, -1) for part in (scale, zero)]
        real_ = (w.astype(np.float32) - wide[1].astype(np.float32)) * wide[0]
        bytes_.append((w, scale, zero))
        plain.append(real_.transpose(0, 2, 1).copy())
    lengths = own.integers(1, steps + 1, 2).astype(np.int32) if own.random() < 0.5 else None
    rest: dict[str, Array | None] = {
        "b": some(count, 8 * hidden),
        "lengths": lengths,
        "h0": some(count, 2, hidden),
        "c0": some(count, 2, hidden),
        "p": some(count, 3 * hidden),
    }
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if own.random() < 0.3:
        attributes["clip"] = 0.7
    (w, ws, wz), (r, rs, rz) = bytes_
    scales = {"ws": ws, "wz": wz, "rs": rs, "rz": rz}
    file = recurrent_model(
        "DynamicQuantizeLSTM", {"w": w, "r": r, **rest, **scales}, steps, **attributes
    )
    exact = recurrent_model("LSTM", {"w": plain[0], "r": plain[1], **rest}, steps, **attributes)
    feeds = {"x": own.standard_normal((steps, 2, 5)).astype(np.float32)}
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        ours = session.run(feeds)
    for served, most in ((exact, 1e-5), (file, 0.03)):
        runtime = theirs.InferenceSession(served, providers=["CPUExecutionProvider"])
        for name, wanted in zip("yhc", runtime.run(list("yhc"), feeds), strict=True):
            np.testing.assert_allclose(ours[name], wanted, rtol=1e-5, atol=most)


def test_what_quantize_dynamic_makes_of_an_lstm_is_read(tmp_path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    held = {"w": numbers(2, 24, 5) / 4, "r": numbers(2, 24, 6) / 4, "b": numbers(2, 48) / 4}
    attributes = {"hidden_size": 6, "direction": "bidirectional"}
    plain, narrow = tmp_path / "plain.onnx", tmp_path / "narrow.onnx"
    plain.write_bytes(recurrent_model("LSTM", held, 4, **attributes))
    quantize_dynamic(plain, narrow, weight_type=QuantType.QInt8)
    file = narrow.read_bytes()
    assert "DynamicQuantizeLSTM" in {n.op_type for n in onnx.load(narrow).graph.node}
    np.testing.assert_allclose(*both(file, {"x": numbers(4, 2, 5)}), atol=0.03)
