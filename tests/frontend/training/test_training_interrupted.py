"""Training that is interrupted where a graph is bound, or weights are read, loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.interrupts import answers, interrupted

from soapstone import Model


def _model() -> Model:
    model = Model("small")
    model.output(model.dense(model.dense(model.input("x", (8, 6)), 12, activation="relu"), 4))
    model.compile("sgd", loss="cross_entropy")
    return model


@pytest.mark.parametrize(("what", "step"), [("evaluate", 211), ("weights", 7)])
def test_weights_outlive_an_interrupt(what: str, step: int) -> None:
    random = np.random.default_rng(0)
    x, y = random.standard_normal((8, 6)).astype(np.float32), random.integers(0, 4, 8)
    point, came = 0, True
    while came:
        with _model() as model:
            model.train_on_batch(x, y)
            before = model.weights()

            def ask(model: Model = model) -> object:
                return model.evaluate(x, y) if what == "evaluate" else model.weights()

            came = interrupted(ask, point)
            assert answers(model.weights), f"no answer after an interrupt at point {point}"
            for name, array in model.weights().items():
                np.testing.assert_array_equal(array, before[name])
            assert np.isfinite(model.evaluate(x, y)["loss"])
        point += step
    assert point > 20 * step
