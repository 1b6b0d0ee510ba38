"""Winograd's convolutions and gradients against direct ones in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.kernel_calls import followed, reference

from soapstone.ir.spec import operator
from soapstone.kernels.cpu.products.conv_epilogue import ConvEpilogue
from soapstone.kernels.cpu.winograd import variants as winograd
from soapstone.kernels.cpu.winograd.entries import Plan
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native.memory import run

LIMITS = {"winograd2": 2e-6, "winograd4": 1e-5}

# n, channels, height, width, filters, padding
SHAPES = [
    (1, 64, 28, 28, 64, (1, 1, 1, 1)),
    (1, 35, 27, 31, 50, (1, 1, 1, 1)),
    (1, 16, 31, 36, 17, (0, 0, 0, 0)),
    (4, 20, 14, 15, 33, (2, 0, 1, 3)),
    (800, 16, 1, 1, 16, (1, 1, 1, 1)),
    (40, 24, 7, 2, 40, (1, 2, 1, 2)),
]


def last(*shape):
    """An (n, c, h, w) array of NaN, dense with channels last."""
    n, c, h, w = shape
    return np.full((n, h, w, c), np.nan, np.float32).transpose(0, 3, 1, 2)


def make(n, channels, height, width, filters, padding, threads=2, bias=True, activation=None):
    rng = np.random.default_rng(0)
    x = last(n, channels, height, width)
    x[...] = rng.standard_normal(x.shape)
    w = rng.standard_normal((filters, channels, 3, 3)).astype(np.float32)
    b = (rng.standard_normal(filters).astype(np.float32),) if bias else ()
    top, left, bottom, right = padding
    y = last(n, filters, height + top + bottom - 2, width + left + right - 2)
    attributes = {
        "stride": (1, 1),
        "padding": padding,
        "dilation": (1, 1),
        "groups": 1,
        "bias": bias,
        "activation": activation,
    }
    return Call("conv2d", attributes, (x, w, *b), (y,), threads, frozenset({1}))


def bind(call, name):
    return next(v for v in variants(call.operator) if v.name == name).bind(call)


def execute(call, name):
    call.outputs[0][...] = np.nan
    entry = bind(call, name)
    assert entry is not None
    assert run(entry) == 0
    return call.outputs[0]


def exact(call):
    """What the reference gives, in float64."""
    return reference(call.operator, call.inputs, call.attributes)[0]


def near(actual, expected, name):
    assert abs(actual - expected).max() <= LIMITS[name] * abs(expected).max()


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_equals_the_direct_convolution(name, shape, threads):
    call = make(*shape, threads=threads)
    near(execute(call, name), exact(call), name)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_bias_and_activation(name, bias, activation):
    call = make(1, 32, 29, 30, 48, (1, 1, 1, 1), bias=bias, activation=activation)
    near(execute(call, name), exact(call), name)


def test_a_bias_that_changes_is_read_on_each_run():
    call = make(1, 32, 28, 28, 33, (1, 1, 1, 1))
    entry = bind(call, "winograd2")
    assert run(entry) == 0
    call.inputs[2][...] += 3
    assert run(entry) == 0
    near(call.outputs[0], exact(call), "winograd2")


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("filters", [32, 41])
@pytest.mark.parametrize(
    ("program", "activation"),
    [
        ((("relu", (0,), ()),), None),
        ((("add", (0, 1), ()),), None),
        ((("add", (0, 1), ()), ("relu", (2,), ())), None),
        ((("add", (1, 0), ()), ("relu", (2,), ())), "relu"),
        ((("clip", (0,), (("low", 0.0), ("high", 6.0))),), None),
        ((("relu", (0,), ()), ("clip", (1,), (("low", None), ("high", 4.0)))), None),
        ((("relu", (0,), ()), ("add", (2, 1), ())), None),
    ],
    ids=str,
)
def test_steps_on_the_result(name, filters, program, activation):
    inner = make(2, 24, 21, 22, filters, (1, 1, 1, 1), activation=activation)
    residual = last(*inner.outputs[0].shape)
    residual[...] = np.random.default_rng(1).standard_normal(residual.shape) * 20
    operands = (residual,) if any(step == "add" for step, _, _ in program) else ()
    call = followed(inner, program, *operands)
    values = [exact(inner), *operands]
    for step, numbers, items in program:
        values.append(
            operator(step).run(
                operator(step).normalise(dict(items)), *(values[i].astype("f8") for i in numbers)
            )[0]
        )
    actual = execute(call, name)
    assert abs(actual - values[-1]).max() <= LIMITS[name] * abs(values[0]).max() + 2e-6


@pytest.mark.parametrize("name", LIMITS)
def test_nan_reaches_what_its_window_reaches_and_stops_at_the_tile(name):
    inner = make(1, 16, 32, 32, 16, (1, 1, 1, 1))
    inner.inputs[0][0, 3, 9, 9] = np.nan
    y = execute(followed(inner, (("relu", (0,), ()),)), name)
    assert np.isnan(y[0, :, 8:11, 8:11]).all()
    assert np.isfinite(y[0, :, :4]).all()
    assert np.isfinite(y[0, :, :, 16:]).all()


@pytest.mark.parametrize("name", LIMITS)
def test_tiles_of_larger_arrays(name):
    call = make(1, 32, 28, 30, 32, (1, 1, 1, 1))
    big_x, big_y = last(1, 48, 40, 40), last(1, 48, 40, 40)
    x, y = big_x[:, 16:, 4:32, 5:35], big_y[:, :32, 2:30, 3:33]
    x[...] = call.inputs[0]
    inside = replace(call, inputs=(x, *call.inputs[1:]), outputs=(y,))
    near(execute(inside, name), exact(call), name)
    y[...] = np.nan
    assert np.isnan(big_y).all()


@pytest.mark.parametrize("name", LIMITS)
def test_what_is_declined(name):
    call = make(1, 32, 28, 28, 32, (1, 1, 1, 1))
    assert bind(call, name) is not None
    changing = replace(call, constants=frozenset())
    assert (bind(changing, name) is None) == (name == "winograd4")
    flipped = replace(changing, inputs=(call.inputs[0], call.inputs[1][..., ::-1], call.inputs[2]))
    assert bind(flipped, name) is None
    x, w, b = call.inputs
    plain = replace(call, inputs=(np.ascontiguousarray(x), w, b))
    assert bind(plain, name) is None
    for change in ({"groups": 2}, {"stride": (2, 2)}, {"dilation": (2, 2)}, {"activation": "tanh"}):
        assert bind(replace(call, attributes={**call.attributes, **change}), name) is None
    assert bind(make(1, 32, 13, 13, 64, (1, 1, 1, 1)), name) is None
    assert bind(make(1, 8, 64, 64, 32, (1, 1, 1, 1)), name) is None
    row = np.ones(32, np.float32)
    assert bind(followed(call, (("mul", (0, 1), ()),), call.outputs[0]), name) is None
    assert bind(followed(call, (("add", (0, 1), ()),), row.reshape(1, 32, 1, 1)), name) is None


# n, channels, height, width, filters, padding: what a training step has, and odd sizes of it
CHANGING = [
    (2, 64, 16, 16, 64, (1, 1, 1, 1)),
    (5, 128, 8, 8, 128, (1, 1, 1, 1)),
    (16, 256, 4, 4, 256, (1, 1, 1, 1)),
    (16, 512, 2, 2, 160, (1, 1, 1, 1)),
    (3, 35, 13, 11, 50, (0, 0, 0, 0)),
    (9, 70, 6, 7, 33, (2, 2, 2, 2)),
    (5, 33, 12, 9, 45, (2, 0, 1, 1)),
]
PLANS = [None, Plan(8), Plan(13, 3), Plan(4, 2, by_panels=True), Plan(14, 8, by_panels=True)]


def backward(n, channels, height, width, filters, padding, threads=2):
    """The gradient's call, with what `make` gives."""
    call = make(n, channels, height, width, filters, padding, threads, bias=False)
    x, w = call.inputs
    dy = last(*call.outputs[0].shape)
    dy[...] = np.random.default_rng(2).standard_normal(dy.shape)
    kept = ("stride", "padding", "dilation", "groups")
    attributes = {name: call.attributes[name] for name in kept} | {"size": (height, width)}
    return Call("conv2d_grad_input", attributes, (dy, w), (last(*x.shape),), threads)


