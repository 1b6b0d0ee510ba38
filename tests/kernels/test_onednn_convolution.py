"""oneDNN convolutions against the reference, in every layout they accept."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from helpers.kernel_calls import LAYOUTS, served
from helpers.onednn_calls import (
    ACTIVATE,
    CONVOLUTIONS,
    bind,
    close,
    convolve,
    place,
    problem,
    random,
    run,
)

from soapstone.kernels.entry import Call

by_onednn = partial(served, only="onednn", tolerance=2e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_gradients(name: str, layout: str) -> None:
    x, w, at = problem(name)
    b, dy = random(w.shape[0], seed=2), random(*convolve(x, w, at).shape, seed=3)
    for operands, bias in (([x, w, b], True), ([x, w], False)):
        given = {**at, "bias": bias, "activation": None}
        assert by_onednn("conv2d", operands, given, layout=layout)
        given = {**at, "kernel": w.shape[2:], "bias": bias}
        assert by_onednn("conv2d_grad_weight", [x, dy], given, layout=layout)
    given = {**at, "size": x.shape[2:]}
    assert by_onednn("conv2d_grad_input", [dy, w], given, layout=layout)


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolution_activations(layout: str, activation: str | None) -> None:
    x, w, at = problem("uneven")
    given = {**at, "bias": False, "activation": activation}
    assert by_onednn("conv2d", [x, w], given, layout=layout)


def test_convolution_of_part_of_the_channels() -> None:
    """Tiles cut along the channels of a channels-last array."""
    x, w, at = problem("wide")
    whole = place(random(2, 80, 7, 7), "channels_last")
    tile = whole[:, 16:48]
    tile[...] = x
    out = place(np.zeros((2, 64, 7, 7), np.float32), "channels_last")
    y = out[:, 8:56]
    entry = bind(Call("conv2d", dict(bias=False, activation=None, **at), (tile, w), (y,)))
    assert entry is not None
    assert run(entry) == 0
    close(y, convolve(x, w, at))
    assert not out[:, :8].any() and not out[:, 56:].any()


def test_constant_weights_are_packed_once() -> None:
    x, w, at = problem("wide")
    w = w.copy()
    y = np.empty(convolve(x, w, at).shape, np.float32)
    call = Call("conv2d", dict(bias=False, **at), (x, w), (y,), constants=frozenset({1}))
    entry = bind(call)
    assert entry is not None
    first = convolve(x, w, at)
    for _ in range(3):
        y.fill(0)
        w.fill(0)  # the copy that was packed with the entry serves
        assert run(entry) == 0
        close(y, first)


@pytest.mark.parametrize("way", [(2, 2), (1, -1), (-2, 1)], ids=str)
def test_convolution_of_images_that_onednn_cannot_address(way: tuple[int, int]) -> None:
    """Every second pixel of an odd width: rows do not step over the last gap. Or backwards."""
    wide, w = random(1, 11, 11, 8), random(16, 8, 3, 3, seed=1)
    x = wide.transpose(0, 3, 1, 2)[:, :, :: way[0], :: way[1]]
    at = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
    attributes = {**at, "bias": False, "activation": None}
    y = np.zeros((1, 16, *x.shape[2:]), np.float32)
    for threads in (1, 2):
        entry = bind(Call("conv2d", attributes, (x, w), (y,), threads))
        assert entry is not None and run(entry) == 0
        close(y, convolve(x, w, at))


def test_convolution_refuses_what_it_cannot_do() -> None:
    x, w, at = problem("plain")
    y = np.empty((2, 7, 9, 8), np.float32)
    ok = dict(bias=False, activation=None, **at)
    assert bind(Call("conv2d", ok, (x, w), (y,))) is not None
    assert bind(Call("conv2d", ok, (x.astype(np.float64), w), (y,))) is None
    assert bind(Call("conv2d", ok, (x, w), (y[:, :, 1:],))) is None
    assert bind(Call("conv2d", {**ok, "activation": "swish"}, (x, w), (y,))) is None
    assert bind(Call("conv2d", {**ok, "groups": 2}, (x, w), (y,))) is None
    stretched = np.broadcast_to(x[:1], x.shape)
    assert bind(Call("conv2d", ok, (stretched, w), (y,))) is None
    negative = {**ok, "padding": (-1, 1, 1, 1)}
    assert bind(Call("conv2d", negative, (x, w), (np.empty((2, 7, 7, 8), np.float32),))) is None


@pytest.mark.parametrize("operator", ["conv2d", "conv2d_grad_input", "conv2d_grad_weight"])
def test_convolution_without_elements(operator: str) -> None:
    _, w, at = problem("plain")
    x, y = np.empty((0, 5, 9, 8), np.float32), np.empty((0, 7, 9, 8), np.float32)
    operands = {
        "conv2d": ((x, w), (y,)),
        "conv2d_grad_input": ((y, w), (x,)),
        "conv2d_grad_weight": ((x, y), (np.empty((0, 5, 3, 3), np.float32),)),
    }
    inputs, outputs = operands[operator]
    entry = bind(Call(operator, dict(bias=False, **at), inputs, outputs))
    assert entry is not None
    assert run(entry) == 0
