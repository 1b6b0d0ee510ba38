"""Copies whose source and target have different innermost axes, through tiles in shared memory.

Threads side by side read what lies side by side in the source, and write what lies side by side in
the target, 16 bytes at a time where it lies so; the tile in between has rows of an odd length, so
that few threads of a warp meet in one bank. Elements are moved as bits.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from soapstone.dtypes import learn
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, reinterpreted
from soapstone.kernels.cuda.substrate.grid import THREADS, joined
from soapstone.kernels.cuda.substrate.source import stored
from soapstone.kernels.cuda.substrate.target import SIMULATED, Kernel, built
from soapstone.kernels.cuda.substrate.vectors import VECTORS, aligned, load

TILE = 8 if SIMULATED else 32  # elements along both axes; twice as many where there are


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `transposition` of a source text."""
    return built("transposition", source, **VECTORS)


def transposition(source: View, target: View) -> DeviceEntry | None:
    """Return the entry that copies between views of one shape and type, or None.

    None where both have the same innermost axis, or one too short for tiles, or where a launch
    cannot have as many blocks.
    """
    if source.dtype != target.dtype or target.size == 0 or source.shape != target.shape:
        return None
    nbytes = np.dtype(learn(source.dtype)).itemsize
    source, target = (reinterpreted(view, f"uint{8 * nbytes}") for view in (source, target))
    extents, (s, t) = joined((source, target), 1)
    last = len(extents) - 1
    near = next((axis for axis, step in enumerate(s) if step == 1), last)
    if near == last or t[last] != 1 or min(extents[near], extents[last]) < TILE:
        return None
    tile = 2 * TILE if min(extents[near], extents[last]) >= 2 * TILE else TILE
    rest = [axis for axis in range(last) if axis != near]
    batch = [(str(axis), extents[axis]) for axis in rest] or [("none", 1)]
    count = math.prod(extent for _, extent in batch)
    grid = (-(-extents[near] // tile), -(-extents[last] // tile), count)
    if max(grid[1:]) > 65535:
        return None
    at_once = 4 if nbytes >= 4 else 8
    read = at_once if _together(source, at_once, extents[near], s, near) else 1
    written = at_once if _together(target, at_once, extents[last], t, last) else 1
    from_x = " + ".join(["o_x", *(f"at_{axis} * s_{axis}" for axis in rest)])
    to_y = " + ".join(["o_y", *(f"at_{axis} * t_{axis}" for axis in rest)])
    steps = [f"{side}_{axis}" for axis in rest for side in "st"]
    lines = [
        f"def transposition(x, o_x, y, o_y, wide, high, s_b, t_a, {', '.join([*steps, 'none'])}):",
        f"    tile = cuda.shared.array({tile * (tile + 1)}, {source.dtype})",
        *indices("cuda.blockIdx.z", batch, "    "),
        f"    from_x = {from_x}",
        f"    to_y = {to_y}",
        f"    first_a, first_b = cuda.blockIdx.x * {tile}, cuda.blockIdx.y * {tile}",
        *_split(tile, read),
        # Threads beyond the end read the last elements again, which nobody writes.
        f"    from_x += min(first_a + column, wide - {read})",
        f"    place = uint64(row * {tile + 1} + column)",
    ]
    own, body = [], []
    for number, down in enumerate(range(0, tile, THREADS * read // tile)):
        names = [f"x{number}_{lane}" for lane in range(read)]
        place = f"from_x + min(first_b + row + {down}, high - 1) * s_b"
        own.append(load(names, "x", place) if read > 1 else f"{names[0]} = x[{place}]")
        to = down * (tile + 1)
        body += [f"tile[place + uint64({to + lane})] = {n}" for lane, n in enumerate(names)]
    inside = THREADS * read // tile <= tile  # whether all threads have a row
    lines += [] if inside else [f"    if row < {tile}:"]
    lines += [("    " if inside else "        ") + line for line in (*own, *body)]
    lines += ["    cuda.syncthreads()", *_split(tile, written)]
    lines += ["    to_y += first_b + column", f"    place = uint64(column * {tile + 1} + row)"]
    for down in range(0, tile, THREADS * written // tile):
        steps_down = [lane * (tile + 1) + down for lane in range(written)]
        values = [f"tile[place + uint64({step})]" for step in steps_down]
        tests = [f"first_a + row + {down} < wide", "first_b + column < high"]
        tests += [] if THREADS * written // tile <= tile else [f"row < {tile}"]
        lines += [f"    if {' and '.join(tests)}:"]
        lines += ["        " + stored("y", f"to_y + (first_a + row + {down}) * t_a", values)]
    arguments = [source.span, source.offset, target.span, target.offset]
    arguments += [extents[near], extents[last], s[last], t[near]]
    arguments += [side[axis] for axis in rest for side in (s, t)]
    kernel = compiled("\n".join(lines))
    return DeviceEntry((Launch(kernel, grid, (THREADS,), (*arguments, 0)),))


def _together(view: View, width: int, extent: int, steps: tuple[int, ...], axis: int) -> bool:
    """Return whether so many elements along an axis can be moved at once."""
    others = [step for number, step in enumerate(steps) if number != axis]
    return extent % width == 0 and aligned(view, width, others)


def _split(tile: int, width: int) -> list[str]:
    """Return the statements that find a thread's place: so many columns of a row, from one on.

    Indices of a tile are unsigned, since of others the compiler asks whether they are negative.
    """
    across = tile // width
    return [
        f"    row, column = cuda.threadIdx.x // {across}, cuda.threadIdx.x % {across} * {width}"
    ]
