"""oneDNN convolutions against small independent NumPy references, in every layout they accept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onednn_calls import (
    ACTIVATE,
    CONVOLUTIONS,
    LAYOUTS,
    bind,
    close,
    convolve,
    execute,
    place,
    problem,
    random,
    run,
)

from soapstone.kernels.entry import Array, Call


def convolve_gradients(x: Array, w: Array, dy: Array, at: dict[str, Any]) -> tuple[Array, Array]:
    """Return dx and dw by scattering each kernel position."""
    groups, filters, channels = at["groups"], w.shape[0] // at["groups"], w.shape[1]
    top, left, bottom, right = at["padding"]
    (_n, _c, h, width), (oh, ow) = x.shape, dy.shape[2:]
    padded = np.pad(x.astype(float), ((0, 0), (0, 0), (top, bottom), (left, right)))
    dpadded, dw = np.zeros_like(padded), np.zeros(w.shape)
    for i in range(w.shape[2]):
        for j in range(w.shape[3]):
            rows = slice(i * at["dilation"][0], None, at["stride"][0])
            columns = slice(j * at["dilation"][1], None, at["stride"][1])
            for g in range(groups):
                ins = slice(g * channels, (g + 1) * channels)
                outs = slice(g * filters, (g + 1) * filters)
                seen = padded[:, ins, rows, columns][:, :, :oh, :ow]
                dw[outs, :, i, j] = np.einsum("nohw,nchw->oc", dy[:, outs].astype(float), seen)
                into = dpadded[:, ins, rows, columns][:, :, :oh, :ow]
                into += np.einsum("nohw,oc->nchw", dy[:, outs].astype(float), w[outs, :, i, j])
    return dpadded[:, :, top : top + h, left : left + width], dw


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_gradients(name: str, layout: str) -> None:
    x, w, at = problem(name)
    expected = convolve(x, w, at)
    b = random(w.shape[0], seed=2)
    (y,) = execute("conv2d", (x, w, b), [expected.shape], layout, bias=True, activation=None, **at)
    close(y, expected + b[:, None, None])
    dy = random(*expected.shape, seed=3)
    dx, dw = convolve_gradients(x, w, dy, at)
    (actual,) = execute("conv2d_grad_input", (dy, w), [x.shape], layout, size=x.shape[2:], **at)
    close(actual, dx)
    kernel = w.shape[2:]
    actual, db = execute(
        *("conv2d_grad_weight", (x, dy), [w.shape, b.shape], layout),
        kernel=kernel, bias=True, **at,
    )  # fmt: skip
    close(actual, dw)
    close(db, dy.sum((0, 2, 3), dtype=float))
    (actual,) = execute(
        "conv2d_grad_weight", (x, dy), [w.shape], layout, kernel=kernel, bias=False, **at
    )
    close(actual, dw)


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolution_activations(layout: str, activation: str | None) -> None:
    x, w, at = problem("uneven")
    expected = convolve(x, w, at)
    (y,) = execute(
        "conv2d", (x, w), [expected.shape], layout, bias=False, activation=activation, **at
    )
    close(y, ACTIVATE[activation](expected))


def test_convolution_two_threads() -> None:
    for name in ("wide", "groups", "strided"):
        x, w, at = problem(name)
        expected = convolve(x, w, at)
        dy = random(*expected.shape, seed=3)
        dx, dw = convolve_gradients(x, w, dy, at)
        common = dict(threads=2, **at)
        (y,) = execute("conv2d", (x, w), [expected.shape], "channels_last", bias=False, **common)
        close(y, expected)
        (got,) = execute("conv2d_grad_input", (dy, w), [x.shape], "plain", **common)
        close(got, dx)
        (got,) = execute("conv2d_grad_weight", (x, dy), [w.shape], "plain", bias=False, **common)
        close(got, dw)


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
