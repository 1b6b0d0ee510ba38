"""Kernels that serve some convolutions beside oneDNN's: depthwise, and 1x1 as products."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.kernel_calls import bound, near, place, random, reference, run, served

from soapstone.kernels.entry import Call

_DEPTHWISE = (  # image, window, stride, padding, dilation
    ((2, 3, 5, 5), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1)),
    ((3, 70, 9, 8), (5, 3), (2, 1), (2, 0, 1, 3), (1, 1)),
    ((1, 130, 7, 11), (2, 4), (1, 3), (0, 2, 0, 1), (2, 2)),
    ((2, 16, 3, 3), (7, 7), (2, 2), (3, 3, 3, 3), (1, 1)),
)


@pytest.mark.parametrize("layout", ["last", "last tile"])
@pytest.mark.parametrize("image, window, stride, padding, dilation", _DEPTHWISE)
def test_depthwise_weight_gradient(image, window, stride, padding, dilation, layout):
    channels, size = image[1], []
    for axis in range(2):
        room = image[2 + axis] + padding[axis] + padding[axis + 2]
        size.append((room - dilation[axis] * (window[axis] - 1) - 1) // stride[axis] + 1)
    x, dy = random(*image), random(image[0], channels, *size, seed=1)
    at = {"stride": stride, "padding": padding, "dilation": dilation, "groups": channels}
    assert served(
        *("conv2d_grad_weight", [x, dy], {**at, "kernel": window}),
        only="depthwise",
        layout=layout,
        tolerance=1e-3,
    )


def test_depthwise_declines_what_it_does_not_serve():
    at = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 4}
    x, dy, dw = random(1, 4, 5, 5), random(1, 4, 3, 3), np.empty((4, 1, 3, 3), np.float32)
    last = tuple(place(array, "last") for array in (x, dy))
    assert bound(Call("conv2d_grad_weight", at, last, (dw,)), "depthwise") is not None
    assert bound(Call("conv2d_grad_weight", at, (x, dy), (dw,)), "depthwise") is None
    bias = np.empty(4, np.float32)
    assert bound(Call("conv2d_grad_weight", at, last, (dw, bias)), "depthwise") is None
    two = (last[0], place(random(1, 8, 3, 3), "last"))  # two filters a channel
    eight = np.empty((8, 1, 3, 3), np.float32)
    assert bound(Call("conv2d_grad_weight", at, two, (eight,)), "depthwise") is None


@pytest.mark.onednn
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
def test_pointwise_gradients_are_products(stride):
    at = {"stride": stride, "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    x, w = random(2, 5, 8, 7), random(6, 5, 1, 1)
    dy = random(2, 6, -(-8 // stride[0]), -(-7 // stride[1]))
    by = {"only": "onednn_product", "layout": "last"}
    if stride == (1, 1):
        assert served("conv2d_grad_input", [dy, w], {**at, "size": (8, 7)}, **by)
    assert served("conv2d_grad_weight", [x, dy], {**at, "kernel": (1, 1)}, **by)


@pytest.mark.onednn
@pytest.mark.parametrize("samples", [1, 2])
def test_pixels_that_no_window_reaches_are_never_read(samples: int) -> None:
    """They may lie between an image's rows, which then need no copy, but not beyond its memory."""
    from soapstone.kernels.cpu.onednn import convolution  # which is not there without oneDNN

    whole = place(random(samples, 16, 14, 14), "last")
    x, w = whole[:, :, :13, :13], random(24, 16, 1, 1, seed=1)
    at = {"stride": (2, 2), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    at |= {"bias": False, "activation": None}
    expected = reference("conv2d", [x.copy(), w], at)[0].astype(np.float32)
    whole[:, :, 13], whole[..., 13] = np.nan, np.nan
    y = place(np.zeros_like(expected), "last")
    call = Call("conv2d", at, (x, w), (y,), 1, frozenset({1}))
    run(bound(call))
    near(y, expected)
    rows = 14 if samples > 1 else 13
    assert convolution._stored(call, x, w, y).shape == (samples, 16, rows, 14)
    padded = replace(call, attributes={**at, "padding": (0, 0, 1, 1)})
    assert convolution._stored(padded, x, w, y).shape == x.shape
    count = ((samples - 1) * 14 + rows) * 14 * 16 - 16  # the last pixel is not there
    short = np.ndarray(x.shape, np.float32, np.zeros(count, np.float32), strides=x.strides)
    assert convolution._stored(call, short, w, y).shape == x.shape
