"""Operators of com.microsoft against ONNX Runtime, whose own they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from soapstone import InferenceSession, from_onnx
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

ort = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
RANDOM = np.random.default_rng(0)
CONSTANT = ("w", "order", "scales", "zeros", "cosines", "sines", "gamma", "beta", "bias")


def drawn(*shape: int) -> Array:
    return RANDOM.standard_normal(shape, np.float32)


def model_of(
    kind: str, inputs: dict[str, Array], outputs: int, attributes: dict[str, Any], domain: str
) -> onnx.ModelProto:
    """Return a model of one operator; inputs called "" are left out."""
    names = [name if array is not None else "" for name, array in inputs.items()]
    made = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(kind, names, made, domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        kind,
        [
            helper.make_tensor_value_info(
                n, helper.np_dtype_to_tensor_dtype(a.dtype), [None] * a.ndim
            )
            for n, a in inputs.items()
            if a is not None and n not in CONSTANT
        ],
        [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in made],
        [numpy_helper.from_array(inputs[n], n) for n in CONSTANT if inputs.get(n) is not None],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def compare(
    kind: str,
    inputs: dict[str, Any],
    outputs: int = 1,
    domain: str = "com.microsoft",
    rows: Array | None = None,
    **attributes: Any,
) -> None:
    """The results are ONNX Runtime's; rows: of the first result, those that count."""
    model = model_of(kind, inputs, outputs, attributes, domain)
    given = {n: a for n, a in inputs.items() if a is not None and n not in CONSTANT}
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, given)
    found = list(InferenceSession(from_onnx(model)).run(given).values())
    for number, (a, b) in enumerate(zip(want, found, strict=True)):
        if rows is not None and number == 0:
            a, b = a[rows], b[rows]
        assert a.shape == b.shape
        assert np.allclose(a, b, rtol=1e-3, atol=2e-4), (kind, number, np.abs(a - b).max())


def test_activations() -> None:
    x, bias = 3 * drawn(2, 8), drawn(8)
    compare("Gelu", {"x": x})
    compare("BiasGelu", {"x": x, "bias": bias})
    compare("FastGelu", {"x": x, "bias": bias})
    compare("FastGelu", {"x": x})
    compare("QuickGelu", {"x": x}, alpha=1.5)
    compare("QuickGelu", {"x": x})


def test_norms() -> None:
    x, skip, gamma, beta = drawn(2, 3, 8), drawn(2, 3, 8), drawn(8), drawn(8)
    both = {"x": x, "skip": skip, "gamma": gamma}
    compare("SimplifiedLayerNormalization", {"x": x, "gamma": gamma}, domain="", epsilon=1e-6)
    compare("SkipSimplifiedLayerNormalization", both)
    compare("SkipSimplifiedLayerNormalization", {**both, "bias": drawn(8)}, epsilon=1e-3)
    compare("SkipLayerNormalization", {**both, "beta": beta}, epsilon=1e-3)
    compare("SkipLayerNormalization", {**both, "beta": None, "bias": drawn(8)})


def test_the_least_mean_square_is_that_of_each_operator() -> None:
    tiny, gamma = 1e-3 * drawn(2, 3, 8), drawn(8)
    compare("SimplifiedLayerNormalization", {"x": tiny, "gamma": gamma}, domain="")
    compare("SkipSimplifiedLayerNormalization", {"x": tiny, "skip": tiny, "gamma": gamma})


@pytest.mark.parametrize(
    ("more", "attributes", "told"),
    [
        ({"other": drawn(2, 8)}, {}, "input 2 is not supported"),
        ({}, {"approximate": "none"}, "attribute 'approximate' is not supported"),
    ],
)
def test_what_a_rule_does_not_look_at_is_refused(
    more: dict[str, Array], attributes: dict[str, Any], told: str
) -> None:
    inputs = {"x": drawn(2, 8), "y": drawn(8), **more}
    model = from_onnx(model_of("BiasGelu", inputs, 1, attributes, "com.microsoft"))
    with pytest.raises(OnnxError, match=told):
        model.graph_for(inputs)


def test_a_norm_gives_the_sum_that_it_was_taken_of() -> None:
    x, skip, gamma = drawn(2, 3, 8), drawn(2, 3, 8), drawn(8)
    inputs = {"x": x, "skip": skip, "gamma": gamma}
    model = model_of("SkipSimplifiedLayerNormalization", inputs, 4, {}, "com.microsoft")
    model.graph.node[0].output[1:3] = ["", ""]
    del model.graph.output[1:3]
    made = InferenceSession(from_onnx(model)).run({"x": x, "skip": skip})
    assert np.allclose(made["y3"], x + skip)


