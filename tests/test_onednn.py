"""oneDNN kernels against small independent NumPy references, in every layout they accept."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from soapstone.kernels.cpu import onednn
from soapstone.kernels.cpu.onednn import library
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variants

LAYOUTS = ("plain", "channels_last", "tile", "channels_last_tile")


def run(entry: Entry) -> int:
    """Return the status of one execution of the entry."""
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(entry.address)
    return int(call(entry.block))


def bind(call: Call, name: str = "onednn") -> Entry | None:
    """Return what the named variant makes of the call."""
    (found,) = [v for v in variants(call.operator) if v.name == name]
    return found.bind(call)


def random(*shape: int, seed: int = 0) -> Array:
    """Return float32 standard normal numbers."""
    rng = np.random.default_rng(abs(hash((shape, seed))) % 2**32)
    return rng.standard_normal(shape).astype(np.float32)


def place(array: Array, layout: str) -> Array:
    """Return the array's contents in memory of the layout (tiles: inside a larger array)."""
    rank = array.ndim
    order = list(range(rank))
    if layout.startswith("channels_last") and rank == 4:
        order = [0, 2, 3, 1]
    margin = 3 if layout.endswith("tile") else 0
    sizes = [array.shape[axis] + margin for axis in order]
    store = np.full(sizes, np.nan, array.dtype)
    view = store[tuple(slice(margin // 2, margin // 2 + array.shape[axis]) for axis in order)]
    view = view.transpose(np.argsort(order))
    view[...] = array
    return view


def execute(
    operator: str,
    inputs: Sequence[Array],
    outputs: Sequence[tuple[int, ...]],
    layout: str = "plain",
    *,
    threads: int = 1,
    name: str = "onednn",
    **attributes: Any,
) -> list[Array]:
    """Return the outputs of an operator run twice on operands in the layout.

    Also checks that memory around a tile stays as it was.
    """
    placed = tuple(place(array, layout) if array.ndim else array for array in inputs)
    results = tuple(place(np.full(shape, 7, np.float32), layout) for shape in outputs)
    entry = bind(Call(operator, attributes, placed, results, threads), name)
    assert entry is not None, "the variant refused the call"
    for _ in range(2):
        assert run(entry) == 0
    for result in results:
        store = result
        while isinstance(store.base, np.ndarray):
            store = store.base
        assert np.isnan(store).sum() == store.size - result.size
    return [np.array(result) for result in results]


def close(actual: Array, expected: Array, tolerance: float = 2e-5) -> None:
    """Assert equality up to float32 rounding, relative to the largest value."""
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance * scale)


def erf(x: Array) -> Array:
    """Return the error function."""
    from math import erf as scalar

    return np.vectorize(scalar, otypes=[np.float64])(x)


ACTIVATE: dict[str | None, Callable[[Array], Array]] = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / np.sqrt(2))),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "tanh": np.tanh,
}


# ---------------------------------------------------------------- convolution


