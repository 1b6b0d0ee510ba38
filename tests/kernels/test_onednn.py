"""Other oneDNN kernels against small independent NumPy references, in every layout they accept."""

from __future__ import annotations

import ctypes
import ctypes.util
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onednn_calls import (
    LAYOUTS,
    bind,
    close,
    convolve,
    execute,
    place,
    problem,
    random,
    run,
    windows,
)

from soapstone.kernels.cpu import onednn
from soapstone.kernels.cpu.onednn import convolution, descriptors, library, matmul
from soapstone.kernels.cpu.substrate import native
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import declining

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


# ---------------------------------------------------------------- softmax, copies


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


@pytest.mark.parametrize("operator", ["relu", "sigmoid", "tanh", "gelu", "leaky_relu"])
def test_not_a_number_is_never_hidden(operator: str) -> None:
    """A step predicated on a finite loss needs NaN to reach it."""
    x = random(4, 20)
    x[1, 3] = np.nan
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


@pytest.mark.parametrize(
    "posts",
    [
        (descriptors.Activation(0x7FFF),),  # no such function
        (descriptors.Binary(0x7FFF, descriptors.Layout.dense((1, 4))),),
        (descriptors.Activation(descriptors.ALGORITHMS["linear"], 1.5),)
        * 40,  # more than a chain holds
    ],
)
def test_refused_steps_are_errors_that_name_the_function(
    posts: tuple[descriptors.Post, ...],
) -> None:
    with pytest.raises(onednn.OneDnnError, match=r"oneDNN dnnl_post_ops_append_\w+: "):
        descriptors.attributes(*posts)


def test_a_variant_whose_steps_are_refused_declines() -> None:
    """The alternative is a product without its activation, and nothing that says so."""
    a, b, y = (np.ones(shape, np.float32) for shape in ((3, 4), (4, 5), (3, 5)))
    flags = {"transpose_a": False, "transpose_b": False}
    call = Call("matmul", flags, (a, b), (y,))
    for steps, serves in (
        ([(descriptors.ALGORITHMS["linear"], 2.0)], True),
        ([(0x7FFF, 2.0)], False),
    ):
        chain = [descriptors.Activation(*step) for step in steps]
        entry = declining(lambda call, chain=chain: matmul.matmul(call, "first", chain))(call)
        assert (entry is not None) == serves
        if entry is not None:
            assert native.run(entry) == 0
            np.testing.assert_array_equal(y, np.full((3, 5), 8.0, np.float32))


def test_every_status_is_checked() -> None:
    """No function of the library returns a status that a caller could drop."""
    for name in library._FUNCTIONS:
        function = getattr(library.library(), name)
        assert name in library._RETURNS or function.errcheck is library._checked, name
