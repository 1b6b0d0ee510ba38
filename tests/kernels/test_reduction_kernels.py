"""Numba's reductions on every layout and axes, of long runs, special values and nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from helpers.kernel_calls import place, random, reference, run, served

from soapstone.kernels.cpu.reduction import reduce
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

NAMES = ("reduce_sum", "reduce_mean", "reduce_max", "reduce_min")


@pytest.mark.parametrize("shape", [(5,), (3, 4), (70, 130), (6, 20, 7, 9), (300, 20, 2), (1, 1)])
@pytest.mark.parametrize("layout", ["plain", "last", "tile", "steps"])
def test_reduce(shape: tuple[int, ...], layout: str) -> None:
    x = place(random(*shape), layout)
    if layout == "steps":
        x = random(*(2 * extent for extent in shape))[tuple(slice(None, None, 2) for _ in shape)]
    for rank in range(len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), rank):
            count = int(np.prod([x.shape[a] for a in axes]))
            at = {"axes": axes, "count": count}
            for name in NAMES:
                given = at | {"keepdims": True}
                assert "numba" in served(name, [x], given, threads=1, tolerance=2e-6 * count**0.5)
            assert "numba" in served("reduce_sum", [x], at, threads=2, tolerance=2e-6 * count**0.5)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_reduce_large(name: str, axes: tuple[int, ...]) -> None:
    x = random(700, 900)
    at = {"axes": axes, "keepdims": True, "count": int(np.prod([x.shape[a] for a in axes]))}
    for threads in (1, 2, 3):
        y, again = (np.zeros(reference(name, [x], at)[0].shape, np.float32) for _ in range(2))
        for made in (y, again):
            assert "numba" in served(name, [x], at, threads=threads, outputs=[made], tolerance=1e-3)
        assert (y == again).all()


def test_reduce_long_sum_keeps_precision() -> None:
    x = np.full((1 << 20,), 0.1, np.float32)
    assert "numba" in served("reduce_sum", [x], {"axes": (0,)}, threads=2, tolerance=1e-7)


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_keeps_nan_and_infinity(name: str, axis: int) -> None:
    x = random(40, 50)
    x[3, 7], x[5, 9], x[6, 1] = np.nan, np.inf, -np.inf
    assert "numba" in served(name, [x], {"axes": (axis,)}, tolerance=0.0)


def test_reduce_nothing() -> None:
    none = np.zeros((0, 4), np.float32)
    assert "numba" in served("reduce_sum", [none], {"axes": (0,)})
    assert "numba" in served("reduce_max", [none.T], {"axes": (0,), "keepdims": True})
    call = Call("reduce_max", {"axes": (0,)}, (none,), (np.zeros(4, np.float32),))
    assert reduce.reduce(call) is None and variants("reduce_max")


@pytest.mark.parametrize("size", [5, 64, 16_384, 40_000])
def test_scale_of_bytes_of_what_is_no_number(size: int) -> None:
    """The scale is 1 wherever the NaN is, and is of all parts where there is none."""
    (kernel,) = variants("byte_scale")
    x = random(size)
    scale, zero = np.zeros((), np.float32), np.zeros((), np.uint8)
    entry = kernel.bind(Call("byte_scale", {}, (x,), (scale, zero), threads=2))
    for place_of in (None, 0, size // 2, size - 1):
        values = random(size)
        values[size - 1], values[size // 3] = 9.0, -7.0
        if place_of is not None:
            values[place_of] = np.nan
        x[...] = values
        run(entry)
        expected = reference("byte_scale", [values], {})
        assert scale == np.float32(expected[0])
        assert place_of is not None or zero == expected[1]
