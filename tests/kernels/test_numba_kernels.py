"""Numba's reductions, normalizations and pooling against formulas in float64, on every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from soapstone.kernels.cpu.normalization import batch_norm, layer_norm
from soapstone.kernels.cpu.pooling import variants as pooling
from soapstone.kernels.cpu.reduction import reduce
from soapstone.kernels.cpu.substrate import native
from soapstone.kernels.entry import Call

Array = np.ndarray[Any, Any]
LAYOUTS = ("plain", "last", "tile")


def run(
    bind: Callable[[Call], Any],
    inputs: list[Array],
    outputs: list[Array],
    threads: int = 1,
    operator: str = "",
    **attributes: Any,
) -> None:
    name = operator or bind.__name__
    entry = bind(Call(name, attributes, tuple(inputs), tuple(outputs), threads))
    assert entry is not None
    assert native.run(entry) == 0


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def laid_out(array: Array, layout: str) -> Array:
    """The same numbers: plain, channels-last, or as a tile of a larger array."""
    if layout == "last" and array.ndim > 2:
        made = np.zeros((array.shape[0], *array.shape[2:], array.shape[1]), array.dtype)
        view = np.moveaxis(made, -1, 1)
    elif layout == "tile":
        made = np.full([extent + 3 for extent in array.shape], 99, array.dtype)
        view = made[tuple(slice(1, -2) for _ in array.shape)]
    else:
        view = np.zeros_like(array)
    view[...] = array
    return view


def around(view: Array) -> int:
    """How many elements of the array that a tile was cut from still have their first value."""
    return int((view.base == 99).sum()) if view.base is not None else 0


# ------------------------------------------------------------------------------------- reduce
REDUCTIONS = {
    "reduce_sum": np.sum,
    "reduce_mean": np.mean,
    "reduce_max": np.max,
    "reduce_min": np.min,
}


def _reduce(x: Array, axes: tuple[int, ...], name: str, threads: int, keepdims: bool) -> Array:
    want = REDUCTIONS[name](x.astype(np.float64), axis=axes, keepdims=keepdims)
    y = np.full(want.shape, 9, np.float32)
    count = int(np.prod([x.shape[a] for a in axes]))
    run(reduce.reduce, [x], [y], threads, name, axes=axes, keepdims=keepdims, count=count)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6 * np.sqrt(count))
    return y


@pytest.mark.parametrize("shape", [(5,), (3, 4), (70, 130), (6, 20, 7, 9), (300, 20, 2), (1, 1)])
@pytest.mark.parametrize("layout", [*LAYOUTS, "steps"])
def test_reduce(shape: tuple[int, ...], layout: str) -> None:
    x = laid_out(normal(*shape), layout)
    if layout == "steps":
        x = normal(*(2 * extent for extent in shape))[tuple(slice(None, None, 2) for _ in shape)]
    for rank in range(len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), rank):
            for name in REDUCTIONS:
                _reduce(x, axes, name, 1, True)
            _reduce(x, axes, "reduce_sum", 2, False)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_reduce_large(axes: tuple[int, ...]) -> None:
    x = normal(700, 900)
    for name in REDUCTIONS:
        for threads in (1, 2, 3):
            first = _reduce(x, axes, name, threads, True)
            assert (first == _reduce(x, axes, name, threads, True)).all()


def test_reduce_long_sum_keeps_precision() -> None:
    x = np.full((1 << 20,), 0.1, np.float32)
    y = np.zeros((), np.float32)
    run(reduce.reduce, [x], [y], 2, "reduce_sum", axes=(0,), keepdims=False)
    np.testing.assert_allclose(y, x.astype(np.float64).sum(), rtol=1e-7)


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_keeps_nan_and_infinity(name: str, axis: int) -> None:
    x = normal(40, 50)
    x[3, 7], x[5, 9], x[6, 1] = np.nan, np.inf, -np.inf
    y = np.zeros(x.shape[1 - axis], np.float32)
    run(reduce.reduce, [x], [y], 1, name, axes=(axis,), keepdims=False)
    np.testing.assert_array_equal(y, REDUCTIONS[name](x, axis=axis))


def test_reduce_nothing() -> None:
    y = np.full((4,), 9, np.float32)
    run(reduce.reduce, [np.zeros((0, 4), np.float32)], [y], 1, "reduce_sum", axes=(0,))
    np.testing.assert_array_equal(y, 0)
    run(reduce.reduce, [np.zeros((4, 0), np.float32)], [y[:0]], 1, "reduce_max", axes=(0,))
    empty = Call("reduce_max", {"axes": (0,)}, (np.zeros((0, 4), np.float32),), (y,))
    assert reduce.reduce(empty) is None


# -------------------------------------------------------------------------------- layer norm
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(5,), (3, 1), (4, 17), (6, 5, 100), (2, 3, 64), (200, 768)])
def test_layer_norm(shape: tuple[int, ...], layout: str, threads: int) -> None:
    c, axes = shape[-1], tuple(range(len(shape) - 1))
    x, y = laid_out(normal(*shape) + 2, layout), laid_out(np.zeros(shape, np.float32), layout)
    gamma, beta = normal(c, seed=1), normal(c, seed=2)
    mean, rstd = np.zeros(shape[:-1], np.float32), np.zeros(shape[:-1], np.float32)
    run(layer_norm.layer_norm, [x, gamma, beta], [y, mean, rstd], threads, epsilon=1e-5)
    wide = x.astype(np.float64)
    m, v = wide.mean(-1), wide.var(-1)
    r = 1 / np.sqrt(v + 1e-5)
    np.testing.assert_allclose(mean, m, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(rstd, r, rtol=1e-5)
    h = (wide - m[..., None]) * r[..., None]
    np.testing.assert_allclose(y, h * gamma + beta, rtol=1e-5, atol=1e-4 if c == 1 else 2e-5)

    dy, dx = laid_out(normal(*shape, seed=3), layout), laid_out(np.zeros(shape, "f"), layout)
    dgamma, dbeta = np.zeros(c, np.float32), np.zeros(c, np.float32)
    given = [dy, x, gamma, mean, rstd]
    run(layer_norm.layer_norm_grad, given, [dx, dgamma, dbeta], threads)
    h = (wide - mean[..., None]) * rstd[..., None]
    g = dy.astype(np.float64) * gamma
    want = g - g.mean(-1, keepdims=True) - h * (g * h).mean(-1, keepdims=True)
    np.testing.assert_allclose(dx, want * rstd[..., None], rtol=1e-4, atol=1e-5 * rstd.max())
    np.testing.assert_allclose(dgamma, (dy * h).sum(axes), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dbeta, dy.astype(np.float64).sum(axes), rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------- batch norm
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(7, 5), (4, 17, 3), (2, 3, 5, 7), (3, 40, 9, 9), (16, 32, 20, 20), (2, 3, 2, 3, 4)]
)
def test_batch_norm(shape: tuple[int, ...], layout: str, threads: int) -> None:
    c, axes = shape[1], (0, *range(2, len(shape)))

    def by_channel(vector: Array) -> Array:
        return vector.astype(np.float64).reshape(1, c, *([1] * (len(shape) - 2)))

    x = laid_out(3 * normal(*shape) + 5, layout)
    y = laid_out(np.zeros(shape, np.float32), layout)
    gamma, beta, old_mean = (normal(c, seed=i) for i in range(1, 4))
    old_variance = np.abs(normal(c, seed=4)) + 0.5
    results = [np.zeros(c, np.float32) for _ in range(4)]
    given = [x, gamma, beta, old_mean, old_variance]
    run(batch_norm.batch_norm, given, [y, *results], threads, epsilon=1e-5, momentum=0.1)
    wide, count = x.astype(np.float64), x.size // c
    m, v = wide.mean(axes), wide.var(axes)
    r = 1 / np.sqrt(v + 1e-5)
    want = (wide - by_channel(m)) * by_channel(r * gamma) + by_channel(beta)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=2e-5)
    unbiased = v * count / (count - 1)
    wanted = (0.9 * old_mean + 0.1 * m, 0.9 * old_variance + 0.1 * unbiased, m, r)
    for result, expected in zip(results, wanted):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)

    run(batch_norm.batch_norm_inference, given, [y], threads, epsilon=1e-5)
    scale = by_channel(gamma / np.sqrt(old_variance.astype(np.float64) + 1e-5))
    want = (wide - by_channel(old_mean)) * scale + by_channel(beta)
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=2e-5)

    mean, rstd = results[2:]
    dy, dx = laid_out(normal(*shape, seed=5), layout), laid_out(np.zeros(shape, "f"), layout)
    dgamma, dbeta = np.zeros(c, np.float32), np.zeros(c, np.float32)
    given = [dy, x, gamma, mean, rstd]
    run(batch_norm.batch_norm_grad, given, [dx, dgamma, dbeta], threads)
    g, h = dy.astype(np.float64), (wide - by_channel(mean)) * by_channel(rstd)
    np.testing.assert_allclose(dgamma, (g * h).sum(axes), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dbeta, g.sum(axes), rtol=1e-5, atol=1e-4)
    want = g - g.mean(axes, keepdims=True) - h * (g * h).mean(axes, keepdims=True)
    want = want * by_channel(gamma * rstd)
    np.testing.assert_allclose(dx, want, rtol=1e-4, atol=2e-5 * rstd.max())


def test_batch_norm_of_a_far_mean() -> None:
    x = (normal(64, 3, 8, 8) + np.float32(1000)).astype(np.float32)
    y, ones, zeros = np.zeros_like(x), np.ones(3, np.float32), np.zeros(3, np.float32)
    results = [np.zeros(3, np.float32) for _ in range(4)]
    given = [x, ones, zeros, zeros, ones]
    run(batch_norm.batch_norm, given, [y, *results], epsilon=1e-5, momentum=0.1)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(results[3], 1 / np.sqrt(wide.var((0, 2, 3)) + 1e-5), rtol=1e-5)


# ----------------------------------------------------------------------------------- pooling
WINDOWS: list[tuple[tuple[int, int], tuple[int, int], tuple[int, int, int, int]]] = [
    ((2, 2), (2, 2), (0, 0, 0, 0)),
    ((3, 3), (2, 2), (1, 1, 1, 1)),
    ((3, 3), (1, 1), (1, 1, 1, 1)),
    ((3, 2), (2, 3), (0, 1, 1, 0)),
    ((5, 5), (1, 3), (2, 2, 2, 2)),
    ((1, 1), (2, 2), (0, 0, 0, 0)),
    ((2, 2), (3, 4), (0, 1, 0, 1)),
]


def _pool(x: Array, window: Any, include_pad: bool) -> tuple[Array, Array, Array, Array]:
    """Maxima, their positions, averages, and the divisors of these."""
    (kh, kw), (sh, sw), (top, left, bottom, right) = window
    n, c, h, w = x.shape
    oh, ow = (h + top + bottom - kh) // sh + 1, (w + left + right - kw) // sw + 1
    y, average = np.zeros((n, c, oh, ow)), np.zeros((n, c, oh, ow))
    index, divisor = np.zeros((n, c, oh, ow), np.uint8), np.zeros((oh, ow))
    for i, j in itertools.product(range(oh), range(ow)):
        h0, w0 = i * sh - top, j * sw - left
        a, b, e, f = max(h0, 0), max(w0, 0), min(h0 + kh, h), min(w0 + kw, w)
        part = x[:, :, a:e, b:f].reshape(n, c, -1)
        winner = part.argmax(-1)
        y[:, :, i, j] = part.max(-1)
        index[:, :, i, j] = (winner // (f - b) + a - h0) * kw + winner % (f - b) + b - w0
        divisor[i, j] = kh * kw if include_pad else (e - a) * (f - b)
        average[:, :, i, j] = part.sum(-1) / divisor[i, j]
    return y, index, average, divisor


def _pool_grad(dy: Array, index: Array, window: Any, size: tuple[int, int], divisor: Array) -> Any:
    (kh, kw), (sh, sw), (top, left, bottom, right) = window
    n, c, oh, ow = dy.shape
    dx = np.zeros((n, c, size[0] + top + bottom + kh, size[1] + left + right + kw))
    shared = dx.copy()
    for i, j, a, b in itertools.product(range(oh), range(ow), range(kh), range(kw)):
        hit = index[:, :, i, j] == a * kw + b
        dx[:, :, i * sh + a, j * sw + b] += np.where(hit, dy[:, :, i, j], 0)
        shared[:, :, i * sh + a, j * sw + b] += dy[:, :, i, j] / divisor[i, j]
    inside = (slice(None), slice(None), slice(top, top + size[0]), slice(left, left + size[1]))
    return dx[inside], shared[inside]


@pytest.mark.parametrize("include_pad", [True, False])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shape", [(2, 3, 7, 9), (1, 1, 5, 5), (2, 20, 6, 40), (1, 17, 9, 70)])
def test_pooling(shape: tuple[int, ...], window: Any, include_pad: bool) -> None:
    # Small integers make ties, which the first position wins.
    start = np.random.default_rng(1).integers(-4, 4, shape).astype(np.float32)
    y, index, average, divisor = _pool(start.astype(np.float64), window, include_pad)
    grad = normal(*y.shape)
    want, want_shared = _pool_grad(grad.astype(np.float64), index, window, shape[2:], divisor)
    kernel, stride, padding = window
    attributes = {"kernel": kernel, "stride": stride, "padding": padding}
    back = {**attributes, "size": shape[2:]}
    for layout, threads in (("plain", 1), ("plain", 2), ("last", 1), ("last", 2), ("tile", 1)):
        x, dy = laid_out(start, layout), laid_out(grad, layout)
        out = laid_out(np.zeros(y.shape, np.float32), layout)
        places = laid_out(np.zeros(y.shape, np.uint8), layout)
        dx = laid_out(np.full(shape, 7, np.float32), layout)
        border = around(dx), around(out)
        run(pooling.max_pool2d, [x], [out, places], threads, indices=True, **attributes)
        np.testing.assert_array_equal(out, y)
        np.testing.assert_array_equal(places, index)
        out[...] = 0
        run(pooling.max_pool2d, [x], [out], threads, indices=False, **attributes)
        np.testing.assert_array_equal(out, y)
        run(pooling.avg_pool2d, [x], [out], threads, include_pad=include_pad, **attributes)
        np.testing.assert_allclose(out, average, rtol=1e-5, atol=1e-6)
        run(pooling.max_pool2d_grad, [dy, places], [dx], threads, "max_pool2d_grad", **back)
        np.testing.assert_allclose(dx, want, rtol=1e-5, atol=1e-6)
        run(pooling.avg_pool2d_grad, [dy], [dx], threads, include_pad=include_pad, **back)
        np.testing.assert_allclose(dx, want_shared, rtol=1e-5, atol=1e-6)
        assert (around(dx), around(out)) == border


@pytest.mark.parametrize("layout", ["plain", "last"])
def test_pooling_nan_wins_and_padding_never_does(layout: str) -> None:
    start = np.full((1, 20, 4, 4), -np.inf, np.float32)
    start[0, :, 2, 3] = np.nan
    x = laid_out(start, layout)
    y = laid_out(np.zeros((1, 20, 3, 3), np.float32), layout)
    places = laid_out(np.zeros((1, 20, 3, 3), np.uint8), layout)
    attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": (1, 1, 1, 1)}
    run(pooling.max_pool2d, [x], [y, places], indices=True, **attributes)
    want = np.full((3, 3), -np.inf)
    want[1, 2] = np.nan
    np.testing.assert_array_equal(y[0, 0], want)
    np.testing.assert_array_equal(places[0, 19], [[3, 2, 2], [1, 0, 2], [1, 0, 0]])


def test_pooling_of_nothing_and_what_is_not_served() -> None:
    empty = np.zeros((0, 3, 4, 4), np.float32)
    attributes = {"kernel": (2, 2), "stride": (2, 2), "padding": (0, 0, 0, 0)}
    run(pooling.avg_pool2d, [empty], [empty[:, :, :2, :2]], include_pad=True, **attributes)
    wide = np.zeros((1, 1, 4, 4))
    call = Call("avg_pool2d", {**attributes, "include_pad": True}, (wide,), (wide[..., :2, :2],))
    assert pooling.avg_pool2d(call) is None
