"""Layers that are a few operators: activations and pools, against torch's, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import soapstone
from soapstone import Model, ShapeError

X = np.random.default_rng(0).standard_normal((4, 6, 4, 8)).astype(np.float32) * 4
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "relu6": (lambda m, x: m.relu6(x), functional.relu6),
    "hard_tanh": (lambda m, x: m.hard_tanh(x, -2), lambda x: functional.hardtanh(x, -2.0, 1.0)),
    "log_sigmoid": (lambda m, x: m.log_sigmoid(x), functional.logsigmoid),
    "tanh_shrink": (lambda m, x: m.tanh_shrink(x), functional.tanhshrink),
    "soft_shrink": (lambda m, x: m.soft_shrink(x, 1), lambda x: functional.softshrink(x, 1.0)),
    "softmin": (lambda m, x: m.softmin(x, 1), lambda x: functional.softmin(x, 1)),
    "glu": (lambda m, x: m.glu(x, 1), lambda x: functional.glu(x, 1)),
    "avg": (
        lambda m, x: m.adaptive_avg_pool(x, 2),
        lambda x: functional.adaptive_avg_pool2d(x, 2),
    ),
    "max": (
        lambda m, x: m.adaptive_max_pool(x, (1, 4)),
        lambda x: functional.adaptive_max_pool2d(x, (1, 4)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_torch(name: str, tmp_path: Path) -> None:
    layer, theirs = CASES[name]
    model = Model("m", seed=1)
    scale = model.parameter("scale", (8,), soapstone.ir.graph.Initial("constant", 0.75))
    model.output(layer(model, model.input("x", X.shape) * scale))
    w = torch.full((8,), 0.75, requires_grad=True)
    wanted = theirs(torch.tensor(X) * w)
    np.testing.assert_allclose(model.predict(X), wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    labels = np.zeros(wanted.shape, np.float32)
    with model:
        model.compile("sgd", loss="mse", cpus=1)
        (wanted**2).mean().backward()
        slopes = model.gradients(X, labels)["scale"]
        np.testing.assert_allclose(slopes, w.grad.numpy(), rtol=1e-3, atol=1e-5)
        model.save(tmp_path / "m.npz")
    again = soapstone.load(tmp_path / "m.npz")
    np.testing.assert_allclose(again.predict(X), wanted.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_halved_or_cut() -> None:
    model = Model("m")
    x = model.input("x", (4, 5, 6))
    with pytest.raises(ShapeError, match=r"glu: axis 1 of float32\[4, 5, 6\] found, an even ext"):
        model.glu(x, 1)
    with pytest.raises(
        ShapeError, match=r"adaptive_avg_pool: size \(4,\) found, divisors of \(6,\)"
    ):
        model.adaptive_avg_pool(x, 4)
