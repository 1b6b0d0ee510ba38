"""Operators of com.microsoft that ONNX took over later, or has none of, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto
from test_attention_microsoft import compare, file_of

import soapstone
from soapstone.frontend.onnx import OnnxError
from soapstone.ir.tensor import Array

REAL, WHOLE = TensorProto.FLOAT, TensorProto.INT64
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((2, 3, 4, 4)).astype(np.float32)


def one(kind: str, inputs: dict[str, Array | None], *types: int, **attributes: Any) -> None:
    compare(*file_of(kind, inputs, {f"y{n}": t for n, t in enumerate(types)}, **attributes))


@pytest.mark.parametrize("k", [None, -2, 0, 1, 9])
@pytest.mark.parametrize("upper", [0, 1])
def test_triangles(k: int | None, upper: int) -> None:
    one("Trilu", {"x": X, "K": None if k is None else np.array(k)}, REAL, upper=upper)


def test_places() -> None:
    grid = RANDOM.uniform(-1.2, 1.2, (2, 5, 6, 2)).astype(np.float32)
    for padding in ("zeros", "border", "reflection"):
        one("GridSample", {"x": X, "grid": grid}, REAL, mode="bilinear", padding_mode=padding)
    one("GatherND", {"x": X, "ids": np.array([[1, 2], [0, -1]])}, REAL)
    one("ExpandDims", {"x": X, "AXIS": np.array(-2, np.int32)}, REAL)
    one("Pad", {"x": X, "P": np.array([0, 1, 0, 2, 0, 0, 1, 0]), "V": np.float32([3])}, REAL)


def test_what_runs_between_graphs() -> None:
    one("Inverse", {"x": X + 3 * np.eye(4, dtype=np.float32)}, REAL)
    one("Unique", {"x": np.float32([2, 1, 1, 3, 4, 3])}, REAL, WHOLE, WHOLE)


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_tokens_that_would_repeat_are_ruled_out(size: int) -> None:
    ids = np.array([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4], [0, 1, 2, 3, 4]])
    scores = RANDOM.standard_normal((3, 6)).astype(np.float32)
    one("NGramRepeatBlock", {"ids": ids, "scores": scores}, REAL, ngram_size=size)


def test_a_matrix_without_an_inverse_is_named() -> None:
    file, feeds = file_of("Inverse", {"x": np.zeros((2, 2), np.float32)}, {"y": REAL})
    with pytest.raises(OnnxError, match=r"\(Inverse\): a matrix that has no inverse"):
        soapstone.InferenceSession(file).run(feeds)
