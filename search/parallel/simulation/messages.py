"""Messages as records in pools: what is sent, from where to where, and who waits for which.

A *message* is a copy from one device to another, or a collective among several. It is sent when the
last of the points that it waits for has ended, occupies its channels, and enables the points that
depend on it when it arrives.

Which points a message waits for, and which wait for it, is recorded only if a choice has room for
that: the total traffic follows from the messages alone (`Choice.messages_only`).
"""

from __future__ import annotations

from typing import Any

from soapstone.search.parallel.problem.arrays import (
    CHANNELS,
    GIVERS,
    HEADS,
    MESSAGES,
    NEEDS,
    OVERFLOW,
    SENDS,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, integer
from soapstone.search.parallel.problem.geometry import overlap
from soapstone.search.parallel.simulation.collectives import collective_ns, copy_ns

HERE = integer(-2)  # in place of a message: nothing has to be waited for


@compiled
def _take(c: Choice, pool: int, capacity: int) -> int:
    """Take one place of a pool; a full pool is recorded, and the caller enlarges it.

    Lists then get no more entries, since a place that is taken twice would close a cycle.
    """
    number = c.top[pool]
    if number + 1 >= capacity:
        c.top[OVERFLOW] = 1
    else:
        c.top[pool] = number + 1
    return int(number)


@compiled
def noted(c: Choice) -> bool:
    """Return whether it is recorded who waits for which message."""
    return bool(c.givers.shape[0] > 0)


@compiled
def new_message(c: Choice, busy: int, latency: int, nbytes: int, source: int, target: int) -> int:
    """Return the number of a new message, for which nothing waits yet."""
    number = _take(c, MESSAGES, c.messages.shape[0])
    row = c.messages[number]
    row.busy, row.latency, row.moved = busy, latency, nbytes
    row.source, row.target = source, target
    row.givers = row.channels = -1
    return number


@compiled
def wait_for(c: Choice, w: Any, message: int) -> None:
    """Make a message wait for a writer's point."""
    if not noted(c):
        return
    number = _take(c, GIVERS, c.givers.shape[0])
    if c.top[OVERFLOW]:
        return
    giver = c.givers[number]
    giver.row, giver.point, giver.next = w.row, w.point, c.messages[message].givers
    c.messages[message].givers = number


@compiled
def _link(c: Choice, links: Any, number: int, message: int, at: int) -> None:
    """Prepend a message to the list whose head is at a place."""
    if c.top[OVERFLOW]:
        return
    links[number].message, links[number].next = message, c.head[at]
    c.head[at] = number


@compiled
def send_last(p: Problem, c: Choice, message: int) -> None:
    """Assign a message to the last of the points that it waits for, which sends it."""
    if not noted(c):
        return
    number = c.messages[message].givers
    row, point, last = ZERO, ZERO, NONE
    while number >= 0:
        giver = c.givers[number]
        place = p.tasks[p.makers[giver.row]].place * p.devices.shape[0] + giver.point
        if place > last:
            row, point, last = giver.row, giver.point, place
        number = giver.next
    _link(c, c.sends, _take(c, SENDS, c.sends.shape[0]), message, c.send_at[row] + point)


@compiled
def send_from_all(
    p: Problem, c: Choice, s: Scratch, box: Any, rank: int, total: int, message: int, copy: int
) -> None:
    """Make a message wait for all points with a part of a box; the last of them sends it.

    copy: the number of the copy that is sent.
    """
    if not noted(c):
        return
    for i in range(total):
        if s.writers[i].number == copy and overlap(s.writers[i].box, box, rank):
            wait_for(c, s.writers[i], message)
    send_last(p, c, message)


@compiled
def depend(c: Choice, message: int, at: int) -> None:
    """Make a reader's point wait for a message. `at`: the place of the head of its list."""
    if not noted(c):
        return
    _link(c, c.needs, _take(c, NEEDS, c.needs.shape[0]), message, at)


@compiled
def new_collective(
    p: Problem, c: Choice, s: Scratch, nbytes: float, kind: int, need: float, moved: float
) -> int:
    """Make a collective among the marked devices."""
    devices = p.devices.shape[0]
    count = ZERO
    for device in range(devices):
        if s.marks[device].stamp == s.stamp[0]:
            s.marks[count].member = device
            count += 1
    busy = collective_ns(p, s.marks, count, nbytes, kind, need)
    receivers = NONE  # their bits, where it is their work
    for i in range(count):
        if p.devices[s.marks[i].member].receives:
            receivers = max(receivers, ZERO) | (ONE << s.marks[i].member)
    number = new_message(c, busy, ZERO, int(moved), NONE, receivers)
    c.messages[number].channels = c.top[CHANNELS]
    for i in range(count):
        pair = s.marks[i].member * devices + s.marks[(i + 1) % count].member
        for place in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            channel = p.route[place]
            if s.seen[channel] != s.stamp[0]:
                s.seen[channel] = s.stamp[0]
                c.channels[_take(c, CHANNELS, c.channels.shape[0])] = channel
    c.channels[_take(c, CHANNELS, c.channels.shape[0])] = -1
    return number


@compiled
def new_copy(p: Problem, c: Choice, nbytes: int, source: int, target: int) -> int:
    """Return a message from one device to another, or within one device, where it takes no time."""
    if source == target:
        return new_message(c, ZERO, ZERO, ZERO, source, target)
    busy, latency = copy_ns(p, source, target, nbytes)
    return new_message(c, busy, latency, nbytes, source, target)


@compiled
def new_lists(c: Choice, devices: int) -> int:
    """Allocate an empty list for each device; return the place of their heads, or -1."""
    if not noted(c):
        return int(NONE)
    at = c.top[HEADS]
    if at + devices > c.head.shape[0]:
        c.top[OVERFLOW] = 1
        at = ZERO
    else:
        c.top[HEADS] = at + devices
    for place in range(at, at + devices):
        c.head[place] = -1
    return int(at)


@compiled
def all_empty(c: Choice, first: int, devices: int) -> bool:
    """Return whether all of some lists are empty."""
    filled = ZERO
    for at in range(first, first + devices):
        filled += c.head[at] >= 0
    return bool(filled == 0)
