"""oneDNN kernels against small independent NumPy references, in every layout they accept."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from soapstone.kernels.cpu import onednn
from soapstone.kernels.cpu.onednn import convolution, library
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
    store = np.full(sizes, np.nan if array.dtype.kind == "f" else 99, array.dtype)
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
    constants: Sequence[int] = (),
    **attributes: Any,
) -> list[Array]:
    """Return the outputs of an operator run twice on operands in the layout.

    Also checks that memory around a tile stays as it was.
    """
    placed = tuple(place(array, layout) if array.ndim else array for array in inputs)
    results = tuple(place(np.full(shape, 7, np.float32), layout) for shape in outputs)
    call = Call(operator, attributes, placed, results, threads, frozenset(constants))
    entry = bind(call, name)
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


CONVOLUTIONS = {
    "plain": {"x": (2, 5, 9, 8), "w": (7, 5, 3, 3), "padding": (1, 1, 1, 1)},
    "one_channel": {"x": (3, 1, 12, 12), "w": (6, 1, 5, 5), "padding": (2, 2, 2, 2)},
    "wide": {"x": (2, 32, 7, 7), "w": (48, 32, 3, 3), "padding": (1, 1, 1, 1)},
    "pointwise": {"x": (2, 24, 6, 5), "w": (40, 24, 1, 1)},
    "batch_1": {"x": (1, 16, 9, 9), "w": (16, 16, 3, 3), "padding": (1, 1, 1, 1)},
    "one_pixel": {"x": (4, 16, 3, 3), "w": (8, 16, 3, 3)},
    "strided": {"x": (2, 3, 15, 15), "w": (16, 3, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3)},
    "uneven": {"x": (2, 6, 9, 10), "w": (5, 6, 3, 2), "stride": (2, 1), "padding": (0, 1, 2, 0)},
    "dilated": {
        "x": (2, 8, 11, 11),
        "w": (8, 8, 3, 3),
        "dilation": (2, 3),
        "padding": (2, 3, 2, 3),
    },
    "groups": {"x": (2, 12, 8, 8), "w": (18, 4, 3, 3), "groups": 3, "padding": (1, 1, 1, 1)},
    "depthwise": {"x": (2, 16, 8, 8), "w": (16, 1, 3, 3), "groups": 16, "padding": (1, 1, 1, 1)},
    "multiplier": {"x": (2, 4, 8, 8), "w": (12, 1, 3, 3), "groups": 4, "padding": (1, 0, 0, 1)},
}


def problem(name: str) -> tuple[Array, Array, dict[str, Any]]:
    """Return x, w and the attributes of a convolution case."""
    case = CONVOLUTIONS[name]
    at = {"stride": (1, 1), "padding": (0, 0, 0, 0), "dilation": (1, 1), "groups": 1}
    at.update({k: v for k, v in case.items() if k in at})
    return random(*case["x"]), random(*case["w"], seed=1), at


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


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(9, 20), (3, 4, 20), (1, 300)], ids=str)
def test_linear_gradients(shape: tuple[int, ...], layout: str) -> None:
    x, w = random(*shape), random(shape[-1], 12, seed=1)
    dy = random(*shape[:-1], 12, seed=2)
    expected = x.reshape(-1, shape[-1]).T.astype(float) @ dy.reshape(-1, 12)
    (dw,) = execute("linear_grad_weight", (x, dy), [w.shape], layout)
    close(dw, expected)
    if layout == "plain":
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


# ---------------------------------------------------------------- pooling

POOLS = {
    "halves": {"x": (2, 6, 8, 10), "kernel": (2, 2), "stride": (2, 2), "padding": (0, 0, 0, 0)},
    "overlap": {"x": (2, 20, 9, 9), "kernel": (3, 3), "stride": (2, 2), "padding": (0, 0, 0, 0)},
    "padded": {"x": (1, 5, 7, 6), "kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)},
    "uneven": {"x": (2, 16, 6, 7), "kernel": (2, 3), "stride": (1, 2), "padding": (0, 2, 1, 1)},
    "gaps": {"x": (2, 3, 7, 6), "kernel": (2, 1), "stride": (3, 2), "padding": (0, 0, 0, 0)},
    "one": {"x": (3, 4, 5, 5), "kernel": (1, 1), "stride": (1, 1), "padding": (0, 0, 0, 0)},
    "global": {"x": (2, 33, 4, 4), "kernel": (4, 4), "stride": (1, 1), "padding": (0, 0, 0, 0)},
}


def pool(name: str, fill: float = 0.0) -> tuple[Array, Array, dict[str, Any]]:
    """Return x, its (n, c, oh, ow, kh * kw) windows and the attributes of a pooling case."""
    at = dict(POOLS[name])
    x = random(*at.pop("x"))
    x[0, 0] = np.round(x[0, 0])  # ties
    view = windows(x, at["kernel"], at["stride"], at["padding"], (1, 1), fill)
    return x, view.reshape(*view.shape[:4], -1), at


def spread(parts: Array, shape: Sequence[int], at: dict[str, Any]) -> Array:
    """Return parts (n, c, oh, ow, kh * kw) of the windows added up where they lie in x."""
    top, left, bottom, right = at["padding"]
    n, c, h, w = shape
    total = np.zeros((n, c, h + top + bottom, w + left + right))
    kernel, stride = at["kernel"], at["stride"]
    for row, column in np.ndindex(parts.shape[2:4]):
        into = total[:, :, row * stride[0] :, column * stride[1] :]
        into[:, :, : kernel[0], : kernel[1]] += parts[:, :, row, column].reshape(n, c, *kernel)
    return total[:, :, top : top + h, left : left + w]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_max_pool(name: str, layout: str) -> None:
    x, view, at = pool(name, -np.inf)
    shape = view.shape[:4]
    (y,) = execute("max_pool2d", (x,), [shape], layout, indices=False, **at)
    np.testing.assert_array_equal(y, view.max(-1))
    placed = place(x, layout)
    y = place(np.zeros(shape, np.float32), layout)
    dense = layout.replace("channels_last_tile", "channels_last").replace("tile", "plain")
    index = place(np.zeros(shape, np.uint8), dense)
    entry = bind(Call("max_pool2d", dict(indices=True, **at), (placed,), (y, index)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(y, view.max(-1))
    np.testing.assert_array_equal(index, view.argmax(-1))
    dy = random(*shape, seed=1)
    dx = place(np.full(x.shape, 7, np.float32), layout)
    call = Call("max_pool2d_grad", dict(size=x.shape[2:], **at), (place(dy, layout), index), (dx,))
    entry = bind(call)
    assert entry is not None
    assert run(entry) == run(entry) == 0
    parts = np.where(np.arange(view.shape[-1]) == view.argmax(-1)[..., None], dy[..., None], 0)
    close(dx, spread(parts, x.shape, at))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", POOLS)
def test_max_pool_of_values_that_are_not_finite(name: str, layout: str) -> None:
    """NaN wins, and a window of -inf has its first element inside x as its maximum."""
    x, _, at = pool(name)
    x[:, :, :2, :3] = -np.inf
    x[0, 1, 3, 2:4] = np.nan
    x[-1, -1, 1, 1] = np.inf
    view = windows(x, at["kernel"], at["stride"], at["padding"], (1, 1), -np.inf)
    inside = windows(np.ones_like(x), at["kernel"], at["stride"], at["padding"], (1, 1)) > 0
    view, inside = (v.reshape(*v.shape[:4], -1) for v in (view, inside))
    y = place(np.zeros(view.shape[:4], np.float32), layout)
    dense = layout.replace("channels_last_tile", "channels_last").replace("tile", "plain")
    index = place(np.zeros(y.shape, np.uint8), dense)
    entry = bind(Call("max_pool2d", {"indices": True, **at}, (place(x, layout),), (y, index)))
    assert entry is not None
    assert run(entry) == 0
    largest = view.max(-1)
    np.testing.assert_array_equal(y, largest)
    winners = ((view == largest[..., None]) | np.isnan(view)) & inside
    np.testing.assert_array_equal(index, winners.argmax(-1))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("name", POOLS)
def test_average_pool(name: str, include_pad: bool, layout: str) -> None:
    x, view, at = pool(name)
    ones = windows(np.ones_like(x), at["kernel"], at["stride"], at["padding"], (1, 1))
    ones = ones.reshape(view.shape)
    count = view.shape[-1] if include_pad else ones.sum(-1)
    (y,) = execute("avg_pool2d", (x,), [y_shape := view.shape[:4]], layout,
                   include_pad=include_pad, threads=2, **at)  # fmt: skip
    close(y, view.sum(-1) / count)
    dy = random(*y_shape, seed=1)
    (dx,) = execute("avg_pool2d_grad", (dy,), [x.shape], layout,
                    include_pad=include_pad, size=x.shape[2:], **at)  # fmt: skip
    parts = np.broadcast_to((dy / count)[..., None], view.shape)
    close(dx, spread(parts, x.shape, at))


def test_average_pool_refuses_tiles_with_hidden_borders() -> None:
    x = random(1, 2, 6, 6)
    at = {"kernel": (3, 3), "stride": (1, 1), "padding": (1, 1, 1, 1), "include_pad": False}
    call = Call("avg_pool2d", {**at, "origin": (4, 0), "full_size": (12, 6)}, (x,), (x.copy(),))
    assert bind(call) is None


# ---------------------------------------------------------------- normalisation

IMAGES = [
    *((4, 6, 5, 3), (2, 32, 4, 4), (1, 1, 3, 3), (3, 17, 1, 1), (8, 5)),
    *((3, 4, 7), (2, 3, 2, 3, 4)),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", IMAGES, ids=str)
def test_batch_norm(shape: tuple[int, ...], layout: str) -> None:
    x = random(*shape) * 2 + 1
    c, over = shape[1], tuple(a for a in range(len(shape)) if a != 1)
    gamma, beta, old_mean = (random(c, seed=s) for s in (1, 2, 3))
    old_var = random(c, seed=4) ** 2
    epsilon, momentum, count = 1e-3, 0.1, x.size // c
    each = (c,) + (1,) * (len(shape) - 2)
    wide = x.astype(float)
    mean, var = wide.mean(over), wide.var(over)
    rstd = 1 / np.sqrt(var + epsilon)
    normal = (wide - mean.reshape(each)) * rstd.reshape(each)
    expected = normal * gamma.reshape(each) + beta.reshape(each)
    vectors = [random(c, seed=s) for s in range(5)]
    y = place(np.full(shape, 7, np.float32), layout)
    inputs = (place(x, layout), gamma, beta, old_mean, old_var)
    call = Call(
        "batch_norm", {"epsilon": epsilon, "momentum": momentum}, inputs, (y, *vectors[:4]), 2
    )
    entry = bind(call)
    assert entry is not None
    assert run(entry) == run(entry) == 0
    close(y, expected)
    unbiased = var * count / max(count - 1, 1)
    close(vectors[0], 0.9 * old_mean + 0.1 * mean)
    close(vectors[1], 0.9 * old_var + 0.1 * unbiased)
    close(vectors[2], mean)
    close(vectors[3], rstd)
    dy = random(*shape, seed=5)
    dgamma, dbeta = (dy * normal).sum(over), dy.sum(over, dtype=float)
    dx = dy - (dbeta.reshape(each) + normal * dgamma.reshape(each)) / count
    dx = dx * (gamma * rstd).reshape(each)
    out = place(np.full(shape, 7, np.float32), layout)
    grads = np.empty(c, np.float32), np.empty(c, np.float32)
    inputs = (place(dy, layout), place(x, layout), gamma, mean.astype("f4"), rstd.astype("f4"))
    entry = bind(Call("batch_norm_grad", {}, inputs, (out, *grads)))
    assert entry is not None
    assert run(entry) == run(entry) == 0
    close(out, dx, 1e-4)
    close(grads[0], dgamma, 1e-4)
    close(grads[1], dbeta, 1e-4)
    inputs = (place(x, layout), gamma, beta, old_mean, old_var)
    entry = bind(Call("batch_norm_inference", {"epsilon": epsilon}, inputs, (y,)))
    assert entry is not None
    assert run(entry) == 0
    scale = (gamma / np.sqrt(old_var.astype(float) + epsilon)).reshape(each)
    close(y, (wide - old_mean.reshape(each)) * scale + beta.reshape(each))


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(6, 33), (2, 3, 64), (5, 1), (1, 7), (2, 3, 4, 20)], ids=str)
def test_layer_norm(shape: tuple[int, ...], layout: str) -> None:
    x, c = random(*shape) * 2 + 1, shape[-1]
    gamma, beta = random(c, seed=1), random(c, seed=2)
    wide = x.astype(float)
    mean, var = wide.mean(-1), wide.var(-1)
    rstd = 1 / np.sqrt(var + 1e-5)
    normal = (wide - mean[..., None]) * rstd[..., None]
    y = place(np.full(shape, 7, np.float32), layout)
    made = np.empty(shape[:-1], np.float32), np.empty(shape[:-1], np.float32)
    entry = bind(Call("layer_norm", {"epsilon": 1e-5}, (place(x, layout), gamma, beta), (y, *made)))
    assert entry is not None
    assert run(entry) == run(entry) == 0
    close(y, normal * gamma + beta)
    close(made[0], mean)
    close(made[1], rstd)
    dy = random(*shape, seed=3)
    over = tuple(range(len(shape) - 1))
    scaled = dy * gamma.astype(float)
    centred = scaled - scaled.mean(-1, keepdims=True)
    dx = rstd[..., None] * (centred - normal * (scaled * normal).mean(-1, keepdims=True))
    out = place(np.full(shape, 7, np.float32), layout)
    grads = np.empty(c, np.float32), np.empty(c, np.float32)
    inputs = (place(dy, layout), place(x, layout), gamma, mean.astype("f4"), rstd.astype("f4"))
    entry = bind(Call("layer_norm_grad", {}, inputs, (out, *grads), 2))
    assert entry is not None
    assert run(entry) == run(entry) == 0
    close(out, dx, 1e-4 if c > 1 else 5e-3)
    close(grads[0], (dy * normal).sum(over), 1e-4)
    close(grads[1], dy.sum(over, dtype=float), 1e-4)


# ---------------------------------------------------------------- softmax, elementwise, copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7, 10), -1), ((7, 10), 0), ((2, 3, 4, 5), 1), ((2, 3, 4, 50), 3), ((1, 1), 1), ((9,), 0)],
    ids=str,
)
def test_softmax(shape: tuple[int, ...], axis: int, layout: str) -> None:
    x, dy = random(*shape) * 5, random(*shape, seed=1)
    shifted = x - x.max(axis, keepdims=True).astype(float)
    logs = shifted - np.log(np.exp(shifted).sum(axis, keepdims=True))
    y = np.exp(logs)
    for name, value in (("softmax", y), ("log_softmax", logs)):
        (actual,) = execute(name, (x,), [shape], layout, axis=axis)
        close(actual, value)
    given = (dy, y.astype("f4"))
    (dx,) = execute("softmax_grad", given, [shape], layout, axis=axis, threads=2)
    close(dx, y * (dy - (dy * y).sum(axis, keepdims=True)))
    given = (dy, logs.astype("f4"))
    (dx,) = execute("log_softmax_grad", given, [shape], layout, axis=axis)
    close(dx, dy - y * dy.sum(axis, keepdims=True))


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


ELEMENTWISE: dict[str, tuple[Callable[[Array], Array], dict[str, Any]]] = {
    "relu": (ACTIVATE["relu"], {}),
    "leaky_relu": (lambda x: np.where(x > 0, x, 0.2 * x), {"alpha": 0.2}),
    "gelu": (ACTIVATE["gelu"], {"approximate": "none"}),
    "gelu tanh": (_gelu_tanh, {"approximate": "tanh"}),
    "sigmoid": (ACTIVATE["sigmoid"], {}),
    "tanh": (np.tanh, {}),
    "exp": (np.exp, {}),
    "log": (lambda x: np.log(np.abs(x)), {}),
    "sqrt": (lambda x: np.sqrt(np.abs(x)), {}),
    "neg": (np.negative, {}),
    "affine": (lambda x: 3 * x - 2, {"scale": 3.0, "shift": -2.0}),
    "power": (lambda x: np.abs(x) ** 1.5, {"exponent": 1.5}),
}


@pytest.mark.parametrize("layout", ["plain", "channels_last"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, layout: str) -> None:
    function, at = ELEMENTWISE[name]
    operator = name.split()[0]
    x = random(2, 5, 7, 3)
    given = np.abs(x) if operator in ("log", "sqrt", "power") else x
    (y,) = execute(operator, (given,), [x.shape], layout, **at)
    close(y, function(given.astype(float)))
    reads_result = {"relu": True, "tanh": True, "sigmoid": True}
    if operator not in (*reads_result, "leaky_relu", "gelu"):
        return
    step = 1e-6
    wide = x.astype(float)
    slope = (function(wide + step) - function(wide - step)) / (2 * step)
    dy = random(*x.shape, seed=1)
    second = function(wide).astype("f4") if operator in reads_result else x
    (dx,) = execute(operator + "_grad", (dy, second), [x.shape], layout, **at)
    close(dx, dy * slope, 1e-4)


@pytest.mark.parametrize("operator", ["relu", "sigmoid", "tanh", "gelu", "leaky_relu"])
def test_not_a_number_is_never_hidden(operator: str) -> None:
    """A step predicated on a finite loss needs NaN to reach it."""
    x = random(4, 20)
    x[1, 3] = np.nan
    (y,) = (np.empty_like(x),)
    entry = bind(Call(operator, {"alpha": 0.01}, (x,), (y,)))
    assert entry is not None
    assert run(entry) == 0
    assert np.isnan(y[1, 3])
    w, z = random(20, 6), np.empty((4, 6), np.float32)
    image, kernel = x.reshape(1, 20, 2, 2), random(8, 20, 1, 1)
    entries = [bind(Call("linear", {"bias": False, "activation": operator}, (x, w), (z,)))]
    at = dict(bias=False, activation=operator, **problem("pointwise")[2])
    for layout in ("plain", "channels_last"):
        out = place(np.zeros((1, 8, 2, 2), np.float32), layout)
        entries.append(bind(Call("conv2d", at, (place(image, layout), kernel), (out,))))
        assert entries[-1] is not None
        assert run(entries[-1]) == 0
        assert np.isnan(out).any(axis=(2, 3)).all()
    assert entries[0] is not None
    assert run(entries[0]) == 0
    assert np.isnan(z[1]).all() and not np.isnan(z[0]).any()


def test_transpose_and_reshape() -> None:
    x = random(4, 5, 6, 7)
    (y,) = execute("transpose", (x,), [(4, 6, 7, 5)], "tile", permutation=(0, 2, 3, 1))
    np.testing.assert_array_equal(y, x.transpose(0, 2, 3, 1))
    (y,) = execute("transpose", (x,), [(7, 4, 5, 6)], threads=2, permutation=(3, 0, 1, 2))
    np.testing.assert_array_equal(y, x.transpose(3, 0, 1, 2))
    last = place(x, "channels_last")
    flat = np.empty((4, 210), np.float32)
    entry = bind(Call("reshape", {"shape": flat.shape}, (last,), (flat,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(flat, x.reshape(4, 210))
    back = place(np.zeros_like(x), "channels_last")
    entry = bind(Call("reshape", {"shape": x.shape}, (flat,), (back,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(back, x)
    ids = np.arange(12, dtype=np.int32).reshape(3, 4)
    out = np.empty((4, 3), np.int32)
    entry = bind(Call("transpose", {"permutation": (1, 0)}, (ids,), (out,)))
    assert entry is not None
    assert run(entry) == 0
    np.testing.assert_array_equal(out, ids.T)


# ---------------------------------------------------------------- entries


def test_two_threads_run_two_entries_of_one_primitive() -> None:
    x, w, at = problem("wide")
    expected = convolve(x, w, at)
    calls = [
        Call("conv2d", dict(bias=False, **at), (x * k, w), (np.empty(expected.shape, "f4"),))
        for k in (1, 2)
    ]
    entries = [bind(call) for call in calls]
    failures: list[int] = []

    def repeat(entry: Entry) -> None:
        failures.extend(status for _ in range(200) if (status := run(entry)))

    workers = [threading.Thread(target=repeat, args=(entry,)) for entry in entries]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures
    for k, call in zip((1, 2), calls):
        close(call.outputs[0], k * expected)


def test_equal_problems_share_a_primitive_and_repeat_to_the_bit() -> None:
    x, w, at = problem("groups")
    outs = [np.empty(convolve(x, w, at).shape, np.float32) for _ in range(2)]
    for out in outs:
        before = convolution._primitive.cache_info().misses
        entry = bind(Call("conv2d", dict(bias=False, **at), (x, w), (out,), 2))
        assert entry is not None
        assert run(entry) == 0
    assert convolution._primitive.cache_info().misses == before
    assert (outs[0] == outs[1]).all()


def test_the_library_is_named_in_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert onednn.available()
    assert onednn.version().startswith("3.")
    monkeypatch.setenv(library.VARIABLE, "/nowhere/libdnnl.so.3")
    library._attempt.cache_clear()
    try:
        assert not onednn.available()
        with pytest.raises(onednn.OneDnnError, match=r"/nowhere/libdnnl\.so\.3.*onednn-cpu-gomp"):
            library.library()
        monkeypatch.setenv(library.VARIABLE, ctypes.util.find_library("c") or "libc.so.6")
        library._attempt.cache_clear()
        with pytest.raises(onednn.OneDnnError, match="no function dnnl_"):
            library.library()
    finally:
        monkeypatch.undo()
        library._attempt.cache_clear()
    with pytest.raises(onednn.OneDnnError, match=r"matmul.*invalid arguments"):
        library.check(2, "matmul (3, 4)")
