"""Connectionist temporal classification: PyTorch's numbers, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from soapstone import SGD, GraphError, Model
from soapstone.errors import DataError
from soapstone.frontend.training.trainer import NonFiniteLoss
from soapstone.ir.tensor import Array
from soapstone.losses import CTC

N, T, C = 5, 40, 30
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((N, T, C)).astype(np.float32) * 3
LENGTHS = np.array([40, 20, 33, 9, 40])
LABELS = np.full((N, 18), -1)
for _row, _count in enumerate((18, 0, 9, 8, 1)):
    LABELS[_row, :_count] = RANDOM.integers(0, C - 1, _count)
LABELS[0, 3:6] = 7  # a blank is needed between equal labels


def scaled(loss: CTC, **settings: Any) -> Model:
    model = Model("m")
    x = model.input("x", (N, T, C), varying=True)
    model.input("lengths", (N,), "int32")
    model.output(model.mul(x, model.parameter("scale", (C,)), name="y"))
    model.compile(SGD(0.01), loss=loss, **settings)
    model.set_weights({"scale": np.ones(C, np.float32)})
    return model


def of_torch(labels: Array, zero: bool, weights: Array) -> tuple[float, Array]:
    scale = torch.ones(C, requires_grad=True)
    logs = torch.log_softmax(torch.from_numpy(X) * scale, -1).transpose(0, 1)
    each = torch.nn.functional.ctc_loss(
        logs,
        torch.from_numpy(np.maximum(labels, 0)),
        torch.from_numpy(LENGTHS),
        torch.from_numpy((labels >= 0).sum(1)),
        blank=C - 1,
        reduction="none",
        zero_infinity=zero,
    )
    loss = (each * torch.from_numpy(weights)).sum() / weights.sum()
    loss.backward()
    return float(loss.detach()), scale.grad.numpy()


@pytest.mark.parametrize("zero", [False, True])
def test_torch_has_the_same_loss_and_gradients(zero: bool) -> None:
    labels, weights = LABELS.copy(), np.array([1, 2, 1, 0.5, 1], np.float32)
    if zero:
        labels[3] = 5  # more than its steps
    loss = CTC(blank=C - 1, lengths="lengths", zero_infinity=zero)
    model = scaled(loss, weighted=True)
    given = {"x": X, "lengths": LENGTHS}
    wanted, slopes = of_torch(labels, zero, weights)
    found = model.evaluate(given, labels, sample_weights=weights)["loss"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    made = model.gradients(given, labels, sample_weights=weights)["scale"]
    np.testing.assert_allclose(made, slopes, rtol=2e-4, atol=1e-4)
    model.close()


def test_labels_that_do_not_fit() -> None:
    model = scaled(CTC(blank=C - 1, lengths="lengths"))
    given = {"x": X, "lengths": LENGTHS}
    with pytest.raises(NonFiniteLoss):
        model.train_on_batch(given, np.full((N, T), 5))
    with pytest.raises(DataError, match="more labels than the 10 steps at row 0"):
        model.evaluate({"x": X[:, :10], "lengths": LENGTHS}, LABELS)
    with pytest.raises(DataError, match="29 at row 0, which is the blank of CTC"):
        model.evaluate(given, np.full((N, 2), C - 1))
    few = model.evaluate({"x": X[:, :20], "lengths": LENGTHS}, LABELS[:, :1])  # padded, or cut
    wide = model.evaluate({"x": X, "lengths": np.minimum(LENGTHS, 20)}, LABELS[:, :1])
    np.testing.assert_allclose(few["loss"], wide["loss"], rtol=1e-5)
    model.close()
    with pytest.raises(GraphError, match="CTC: lengths: the model has no input 'steps'"):
        scaled(CTC(lengths="steps"))
