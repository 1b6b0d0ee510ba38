"""Linear attention of com.microsoft, its gates and convolutions, against ONNX Runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from test_attention_microsoft import compare, file_of

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

RULES = ("linear", "gated", "delta", "gated_delta")
SAMPLES, KEYS, VALUES = 2, 8, 12  # KEYS, VALUES: elements of one
REAL = TensorProto.FLOAT


def drawn(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def unit(*shape: int) -> Array:
    x = drawn(*shape)
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize(("queries", "heads"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("kind", RULES)
def test_linear_attention(kind: str, queries: int, heads: int, count: int) -> None:
    for by_key, past in itertools.product((False, True), repeat=2):
        inputs: dict[str, Array | None] = {
            "q": drawn(SAMPLES, count, queries * KEYS),
            "k": unit(SAMPLES, count, heads, KEYS).reshape(SAMPLES, count, heads * KEYS),
            "v": drawn(SAMPLES, count, heads * VALUES),
            "past": drawn(SAMPLES, heads, KEYS, VALUES) if past else None,
            "decay": -np.abs(drawn(SAMPLES, count, heads * (KEYS if by_key else 1))),
            "rate": np.abs(drawn(SAMPLES, count, heads if past else 1)) / 4,
        }
        if "gated" not in kind:
            inputs["decay"] = None
        if "delta" not in kind:
            inputs["rate"] = None
        attributes: dict[str, Any] = {"q_num_heads": queries, "kv_num_heads": heads}
        attributes |= {"update_rule": kind, "scale": 0.5 if by_key else 0.0}
        compare(*file_of("LinearAttention", inputs, {"y": REAL, "last": REAL}, **attributes))


@pytest.mark.parametrize("gate", ["none", "softplus", "sigmoid"])
@pytest.mark.parametrize("form", ["rank 4", "rank 3", "one input"])
@pytest.mark.parametrize("kind", RULES)
def test_gated_delta_networks(kind: str, form: str, gate: str) -> None:
    few, heads = 2, 4
    tokens = (SAMPLES, 5) if form == "rank 4" else (SAMPLES * 5,)
    q, k, v = drawn(*tokens, few, KEYS), unit(*tokens, few, KEYS), drawn(*tokens, heads, VALUES)
    whole = np.concatenate([part.reshape(*tokens, -1) for part in (q, k, v)], axis=-1)
    apart = form != "one input"
    gated, delta = "gated" in kind, "delta" in kind
    bent = gated and gate != "none"
    inputs: dict[str, Array | None] = {
        "q": q if apart else whole,
        "k": k if apart else None,
        "v": v if apart else None,
        "ends": None,
        "decay": -np.abs(drawn(*tokens, heads)) if gated else None,
        "rate": drawn(*tokens, heads) if delta else None,
        "state": drawn(SAMPLES, heads, VALUES, KEYS),
        "SLOPE": drawn(heads) if bent else None,
        "SHIFT": drawn(heads) if bent else None,
    }
    attributes: dict[str, Any] = {"update_rule": kind, "qk_l2_norm": 1}
    if bent:
        attributes["gate_activation"] = gate
    if delta:
        attributes["beta_activation"] = "sigmoid"
    compare(*file_of("GatedDeltaNet", inputs, {"y": REAL, "last": REAL}, **attributes))


@pytest.mark.parametrize("count", [1, 9])
@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_causal_convolutions_keep_what_the_next_token_needs(
    last: bool, dilation: int, count: int
) -> None:
    channels, size = 6, 4
    room = (size - 1) * dilation

    def part(tokens: int) -> Array:
        return drawn(*((2, tokens, channels) if last else (2, channels, tokens)))

    for past, bias, bent in itertools.product((False, True), repeat=3):
        inputs: dict[str, Array | None] = {
            "x": part(count),
            "W": drawn(channels, 1, size),
            "B": drawn(channels) if bias else None,
            "past": part(room) if past else None,
        }
        attributes: dict[str, Any] = {"dilation": dilation, "channels_last": int(last)}
        attributes["activation"] = "silu" if bent else "none"
        compare(*file_of("CausalConvWithState", inputs, {"y": REAL, "held": REAL}, **attributes))


def test_gates() -> None:
    a, b, shift, slope = drawn(2, 3, 4), drawn(2, 3, 4) + 1, drawn(4), -np.abs(drawn(4))
    inputs: dict[str, Array | None] = {"a": a, "SHIFT": shift, "SLOPE": slope, "b": b}
    compare(*file_of("LinearAttentionGate", inputs, {"decay": REAL, "rate": REAL}))
    inputs["b"] = None
    compare(*file_of("LinearAttentionGate", inputs, {"decay": REAL}))
    compare(*file_of("GatedAdd", {"x": a, "y": b, "gate": drawn(2, 3, 1)}, {"z": REAL}))


def test_what_a_rule_needs_is_named() -> None:
    inputs: dict[str, Array | None] = {which: drawn(1, 2, 8) for which in "qkv"}
    file, feeds = file_of(
        "LinearAttention", inputs, {"y": REAL, "last": REAL}, q_num_heads=1, kv_num_heads=1
    )
    with pytest.raises(OnnxError, match="what 'gated_delta' has needed"):
        soapstone.InferenceSession(file).run(feeds)
