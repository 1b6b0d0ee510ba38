"""Convolutions of small groups against the operator's reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.kernel_calls import followed
from helpers.operator_checks import named

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native.memory import run

GROUPS = [(1, 3), (1, 5), (1, 7), (4, 3), (8, 3), (16, 3)]  # channels, columns of the window


def image(n, c, h, w, seed=0):
    """A channels-last image of these shapes."""
    made = np.random.default_rng(seed).standard_normal((n, h, w, c)).astype(np.float32)
    return made.transpose(0, 3, 1, 2)


def call_of(
    x, group, window, stride=(1, 1), padding=(1, 1, 1, 1), bias=True, activation=None, threads=2
):
    """The call of a convolution with as many filters as channels."""
    random = np.random.default_rng(1)
    channels = x.shape[1]
    w = random.standard_normal((channels, group, *window)).astype(np.float32)
    rest = (random.standard_normal(channels).astype(np.float32),) if bias else ()
    top, left, bottom, right = padding
    size = (
        (x.shape[2] + top + bottom - window[0]) // stride[0] + 1,
        (x.shape[3] + left + right - window[1]) // stride[1] + 1,
    )
    y = np.full_like(image(x.shape[0], channels, *size), np.nan)
    attributes = operator("conv2d").normalise(
        {
            "stride": stride,
            "padding": padding,
            "groups": channels // group,
            "bias": bias,
            "activation": activation,
        }
    )
    return Call("conv2d", attributes, (x, w, *rest), (y,), threads, frozenset({1}))


def bind(call):
    return next(v for v in variants(call.operator) if v.name == "grouped").bind(call)


def check(call):
    """Run the call; compare with its reference in float64."""
    entry = bind(call)
    assert entry is not None
    assert run(entry) == 0
    spec = operator(call.operator)
    (expected,) = spec.run(call.attributes, *(a.astype(np.float64) for a in call.inputs))
    (y,) = call.outputs
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    held = np.isfinite(expected)
    assert abs(y[held] - expected[held]).max() <= 3e-6 * max(1.0, abs(expected[held]).max())


@pytest.mark.parametrize(("group", "window"), GROUPS)
@pytest.mark.parametrize("stride", [1, 2])
def test_equals_the_convolution(group, window, stride):
    for channels, size in [(32, (9, 14)), (48, (5, 29)), (16 + group, (12, 3 + window))]:
        pad = window // 2
        with named(channels, size):
            x = image(2, channels, *size)
            check(call_of(x, group, (window, window), (stride, stride), (pad,) * 4))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_and_uneven_windows(threads):
    x = image(1, 80, 21, 17)
    check(call_of(x, 1, (3, 5), (2, 1), (0, 2, 1, 0), bias=False, threads=threads))
    check(call_of(x, 8, (2, 3), (3, 2), (1, 0, 0, 2), threads=threads))
    check(call_of(x, 1, (1, 3), (1, 1), (0, 0, 0, 0), threads=threads))


def test_images_of_one_place_and_windows_larger_than_the_image():
    check(call_of(image(3, 32, 1, 1), 4, (3, 3)))
    check(call_of(image(1, 20, 2, 2), 1, (7, 7), padding=(3, 3, 3, 3)))


def test_parts_of_images():
    whole = image(2, 96, 11, 13)
    for x in (whole[:, 32:64], whole[:, :, 2:9, 1:12]):
        check(call_of(x, 4, (3, 3)))
    target = np.full_like(whole, np.nan)
    call = call_of(whole[:, 32:64], 8, (3, 3))
    part = target[:, 8:40]
    check(Call(call.operator, call.attributes, call.inputs, (part,), 2, call.constants))
    assert np.isnan(target[:, :8]).all()
    assert np.isnan(target[:, 40:]).all()


def test_what_follows_and_what_is_no_number():
    x = image(1, 40, 8, 9).copy(order="K")
    x[0, 3, 2, 2], x[0, 17, 5, 5] = np.nan, np.inf
    for activation in (None, "relu"):
        check(call_of(x, 4, (3, 3), activation=activation))
    x = image(1, 40, 8, 9)
    call = call_of(x, 1, (5, 5), padding=(2, 2, 2, 2))
    check(followed(call, (("relu", (0,), ()),)))
    check(followed(call, (("clip", (0,), (("low", -0.5), ("high", 1.5))),)))
    assert bind(followed(call, (("tanh", (0,), ()),))) is None


def test_what_is_not_served():
    x = image(1, 32, 8, 8)
    assert bind(call_of(np.ascontiguousarray(x), 4, (3, 3))) is None
    assert bind(call_of(x, 32, (3, 3))) is None
    assert bind(call_of(x, 2, (3, 3))) is None
    assert bind(call_of(x, 4, (5, 5))) is None
    assert bind(call_of(image(1, 32, 3, 2000), 4, (3, 3))) is None
    call = call_of(x, 4, (3, 3))
    changing = Call(call.operator, call.attributes, call.inputs, call.outputs, 2, frozenset())
    assert bind(changing) is None
