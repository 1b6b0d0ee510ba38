"""Sessions that are interrupted, at any point of a run, answer afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers.interrupts import answers, interrupted

import soapstone
from soapstone import InferenceSession


def _model() -> soapstone.Model:
    model = soapstone.Model("small")
    x = model.input("x", (3, 8))
    model.output(model.dense(x, 8, activation="relu"))
    return model


@pytest.mark.filterwarnings("ignore:cpus")
@pytest.mark.parametrize("options", [{}, {"requests": 2}, {"cpus": 2}], ids=str)
def test_a_session_answers_after_an_interrupt_anywhere(options: dict[str, Any]) -> None:
    asked = [{"x": np.full((rows, 8), rows, np.float32)} for rows in (3, 4)]
    with InferenceSession(_model(), threads=1, **options) as session:
        wanted = [session.run(each) for each in asked]

        def right() -> bool:
            found = [session.run(each) for each in asked]
            return all(
                np.allclose(one[name], other[name])
                for one, other in zip(found, wanted, strict=True)
                for name in other
            )

        for point in itertools.count():
            came = interrupted(lambda: session.run(asked[0]), point)
            assert answers(right), f"a run waits for ever after an interrupt at point {point}"
            assert right()
            if not came:
                break
        assert point > 50
