"""Launches of composites on a GPU: products, and one kernel for what is between two of them."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.ir.spec import operator
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.choices import Choices
from soapstone.kernels.cuda.entry import Launch
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device

STEPS, SAMPLES, WIDTH = 6, 4, 8


def launches(name: str, *shapes: str, **attributes: object) -> list[Launch]:
    """Return the launches of a call on described arrays; shapes may name t, n, k and h."""
    extents = {"t": STEPS, "n": SAMPLES, "k": 5, "h": WIDTH, "3h": 3 * WIDTH, "4h": 4 * WIDTH}
    extents |= {"8h": 8 * WIDTH}
    spec = operator(name)
    given = [
        TensorSpec(tuple(extents[word] for word in shape.split() if word in extents), dtype)
        for shape in shapes
        for dtype in ["int32" if "int32" in shape else "float32"]
    ]
    normal = spec.normalise(attributes)
    made = spec.bind(tuple(given), normal).output_specs

    def array(of: TensorSpec) -> Described:
        return Described.like(np.empty(of.shape, of.dtype))

    call = Call(name, normal, (*map(array, given),), (*map(array, made),))
    with Choices(tune=False).current():  # nothing can be measured
        _, entry = select_device(call)
    assert all(isinstance(each, Launch) for each in entry.launches)
    return list(entry.launches)


LSTM = ("t n k", "k 4h", "h 4h", "4h", "n h", "n h")
GRU = ("t n k", "k 3h", "h 3h", "3h", "3h", "n h")
LSTM_GRAD = ("t n h", "n h", "n h", "t n 4h", "t n h", "h 4h", "n h")
GRU_GRAD = ("t n h", "n h", "t n 3h", "t n h", "t n h", "h 3h")


@pytest.mark.parametrize(
    ("name", "shapes", "before"),
    [
        ("lstm", LSTM, 1),
        ("lstm", (*LSTM, "int32 n"), 1),
        ("gru", GRU, 1),
        ("gru", (*GRU, "int32 n"), 1),
        ("rnn", ("t n k", "k h", "h h", "h", "n h"), 1),
        ("lstm_grad", LSTM_GRAD, 0),
        ("lstm_grad", (*LSTM_GRAD, "int32 n"), 0),
        ("gru_grad", GRU_GRAD, 0),
        ("gru_grad", (*GRU_GRAD, "int32 n"), 0),
        ("rnn_grad", ("t n h", "n h", "t n h", "h h"), 0),
    ],
)
def test_a_step_is_a_product_and_one_kernel(
    name: str, shapes: tuple[str, ...], before: int
) -> None:
    kernels = [each.kernel.name for each in launches(name, *shapes)]
    assert kernels.count("product") == before + STEPS
    assert STEPS <= kernels.count("pointwise") <= STEPS + 1  # one more of the first state
    assert set(kernels) == {"product", "pointwise"}


@pytest.mark.parametrize(
    ("name", "shapes", "products", "others"),
    [
        ("lstm_cell", ("n k", "n h", "n h", "k 4h", "h 4h", "4h"), 2, 1),
        ("lstm_cell_grad", ("n h", "n h", "n 4h", "n h", "n h"), 0, 1),
        ("gru_cell", ("n k", "n h", "k 3h", "h 3h", "3h", "3h"), 2, 1),
        ("gru_cell_grad", ("n h", "n 3h", "n h", "n h", "h 3h"), 1, 2),
        ("nas_cell", ("n k", "n h", "n h", "k 8h", "h 8h", "8h"), 2, 1),
        ("nas_cell_grad", ("n h", "n h", "n 8h", "n h", "n h", "n h"), 0, 1),
        ("previous_step", ("t n h", "n h"), 0, 2),
    ],
)
def test_cells_are_their_products_and_one_kernel(
    name: str, shapes: tuple[str, ...], products: int, others: int
) -> None:
    kernels = [each.kernel.name for each in launches(name, *shapes)]
    assert (kernels.count("product"), kernels.count("pointwise")) == (products, others)


def test_memory_between_steps_serves_again() -> None:
    made = launches("lstm", *LSTM)
    sums = {id(each.arguments[-1]) for each in made if each.kernel.name == "product"}
    held = {id(a): a for each in made for a in each.arguments if isinstance(a, Described)}
    nbytes = sum(array.size * array.dtype.itemsize for array in held.values())
    assert sums and nbytes < 8 * 4 * STEPS * SAMPLES * 4 * WIDTH


def test_a_kernel_says_what_it_reads_and_writes() -> None:
    step = [each for each in launches("lstm", *LSTM) if each.kernel.name == "pointwise"][1]
    state = 4 * SAMPLES * WIDTH
    assert step.nbytes == (4 + 4 + 1 + 4 + 2) * state  # sums, gates, cell; gates, cell, state
