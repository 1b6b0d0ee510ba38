"""Copies whose source and target have different innermost axes, through tiles in shared memory.

Threads side by side read what lies side by side in the source, and write what lies side by side in
the target; the tile in between has rows of an odd length, so that no two threads of a warp meet in
one bank.
"""

from __future__ import annotations

import math
from functools import cache

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.grid import joined
from soapstone.kernels.cuda.substrate.target import SIMULATED, Kernel, built

TILE, HIGH = (8, 4) if SIMULATED else (32, 8)  # elements along both axes; rows of threads


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `transposition` of a source text."""
    return built("transposition", source)


def transposition(source: View, target: View) -> DeviceEntry | None:
    """Return the entry that copies between views of one shape and type, or None.

    None where both have the same innermost axis, or one too short for tiles, or where a launch
    cannot have as many blocks.
    """
    if source.dtype != target.dtype or target.size == 0 or source.shape != target.shape:
        return None
    extents, (s, t) = joined((source, target), 1)
    last = len(extents) - 1
    near = next((axis for axis, step in enumerate(s) if step == 1), last)
    if near == last or t[last] != 1 or min(extents[near], extents[last]) < TILE:
        return None
    rest = [axis for axis in range(last) if axis != near]
    batch = [(str(axis), extents[axis]) for axis in rest] or [("none", 1)]
    count = math.prod(extent for _, extent in batch)
    grid = (-(-extents[near] // TILE), -(-extents[last] // TILE), count)
    if max(grid[1:]) > 65535:
        return None
    kind = "float16" if source.dtype == "float16" else wide(source.dtype)
    from_x = " + ".join(["o_x", *(f"at_{axis} * s_{axis}" for axis in rest)])
    to_y = " + ".join(["o_y", *(f"at_{axis} * t_{axis}" for axis in rest)])
    steps = [f"{side}_{axis}" for axis in rest for side in "st"]
    lines = [
        f"def transposition(x, o_x, y, o_y, wide, high, s_b, t_a, {', '.join([*steps, 'none'])}):",
        f"    tile = cuda.shared.array({TILE * (TILE + 1)}, {kind})",
        *indices("cuda.blockIdx.z", batch, "    "),
        f"    from_x = {from_x}",
        f"    to_y = {to_y}",
        "    column, row = cuda.threadIdx.x, cuda.threadIdx.y",
        f"    first_a, first_b = cuda.blockIdx.x * {TILE}, cuda.blockIdx.y * {TILE}",
        f"    for down in range(row, {TILE}, {HIGH}):",
        "        if first_a + column < wide and first_b + down < high:",
        f"            tile[down * {TILE + 1} + column] = "
        "x[from_x + first_a + column + (first_b + down) * s_b]",
        "    cuda.syncthreads()",
        f"    for down in range(row, {TILE}, {HIGH}):",
        "        if first_a + down < wide and first_b + column < high:",
        "            y[to_y + (first_a + down) * t_a + first_b + column] = "
        f"tile[column * {TILE + 1} + down]",
    ]
    arguments = [source.span, source.offset, target.span, target.offset]
    arguments += [extents[near], extents[last], s[last], t[near]]
    arguments += [side[axis] for axis in rest for side in (s, t)]
    kernel = compiled("\n".join(lines))
    return DeviceEntry((Launch(kernel, grid, (TILE, HIGH), (*arguments, 0)),))
