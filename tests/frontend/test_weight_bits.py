"""Sessions that round weights of products to a few bits, against the rounding done by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone import GraphError, Model, to_onnx
from soapstone.cli.main import app
from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.products import nbits

RANDOM = np.random.default_rng(0)


def rounded(w: Array, bits: int, block: int) -> Array:
    """Return weights (k, n) as the nearest multiples of what each block of a column has."""
    lowest = -(1 << (bits - 1))
    blocks = np.float64(w).T.reshape(w.shape[1], -1, block)
    high, low = blocks.max(2, keepdims=True), blocks.min(2, keepdims=True)
    scales = np.float32(np.where(high > -low, high, low) / lowest)
    scales[scales == 0] = 1
    whole = np.clip(np.rint(blocks / scales), lowest, -lowest - 1)
    return np.asarray((whole * scales).reshape(w.T.shape).T)


def layers(model: Model, sizes: tuple[int, ...]) -> None:
    x = model.input("x", (1, sizes[0]))
    for number, size in enumerate(sizes[1:]):
        x = model.dense(x, size, name=f"layer_{number}", activation="relu" if number == 0 else None)
    model.output(x)


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_weights_are_the_nearest_of_few_bits(precision: str) -> None:
    model = Model("rows", seed=3)
    layers(model, (96, 48, 37, 5))
    bits, x = int(precision[3:]), RANDOM.standard_normal((4, 96)).astype(np.float32)
    with model.inference(precision=precision) as session:
        (found,) = session.run(x).values()
        used = session.variants({"x": x})
    weights, y = model.weights(), np.float64(x)
    for number, block in enumerate((32, 16, 0)):
        w, b = weights[f"layer_{number}.weight"], weights[f"layer_{number}.bias"]
        y = y @ (rounded(w, bits, block) if block else w) + b
        y = y if number else np.maximum(y, 0)
    np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-5 * np.abs(y).max())
    assert {"dots", "panels"} & set(used.values())


def test_blocks_of_zeros_and_numbers_as_far_on_both_sides() -> None:
    model = Model("rows")
    model.output(model.dense(model.input("x", (1, 64)), 3, bias=False, name="layer_0"))
    w = np.zeros((64, 3), np.float32)
    w[:32, 1] = np.linspace(-1, 1, 32)
    model.set_weights({"layer_0.weight": w})
    x = np.eye(64, dtype=np.float32)
    with model.inference(precision="int4") as session:
        (found,) = session.run(x).values()
    np.testing.assert_allclose(found, rounded(w, 4, 32), atol=1e-6)


def test_decoders_of_layers_and_of_files_are_continued(tmp_path: Path) -> None:
    model = Model("letters", seed=1)
    x = model.learned_positions(model.embedding(model.input("ids", (16, 32), "int32"), 61, 32))
    x = x + model.multi_head_attention(x, x, x, heads=4, causal=True)
    model.output(model.dense(model.dense(x, 64, activation="gelu"), 61))
    path = tmp_path / "letters.onnx"
    to_onnx(model, path, dims={"batch": 1})
    with model.inference(precision="int4", threads=1) as session:
        tokens = session.generate([3, 4, 5], 10)
        text = [3, 4, 5]
        for _ in range(10):
            (logits,) = session.run(np.array([text + [0] * (32 - len(text))], np.int32)).values()
            text.append(int(logits[0, len(text) - 1].argmax()))
    assert [3, 4, 5, *tokens] == text
    shown = CliRunner().invoke(
        app, ["generate", str(path), "3", "4", "5", "-n", "10", "--precision", "int4"]
    )
    assert shown.exit_code == 0 and list(map(int, shown.output.split())) == tokens


def test_another_shape_finds_what_was_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    real = nbits._packed

    def counted(kind: Any, together: int, w: Array, scales: Array, zeros: Any) -> Array:
        made.append(w.shape)
        return real(kind, together, w, scales, zeros)

    monkeypatch.setattr(nbits, "_packed", counted)
    model = Model("rows", seed=1)
    y = model.dense(model.input("x", (1, 128)), 256)
    model.output(model.dense(y, 256))
    with model.inference(precision="int4", tune=False) as session:
        for rows in (1, 3, 9):
            x = RANDOM.standard_normal((rows, 128)).astype(np.float32)
            (found,) = session.run(x).values()
            (again,) = session.run(x[-1:]).values()
            np.testing.assert_allclose(found[-1:], again, rtol=1e-5, atol=1e-5)
    assert sorted(made) == [(256, 4, 16), (256, 8, 16)]


def test_what_cannot_be_is_refused() -> None:
    model = Model("rows")
    layers(model, (64, 3))
    with pytest.raises(GraphError, match="'int4' found, but weights are rounded for CPUs alone"):
        model.inference(precision="int4", plain=True)
    with pytest.raises(GraphError, match="'int8' found, but weights are rounded for CPUs alone"):
        model.inference(precision="int8", fast_memory=1 << 20)
