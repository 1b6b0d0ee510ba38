"""Products of many rows with constant weights, and 1x1 convolutions, against NumPy in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.kernel_calls import bound, followed, place, random
from helpers.operator_checks import named

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call
from soapstone.native.lanes import held
from soapstone.native.memory import run


def linear(rows, depth, columns, threads=2, bias=True, activation=None):
    x, w, b = random(rows, depth), random(depth, columns, seed=1), random(columns, seed=2)
    y = np.full((rows, columns), np.nan, np.float32)
    attributes = {"bias": bias, "activation": activation}
    inputs = (x, w, b) if bias else (x, w)
    return Call("linear", attributes, inputs, (y,), threads, frozenset({1}))


def conv2d(x_shape, filters, stride=(1, 1), layout="last", activation=None):
    x, w = place(random(*x_shape), layout), random(filters, x_shape[1], 1, 1, seed=1)
    sizes = [-(-extent // step) for extent, step in zip(x_shape[2:], stride)]
    y = place(np.full((x_shape[0], filters, *sizes), np.nan, np.float32), layout)
    attributes = {
        "stride": stride,
        "padding": (0, 0, 0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "bias": True,
        "activation": activation,
    }
    return Call("conv2d", attributes, (x, w, random(filters, seed=2)), (y,), 2, frozenset({1}))


def check(call):
    """Run the call; compare with its reference in float64."""
    entry = bound(call, "blocked")
    assert entry is not None
    assert run(entry) == 0
    spec = operator(call.operator)
    attributes = spec.normalise(dict(call.attributes))
    (expected,) = spec.run(attributes, *(a.astype(np.float64) for a in call.inputs))
    (y,) = call.outputs
    assert expected.shape == y.shape
    np.testing.assert_allclose(y, expected, rtol=0, atol=3e-6 * max(1.0, abs(expected).max()))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [5, 6, 11, 127, 128, 257])
def test_equals_the_product(rows, threads):
    for depth, columns in (
        (1, 1),
        (3, 17),
        (64, 16),
        (263, 47),
        (515, 129),
        (1030, 260),
        (40, 192),
    ):
        with named(depth, columns):
            check(linear(rows, depth, columns, threads))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "tanh"])
def test_bias_and_activation(bias, activation):
    check(linear(9, 67, 150, bias=bias, activation=activation))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_matmul(transpose_a, transpose_b):
    a = random(55, 7) if transpose_a else random(7, 55)
    b = random(71, 55) if transpose_b else random(55, 71)
    y = np.full((7, 71), np.nan, np.float32)
    attributes = {"transpose_a": transpose_a, "transpose_b": transpose_b}
    call = Call("matmul", attributes, (a, b), (y,), 2, frozenset({1}))
    if transpose_a:
        assert bound(call, "blocked") is None  # rows whose numbers lie apart
    else:
        check(call)


def test_rows_that_lie_apart():
    call = linear(4, 91, 53)
    x = random(2, 4, 200)[:, :, 20:111]
    y = np.full((2, 4, 99), np.nan, np.float32)
    check(replace(call, inputs=(x, *call.inputs[1:]), outputs=(y[..., 7:60],)))
    assert np.isnan(y[..., :7]).all()
    assert np.isnan(y[..., 60:]).all()


@pytest.mark.parametrize("shape", [(8, 83), (83,), (8, 1), ()], ids=str)
def test_an_operand_of_any_shape(shape):
    operand = np.asarray(random(*shape, seed=3), np.float32)
    for name, numbers in (("add", (0, 1)), ("mul", (0, 1)), ("sub", (1, 0))):
        with named(name, numbers):
            program = ((name, numbers, ()), ("relu", (2,), ()))
            check(followed(linear(8, 44, 83, activation="relu"), program, operand))
            check(followed(linear(8, 44, 83, activation="tanh"), program, operand))


@pytest.mark.parametrize("layout", ["last", "last tile"])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
def test_pixels(layout, stride):
    for shape, filters in (((1, 35, 9, 7), 40), ((3, 8, 5, 5), 130)):
        with named(shape, filters):
            call = conv2d(shape, filters, stride, layout, "relu")
            check(call)
            added = place(random(*call.outputs[0].shape, seed=4), layout)
            check(followed(call, (("add", (0, 1), ()), ("clip", (2,), (("high", 1.0),))), added))


def conv1d(x, w, stride=1, bias=True, activation=None):
    y = np.full((len(x), len(w), (x.shape[2] - w.shape[2]) // stride + 1), np.nan, np.float32)
    attributes = {
        "stride": (stride,),
        "padding": (0, 0),
        "dilation": (1,),
        "groups": 1,
        "bias": bias,
        "activation": activation,
    }
    inputs = (x, w, random(len(w), seed=2)) if bias else (x, w)
    return Call("conv1d", attributes, inputs, (last(y),), 2, frozenset({1}))


def last(sequence):
    """Return a sequence whose channels are last in memory."""
    return np.ascontiguousarray(sequence.transpose(0, 2, 1)).transpose(0, 2, 1)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_windows_of_sequences(bias, activation):
    for shape, filters, length, stride in (
        ((1, 35, 60), 40, 3, 2),
        ((2, 1, 57), 17, 10, 5),
        ((3, 8, 11), 130, 4, 1),
        ((2, 130, 9), 8, 4, 1),
    ):
        with named(shape, filters, length, stride):
            x, w = last(random(*shape)), random(filters, shape[1], length, seed=1)
            w /= np.sqrt(w[0].size)  # so that what follows leaves sums about as large
            call = conv1d(x, w, stride, bias, activation)
            check(call)
            added = last(random(*call.outputs[0].shape, seed=4))
            check(followed(call, (("add", (0, 1), ()), ("relu", (2,), ())), added))
            factors = random(filters, 1, seed=5)
            check(followed(call, (("tanh", (0,), ()), ("mul", (2, 1), ())), factors))


def test_sequences_that_are_left_to_others():
    x, w = random(1, 8, 40), random(16, 8, 3, seed=1)
    assert bound(conv1d(x, w), "blocked") is None  # channels that lie apart
    call = conv1d(last(x), w)
    check(call)
    for changed in ({"padding": (1, 1)}, {"dilation": (2,)}, {"groups": 2}):
        other = replace(call, attributes={**call.attributes, **changed})
        assert bound(other, "blocked") is None
    part = last(random(1, 16, 40))[:, :8]  # windows that do not lie side by side
    assert bound(replace(call, inputs=(part, *call.inputs[1:])), "blocked") is None


def test_pixels_with_what_follows():
    call = conv2d((2, 35, 5, 6), 40, activation="gelu")
    check(call)
    factors = random(1, 40, 1, 1, seed=3)
    check(followed(call, (("sigmoid", (0,), ()), ("mul", (2, 1), ())), factors))


def test_an_operand_may_be_the_result():
    call = followed(linear(8, 31, 90), (("add", (0, 1), ()),))
    (y,) = call.outputs
    residual = y[...] = random(8, 90, seed=3)
    entry = bound(replace(call, inputs=(*call.inputs, y)), "blocked")
    assert run(entry) == 0
    x, w, b = call.inputs
    np.testing.assert_allclose(y, x @ w + b + residual, rtol=1e-4, atol=1e-5)


def test_nan_passes_relu_and_infinity_stays():
    call = linear(7, 40, 50, activation="relu")
    call.inputs[0][0, 5], call.inputs[0][1, 7] = np.nan, np.inf
    assert run(bound(call, "blocked")) == 0
    (y,) = call.outputs
    assert np.isnan(y[0]).all()
    assert np.isinf(y[1]).any()
    assert np.isfinite(y[2:]).all()


def test_what_is_left_to_others():
    assert bound(linear(4, 40, 50), "blocked") is None  # test_panels
    call = linear(8, 40, 50)
    assert bound(replace(call, constants=frozenset()), "blocked") is None
    x, w, b = call.inputs
    assert bound(replace(call, inputs=(x.astype(np.float64), w, b)), "blocked") is None
    assert bound(replace(call, outputs=(random(8, 100)[:, ::2],)), "blocked") is None
    assert bound(conv2d((1, 8, 5, 5), 16, layout="plain"), "blocked") is None
    padded = conv2d((1, 8, 5, 5), 16)
    attributes = {**padded.attributes, "padding": (1, 0, 1, 0)}
    assert bound(replace(padded, attributes=attributes), "blocked") is None


def test_vectors_that_registers_hold():
    assert held() in (4, 8, 32)
