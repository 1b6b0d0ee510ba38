"""The times of messages: as measured among ranks, else by latency and bandwidth.

Without measurements a collective is the fastest of ring, tree and hierarchical.
"""

from __future__ import annotations

from math import ceil, log2

from soapstone.ir.tensor import Array
from soapstone.runtime.machines import exchanges
from soapstone.search.parallel.problem.arrays import MOST_EXPONENT, Problem
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, entry, integer

FROM_ONE, SUM = ZERO, ONE  # what a collective does
_COPY, _GATHER, _SCATTER, _SUM = (integer(number) for number in range(len(exchanges.KINDS)))
_LAST = integer(MOST_EXPONENT - 2)  # from where on a byte takes as long as there


@compiled
def _profiled_ns(p: Problem, kind: int, members: int, nbytes: float) -> int:
    """Return the measured time of an exchange, interpolated between 2^i bytes; -1: not known."""
    for row in range(p.messages.shape[0]):
        known = p.messages[row]
        if known.kind == kind and known.members == members:
            at, size = ZERO, 1.0
            while at < _LAST and 2.0 * size <= nbytes:
                at, size = at + ONE, 2.0 * size
            less, more = known.ns[at], known.ns[at + 1]
            return int(less + (more - less) * max(0.0, nbytes / size - 1.0))
    return int(NONE)


@entry
def copy_ns(p: Problem, source: int, target: int, nbytes: int) -> tuple[int, int]:
    """Return how long a copy occupies its channels, and its latency."""
    members = (ONE << p.devices[source].memory) | (ONE << p.devices[target].memory)
    known = _profiled_ns(p, _COPY, members, float(nbytes))
    if known >= 0:
        return known, ZERO
    busy = ceil(nbytes * (p.ns_per_byte[source, target] + p.read_ns[source, target]))
    return busy, p.latency_ns[source, target]


@entry
def collective_ns(
    p: Problem, marks: Array, count: int, nbytes: float, kind: int, need: float
) -> int:
    """Return the time of a collective.

    Args:
        marks: the members, in the first `count` places, ascending. nbytes: of the whole box.
        kind: FROM_ONE (broadcast or all-gather) or SUM. need: the most bytes that a member needs.
    """
    part = nbytes / count
    rest = max(0.0, need - part)
    members = ZERO
    for i in range(count):
        members |= ONE << p.devices[marks[i].member].memory
    asked = _GATHER if kind == FROM_ONE else _SUM if rest > 0.01 * part else _SCATTER
    known = _profiled_ns(p, asked, members, nbytes)
    if known >= 0:
        return known
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
