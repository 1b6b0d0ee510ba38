"""Calls of oneDNN kernels in every layout, and the convolutions that tests share."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
