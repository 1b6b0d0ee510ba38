"""The models, images and labels of tables of mistakes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from soapstone import SGD, Model

X = np.random.default_rng(0).standard_normal((20, 6)).astype(np.float32)
Y = np.arange(20) % 4


def masked(x: Any) -> Any:
    """Return an array with the first number of each row masked."""
    return np.ma.masked_array(x, mask=np.arange(x.shape[1]) < np.ones((len(x), 1)))


def net(out: int = 4, *, compiled: bool = True, **settings: Any) -> Model:
    model = Model("net")
    x = model.input("x", (8, 6))
    model.output(model.dense(model.dense(x, 5, name="h"), out, name="o"))
    if compiled:
        model.compile(**{"optimizer": SGD(0.1), "metrics": "accuracy", **settings})
    return model


def still() -> Model:
    model = net(compiled=False)
    model.freeze("*")
    model.compile(SGD(0.1))
    return model


@cache
def ids() -> Model:
    model = Model("ids")
    i = model.input("ids", (8, 3), "int32")
    model.output(model.dense(model.flatten(model.embedding(i, 10, 4, name="e")), 4, name="o"))
    model.compile()
    return model


def two(**settings: Any) -> Model:
    model = Model("two")
    x = model.input("x", (8, 6))
    model.output(model.dense(x, 4, name="a"), model.dense(x, 1, name="b"))
    model.compile(**{"loss": {"a": "cross_entropy", "b": "mse"}, **settings})
    return model


def pair() -> Model:
    model = Model("pair")
    model.output(model.dense(model.concat([model.input("a", (8, 2)), model.input("b", (8, 2))]), 4))
    model.compile()
    return model


def image(m: Model) -> Any:
    return m.input("x", (8, 3, 8, 8))


def ends(last: Any, **settings: Any) -> Model:
    """Return a model that ends with what `last` makes of three logits."""
    model = Model("n")
    model.output(last(model, model.dense(model.input("x", (8, 6)), 3, name="o")))
    model.compile(**settings)
    return model


def of(make: Any) -> Any:
    """Return what is made with an empty model."""
    return make(Model("n"))
