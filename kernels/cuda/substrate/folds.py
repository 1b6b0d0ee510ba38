"""Folds of one value a thread, over a warp or over a block: every thread gets the result.

On a GPU they are shuffles, and one word a warp in shared memory. The simulator has no shuffles, so
there each thread's value goes through shared memory. All threads of a block must call them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, cuda, device

MOST = 1024  # threads of a block
EVERYONE = 0xFFFFFFFF


def _sum(a: Any, b: Any) -> Any:
    return a + b


def _prod(a: Any, b: Any) -> Any:
    return a * b


def _max(a: Any, b: Any) -> Any:
    return a if (a > b or a != a) else b


def _min(a: Any, b: Any) -> Any:
    return a if (a < b or a != a) else b


def _greatest(a: Any, b: Any) -> Any:
    return max(a, b)


# `greatest` is the greatest number: unlike `max` it passes over what is none, in one instruction.
COMBINE: dict[str, Any] = {
    name: device(f)
    for name, f in (
        *(("sum", _sum), ("prod", _prod), ("max", _max), ("min", _min)),
        ("greatest", _greatest),
    )
}


def identity(monoid: str, kind: str) -> str:
    """Return the text of a monoid's identity in a type."""
    if monoid in ("sum", "prod"):
        return f"{kind}({1 if monoid == 'prod' else 0})"
    if kind.startswith("float"):
        return f"{kind}({'inf' if monoid == 'min' else '-inf'})"
    info = np.iinfo(kind)
    return f"{kind}({int(info.max if monoid == 'min' else info.min)})"


def accumulator(dtype: str) -> str:
    """Return the type in which elements of a type are folded."""
    if kind_of(dtype) == "f":
        return "float64" if dtype == "float64" else "float32"
    return "uint64" if dtype == "uint64" else "int64"


def combined(total: str, value: str, monoid: str) -> str:
    """Return the statement that folds a value into a total."""
    if monoid in ("sum", "prod"):
        return f"{total} = {total} {'+' if monoid == 'sum' else '*'} {value}"
    if monoid == "greatest":
        return f"{total} = max({total}, {value})"
    sign = ">" if monoid == "max" else "<"
    return f"{total} = {value} if ({value} {sign} {total} or {value} != {value}) else {total}"


def over_warp(combine: Callable[[Any, Any], Any], lanes: int = WARP) -> Any:
    """Return the fold over the 32 threads of a warp, or over each `lanes` neighbours of them, a
    power of two: `fold(value, scratch)`."""

    def simulated(value: Any, scratch: Any) -> Any:
        thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        scratch[thread] = value
        cuda.syncthreads()
        first = thread // lanes * lanes
        total = scratch[first]
        for lane in range(1, lanes):
            total = combine(total, scratch[first + lane])
        cuda.syncthreads()
        return total

    def shuffled(value: Any, scratch: Any) -> Any:
        if lanes > 16:
            value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 16))
        if lanes > 8:
            value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 8))
        if lanes > 4:
            value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 4))
        if lanes > 2:
            value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 2))
        return combine(value, cuda.shfl_xor_sync(EVERYONE, value, 1))

    return device(simulated if SIMULATED else shuffled)


def over_block(combine: Callable[[Any, Any], Any]) -> Any:
    """Return the fold over the threads of a block of one row: `fold(value, scratch)`."""
    warp_fold = over_warp(combine)

    def simulated(value: Any, scratch: Any) -> Any:
        thread = cuda.threadIdx.x
        scratch[thread] = value
        cuda.syncthreads()
        total = scratch[0]
        for other in range(1, cuda.blockDim.x):
            total = combine(total, scratch[other])
        cuda.syncthreads()
        return total

    def shuffled(value: Any, scratch: Any) -> Any:
        value = warp_fold(value, scratch)
        warps = cuda.blockDim.x // WARP
        if warps > 1:
            lane = cuda.threadIdx.x % WARP
            if lane == 0:
                scratch[cuda.threadIdx.x // WARP] = value
            cuda.syncthreads()
            value = scratch[lane % warps]  # warps are a power of two: each counts equally often
            if warps > 16:
                value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 16))
            if warps > 8:
                value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 8))
            if warps > 4:
                value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 4))
            if warps > 2:
                value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 2))
            value = combine(value, cuda.shfl_xor_sync(EVERYONE, value, 1))
            cuda.syncthreads()
        return value

    return device(simulated if SIMULATED else shuffled)


def scan_over_block() -> Any:
    """Return the scan over the threads of a block of one row: the sum of the values of those before
    each, and of all, `before, total = scan_sum(value, zero, scratch)`."""

    def simulated(value: Any, zero: Any, scratch: Any) -> Any:
        thread = cuda.threadIdx.x
        scratch[thread] = value
        cuda.syncthreads()
        before = total = zero
        for other in range(cuda.blockDim.x):
            before = total if other == thread else before
            total = total + scratch[other]
        cuda.syncthreads()
        return before, total

    def shuffled(value: Any, zero: Any, scratch: Any) -> Any:
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        step = 1
        while step < WARP:
            other = cuda.shfl_up_sync(EVERYONE, value, step)
            if lane >= step:
                value = value + other
            step = step * 2
        if lane == WARP - 1:
            scratch[warp] = value
        cuda.syncthreads()
        before = total = zero
        for other_warp in range(cuda.blockDim.x // WARP):
            if other_warp == warp:
                before = total
            total = total + scratch[other_warp]
        cuda.syncthreads()
        other = cuda.shfl_up_sync(EVERYONE, value, 1)
        return (before + other if lane > 0 else before), total

    return device(simulated if SIMULATED else shuffled)


@cache
def lane_folds(lanes: int) -> dict[str, Any]:
    """Return the folds over each so many neighbours of a warp, by the names of `folds`."""
    return {f"fold_{name}": over_warp(combine, lanes) for name, combine in COMBINE.items()}


@cache
def folds(by_warp: bool) -> dict[str, Any]:
    """Return the folds of all monoids, by their names in kernels: `fold_sum` and so on."""
    make = over_warp if by_warp else over_block
    return {f"fold_{name}": make(combine) for name, combine in COMBINE.items()}


SCANS: dict[str, Any] = {"scan_sum": scan_over_block()}