@pytest.mark.parametrize("transposed", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_fused_products(transposed: tuple[int, int]) -> None:
    a, b = (
        each.swapaxes(1, 2).copy() if turned else each
        for each, turned in zip((drawn(2, 3, 4), drawn(2, 4, 5)), transposed)
    )
    compare("FusedMatMul", {"a": a, "b": b}, alpha=0.5, transA=transposed[0], transB=transposed[1])


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
def test_products_of_few_bits(bits: int, zeros: str) -> None:
    depth, columns, size = 96, 37, 32
    blocks = depth // size
    inputs = {
        "x": drawn(3, depth),
        "w": RANDOM.integers(0, 256, (columns, blocks, size * bits // 8), np.uint8),
        "scales": 0.1 * drawn(columns * blocks),
    }
    if zeros == "packed":
        inputs["zeros"] = RANDOM.integers(0, 256, columns * -(-blocks * bits // 8), np.uint8)
    elif zeros == "floats":
        inputs["zeros"] = RANDOM.integers(0, 1 << bits, columns * blocks).astype(np.float32)
    if bits == 8 and zeros == "floats":
        pytest.skip("not served by ONNX Runtime")
    compare("MatMulNBits", inputs, K=depth, N=columns, bits=bits, block_size=size)


@pytest.mark.parametrize("level", [0, 1, 4])
def test_numbers_of_x_are_rounded_to_bytes_where_the_file_says_so(level: int) -> None:
    x, w = drawn(3, 64), RANDOM.integers(0, 256, (8, 2, 16), np.uint8)
    inputs = {"x": x, "w": w, "scales": drawn(16)}
    attributes = {"K": 64, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": level}
    model = from_onnx(model_of("MatMulNBits", inputs, 1, attributes, "com.microsoft"))
    graph, *_ = model.graph_for({"x": x})
    (node,) = (n for n in graph.nodes if n.operator == "matmul_nbits")
    assert node.attributes["coarse"] == (level == 4)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_rows_of_few_bits(bits: int, zeros: bool) -> None:
    rows, depth, size = 11, 96, 32
    inputs = {
        "w": RANDOM.integers(0, 256, (rows, depth * bits // 8), np.uint8),
        "ids": np.array([[3, 10, 3], [0, 1, 2]]),
        "scales": drawn(rows, depth // size),
    }
    if zeros:
        packed = -(-depth // size * bits // 8)
        inputs["zeros"] = RANDOM.integers(0, 256, (rows, packed), np.uint8)
    attributes = {"bits": bits, "block_size": size, "quantize_axis": 1, "gather_axis": 0}
    compare("GatherBlockQuantized", inputs, **attributes)


# shapes of weights, and along which axes they are quantised and gathered
TABLES = [
    ((11, 64), 1, 0),
    ((32, 11), 0, 1),
    ((5, 48, 8), 1, 0),
    ((5, 48, 8), 1, 2),
    ((48, 8), 0, 0),
]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize(("shape", "axis", "along"), TABLES)
def test_rows_of_numbers_of_four_bits(
    shape: tuple[int, ...], axis: int, along: int, dtype: str, zeros: bool
) -> None:
    low, high = (-8, 8) if dtype == "int4" else (0, 16)
    scales = list(shape)
    scales[axis] //= 16
    inputs = {
        "w": RANDOM.integers(low, high, shape).astype(dtype),
        "ids": np.array([[3, 1, 3], [0, 1, 2]]),
        "scales": drawn(*scales),
    }
    if zeros:
        inputs["zeros"] = RANDOM.integers(0, 8, scales).astype(dtype)
    attributes = {"block_size": 16, "quantize_axis": axis, "gather_axis": along}
    compare("GatherBlockQuantized", inputs, **attributes)


@pytest.mark.parametrize(("dtype", "size"), [("float8_e4m3fn", 16), ("float4_e2m1fn", 0)])
def test_rows_of_narrow_floating_point(dtype: str, size: int) -> None:
    inputs = {
        "w": drawn(11, 64).astype(dtype),
        "ids": np.array([[3, 10, 3], [0, 1, 2]]),
        "scales": drawn(11, 64 // size if size else 1),
    }
    compare("GatherBlockQuantized", inputs, block_size=size, quantize_axis=1, gather_axis=0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("depth", [96, 80, 128])
def test_products_of_weights_in_an_order_of_their_own(bits: int, zeros: bool, depth: int) -> None:
    columns, size = 5, 32
    blocks = -(-depth // size)
    inputs = {
        "x": drawn(3, depth),
        "w": RANDOM.integers(0, 256, (columns, blocks, size * bits // 8), np.uint8),
        "scales": drawn(columns * blocks),
        "zeros": RANDOM.integers(0, 256, columns * -(-blocks * bits // 8), np.uint8),
        "order": RANDOM.permutation(np.arange(depth) // size).astype(np.int32),
    }
    inputs["zeros"] = inputs["zeros"] if zeros else None
    attributes = {"K": depth, "N": columns, "bits": bits, "block_size": size}
    shifts = np.arange(0, 8, bits)
    codes = (inputs["w"][..., None] >> shifts & ((1 << bits) - 1)).reshape(columns, -1)[:, :depth]
    zero = np.full((columns, blocks), 1 << (bits - 1))
    if zeros:
        packed = inputs["zeros"].reshape(columns, -1)[..., None] >> shifts & ((1 << bits) - 1)
        zero = packed.reshape(columns, -1)[:, :blocks]
    at = inputs["order"]
    weights = (codes - zero[:, at]) * inputs["scales"].reshape(columns, blocks)[:, at]
    model = model_of("MatMulNBits", inputs, 1, attributes, "com.microsoft")
    found = InferenceSession(from_onnx(model)).run({"x": inputs["x"]})["y0"]
    want = inputs["x"] @ weights.T
    assert np.allclose(found, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())
    if bits == 4 and not zeros:  # which ONNX Runtime passes over where weights have an order
        compare("MatMulNBits", inputs, **attributes)


def test_orders_that_fill_no_blocks_are_refused() -> None:
    inputs = {
        "x": drawn(3, 64),
        "w": np.zeros((4, 2, 16), np.uint8),
        "scales": drawn(8),
        "zeros": None,
        "order": np.zeros(64, np.int32),
    }
    attributes = {"K": 64, "N": 4, "bits": 4, "block_size": 32}
    model = from_onnx(model_of("MatMulNBits", inputs, 1, attributes, "com.microsoft"))
    with pytest.raises(OnnxError, match="g_idx"):
        model.graph_for({"x": inputs["x"]})


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize(("depth", "columns", "size"), [(32, 5, 16), (7, 3, 64), (10, 13, 16)])
def test_products_of_codes_of_four_bits(
    kind: int, transposed: int, depth: int, columns: int, size: int
) -> None:
    count = depth * columns
    inputs = {
        "x": drawn(2, 3, depth if transposed else columns),
        "w": RANDOM.integers(0, 256, -(-count // 2), np.uint8),
        "scales": drawn(-(-count // size)),
    }
    options = {"K": depth, "N": columns, "block_size": size, "quant_type": kind}
    if transposed:
        compare("MatMulBnb4", inputs, **options)
        return
    # ONNX Runtime's kernel goes past the end: the other product, by the weights that it knows.
    each = {**inputs, "x": np.eye(depth, dtype=np.float32)}
    model = model_of("MatMulBnb4", each, 1, options, "com.microsoft")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (weights,) = session.run(None, {"x": each["x"]})
    model = model_of("MatMulBnb4", inputs, 1, {**options, "transB": 0}, "com.microsoft")
    found = InferenceSession(from_onnx(model)).run({"x": inputs["x"]})["y0"]
    assert np.allclose(found, inputs["x"] @ weights.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("a", "b"), [((3, 2, 4), (2, 4, 5)), ((3, 2, 6, 4), (4, 2, 6, 5))])
def test_products_of_batches_behind_rows(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    compare("FusedMatMul", {"a": drawn(*a), "b": drawn(*b)}, transBatchA=1, transBatchB=len(b) - 3)
    compare("TransposeMatMul", {"a": drawn(2, 4, 3), "b": drawn(2, 4, 5)}, transA=1, alpha=0.3)


def test_softmaxes_with_a_bias() -> None:
    """As another processor's optimiser writes them: a sum and a softmax."""
    x, bias = drawn(2, 3, 4, 5), drawn(2, 1, 1, 5)
    inputs = {"x": x, "mask": bias}
    for axis, dims in ((3, (3,)), (2, (2, 3))):
        attributes = {"axis": axis, "is_inner_broadcast": 1}
        model = model_of("BiasSoftmax", inputs, 1, attributes, "com.microsoft")
        found = InferenceSession(from_onnx(model)).run(inputs)["y0"]
        total = np.exp(x + bias)
        want = total / total.sum(axis=dims, keepdims=True)
        assert np.allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embeddings(interleaved: int) -> None:
    angles = np.arange(12)[:, None] * 0.7 ** np.arange(4)
    tables = {
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
    }
    places = np.array([[3, 4, 5], [0, 1, 2]])
    whole = {"x": drawn(2, 3, 24), "places": places, **tables}
    compare("RotaryEmbedding", whole, interleaved=interleaved)
    first = {**whole, "places": np.array([4])}
    compare("RotaryEmbedding", first, interleaved=interleaved)
    some = {"x": drawn(2, 2, 3, 12), "places": places, **tables}
    compare("RotaryEmbedding", some, interleaved=interleaved, rotary_embedding_dim=8, num_heads=2)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("layout", [0, 1])
def test_rotary_embeddings_by_three_places(layout: int, interleaved: int) -> None:
    angles = np.arange(12)[:, None] * 0.7 ** np.arange(8)
    inputs = {
        "x": drawn(2, 3, 48),
        "places": RANDOM.integers(0, 12, (3, 2, 3)),
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
    }
    options = {"mrope_section": [4, 2, 2], "mrope_layout": layout, "interleaved": interleaved}
    compare("MRotaryEmbedding", inputs, num_heads=3, **options)
    by_head = {**inputs, "x": drawn(2, 2, 3, 24)}
    compare("MRotaryEmbedding", by_head, num_heads=2, rotary_embedding_dim=16, **options)


def test_rotary_embeddings_of_gemma() -> None:
    """Which ONNX Runtime has on GPUs alone: the formula of its documentation."""
    names = ("x", "q", "q_turned", "k", "k_turned")
    inputs = dict(zip(names, (drawn(2, 3, 8), *drawn(4, 2, 5, 3, 8)), strict=True))
    model = model_of("GemmaRotaryEmbedding", inputs, 2, {}, "com.microsoft")
    found = list(InferenceSession(from_onnx(model)).run(inputs).values())
    sine, cosine = (f(inputs["x"])[:, None] for f in (np.sin, np.cos))
    for made, name in zip(found, "qk", strict=True):
        want = inputs[name] * cosine + inputs[f"{name}_turned"] * sine
        assert np.allclose(made, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_gated_norms(activation: str) -> None:
    inputs = {"x": drawn(2, 3, 24), "gamma": drawn(8), "gate": drawn(2, 3, 24)}
    compare("GatedRMSNorm", inputs, activation=activation, epsilon=1e-3)


@pytest.mark.parametrize("scale", [(), (8,), (24,), (3, 8)])
@pytest.mark.parametrize("flat", [False, True])
def test_norms_of_branches(flat: bool, scale: tuple[int, ...]) -> None:
    x = drawn(2, 5, 24) if flat else drawn(2, 5, 3, 8)
    inputs = {"x": x, "gamma": drawn(*scale) if scale else None}
    compare("BranchwiseRMSNorm", inputs, num_branches=3 if flat else 0)


def test_scaled_activations() -> None:
    compare("ScaledSiLU", {"x": drawn(3, 4)}, alpha=1.7)
    compare("ScaledSiLU", {"x": drawn(3, 4), "scale": np.array(0.6, np.float32)}, alpha=1.7)


GROUPED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, ()),
    "packed": ({}, ("packed",)),
    "window": ({"local_window_size": 3}, ()),
    "no rotation": ({"do_rotary": 0}, ("places",)),
    "interleaved": ({"rotary_interleaved": 1, "scale": 0.3}, ()),
    "places": ({}, ("places",)),
    "bias of all samples": ({}, ("bias",)),
    "bias by sample": ({"local_window_size": 2}, ("biases", "packed")),
    "sinks": ({}, ("sinks",)),
    "sinks in a window": ({"local_window_size": 3}, ("sinks", "bias")),
    "smooth": ({"smooth_softmax": 1}, ()),
    "cap": ({"softcap": 0.7}, ()),
    "cap of all": ({"softcap": 0.7, "local_window_size": 3}, ("sinks", "biases")),
    "smooth cap": ({"softcap": 0.7, "smooth_softmax": 1, "scale": 0.5}, ()),
    "later keys": ({"causal": 0}, ("sinks",)),
}


def grouped(
    past: int, room: int, more: tuple[str, ...], **options: Any
) -> tuple[onnx.ModelProto, dict[str, Array], list[int], Array]:
    """Return a model, its inputs, each sample's number of keys, and which queries count."""
    heads, kv, width, samples = 4, 2, 16, 2
    count, used = (4, [4, 3]) if not past else (1, [past + 1, past - 1])
    angles = np.arange(24)[:, None] * 0.7 ** np.arange(8)
    q, k, v = (drawn(samples, count, h * width) for h in (heads, kv, kv))
    packed = "packed" in more
    biases = {"bias": 1, "biases": samples}
    of = next((samples for name, samples in biases.items() if name in more), 0)
    inputs = {
        "q": np.concatenate([q, k, v], axis=2) if packed else q,
        "k": None if packed else k,
        "v": None if packed else v,
        "past_k": drawn(samples, kv, past + room, width),
        "past_v": drawn(samples, kv, past + room, width),
        "last": np.array(used, np.int32) - 1,
        "total": np.array(max(used), np.int32),
        "cosines": np.cos(angles).astype(np.float32),
        "sines": np.sin(angles).astype(np.float32),
        "places": np.array([[3], [5]]) + np.arange(count) if "places" in more else None,
        "mask": drawn(of, heads, count, max(used)) if of else None,
        "sinks": drawn(heads) if "sinks" in more else None,
    }
    rows = np.zeros((samples, count), bool)
    for sample, length in enumerate(used):
        rows[sample, : length if not past else 1] = True
    attributes = {"num_heads": heads, "kv_num_heads": kv, "do_rotary": 1, **options}
    model = model_of("GroupQueryAttention", inputs, 3, attributes, "com.microsoft")
    given = {n: a for n, a in inputs.items() if a is not None and n not in CONSTANT}
    return model, given, used, rows


@pytest.mark.parametrize(("past", "room"), [(0, 0), (5, 0), (5, 3)])
@pytest.mark.parametrize("case", GROUPED)
def test_grouped_queries(case: str, past: int, room: int) -> None:
    options, more = GROUPED[case]
    model, given, used, rows = grouped(past, room, more, **options)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, given)
    found = list(InferenceSession(from_onnx(model)).run(given).values())
    assert np.allclose(want[0][rows], found[0][rows], rtol=1e-3, atol=2e-5)
    for a, b in zip(want[1:], found[1:], strict=True):
        assert a.shape == b.shape
        for sample, length in enumerate(used):
            assert np.allclose(a[sample, :, :length], b[sample, :, :length], atol=1e-5)


def test_grouped_queries_and_keys_over_their_root_mean_square() -> None:
    """Which ONNX Runtime has on other devices alone: as norms of its own do it before."""
    options: dict[str, Any] = {"qk_norm_epsilon": 1e-2, "k_norm_epsilon": 1e-3}
    model, given, _, rows = grouped(0, 0, (), **options)
    (node,) = model.graph.node
    scales = drawn(2, 16)
    node.input.extend(["", "", "scale_q", "scale_k"])
    model.graph.initializer.extend(
        numpy_helper.from_array(each, name)
        for each, name in zip(scales, ("scale_q", "scale_k"), strict=True)
    )
    found = list(InferenceSession(from_onnx(model)).run(given).values())
    plain, *_ = grouped(0, 0, ())
    normed = dict(given)
    for name, scale, least in zip("qk", scales, (1e-2, 1e-3), strict=True):
        heads = given[name].reshape(*given[name].shape[:2], -1, 16)
        size = np.sqrt((heads * heads).mean(axis=-1, keepdims=True) + least)
        normed[name] = (heads / size * scale).reshape(given[name].shape)
    session = ort.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
    want = session.run(None, normed)
    assert np.allclose(want[0][rows], found[0][rows], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("position", "told"), [(12, "input 12"), (13, "input 13"), (16, "input 16")]
)
def test_what_grouped_queries_would_pass_over_is_refused(position: int, told: str) -> None:
    model, given, *_ = grouped(0, 0, ())
    (node,) = model.graph.node
    node.input.extend([""] * (position - len(node.input)) + ["last"])
    with pytest.raises(OnnxError, match=f"{told} is not supported"):
        InferenceSession(from_onnx(model)).run(given)


@pytest.mark.parametrize(
    "attribute", [{"qk_output": 1}, {"k_quant_type": "PER_TENSOR"}, {"kv_cache_bit_width": 8}]
)
def test_caches_and_results_that_no_grouped_queries_have_here(attribute: dict[str, Any]) -> None:
    model, given, *_ = grouped(0, 0, (), **attribute)
    with pytest.raises(OnnxError, match=f"{next(iter(attribute))}.*is not supported"):
        InferenceSession(from_onnx(model)).run(given)
