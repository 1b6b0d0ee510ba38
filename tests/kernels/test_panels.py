"""Products of few rows with constant weights against NumPy in float64."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from helpers.kernel_calls import followed
from helpers.operator_checks import named

from soapstone.ir.spec import operator
from soapstone.kernels.cpu.products import panels
from soapstone.kernels.cpu.products.panels_lanes import READINGS
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.kernels.select import select
from soapstone.native import shared
from soapstone.native.memory import run

DEPTHS = [1, 3, 37, 64, 515]
COLUMNS = [1, 16, 47, 64, 100, 129, 320]


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(x, columns, threads=2, bias=True, activation=None):
    w = random(x.shape[-1], columns, seed=1)
    b = (random(columns, seed=2),) if bias else ()
    y = np.full((*x.shape[:-1], columns), np.nan, np.float32)
    attributes = {"bias": bias, "activation": activation}
    return Call("linear", attributes, (x, w, *b), (y,), threads, frozenset({1}))


def bind(call):
    return next(v for v in variants(call.operator) if v.name == "panels").bind(call)


def check(call, limit=3e-6):
    """Run the call; compare with its reference in float64."""
    entry = bind(call)
    assert entry is not None
    assert run(entry) == 0
    spec = operator(call.operator)
    attributes = spec.normalise(dict(call.attributes))
    (expected,) = spec.run(attributes, *(a.astype(np.float64) for a in call.inputs))
    (y,) = call.outputs
    assert expected.shape == y.shape
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(expected))
    finite = np.isfinite(expected)
    scale = max(1.0, abs(expected[finite]).max())
    assert abs(y[finite] - expected[finite]).max() <= limit * scale


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equals_the_product(rows, threads):
    for depth, columns in itertools.product(DEPTHS, COLUMNS):
        with named(depth, columns):
            check(linear(random(rows, depth), columns, threads))


def test_many_columns_over_threads():
    check(linear(random(2, 130), 2000, threads=2))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "leaky_relu", "gelu", "sigmoid", "tanh"])
def test_bias_and_activation(bias, activation):
    check(linear(random(3, 67), 70, bias=bias, activation=activation))


def test_rows_that_lie_apart():
    x = random(3, 200)[:, 20:111]
    call = linear(x, 53)
    y = np.full((3, 99), np.nan, np.float32)
    check(Call(call.operator, call.attributes, call.inputs, (y[:, 7:60],), 2, call.constants))
    assert np.isnan(y[:, :7]).all()
    assert np.isnan(y[:, 60:]).all()


@pytest.mark.parametrize(
    "x",
    [random(1, 2, 2, 33), random(37), random(40, 3).T, random(2, 80)[:, ::2], random(4, 20)[::-1]],
    ids=["4-D", "1-D", "columns", "every second", "backwards"],
)
def test_layouts_of_x(x):
    check(linear(x, 45))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_a, transpose_b):
    a = random(55, 3) if transpose_a else random(3, 55)
    b = random(71, 55) if transpose_b else random(55, 71)
    y = np.full((3, 71), np.nan, np.float32)
    attributes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    check(Call("matmul", attributes, (a, b), (y,), 2, frozenset({1})))


UNARY = [
    ("relu", ()),
    ("tanh", ()),
    ("sigmoid", ()),
    ("gelu", (("approximate", "none"),)),
    ("gelu", (("approximate", "tanh"),)),
    ("silu", (("alpha", 1.0),)),
    ("elu", (("alpha", 0.5),)),
    ("clip", (("low", -0.5), ("high", 2.0))),
    ("affine", (("scale", -2.0), ("shift", 0.25))),
]


@pytest.mark.parametrize(("name", "items"), UNARY, ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_a_function_of_the_result(name, items, rows):
    check(followed(linear(random(rows, 44), 83), ((name, (0,), items),)))


@pytest.mark.parametrize("shape", [(3, 83), (83,), (1, 83), (3, 1), (1,), ()], ids=str)
@pytest.mark.parametrize("name", ["add", "mul", "sub", "maximum"])
@pytest.mark.parametrize("numbers", [(0, 1), (1, 0)], ids=str)
def test_an_operand_of_any_shape(shape, name, numbers):
    operand = np.asarray(random(*shape, seed=3), np.float32)
    program = ((name, numbers, ()), ("relu", (2,), ()))
    check(followed(linear(random(3, 44), 83, activation="tanh"), program, operand))


def test_a_program_that_is_no_chain():
    program = (("sigmoid", (0,), ()), ("mul", (0, 3), ()), ("add", (4, 1), ()), ("sub", (5, 2), ()))
    operands = random(2, 90, seed=3), random(90, seed=4)
    check(followed(linear(random(2, 31), 90, bias=False), program, *operands))


@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_images_of_one_pixel(images, bias):
    """As those that say from an image's means how its channels are scaled."""
    x, w, b = random(images, 37, 1, 1), random(83, 37, 1, 1, seed=1), random(83, seed=2)
    attributes = operator("conv2d").normalise({"bias": bias, "activation": "relu"})

    def call(x, y, **others):
        inputs = (x, w, b) if bias else (x, w)
        return Call("conv2d", {**attributes, **others}, inputs, (y,), 2, frozenset({1}))

    y = np.full((images, 83, 1, 1), np.nan, np.float32)
    check(call(x, y))
    check(followed(call(x, y), (("silu", (0,), ()), ("add", (2, 1), ())), random(83, 1, 1, seed=3)))
    assert bind(call(random(images, 37, 1, 2), np.zeros((images, 83, 1, 2), np.float32))) is None
    padded = np.zeros((images, 83, 3, 3), np.float32)
    assert bind(call(x, padded, padding=(1, 1, 1, 1))) is None