def by_plan(call, plan):
    """The entry that follows the plan."""
    if call.operator == "conv2d":
        return winograd.bind(call, 2, ConvEpilogue(), plan)
    return winograd.grad_input(call, plan)


@pytest.mark.parametrize("way", [make, backward])
@pytest.mark.parametrize("shape", CHANGING, ids=str)
def test_weights_that_change_are_read_on_each_run_forward_and_in_the_gradient(shape, way):
    call = replace(way(*shape), constants=frozenset())
    entries = [by_plan(replace(call, threads=threads), p) for p in PLANS for threads in (1, 2)]
    rng = np.random.default_rng(3)
    for _ in range(2):
        wanted = exact(call)
        for entry in entries:
            call.outputs[0][...] = np.nan
            assert run(entry) == 0
            near(call.outputs[0], wanted, "winograd2")
        call.inputs[1][...] = rng.standard_normal(call.inputs[1].shape)


def test_many_tiles_are_taken_in_several_passes():
    shape = (5, 512, 16, 16, 64, (1, 1, 1, 1))
    plan = Plan(12, 8, by_panels=True)
    call = replace(make(*shape), constants=frozenset())
    assert run(by_plan(call, plan)) == 0
    near(call.outputs[0], exact(call), "winograd2")
    call = backward(*shape[:1], 64, 16, 16, 512, shape[-1])
    assert run(by_plan(call, plan)) == 0
    near(call.outputs[0], exact(call), "winograd2")


