"""Attention without padding, which ONNX Runtime has on GPUs alone, against its own with padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from test_attention_microsoft import file_of

import soapstone
from soapstone.ir.tensor import Array

theirs = pytest.importorskip("onnxruntime", reason="pip install soapstone[test]")
LENGTHS, LENGTH, HEADS, WIDTH = np.array([1, 2, 4], np.int32), 4, 2, 8
SAMPLES, HIDDEN = len(LENGTHS), HEADS * WIDTH
THERE = np.arange(LENGTH) < LENGTHS[:, None]
OFFSETS = np.concatenate([np.flatnonzero(THERE), np.flatnonzero(~THERE)]).astype(np.int32)
OFFSETS = OFFSETS.reshape(SAMPLES, LENGTH)
ENDS = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
OF_REALS = {"y": TensorProto.FLOAT}


def drawn(*shape: int) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def ours(kind: str, inputs: dict[str, Array | None], **options: Any) -> Array:
    file, feeds = file_of(kind, inputs, OF_REALS, **options)
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        (made,) = session.run(feeds).values()
    return np.asarray(made)


def padded(kind: str, inputs: dict[str, Array | None], **options: Any) -> Array:
    """Return ONNX Runtime's results of tokens that are no padding."""
    file, feeds = file_of(kind, inputs, OF_REALS, num_heads=HEADS, **options)
    session = theirs.InferenceSession(file, providers=["CPUExecutionProvider"])
    (made,) = session.run(None, feeds)
    return np.asarray(made[THERE])


@pytest.mark.parametrize("scores", [0, 1, SAMPLES])
@pytest.mark.parametrize("options", [{}, {"scale": 0.2}], ids=str)
def test_attention_with_its_own_projection(options: dict[str, float], scores: int) -> None:
    x, w, bias = drawn(SAMPLES, LENGTH, 5), drawn(5, 3 * HIDDEN), drawn(3 * HIDDEN)
    added = drawn(scores, HEADS, LENGTH, LENGTH) if scores else None
    mask = THERE.astype(np.int32)
    inputs = {"x": x, "W": w, "B": bias, "mask": mask, "past": None, "scores": added}
    wanted = padded("Attention", inputs, **options)
    inputs = {"x": x[THERE], "W": w, "B": bias, "at": OFFSETS, "ends": ENDS, "scores": added}
    found = ours("PackedAttention", inputs, num_heads=HEADS, **options)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_of_what_is_projected(joined: bool, biased: bool) -> None:
    q, k, v = drawn(3, SAMPLES, LENGTH, HIDDEN)
    bias = drawn(3 * HIDDEN) if biased else None
    mask = THERE.astype(np.int32)
    wanted = padded("MultiHeadAttention", {"q": q, "k": k, "v": v, "B": bias, "mask": mask})
    parts = [each[THERE] for each in (q, k, v)]
    if joined:
        heads = [each.reshape(-1, HEADS, WIDTH) for each in parts]
        parts = [np.stack(heads, axis=2), None, None]
    inputs = {**dict(zip("qkv", parts)), "B": bias, "at": OFFSETS, "ends": ENDS}
    found = ours("PackedMultiHeadAttention", inputs, num_heads=HEADS)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_padding_is_left_out_and_put_back() -> None:
    x = drawn(SAMPLES, LENGTH, 5)
    outputs = OF_REALS | dict.fromkeys(("at", "ends", "most"), TensorProto.INT32)
    file, feeds = file_of("RemovePadding", {"x": x, "counts": LENGTHS}, outputs)
    with soapstone.InferenceSession(soapstone.from_onnx(file)) as session:
        y, *told = session.run(feeds).values()
    np.testing.assert_array_equal(y, x[THERE])
    for found, wanted in zip(told, (OFFSETS, ENDS, LENGTHS.max(keepdims=True)), strict=True):
        np.testing.assert_array_equal(found, wanted)
    again = ours("RestorePadding", {"x": y, "at": OFFSETS})
    np.testing.assert_array_equal(again, np.where(THERE[..., None], x, 0))
