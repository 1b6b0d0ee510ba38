"""What a collective takes: the fastest of ring, tree and hierarchical, by latency and bandwidth."""

from __future__ import annotations

from math import ceil, log2

from soapstone.search.parallel.problem.arrays import Array, Problem
from soapstone.search.parallel.problem.compiling import ONE, ZERO, entry

FROM_ONE, SUM = ZERO, ONE  # what a collective does


@entry
def collective_ns(
    p: Problem, marks: Array, count: int, nbytes: float, kind: int, need: float
) -> int:
    """Return the time of a collective: the fastest of ring, tree and hierarchical.

    Args:
        marks: their members are the devices, ascending. nbytes: of the whole box.
        kind: FROM_ONE (broadcast or all-gather) or SUM; need: the most bytes a member needs of it.
    """
    flat_lat, flat_byte, near_lat, near_byte, far_lat, far_byte = 0, 0.0, 0, 0.0, 0, 0.0
    groups, together, most = 1, 1, 1
    for i in range(count):
        a, b = marks[i].member, marks[(i + 1) % count].member
        lat, per = p.latency_ns[a, b], p.ns_per_byte[a, b]
        flat_lat, flat_byte = max(flat_lat, lat), max(flat_byte, per)
        if p.devices[a].computer == p.devices[b].computer:
            near_lat, near_byte = max(near_lat, lat), max(near_byte, per)
        else:
            far_lat, far_byte = max(far_lat, lat), max(far_byte, per)
        if i + 1 < count and p.devices[a].computer != p.devices[b].computer:
            groups += 1
            together = 1
        elif i + 1 < count:
            together += 1
        most = max(most, together)
    steps = count - 1
    levels = ceil(log2(count))
    if kind == FROM_ONE:
        best = steps * flat_lat + nbytes * flat_byte
        best = min(best, levels * (flat_lat + nbytes * flat_byte))
        if groups > 1 and most > 1:
            far = (groups - 1) * far_lat + nbytes * far_byte
            best = min(best, far + (most - 1) * near_lat + nbytes * near_byte)
        return int(best)
    part = nbytes / count
    rest = max(0.0, need - part)
    best = steps * flat_lat + steps * part * flat_byte
    if rest > 0.01 * part:
        best += steps * flat_lat + rest * flat_byte
    tree = levels * (flat_lat + nbytes * flat_byte)
    best = min(best, tree + (tree if rest > 0.01 * part else 0.0))
    if groups > 1 and most > 1:
        share = nbytes / most
        near = (most - 1) * (near_lat + share * near_byte)
        far = (groups - 1) * (far_lat + nbytes / groups * far_byte)
        both = near + far
        if rest > 0.01 * part:
            both += (groups - 1) * far_lat + rest * (groups - 1) / groups * far_byte
            both += (most - 1) * near_lat + rest * near_byte
        best = min(best, both)
    return int(best)
