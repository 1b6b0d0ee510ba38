"""Updates in the order of the rows that they come to, and those of one row in their own order.

A key is a row and an update's number, so no two are equal, and there is one order whatever blocks
do at the same time. A block sorts a run of keys in shared memory; runs are then merged. Both are
done by ranks: the place of a key is its place in its run and, of each other run, how many keys are
before it, which is found by bisection.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from soapstone.kernels.cuda.entry import DeviceArray, Launch
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, scratch
from soapstone.kernels.cuda.substrate.element import compiled, parameters
from soapstone.kernels.cuda.substrate.grid import THREADS
from soapstone.kernels.cuda.substrate.target import SIMULATED

RUN = 16 if SIMULATED else 1024  # keys that a block sorts: a power of four
# Merging many runs at once takes fewer launches, and more steps, which many keys are to be spared.
_WIDE, _NARROW, _MANY = 4, 2, 256 if SIMULATED else 1 << 17  # bits of ways; keys


def _placed(keys: str, way: int, length: str, total: str | None = None) -> list[str]:
    """Return the statements that make `place`, where `key`, at `at`, is among those of its runs.

    way: runs of `length` keys each that are merged; both are powers of two. total: of all keys,
    where not all runs are there.
    """
    others = range(1, way)

    def before(run: int, at: str) -> str:
        if total is None:
            return f"{keys}[{at}] < key"
        return f"(uint32({at}) < {total}) & ({keys}[min(uint32({at}), uint32({total} - 1))] < key)"

    lines = [f"own = uint32(at & uint32({length} - 1))"]
    for run in others:
        lines.append(f"run{run} = uint32((at ^ uint32({run} * {length})) - own)")
        lines.append(f"to{run} = run{run}")
    lines += [f"step = uint32({length} >> 1)", "while step > 0:"]
    for run in others:
        found = before(run, f"uint32(to{run} + step - 1)")
        lines.append(f"    to{run} = uint32(to{run} + (step if {found} else uint32(0)))")
    lines.append("    step = uint32(step >> 1)")
    lines.append(f"place = uint32(at - (at & uint32({way} * {length} - 1)) + own)")
    for run in others:
        found = before(run, f"to{run}")
        lines.append(f"place = uint32(place + to{run} - run{run} + (1 if {found} else 0))")
    return lines


def ordered(
    updates: Sequence[int],
    rows: int,
    row: Sequence[str],
    operands: Mapping[str, View],
    status: DeviceArray | None,
    beside: DeviceArray,
) -> tuple[View, tuple[Launch, ...]]:
    """Return keys, `row << 32 | number of the update`, and the launches that make and sort them.

    Those of updates without a row, and what fills the last run, come last, as of row `rows`.

    Args:
        updates: their shape; `row`: statements that make `row` of at_u0 and so on, -1 where there
            is none. operands: what these read; status: given as `status`. beside: an array where
            keys are to be.
    """
    count = math.prod(updates)
    runs = -(-count // RUN)
    total, names, values = runs * RUN, *parameters(operands)
    more = ["status"] if status is not None else []
    each = [(f"u{d}", extent) for d, extent in enumerate(updates)]
    lines = [
        f"def sorting(count, rows, keys, {', '.join([*names, *more])}):",
        f"    held = cuda.shared.array({RUN}, int64)",
        "    at = uint32(cuda.threadIdx.x)",
        f"    n = cuda.blockIdx.x * {RUN} + int64(at)",
        "    row = int64(-1)",
        "    if n < count:",
        *(indices("n", each, " " * 8) if each else []),
        *(" " * 8 + line for line in row),
        "    if row < 0 or row >= rows: row = rows",
        "    key = (row << 32) | n",
    ]
    length = 1
    while length < RUN:
        lines += [
            "    held[at] = key",
            "    cuda.syncthreads()",
            *("    " + line for line in _placed("held", 4, str(length))),
            "    cuda.syncthreads()",
            "    held[place] = key",
            "    cuda.syncthreads()",
            "    key = held[at]",
            "    cuda.syncthreads()",
        ]
        length *= 4
    lines.append("    keys[n] = key")
    keys = scratch(total, "int64", beside)
    arguments = (count, rows, keys.span, *values, *([status] if status is not None else []))
    launches = [Launch(compiled("\n".join(lines), "sorting"), (runs,), (RUN,), arguments)]
    bits, done = (runs - 1).bit_length(), 0
    most = _WIDE if total <= _MANY else _NARROW
    passes = -(-bits // most)
    for number in range(passes):
        own = -(-(bits - done) // (passes - number))
        merged = scratch(total, "int64", beside)
        text = [
            "def merging(total, length, keys, merged):",
            "    at = uint32(cuda.grid(1))",
            "    total = uint32(total)",
            "    length = uint32(length)",
            "    if at < total:",
            "        key = keys[at]",
            *("        " + line for line in _placed("keys", 1 << own, "length", "total")),
            "        merged[place] = key",
        ]
        grid = (-(-total // THREADS),)
        given = (total, RUN << done, keys.span, merged.span)
        launches.append(Launch(compiled("\n".join(text), "merging"), grid, (THREADS,), given))
        keys, done = merged, done + own
    return keys, tuple(launches)