def windows(
    x: Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    fill: float = 0.0,
) -> Array:
    """Return the (n, c, oh, ow, kh, kw) windows of x, in float64."""
    top, left, bottom, right = padding
    spread = ((0, 0), (0, 0), (top, bottom), (left, right))
    padded = np.pad(x.astype(np.float64), spread, constant_values=fill)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilation)]
    view = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(2, 3))
    return view[:, :, :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolve(x: Array, w: Array, at: dict[str, Any]) -> Array:
    """Return the convolution, group by group."""
    groups, filters, channels = at["groups"], w.shape[0] // at["groups"], w.shape[1]
    view = windows(x, w.shape[2:], at["stride"], at["padding"], at["dilation"])
    parts = []
    for g in range(groups):
        inside = view[:, g * channels : (g + 1) * channels]
        parts.append(
            np.einsum("nchwij,ocij->nohw", inside, w[g * filters : (g + 1) * filters].astype(float))
        )
    return np.concatenate(parts, axis=1)


def convolve_gradients(x: Array, w: Array, dy: Array, at: dict[str, Any]) -> tuple[Array, Array]:
    """Return dx and dw by scattering each kernel position."""
    groups, filters, channels = at["groups"], w.shape[0] // at["groups"], w.shape[1]
    top, left, bottom, right = at["padding"]
    (n, c, h, width), (oh, ow) = x.shape, dy.shape[2:]
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


CONVOLUTIONS = {
    "plain": dict(x=(2, 5, 9, 8), w=(7, 5, 3, 3), padding=(1, 1, 1, 1)),
    "one_channel": dict(x=(3, 1, 12, 12), w=(6, 1, 5, 5), padding=(2, 2, 2, 2)),
    "wide": dict(x=(2, 32, 7, 7), w=(48, 32, 3, 3), padding=(1, 1, 1, 1)),
    "pointwise": dict(x=(2, 24, 6, 5), w=(40, 24, 1, 1)),
    "batch_1": dict(x=(1, 16, 9, 9), w=(16, 16, 3, 3), padding=(1, 1, 1, 1)),
    "one_pixel": dict(x=(4, 16, 3, 3), w=(8, 16, 3, 3)),
    "strided": dict(x=(2, 3, 15, 15), w=(16, 3, 7, 7), stride=(2, 2), padding=(3, 3, 3, 3)),
    "uneven": dict(x=(2, 6, 9, 10), w=(5, 6, 3, 2), stride=(2, 1), padding=(0, 1, 2, 0)),
    "dilated": dict(x=(2, 8, 11, 11), w=(8, 8, 3, 3), dilation=(2, 3), padding=(2, 3, 2, 3)),
    "groups": dict(x=(2, 12, 8, 8), w=(18, 4, 3, 3), groups=3, padding=(1, 1, 1, 1)),
    "depthwise": dict(x=(2, 16, 8, 8), w=(16, 1, 3, 3), groups=16, padding=(1, 1, 1, 1)),
    "multiplier": dict(x=(2, 4, 8, 8), w=(12, 1, 3, 3), groups=4, padding=(1, 0, 0, 1)),
}


def problem(name: str) -> tuple[Array, Array, dict[str, Any]]:
    """Return x, w and the attributes of a convolution case."""
    case = CONVOLUTIONS[name]
    at = dict(stride=(1, 1), padding=(0, 0, 0, 0), dilation=(1, 1), groups=1)
    at.update({k: v for k, v in case.items() if k in at})
    return random(*case["x"]), random(*case["w"], seed=1), at


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_and_gradients(name: str, layout: str) -> None:
    x, w, at = problem(name)
    expected = convolve(x, w, at)
    b = random(w.shape[0], seed=2)
    (y,) = execute(
        "conv2d", (x, w, b), [expected.shape], layout, bias=True, activation=None, **at
    )
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
    call = Call("conv2d", dict(constant_weights=True, bias=False, **at), (x, w), (y,))
    entry = bind(call)
    assert entry is not None
    first = convolve(x, w, at)
    for _ in range(3):
        y.fill(0)
        assert run(entry) == 0
        close(y, first)
        w.fill(0)  # the packed copy serves from the second run on


def test_convolution_refuses_what_it_cannot_do() -> None:
    x, w, at = problem("plain")
    y = np.empty((2, 7, 9, 8), np.float32)
    ok = dict(bias=False, activation=None, **at)
    assert bind(Call("conv2d", ok, (x, w), (y,))) is not None
    assert bind(Call("conv2d", ok, (x.astype(np.float64), w), (y,))) is None
    assert bind(Call("conv2d", ok, (x, w), (y[:, :, 1:],))) is None
    assert bind(Call("conv2d", {**ok, "activation": "swish"}, (x, w), (y,))) is None
    assert bind(Call("conv2d", {**ok, "groups": 2}, (x, w), (y,))) is None
    assert bind(Call("conv2d", ok, (x[:, :, :, ::-1], w), (y,))) is None
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


# ---------------------------------------------------------------- matrix products

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


@pytest.mark.parametrize("activation", ACTIVATE)
@pytest.mark.parametrize("layout", ["plain", "tile"])
def test_linear(layout: str, activation: str | None) -> None:
    w, b = random(20, 12, seed=1), random(12, seed=2)
    for shape in ((9, 20), (1, 20), (20,), (3, 4, 20), (2, 3, 4, 20)):
        x = random(*shape)
        product = x.astype(float) @ w
        (y,) = execute(
            "linear", (x, w), [product.shape], layout, bias=False, activation=activation
        )
        close(y, ACTIVATE[activation](product))
        for constant in (False, True):
            (y,) = execute(
                *("linear", (x, w, b), [product.shape], layout),
                bias=True, activation=activation, constant_weights=constant,
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
    at = dict(bias=False, activation=None)
    assert bind(Call("linear", {**at, "bias": True}, (x, w), (y,))) is None
    assert bind(Call("linear", at, (x, w.astype(np.float64)), (y,))) is None
    assert bind(Call("matmul", {}, (x, w), (np.empty((4, 7), np.float32),))) is None
    assert bind(Call("matmul", {}, (x, w), (np.broadcast_to(y[:1], y.shape),))) is None
    none = bind(Call("matmul", {}, (x[:0], w), (y[:0],)))
    assert none is not None
    assert run(none) == 0
