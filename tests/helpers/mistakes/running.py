"""Evaluating, predicting, serving, and steps of one's own.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

from helpers.mistakes.models import X, Y, masked, net

from soapstone import Model
from soapstone.data import Buckets, Samples


def idle() -> Model:
    model = Model("idle")
    model.output(model.relu(model.input("x", (8, 6))))
    model.compile(loss="mse")
    return model


RUNNING: list[tuple[Any, ...]] = [
    (
        lambda: idle().gradients(X, X),
        "gradients: model 'idle' has nothing to train: the model has no parameters",
    ),
    (
        lambda: net()(X),
        "model 'net' is not called: model.predict(x) runs it on arrays, and a function of tensors",
    ),
    (
        lambda: Model.predict(X),
        "predict: ndarray of shape (20, 6) found in place of a model; it is called of one that was",
    ),
    (lambda: Model.evaluate(), "evaluate: nothing found in place of a model"),
    (
        lambda: net().predict(X[:, :2]),
        "predict: input 'x': samples of shape (2,) found, (6,) needed",
    ),
    (lambda: net().predict(X[:0]), "predict: 0 samples found, 1 or more needed"),
    (lambda: net().predict(X[0]), "predict: input 'x': samples of shape () found, (6,) needed"),
    (
        lambda: net(compiled=False).predict(X[:, :2]),
        "model 'net': input 'x': float32[8, 2] found, x: float32[batch, 6] needed",
    ),
    (
        lambda: net().predict({"image": X}),
        "input 'image' is unknown, 'x' is missing; model 'net' takes 'x'",
    ),
    (lambda: net().evaluate(X), "evaluate: labels are missing; y, or files with y, needed"),
    (
        lambda: net().evaluate(X, Y + 1),
        "evaluate: labels: 4 at row 3; layer 'o' has 4 classes (0-3)",
    ),
    (
        lambda: net().inference().run({"image": X}),
        "model 'net': unknown input 'image'; inputs are x: float32[batch, 6]",
    ),
    (
        lambda: net().inference().run({"x": masked(X)}),
        "model 'net': input 'x': 20 masked elements found; an array without needed (filled)",
    ),
    (lambda: net().predict(masked(X)), "predict: x: 20 masked elements found"),
    (
        lambda: net().inference().run({"x": X.astype(str)}),
        "model 'net': input 'x': str1024[20, 6] found, x: float32[batch, 6]",
    ),
    (
        lambda: net().train_on_batch(X[:0], Y[:0]),
        "train_on_batch: 0 samples found, 1 or more needed",
    ),
    (
        lambda: net().train_on_batch([(X[:8], Y[:8]), (X[8:], Y[8:])]),
        "train_on_batch: several batches found, one needed",
    ),
    (lambda: net().gradients(lambda: iter(())), "gradients: no batch found, one needed"),
    (lambda: net().train_on_batch(None, Y), "train_on_batch: x: None found, an array with one row"),
    (lambda: net().gradients(iter([X])), "gradients: labels are missing; y needed"),
    (
        lambda: net(compiled=False).predict(Buckets([[1], [2, 3]])),
        "predict: buckets found, whose batches have an order of their own;",
    ),
    (
        lambda: net().predict(Samples((X, Y), balance=Y)),
        "predict: samples with a balance found, whose order is drawn;",
    ),
    (
        lambda: net().train_on_batch(X, Y, learning_rate="a"),
        "train_on_batch: learning_rate: str 'a' found, a number needed",
    ),
    (
        lambda: net(compiled=False).gradients(X, Y),
        "model 'net' is not compiled; call model.compile(…) first",
    ),
]
