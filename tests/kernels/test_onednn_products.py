"""oneDNN matrix products against NumPy, in every layout they accept."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.onednn_calls import ACTIVATE, bind, close, execute, place, random, run

from soapstone.kernels.entry import Call

PRODUCTS = [
    ((6, 5), (5, 7)),
    ((1, 300), (300, 40)),
    ((33, 1), (1, 17)),
    ((8, 64), (64, 1)),
    ((1, 1), (1, 1)),
    ((64, 800), (800, 700)),
    ((4, 6, 5), (4, 5, 7)),
    ((4, 6, 5), (5, 7)),
    ((6, 5), (4, 5, 7)),
    ((2, 3, 6, 5), (2, 3, 5, 7)),
    ((2, 3, 6, 5), (3, 5, 7)),
    ((2, 1, 6, 5), (1, 3, 5, 7)),
    ((2, 3, 1, 5), (2, 1, 5, 7)),
]


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_matmul(shapes: Any, layout: str, transposes: tuple[bool, bool]) -> None:
    a, b = random(*shapes[0]), random(*shapes[1], seed=1)
    expected = a.astype(float) @ b.astype(float)
    a = np.ascontiguousarray(a.swapaxes(-1, -2)) if transposes[0] else a
    b = np.ascontiguousarray(b.swapaxes(-1, -2)) if transposes[1] else b
    for threads in (1, 2):
        (y,) = execute(
            *("matmul", (a, b), [expected.shape], layout),
            transpose_a=transposes[0], transpose_b=transposes[1], threads=threads,
        )  # fmt: skip
        close(y, expected)


def test_matmul_of_odd_strides() -> None:
    """Columns of outputs, and operands with no unit stride at all."""
    a, b = random(12, 20), random(20, 18, seed=1)
    for x in (a, a[::2], a[:, ::2], a[::2, ::2]):
        right = b[: x.shape[1]]
        y = np.empty((x.shape[0], 18), np.float32, order="F")
        entry = bind(Call("matmul", {}, (x, right), (y,)))
        assert entry is not None
        assert run(entry) == 0
        close(y, x.astype(float) @ right)


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(9, 20), (3, 4, 20), (1, 300)], ids=str)
def test_linear_gradients(shape: tuple[int, ...], layout: str) -> None:
    x, w = random(*shape), random(shape[-1], 12, seed=1)
    dy = random(*shape[:-1], 12, seed=2)
    expected = x.reshape(-1, shape[-1]).T.astype(float) @ dy.reshape(-1, 12)
    (dw,) = execute("linear_grad_weight", (x, dy), [w.shape], layout)
    close(dw, expected)
    (dx,) = execute("linear_grad_input", (dy, w), [shape], layout, threads=2)
    close(dx, dy.astype(float) @ w.T)


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("layout", ["plain", "tile"])
def test_linear(layout: str, activation: str | None) -> None:
    w, b = random(20, 12, seed=1), random(12, seed=2)
    for shape in ((9, 20), (1, 20), (20,), (3, 4, 20), (2, 3, 4, 20)):
        x = random(*shape)
        product = x.astype(float) @ w
        (y,) = execute("linear", (x, w), [product.shape], layout, bias=False, activation=activation)
        close(y, ACTIVATE[activation](product))
        for constant in (False, True):
            (y,) = execute(
                *("linear", (x, w, b), [product.shape], layout),
                bias=True, activation=activation, constants=(1, 2) if constant else (),
            )  # fmt: skip
            close(y, ACTIVATE[activation](product + b))


def test_linear_with_wide_weights_and_bias() -> None:
    x, w, b = random(16, 700), random(700, 800, seed=1), random(800, seed=2)
    expected = np.maximum(x.astype(float) @ w + b, 0)
    for threads in (1, 2):
        for rows in (1, 16):
            (y,) = execute(
                *("linear", (x[:rows], w, b), [(rows, 800)]),
                bias=True, activation="relu", threads=threads,
            )  # fmt: skip
            close(y, expected[:rows])


def test_products_refuse_and_do_nothing() -> None:
    x, w = random(4, 5), random(5, 6)
    y = np.empty((4, 6), np.float32)
    at = {"bias": False, "activation": None}
    assert bind(Call("linear", {**at, "bias": True}, (x, w), (y,))) is None
    assert bind(Call("linear", at, (x, w.astype(np.float64)), (y,))) is None
    assert bind(Call("matmul", {}, (x, w), (np.empty((4, 7), np.float32),))) is None
    assert bind(Call("matmul", {}, (x, w), (np.broadcast_to(y[:1], y.shape),))) is None
    none = bind(Call("matmul", {}, (x[:0], w), (y[:0],)))
    assert none is not None
    assert run(none) == 0


def test_a_row_is_added_to_matrices_whose_rows_interleave() -> None:
    a, b, row = random(12, 128, 64), random(12, 64, 128, seed=1), random(1, 1, 128, seed=2)
    y = np.zeros((128, 12, 128), np.float32).transpose(1, 0, 2)
    attributes = {
        "operator": "matmul",
        "items": (("transpose_a", False), ("transpose_b", False)),
        "arity": 2,
        "program": (("add", (0, 1), ()),),
    }
    entry = bind(Call("with_epilogue", attributes, (a, b, row), (y,), 2), "onednn")
    assert entry is not None
    assert run(entry) == 0
    close(y, a.astype(float) @ b.astype(float) + row)


@pytest.mark.parametrize("name", ["onednn", "onednn_gemm"])
@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_an_operand_repeated_over_batches_is_added(name: str, layout: str, rows: int) -> None:
    attributes = {
        "operator": "matmul",
        "items": (("transpose_a", False), ("transpose_b", True)),
        "arity": 2,
        "program": (("affine", (0,), (("scale", 0.5), ("shift", 0.0))), ("add", (2, 1), ())),
    }
    size = (2, 3, rows, 7)
    a, b = random(2, 3, rows, 4), random(2, 3, 7, 4, seed=1)
    expected = 0.5 * (a.astype(float) @ b.astype(float).swapaxes(-1, -2))
    bound = 0
    for kept in product((True, False), repeat=4):
        mask = random(*(n if keep else 1 for n, keep in zip(size, kept)), seed=2)
        y = place(np.zeros(size, np.float32), layout)
        entry = bind(Call("with_epilogue", attributes, (a, b, mask), (y,), 1), name)
        if entry is not None:
            bound += 1
            assert run(entry) == 0
            close(y, expected + mask)
    assert bound or name == "onednn_gemm"
