"""The gradient of a maximum or minimum: shared out among the elements that equal it.

Two passes over a chunk of neighbouring results: how many elements equal each, then what they get.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.intrinsics import f32p, i64p, stack
from soapstone.native.memory import pack
from soapstone.native.moves import row_at
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import memory_order, merge

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


# inner_kept: a run of `length` is kept, else reduced; step: along it; kept, reduced: walks of the
# other dims, of such ranks: of the former in dy, x, y and dx; of the latter, of so many rows, in x
# and dx.
_BLOCK = Fields(
    "dy x y dx inner_kept length step(dy x y dx) chunks kept_rank reduced_rank rows kept reduced"
)
_block_of = _BLOCK.at


@native("body")
def _reduce_max_grad(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    length, rows, kept = w.length, w.rows, i64p(w.kept)
    rank, down = w.reduced_rank, i64p(w.reduced)
    ties = f32p(stack(1024))
    for item in range(begin, end):
        row = item // w.chunks
        dy = w.dy + row_at(kept, w.kept_rank, 0, row)
        x = w.x + row_at(kept, w.kept_rank, 1, row)
        y = w.y + row_at(kept, w.kept_rank, 2, row)
        dx = w.dx + row_at(kept, w.kept_rank, 3, row)
        if w.inner_kept == 0:
            found = 0
            for r in range(rows):
                found += _count(x + row_at(down, rank, 0, r), w.step_x, y, length)
            share = f32p(dy)[0] / np.float32(max(found, 1))
            for r in range(rows):
                at = x + row_at(down, rank, 0, r)
                to = dx + row_at(down, rank, 1, r)
                _give(to, w.step_dx, at, w.step_x, y, share, length)
            continue
        column = item % w.chunks * _CHUNK
        n = min(_CHUNK, length - column)
        dy += column * w.step_dy
        x += column * w.step_x
        y += column * w.step_y
        dx += column * w.step_dx
        for j in range(n):
            ties[j] = np.float32(0.0)
        for r in range(rows):
            at = x + row_at(down, rank, 0, r)
            if w.step_x == 4 and w.step_y == 4:
                _count_each(ties, f32p(at), f32p(y), n)
                continue
            for j in range(n):
                equal = f32p(at + j * w.step_x)[0] == f32p(y + j * w.step_y)[0]
                ties[j] += np.float32(1.0) if equal else np.float32(0.0)
        for j in range(n):
            ties[j] = f32p(dy + j * w.step_dy)[0] / max(ties[j], np.float32(1.0))
        for r in range(rows):
            at = x + row_at(down, rank, 0, r)
            to = dx + row_at(down, rank, 1, r)
            if w.step_x == 4 and w.step_y == 4 and w.step_dx == 4:
                _give_each(f32p(to), f32p(at), f32p(y), ties, n)
                continue
            for j in range(n):
                equal = f32p(at + j * w.step_x)[0] == f32p(y + j * w.step_y)[0]
                f32p(to + j * w.step_dx)[0] = ties[j] if equal else np.float32(0.0)
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
    dims = [d for d in memory_order(x.strides) if x.shape[d] != 1]
    inner_kept = bool(dims) and dims[-1] not in axes
    kept, reduced = ([d for d in dims if (d in axes) == side] for side in (False, True))
    outer = merge(x.shape, [v.strides for v in arrays], kept)
    down = merge(x.shape, (x.strides, dx.strides), reduced)
    length, chunks = down.extents[-1], 1
    steps: tuple[int, ...] = (0, down.steps[0], 0, down.steps[1])
    if inner_kept:
        length, steps, outer = outer.extents[-1], outer.steps, outer.rows
        chunks = -(-length // _CHUNK)
    else:
        down = down.rows
    block = _BLOCK.pack(
        **dict(zip(("dy", "x", "y", "dx"), arrays)),
        inner_kept=inner_kept,
        length=length,
        step=steps,
        chunks=chunks,
        kept_rank=outer.rank,
        reduced_rank=down.rank,
        rows=down.size,
        kept=pack(outer),
        reduced=pack(down),
    )
    threads = useful_threads(call.threads, x.nbytes + dx.nbytes)
    return parallel_for(_reduce_max_grad, block, outer.size * chunks, threads)
