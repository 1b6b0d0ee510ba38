"""Mixtures of experts of com.microsoft against ONNX Runtime, or NumPy where it has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from test_attention_microsoft import file_of

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
EXPERTS, WIDTH, INNER = 6, 32, 64
SWIGLU = {"activation_type": "swiglu", "activation_alpha": 1.7, "activation_beta": 1.0}


def drawn(*shape: int) -> Array:
    random = np.random.default_rng(sum(shape))
    return (random.standard_normal(shape) / 3).astype(np.float32)


def ours(file: bytes, feeds: dict[str, Array]) -> Array:
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        (made,) = session.run(feeds).values()
    return np.asarray(made)


def compare(kind: str, inputs: dict[str, Array | None], near: float = 1e-5, **options: Any) -> None:
    file, feeds = file_of(kind, inputs, {"y": TensorProto.FLOAT}, **options)
    session = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, feeds)
    np.testing.assert_allclose(ours(file, feeds), wanted, rtol=near, atol=near * abs(wanted).max())


def of_reals(tokens: int, rows: int, bias: bool = True) -> dict[str, Array | None]:
    return {
        "x": drawn(1, tokens, WIDTH) if bias else drawn(tokens, WIDTH),
        "router": 6 * drawn(tokens, EXPERTS),
        "W": drawn(EXPERTS, rows, WIDTH),
        "B": drawn(EXPERTS, rows) if bias else None,
        "V": drawn(EXPERTS, WIDTH, INNER),
        "C": drawn(EXPERTS, WIDTH) if bias else None,
    }


@pytest.mark.parametrize("tokens", [1, 5])  # of one the weights of chosen experts are taken
@pytest.mark.parametrize("kind", ["relu", "gelu", "silu", "identity"])
def test_experts_of_one_activation(kind: str, tokens: int) -> None:
    compare("MoE", of_reals(tokens, INNER), k=2, activation_type=kind)


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("more", [{}, {"swiglu_limit": 0.3}, {"normalize_routing_weights": 1}])
def test_experts_with_gates(more: dict[str, Any], tokens: int) -> None:
    inputs = of_reals(tokens, 2 * INNER, bias=not more)
    compare("MoE", inputs, k=3, swiglu_fusion=1, **SWIGLU, **more)


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


@pytest.mark.parametrize(
    ("kind", "fusion"), [("silu", 0), ("swiglu", 0), ("swiglu", 2), ("geglu", 2)]
)
def test_experts_with_gates_that_no_processor_of_theirs_has(kind: str, fusion: int) -> None:
    """Gates by weights of their own (0), or in the second half of a row (2)."""
    inputs = of_reals(4, INNER, bias=False)
    beside = drawn(EXPERTS, INNER, WIDTH)[::-1].copy()
    x, router, w, v = (inputs[name].astype(np.float64) for name in ("x", "router", "W", "V"))
    share = np.exp(router) / np.exp(router).sum(axis=1, keepdims=True)
    wanted = np.zeros((4, WIDTH))
    for token in range(4):
        for expert in np.argsort(-router[token])[:2]:
            y, gate = w[expert] @ x[token], beside[expert] @ x[token]
            if kind == "silu":
                y = y * sigmoid(y) * gate
            elif kind == "swiglu":
                y = y * sigmoid(1.7 * y) * (gate + 1)
            else:
                y = y * 0.5 * (1 + np.tanh((2 / np.pi) ** 0.5 * (y + 0.044715 * y**3))) * gate
            wanted[token] += share[token, expert] * (v[expert] @ y)
    if fusion:
        inputs["W"] = np.concatenate([inputs["W"], beside], axis=1)
    else:
        inputs["G"] = beside
    options = SWIGLU if kind == "swiglu" else {"activation_type": kind}
    file, feeds = file_of(
        "MoE", inputs, {"y": TensorProto.FLOAT}, k=2, swiglu_fusion=fusion, **options
    )
    np.testing.assert_allclose(ours(file, feeds), wanted, rtol=1e-4, atol=1e-5)


def of_bits(bits: int, size: int, zeros: bool, tokens: int) -> dict[str, Array | None]:
    random = np.random.default_rng(bits + size)

    def packed(*shape: int) -> Array:
        return random.integers(0, 256, shape).astype(np.uint8)

    def scales(rows: int, depth: int) -> Array:
        shape = (EXPERTS, rows, *((depth // size,) if size else ()))
        return random.uniform(0.01, 0.05, shape).astype(np.float32) / (1 << bits) * 8

    def points(rows: int, depth: int) -> Array | None:
        if not zeros:
            return None
        last = (rows, -(-depth // size * bits // 8)) if size else (-(-rows * bits // 8),)
        return packed(EXPERTS, *last)

    return {
        "x": drawn(tokens, WIDTH),
        "router": 6 * drawn(tokens, EXPERTS),
        "W": packed(EXPERTS, 2 * INNER, WIDTH * bits // 8),
        "S": scales(2 * INNER, WIDTH),
        "B": drawn(EXPERTS, 2 * INNER),
        "V": packed(EXPERTS, WIDTH, INNER * bits // 8),
        "T": scales(WIDTH, INNER),
        "C": drawn(EXPERTS, WIDTH),
        **dict.fromkeys(("W3", "S3", "B3")),
        "Z": points(2 * INNER, WIDTH),
        "Y": points(WIDTH, INNER),
    }


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(4, 0), (4, 16), (4, 32), (8, 0), (8, 32), (2, 16)])
def test_experts_of_few_bits(bits: int, size: int, zeros: bool, tokens: int) -> None:
    """Experts of 8 bits in blocks round x to bytes there, whatever the accuracy."""
    options = {"k": 2, "expert_weight_bits": bits, "swiglu_fusion": 1, **SWIGLU}
    if size:
        options["block_size"] = size
    near = 0.02 if (bits, bool(size)) == (8, True) else 1e-5
    compare("QMoE", of_bits(bits, size, zeros, tokens), near, **options)


@pytest.mark.parametrize("more", [{}, {"normalize_routing_weights": 1}])
def test_shares_of_experts_apart_from_their_choice(more: dict[str, int]) -> None:
    inputs = of_bits(4, 32, False, 5) | {"Q": None, "shares": abs(drawn(5, EXPERTS))}
    options = {"k": 2, "block_size": 32, "swiglu_fusion": 1, **SWIGLU, **more}
    compare("QMoE", inputs, **options)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"quant_type": "fp8"}, "quant_type"),
        ({"use_sparse_mixer": 1}, "use_sparse_mixer"),
        ({"weights_prepacked": 1}, "weights_prepacked"),
        ({"expert_weight_bits": 3}, "3 bits"),
    ],
)
def test_experts_that_are_refused(option: dict[str, Any], told: str) -> None:
    inputs = of_bits(4, 32, False, 2)
    options = {"k": 2, "block_size": 32, "swiglu_fusion": 1, **SWIGLU, **option}
    file, feeds = file_of("QMoE", inputs, {"y": TensorProto.FLOAT}, **options)
    with pytest.raises(OnnxError, match=told):
        ours(file, feeds)