def test_weights_may_be_a_tile_of_filters_and_channels_tiles_of_larger_images():
    call = backward(4, 32, 8, 8, 64, (1, 1, 1, 1))
    dy, w = call.inputs
    big_w = np.full((100, 32, 3, 3), np.nan, np.float32)
    big_dy, big_dx = last(4, 96, 12, 12), last(4, 64, 12, 12)
    w_tile, dy_tile, dx_tile = big_w[20:84], big_dy[:, 16:80, 2:10, 3:11], big_dx[:, 8:40, 1:9, 1:9]
    w_tile[...], dy_tile[...] = w, dy
    inside = replace(call, inputs=(dy_tile, w_tile), outputs=(dx_tile,))
    near(execute(inside, "winograd2"), exact(call), "winograd2")
    dx_tile[...] = np.nan
    assert np.isnan(big_dx).all()
    wider = np.full((64, 40, 3, 3), np.nan, np.float32)
    wider[:, 4:36] = w
    inside = replace(call, inputs=(dy, wider[:, 4:36]))
    near(execute(inside, "winograd2"), exact(call), "winograd2")


def test_steps_follow_a_convolution_whose_weights_change():
    inner = replace(make(8, 64, 8, 8, 64, (1, 1, 1, 1)), constants=frozenset())
    residual = last(*inner.outputs[0].shape)
    residual[...] = np.random.default_rng(1).standard_normal(residual.shape)
    program = (("add", (0, 1), ()), ("relu", (2,), ()))
    actual = execute(followed(inner, program, residual), "winograd2")
    near(actual, np.maximum(exact(inner) + residual, 0), "winograd2")


def test_gradients_that_are_declined():
    call = backward(4, 64, 8, 8, 64, (1, 1, 1, 1))
    assert bind(call, "winograd2") is not None
    for change in ({"groups": 2}, {"stride": (2, 2)}, {"dilation": (2, 2)}, {"size": (9, 8)}):
        changed = replace(call, attributes={**call.attributes, **change})
        if "size" in change:
            changed = replace(changed, outputs=(last(4, 64, 9, 8),))
        assert bind(changed, "winograd2") is None
    assert bind(backward(4, 64, 8, 8, 64, (3, 3, 3, 3)), "winograd2") is None
    dy, w = call.inputs
    assert bind(replace(call, inputs=(np.ascontiguousarray(dy), w)), "winograd2") is None
    assert bind(backward(1, 32, 2, 2, 32, (1, 1, 1, 1)), "winograd2") is None