def test_an_operand_may_be_the_result():
    call = followed(linear(random(2, 31), 90), (("add", (0, 1), ()),))
    (y,) = call.outputs
    residual = y[...] = random(2, 90, seed=3)
    entry = bind(Call(call.operator, call.attributes, (*call.inputs, y), (y,), 2, frozenset({1})))
    assert run(entry) == 0
    x, w, b = call.inputs
    np.testing.assert_allclose(y, x @ w + b + residual, rtol=1e-4, atol=1e-5)


def test_nan_passes_relu_and_infinity_stays():
    x = random(3, 40)
    x[0, 5], x[1, 7] = np.nan, np.inf
    call = linear(x, 50, activation="relu")
    check(call)
    assert np.isnan(call.outputs[0][0]).all()
    assert np.isinf(call.outputs[0][1]).any()


def test_what_changes_is_read_on_each_run_and_weights_are_not():
    call = linear(random(2, 40), 50)
    x, w, b = call.inputs
    entry = bind(call)
    kept = w.copy()
    w[...], x[...], b[...] = np.nan, random(2, 40, seed=8), 3.0
    assert run(entry) == 0
    np.testing.assert_allclose(call.outputs[0], x @ kept + b, rtol=1e-4, atol=1e-5)


def test_equal_weights_are_packed_once():
    gc.collect()
    before = len(shared._known)
    first, second = (bind(linear(random(2, 41), 57)) for _ in range(2))
    assert len(shared._known) == before + 1
    assert run(first) == run(second) == 0
    del first, second
    gc.collect()
    assert len(shared._known) == before


def test_what_is_left_to_others():
    call = linear(random(2, 40), 50)
    x, w, b = call.inputs

    def other(inputs, outputs=call.outputs, constants=frozenset({1})):
        return bind(Call("linear", call.attributes, inputs, outputs, 1, constants))

    assert other((x, w, b)) is not None
    assert other((x, w, b), constants=frozenset()) is None
    assert other((x.astype(np.float64), w, b)) is None
    assert bind(linear(random(5, 40), 50)) is None
    assert bind(linear(random(0, 40), 50)) is None
    assert bind(linear(random(2, 0), 50)) is None
    wide = np.zeros((2, 100), np.float32)
    assert other((x, w, b), (wide[:, ::2],)) is None


def test_how_weights_are_asked_for_makes_no_difference(monkeypatch):
    made = []
    for number in range(len(READINGS)):
        monkeypatch.setattr(panels, "reading_of", lambda threads, number=number: number)
        call = linear(random(3, 515), 320)
        check(call)
        made.append(call.outputs[0])
    assert all((y == made[0]).all() for y in made)


def test_weights_are_asked_for_as_was_measured(monkeypatch):
    def reading(times):
        monkeypatch.setattr(panels, "of_computer", lambda *_: times)
        return list(READINGS)[panels.reading_of(2)]

    assert reading(None) == "farther"
    assert reading({"unasked 0": 5.0, "farther 1": 4.9, "nearest 2": 6.0}) == "unasked"
    two = {"unasked 0": 5.0, "farther 0": 3.0, "nearest 0": 6.0, "unasked 1": 2.0}
    assert reading(two) == "unasked"
    assert reading({"unasked 0": 5.0, "farther 1": 4.0, "nearest 2": 2.0}) == "nearest"


def test_what_is_measured_to_know_is_of_one_size():
    entries = panels._readings(2)
    assert len({name.split()[1] for name in entries}) * len(READINGS) == len(entries)
    assert all(run(entry) == 0 for entry in entries.values())


def test_select_knows_the_variant():
    call = linear(random(1, 64), 64)
    name, entry = select(call, variant="panels")
    assert name == "panels"
    assert run(entry) == 0
    np.testing.assert_allclose(
        call.outputs[0], call.inputs[0] @ call.inputs[1] + call.inputs[2], rtol=1e-4, atol=1e-5
    )
