"""Calls of the paper's operators, as terms say them, that tests of the language try."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.ir.term import Value
from soapstone.search.rules import language

PAPER = {
    *("add", "mul", "smul", "transpose", "matmul", "conv2d", "enlarge", "relu"),
    *("avg_pool2d", "max_pool2d", "concat", "split0", "split1"),
}
# Shapes of operands for each form of the paper's operators; those that do not fit give None.
SHAPES: dict[str, list[tuple[tuple[int, ...], ...]]] = {
    "add": [((2, 3), (2, 3)), ((2, 3), (3,)), ((4, 1), (2, 4, 3)), ((2, 3), (3, 2))],
    "mul": [((2, 3), (2, 3)), ((2, 3), (3,)), ((4, 1), (2, 4, 3)), ((2, 3), (3, 2))],
    "smul": [((2, 3), ()), ((), ()), ((2, 3), (1,))],
    "relu": [((),), ((2, 3, 4),)],
    "transpose": [((2, 3),), ((5, 4, 2, 3),), ((3,),), ((3, 3),)],
    "matmul": [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 1)), ((3,), (3, 2))],
    "conv2d": [
        ((2, 3, 5, 6), (4, 3, 3, 3)),
        ((2, 4, 5, 6), (6, 2, 3, 1)),
        ((1, 4, 5, 6), (4, 1, 1, 1)),
        ((1, 2, 4, 5), (2, 1, 2, 3)),
        ((1, 1, 3, 3), (1, 1, 5, 5)),
        ((1, 1, 3, 3), (3, 1, 1, 1)),
        ((1, 3, 3, 3), (3, 2, 1, 1)),
        ((3, 3), (3, 3)),
    ],
    "enlarge": [((4, 2, 1, 1),), ((4, 2, 3, 3),), ((2, 2, 1, 3),), ((2, 2, 2, 2),), ((3, 3),)],
    "avg_pool2d": [((2, 3, 5, 6),), ((1, 1, 2, 2),), ((3, 3),)],
    "max_pool2d": [((2, 3, 5, 6),), ((1, 1, 2, 2),), ((3, 3),)],
    "concat": [((2, 3), (2, 4)), ((2, 3), (4, 3)), ((2, 3, 4, 5), (1, 3, 4, 5)), ((3,), (2,))],
    "split0": [((5, 3),), ((2, 5, 3, 5),)],
    "split1": [((5, 3),), ((2, 5, 3, 5),)],
}
SIZES = (2, 3)  # into which splits part an extent of 5


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.uniform(-1, 1, shape) for shape in shapes]


def uses(symbol: str) -> Iterator[tuple[tuple[Value, ...], tuple[tuple[int, ...], ...]]]:
    """Yield all declared parameters of a symbol with all shapes of operands to try."""
    form = language.forms()[symbol].form
    for parameters in itertools.product(*form.parameters.values()):
        for shapes in SHAPES[symbol]:
            yield parameters, shapes
