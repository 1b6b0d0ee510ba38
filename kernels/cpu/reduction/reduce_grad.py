"""The gradient of a maximum or minimum: shared out among the elements that equal it.

Two passes over a chunk of neighbouring results: how many elements equal each, then what they get.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import native, noop, parallel_for, routine, useful_threads
from soapstone.native.intrinsics import f32p, stack, words
from soapstone.native.memory import pack
from soapstone.native.moves import row_offset
from soapstone.native.walks import merge

_CHUNK = 256


@routine
def _count(x: int, step: int, y: int, n: int) -> Any:
    """How many of n floats at x equal the one at y."""
    found, wanted = 0, f32p(y)[0]
    if step == 4:
        for i in range(n):
            found += f32p(x)[i] == wanted
    else:
        for i in range(n):
            found += f32p(x + i * step)[0] == wanted
    return found


@routine
def _give(dx: int, dx_step: int, x: int, x_step: int, y: int, share: Any, n: int) -> None:
    wanted = f32p(y)[0]
    if dx_step == 4 and x_step == 4:
        to, a = f32p(dx), f32p(x)
        for i in range(n):
            to[i] = share if a[i] == wanted else np.float32(0.0)
    else:
        for i in range(n):
            equal = f32p(x + i * x_step)[0] == wanted
            f32p(dx + i * dx_step)[0] = share if equal else np.float32(0.0)


@routine
def _count_each(ties: Any, x: Any, y: Any, n: int) -> None:
    for j in range(n):
        ties[j] += np.float32(1.0) if x[j] == y[j] else np.float32(0.0)


@routine
def _give_each(dx: Any, x: Any, y: Any, shares: Any, n: int) -> None:
    for j in range(n):
        dx[j] = shares[j] if x[j] == y[j] else np.float32(0.0)


# Words: 0 dy, 1 x, 2 y, 3 dx, 4 whether a run is kept, 5 its length, 6.. steps of the four along
# it, 10 chunks of it, 11 and 12 ranks of the other kept and the other reduced dims, 13 rows of the
# latter, 14.. extents and strides of the four along kept dims; extents, strides of x and dx along
# reduced ones.
@native("body")
def _reduce_max_grad(block: Any, begin: int, end: int) -> int:
    w = words(block)
    length, kept, reduced, rows = w[5], w[11], w[12], w[13]
    down = 14 + 5 * kept
    ties = f32p(stack(1024))
    for item in range(begin, end):
        row = item // w[10]
        dy = w[0] + row_offset(w, 14, 14 + kept, kept, row)
        x = w[1] + row_offset(w, 14, 14 + 2 * kept, kept, row)
        y = w[2] + row_offset(w, 14, 14 + 3 * kept, kept, row)
        dx = w[3] + row_offset(w, 14, 14 + 4 * kept, kept, row)
        if w[4] == 0:
            found = 0
            for r in range(rows):
                found += _count(
                    x + row_offset(w, down, down + reduced, reduced, r), w[7], y, length
                )
            share = f32p(dy)[0] / np.float32(max(found, 1))
            for r in range(rows):
                at = x + row_offset(w, down, down + reduced, reduced, r)
                to = dx + row_offset(w, down, down + 2 * reduced, reduced, r)
                _give(to, w[9], at, w[7], y, share, length)
            continue
        column = item % w[10] * 256
        n = min(256, length - column)
        dy += column * w[6]
        x += column * w[7]
        y += column * w[8]
        dx += column * w[9]
        for j in range(n):
            ties[j] = np.float32(0.0)
        for r in range(rows):
            at = x + row_offset(w, down, down + reduced, reduced, r)
            if w[7] == 4 and w[8] == 4:
                _count_each(ties, f32p(at), f32p(y), n)
                continue
            for j in range(n):
                equal = f32p(at + j * w[7])[0] == f32p(y + j * w[8])[0]
                ties[j] += np.float32(1.0) if equal else np.float32(0.0)
        for j in range(n):
            ties[j] = f32p(dy + j * w[6])[0] / max(ties[j], np.float32(1.0))
        for r in range(rows):
            at = x + row_offset(w, down, down + reduced, reduced, r)
            to = dx + row_offset(w, down, down + 2 * reduced, reduced, r)
            if w[7] == 4 and w[8] == 4 and w[9] == 4:
                _give_each(f32p(to), f32p(at), f32p(y), ties, n)
                continue
            for j in range(n):
                equal = f32p(at + j * w[7])[0] == f32p(y + j * w[8])[0]
                f32p(to + j * w[9])[0] = ties[j] if equal else np.float32(0.0)
    return 0


@variant("reduce_max_grad", "numba")
def reduce_max_grad(call: Call) -> Entry | None:
    """dy where x equals y, divided by how many of them there are."""
    (dy, x, y), (dx,) = call.inputs, call.outputs
    if not is_float32(dy, x, y, dx):
        return None
    if dx.size == 0:
        return noop()
    axes = call.attributes["axes"]
    axes = tuple(range(x.ndim)) if axes is None else axes
    shape = [1 if d in axes else extent for d, extent in enumerate(x.shape)]
    arrays: list[Array] = [dy.reshape(shape), x, y.reshape(shape), dx]
    dims = sorted((d for d in range(x.ndim) if x.shape[d] != 1), key=lambda d: -abs(x.strides[d]))
    inner_kept = bool(dims) and dims[-1] not in axes
    kept, reduced = ([d for d in dims if (d in axes) == side] for side in (False, True))
    extents, strides = merge(
        [x.shape[d] for d in kept], [[v.strides[d] for d in kept] for v in arrays]
    )
    down, down_strides = merge(
        [x.shape[d] for d in reduced], [[v.strides[d] for d in reduced] for v in (x, dx)]
    )
    length, chunks = down[-1], 1
    steps: tuple[int, ...] = (0, down_strides[0][-1], 0, down_strides[1][-1])
    if inner_kept:
        length, steps = extents[-1], tuple(s[-1] for s in strides)
        chunks = -(-length // _CHUNK)
        extents, strides = extents[:-1] or (1,), tuple(s[:-1] or (0,) for s in strides)
    else:
        down, down_strides = down[:-1] or (1,), tuple(s[:-1] or (0,) for s in down_strides)
    block = pack(
        (*arrays, inner_kept, length, steps, chunks, len(extents), len(down), math.prod(down)),
        (extents, strides, down, down_strides),
    )
    threads = useful_threads(call.threads, x.nbytes + dx.nbytes)
    return parallel_for(_reduce_max_grad, block, math.prod(extents) * chunks, threads)
