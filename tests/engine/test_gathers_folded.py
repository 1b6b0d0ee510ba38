"""Gathers that read an axis in order are reshapes, and no others are."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

PLACES = np.arange(12)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize(
    ("axis", "indices", "folds"),
    [
        (0, PLACES.reshape(3, 4), True),
        (1, np.arange(5), True),
        (0, PLACES[::-1].reshape(3, 4), False),
        (0, PLACES[:6].reshape(2, 3), False),
        (1, np.array([0, 1, 2, 3, 3]), False),
        (1, np.array([[0, 1, 2, 3, -1]]), False),
    ],
)
def test_gathers_in_order_are_reshapes(
    axis: int, indices: Array, folds: bool, counted: bool
) -> None:
    """counted: whether indices are computed from constants."""
    held = {"places": indices - counted, "one": np.array(1)}
    builder = GraphBuilder("view")
    x = builder.input("x", (12, 5))
    places, one = (
        builder.input(name, array.shape, "int64", role=Role.CONSTANT)
        for name, array in held.items()
    )
    if counted:
        (places,) = builder.apply("add", places, one)
    builder.output(builder.apply("gather", x, places, axis=axis)[0])
    folded = fold_weights(builder.build(), held)
    given = {"x": np.random.default_rng(0).standard_normal((12, 5), np.float32), **held}
    found = interpret(folded, {name: given[name] for name in folded.roles})
    assert np.array_equal(found[folded.outputs[0]], np.take(given["x"], indices, axis))
    assert ("gather" in {node.operator for node in folded.nodes}) == (not folds)
