"""oneDNN matrix products against the references, in every layout they accept."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import bound, followed, near, place, random, run, served

from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

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


by_onednn = partial(served, only="onednn", every=True, tolerance=2e-4)


@pytest.mark.parametrize("transposes", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shapes", PRODUCTS, ids=str)
def test_matmul(shapes: Any, layout: str, transposes: tuple[bool, bool]) -> None:
    operands = [
        np.ascontiguousarray(random(*shape, seed=seed).swapaxes(-1, -2 if turned else -1))
        for seed, (shape, turned) in enumerate(zip(shapes, transposes))
    ]
    flags = dict(zip(("transpose_a", "transpose_b"), transposes))
    assert by_onednn("matmul", operands, flags, layout=layout)


def test_matmul_of_odd_strides() -> None:
    """Columns of outputs, and operands with no unit stride at all."""
    a, b = random(12, 20), random(20, 18, seed=1)
    for x in (a, a[::2], a[:, ::2], a[::2, ::2]):
        right = b[: x.shape[1]]
        y = np.empty((x.shape[0], 18), np.float32, order="F")
        run(bound(Call("matmul", {}, (x, right), (y,))))
        near(y, x.astype(float) @ right)


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(9, 20), (3, 4, 20), (1, 300)], ids=str)
def test_linear_gradients(shape: tuple[int, ...], layout: str) -> None:
    x, w, dy = random(*shape), random(shape[-1], 12, seed=1), random(*shape[:-1], 12, seed=2)
    assert by_onednn("linear_grad_weight", [x, dy], layout=layout)
    assert by_onednn("linear_grad_input", [dy, w], layout=layout)


@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "gelu", "sigmoid", "tanh"])
@pytest.mark.parametrize("layout", ["plain", "tile"])
def test_linear(layout: str, activation: str | None) -> None:
    w, b, at = random(20, 12, seed=1), random(12, seed=2), {"activation": activation}
    for shape in ((9, 20), (1, 20), (20,), (3, 4, 20), (2, 3, 4, 20)):
        x = random(*shape)
        assert by_onednn("linear", [x, w], {**at, "bias": False}, layout=layout)
        for constants in (frozenset[int](), frozenset({1, 2})):
            given = {**at, "bias": True}
            assert by_onednn("linear", [x, w, b], given, layout=layout, constants=constants)


@pytest.mark.parametrize("rows", [1, 16])
def test_linear_with_wide_weights_and_bias(rows: int) -> None:
    operands = [random(rows, 700), random(700, 800, seed=1), random(800, seed=2)]
    assert by_onednn("linear", operands, {"bias": True, "activation": "relu"}, tolerance=1e-3)


def test_products_refuse_and_do_nothing() -> None:
    x, w = random(4, 5), random(5, 6)
    y = np.empty((4, 6), np.float32)
    at = {"bias": False, "activation": None}
    assert bound(Call("linear", {**at, "bias": True}, (x, w), (y,))) is None
    assert bound(Call("linear", at, (x, w.astype(np.float64)), (y,))) is None
    assert bound(Call("matmul", {}, (x, w), (np.empty((4, 7), np.float32),))) is None
    assert bound(Call("matmul", {}, (x, w), (np.broadcast_to(y[:1], y.shape),))) is None
    run(bound(Call("matmul", {}, (x[:0], w), (y[:0],))))


def test_a_row_is_added_to_matrices_whose_rows_interleave() -> None:
    a, b, row = random(12, 128, 64), random(12, 64, 128, seed=1), random(1, 1, 128, seed=2)
    y = np.zeros((128, 12, 128), np.float32).transpose(1, 0, 2)
    attributes = {
        "operator": "matmul",
        "items": (("transpose_a", False), ("transpose_b", False)),
        "arity": 2,
        "program": (("add", (0, 1), ()),),
    }
    run(bound(Call("with_epilogue", attributes, (a, b, row), (y,), 2)))
    near(y, a.astype(float) @ b.astype(float) + row)


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
    serving = 0
    for kept in product((True, False), repeat=4):
        mask = random(*(n if keep else 1 for n, keep in zip(size, kept)), seed=2)
        y = place(np.zeros(size, np.float32), layout)
        entry = bound(Call("with_epilogue", attributes, (a, b, mask), (y,), 1), name)
        if entry is not None:
            serving += 1
            run(entry)
            near(y, expected + mask)
    assert serving or name == "onednn_gemm"


STEPS = (
    "clip",
    "elu",
    "exp",
    "gelu",
    "hard_sigmoid",
    "hard_swish",
    "leaky_relu",
    "relu",
    "sigmoid",
)


@pytest.mark.parametrize("constants", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("name", [*STEPS, "silu", "sqrt", "tanh", "maximum", "minimum"])
def test_no_step_on_a_product_makes_a_number_of_nan(name: str, constants: frozenset[int]) -> None:
    """A step of training that has diverged would pass for a finite one."""
    x, w, y = random(8, 44), random(44, 32, seed=1), np.zeros((8, 32), np.float32)
    x[3, 5] = np.nan
    two = name in ("maximum", "minimum")
    items = (("high", 0.75), ("low", -0.5)) if name == "clip" else ()
    plain = Call("linear", {"bias": False, "activation": None}, (x, w), (y,), 1, constants)
    operands = [random(32, seed=2)] if two else []
    call = followed(plain, ((name, (0, 1) if two else (0,), items),), *operands)
    for variant in variants("with_epilogue", "cpu"):
        y[...] = 0.0
        entry = bound(call, variant.name)
        if entry is not None:
            run(entry)
            assert np.isnan(y[3]).all(), variant.name
