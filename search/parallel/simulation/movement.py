"""What has to move for one value: copies between devices, and collectives, compiled.

A *message* is a copy from one device to another, or a collective among several. It is sent when the
last of the points that it waits for has ended, takes its channels, and when it arrives the points
that depend on it have what they need. A tile that is already on a device
is not sent there again, whichever operator needs it.

Where three devices or more need one box, that is a broadcast or an all-gather; where the tiles of
several devices are partial results, it is a reduction: to one, scattered, or to all.
"""

from __future__ import annotations

from math import ceil

from soapstone.search.parallel.problem.arrays import (
    BOUNDS,
    BROUGHT,
    BYTES,
    CHANNEL,
    CHANNELS,
    CLASS,
    CUT,
    DEGREES,
    DEVICE,
    DIMS,
    FAN,
    GIVER,
    GIVERS,
    HEAD,
    HOLDING,
    KNOWN,
    MARK,
    MEMBER,
    MESSAGE,
    MOST_RANK,
    NEED,
    NEXT,
    NODE,
    NODES,
    OP,
    OPERANDS,
    OVERFLOW,
    PLACE,
    POINT,
    POINTS,
    RANK,
    READERS,
    ROW,
    SAME,
    SEND,
    SENT,
    WRITERS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import NONE, ZERO, compiled, integer, put
from soapstone.search.parallel.problem.geometry import inside, partial, tile, volume
from soapstone.search.parallel.simulation.collectives import FROM_ONE, SUM, collective_ns

HERE = integer(-2)  # in place of a message: nothing has to be waited for
ENOUGH = 3  # devices that need one box, for a collective


@compiled
def overlap(a: Array, b: Array, rank: int) -> int:
    """Return how many elements two boxes share."""
    result = 1
    for axis in range(rank):
        low = max(a[axis], b[axis])
        high = min(a[MOST_RANK + axis], b[MOST_RANK + axis])
        if low >= high:
            return 0
        result *= high - low
    return result


@compiled
def _equal(a: Array, b: Array, rank: int) -> bool:
    for axis in range(rank):
        if a[axis] != b[axis] or a[MOST_RANK + axis] != b[MOST_RANK + axis]:
            return False
    return True


@compiled
def _take(c: Choice, pool: int, capacity: int) -> int:
    """Take one place of a pool; a full pool is noted, and whoever called makes it larger.

    Lists get no more entries then: a place taken twice would join a list to itself.
    """
    number = c.top[pool]
    if number + 1 >= capacity:
        c.top[OVERFLOW] = 1
    else:
        c.top[pool] = number + 1
    found: int = number
    return found


@compiled
def _message(c: Choice, busy: int, latency: int, nbytes: int, source: int, target: int) -> int:
    number = _take(c, MESSAGE, c.messages.shape[0])
    row = c.messages[number]
    row[0], row[1], row[2], row[3], row[4], row[5], row[6] = (
        busy,
        latency,
        nbytes,
        source,
        target,
        -1,
        -1,
    )
    return number


@compiled
def _give(c: Choice, row: int, point: int, message: int) -> None:
    """Let a message wait for a writer's point."""
    number = _take(c, GIVER, c.givers.shape[0])
    if c.top[OVERFLOW]:
        return
    c.givers[number, 0] = row
    c.givers[number, 1] = point
    c.givers[number, 2] = c.messages[message, GIVERS]
    c.messages[message, GIVERS] = number


@compiled
def _sent(p: Problem, c: Choice, message: int) -> None:
    """Let a message be sent by the last of those that it waits for."""
    giver = c.messages[message, GIVERS]
    row, point, last = ZERO, ZERO, NONE
    while giver >= 0:
        task = p.makers[c.givers[giver, 0]]
        place = p.tasks[task, PLACE] * p.devices.shape[0] + c.givers[giver, 1]
        if place > last:
            row, point, last = c.givers[giver, 0], c.givers[giver, 1], place
        giver = c.givers[giver, 2]
    number = _take(c, SEND, c.sends.shape[0])
    if c.top[OVERFLOW]:
        return
    at = c.send_at[row] + point
    c.sends[number, 0] = message
    c.sends[number, 1] = c.head[at]
    c.head[at] = number


@compiled
def _depend(c: Choice, message: int, at: int) -> None:
    """Let a reader's point wait for a message; `at` is where the head of its list is."""
    number = _take(c, NEED, c.needs.shape[0])
    if c.top[OVERFLOW]:
        return
    c.needs[number, 0] = message
    c.needs[number, 1] = c.head[at]
    c.head[at] = number


@compiled
def _hold(c: Choice, s: Scratch, count: int, device: int, message: int, box: Array) -> int:
    """Note that a device has a box once a message has arrived; a full table is as a full pool."""
    if count >= s.holdings.shape[0]:
        c.top[OVERFLOW] = 1
        return count
    row = s.holdings[count]
    put(row, box, 2 * MOST_RANK)
    row[BROUGHT] = message
    row[NEXT] = s.marks[device, HOLDING]
    s.marks[device, HOLDING] = count
    return count + 1


@compiled
def _at_hand(p: Problem, c: Choice, row: int) -> bool:
    """Return whether a writer's results are final on its device as soon as it has ended.

    What comes after it there need not wait: devices run tasks in order.
    """
    task = p.makers[row]
    return bool(c.task_ns[task, p.devices.shape[0]] == 0)


@compiled
def _held(s: Scratch, device: int, box: Array, rank: int) -> int:
    """Return the message that brings a device a box, HERE if it needs none, or -1."""
    number = s.marks[device, HOLDING]
    while number >= 0:
        if inside(box, s.holdings[number], rank):
            return int(s.holdings[number, BROUGHT])
        number = s.holdings[number, NEXT]
    return -1


@compiled
def _collective(
    p: Problem, c: Choice, s: Scratch, nbytes: float, kind: int, need: float, moved: float
) -> int:
    """Make a collective among the marked devices."""
    devices = p.devices.shape[0]
    count = ZERO
    for device in range(devices):
        if s.marks[device, MARK] == s.stamp[0]:
            s.marks[count, MEMBER] = device
            count += 1
    busy = collective_ns(p, s.marks, count, nbytes, kind, need)
    number = _message(c, busy, ZERO, int(moved), NONE, NONE)
    c.messages[number, CHANNELS] = c.top[CHANNEL]
    for i in range(count):
        pair = s.marks[i, MEMBER] * devices + s.marks[(i + 1) % count, MEMBER]
        for place in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            channel = p.route[place]
            if s.seen[channel] != s.stamp[0]:
                s.seen[channel] = s.stamp[0]
                c.channels[_take(c, CHANNEL, c.channels.shape[0])] = channel
    c.channels[_take(c, CHANNEL, c.channels.shape[0])] = -1
    return number


@compiled
def _copy(p: Problem, c: Choice, nbytes: int, source: int, target: int) -> int:
    if source == target:
        return _message(c, ZERO, ZERO, ZERO, source, target)
    busy = ceil(nbytes * (p.ns_per_byte[source, target] + p.read_ns[source, target]))
    return _message(c, busy, p.latency_ns[source, target], nbytes, source, target)


@compiled
def _heads(c: Choice, devices: int) -> int:
    """Take empty lists, one a device; return where their heads begin."""
    at = c.top[HEAD]
    if at + devices > c.head.shape[0]:
        c.top[OVERFLOW] = 1
        at = ZERO
    else:
        c.top[HEAD] = at + devices
    for place in range(at, at + devices):
        c.head[place] = -1
    found: int = at
    return found


@compiled
def _none(c: Choice, first: int, devices: int) -> bool:
    """Return whether all of some lists are empty."""
    filled = ZERO
    for at in range(first, first + devices):
        filled += c.head[at] >= 0
    return bool(filled == 0)


@compiled
def connect(p: Problem, c: Choice, s: Scratch, value: int) -> None:
    """Make the messages of a value anew, at the top of the pools."""
    devices = p.devices.shape[0]
    for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
        c.send_at[row] = NONE
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        c.need_at[place] = NONE
    total, sums = _writers(p, c, s, value)
    for device in range(devices):
        s.marks[device, HOLDING] = -1
    if sums or p.values[value, FAN]:
        _reduce(p, c, s, value, total)
    elif total:
        _distribute(p, c, s, value, total)
    for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
        if c.send_at[row] >= 0 and _none(c, c.send_at[row], devices):
            c.send_at[row] = NONE
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        if c.need_at[place] >= 0 and _none(c, c.need_at[place], devices):
            c.need_at[place] = NONE


@compiled
def _writers(p: Problem, c: Choice, s: Scratch, value: int) -> tuple[int, bool]:
    """Collect the tiles of a value's writers; return how many, and whether they are partial.

    The last writers come first. Of those with the same tiles on the same devices only the last
    counts: devices run tasks in order, and add up what they have.
    """
    total, kept, sums = ZERO, ZERO, False
    for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
        operand = p.writers[row]
        node = p.operands[operand, NODE]
        op = p.nodes[node, OP]
        sums = sums or partial(p, c, operand)
        if p.values[value, FAN] and _at_hand(p, c, row):
            if _known(p, c, s, operand, ZERO, kept):
                continue
            kept += 1
        c.send_at[row] = _heads(c, p.devices.shape[0])
        for point in range(c.nodes[node, POINTS]):
            w = s.writers[total]
            tile(p, c, operand, point, w, s.at)
            w[ROW] = row
            w[POINT] = c.node_at[node, point]
            w[DEVICE] = c.placed[op, w[POINT]]
            total += 1
    return total, sums


@compiled
def _reader(p: Problem, c: Choice, s: Scratch, place: int) -> int:
    """Collect the tiles of one reader; return how many. POINT is its list of needs, or -1."""
    operand, task = p.readers[place, 0], p.readers[place, 1]
    node = p.operands[operand, NODE]
    op = p.nodes[node, OP]
    if task >= 0 and c.need_at[place] < 0:
        c.need_at[place] = _heads(c, p.devices.shape[0])
    for point in range(c.nodes[node, POINTS]):
        r = s.readers[point]
        tile(p, c, operand, point, r, s.at)
        at = c.node_at[node, point]
        r[DEVICE] = c.placed[op, at]
        r[POINT] = c.need_at[place] + at if task >= 0 else -1
    return int(c.nodes[node, POINTS])


@compiled
def _same(p: Problem, c: Choice, operand: int, other: int) -> bool:
    """Return whether two operands, of equal operators, have equal tiles on equal devices."""
    node, before = p.operands[operand, NODE], p.operands[other, NODE]
    op, first = p.nodes[node, OP], p.nodes[before, OP]
    if (
        c.nodes[node, POINTS] != c.nodes[before, POINTS]
        or p.operators[op, CLASS] != p.operators[first, CLASS]
        or p.operators[op, NODES + 1] - p.operators[op, NODES]
        != p.operators[first, NODES + 1] - p.operators[first, NODES]
        or p.lists[p.operators[op, NODES]] - node != p.lists[p.operators[first, NODES]] - before
        or p.nodes[node, OPERANDS] - operand != p.nodes[before, OPERANDS] - other
        or c.cuts[op, CUT] != c.cuts[first, CUT]
    ):
        return False
    for i in range(DEGREES + p.nodes[node, DIMS]):
        if c.nodes[node, i] != c.nodes[before, i]:
            return False
    for point in range(c.nodes[node, POINTS]):
        if c.placed[op, c.node_at[node, point]] != c.placed[first, c.node_at[before, point]]:
            return False
    if c.cuts[op, CUT] >= 0:
        for i in range(BOUNDS, BOUNDS + c.operators[op, DEGREES + c.cuts[op, CUT]] + 1):
            if c.cuts[op, i] != c.cuts[first, i]:
                return False
    return True


@compiled
def _known(p: Problem, c: Choice, s: Scratch, operand: int, waits: int, count: int) -> bool:
    """Return whether an operand is the same as one of the last kept ones; else keep it."""
    for i in range(max(ZERO, count - KNOWN), count):
        kept = s.known[i % KNOWN]
        if kept[1] == waits and _same(p, c, operand, kept[0]):
            return True
    s.known[count % KNOWN, 0] = operand
    s.known[count % KNOWN, 1] = waits
    return False


@compiled
def _distribute(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Bring final tiles to their readers."""
    rank = p.values[value, RANK]
    held, kept = ZERO, ZERO
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        # The first to read a tile on a device waits for it; those after it find it there.
        if _known(p, c, s, p.readers[place, 0], 1 if p.readers[place, 1] >= 0 else 0, kept):
            continue
        kept += 1
        count = _reader(p, c, s, place)
        for j in range(count):
            r = s.readers[j]
            r[SAME] = -2
            if volume(r, rank) == 0:
                continue
            found = _held(s, r[DEVICE], r, rank)
            if found == NONE:
                w = s.writers[j if j < total else 0]
                if w[DEVICE] == r[DEVICE] and inside(r, w, rank):
                    found = HERE
                    if not _at_hand(p, c, w[ROW]):
                        found = _message(c, ZERO, ZERO, ZERO, r[DEVICE], r[DEVICE])
                        _give(c, w[ROW], w[POINT], found)
                        _sent(p, c, found)
                    held = _hold(c, s, held, r[DEVICE], found, w)
            if found == NONE:
                r[SAME] = -1
            elif found >= 0 and r[POINT] >= 0:
                _depend(c, found, r[POINT])
        for j in range(count):
            if s.readers[j, SAME] != -1:
                continue
            s.readers[j, SAME] = j
            s.stamp[0] += 1
            s.marks[s.readers[j, DEVICE], MARK] = s.stamp[0]
            devices = 1
            for other in range(j + 1, count):
                r = s.readers[other]
                if r[SAME] == -1 and _equal(s.readers[j], r, rank):
                    r[SAME] = j
                    if s.marks[r[DEVICE], MARK] != s.stamp[0]:
                        s.marks[r[DEVICE], MARK] = s.stamp[0]
                        devices += 1
            if devices >= ENOUGH:
                held = _gather(p, c, s, value, j, count, total, held)
            else:
                for other in range(j, count):
                    if s.readers[other, SAME] == j:
                        held = _fetch(p, c, s, value, other, total, held)


@compiled
def _gather(
    p: Problem, c: Choice, s: Scratch, value: int, j: int, count: int, total: int, held: int
) -> int:
    """One box for many devices: a broadcast or an all-gather."""
    rank, item = p.values[value, RANK], p.values[value, BYTES]
    box = s.readers[j]
    nbytes = float(volume(box, rank) * item)
    wanted = 0.0
    for device in range(p.devices.shape[0]):
        if s.marks[device, MARK] == s.stamp[0]:
            wanted += nbytes
    for i in range(total):
        shared = overlap(s.writers[i], box, rank)
        if shared and s.marks[s.writers[i, DEVICE], MARK] == s.stamp[0]:
            wanted -= shared * item
    for i in range(total):
        if overlap(s.writers[i], box, rank):
            s.marks[s.writers[i, DEVICE], MARK] = s.stamp[0]
    message = _collective(p, c, s, nbytes, FROM_ONE, nbytes, wanted)
    for i in range(total):
        if overlap(s.writers[i], box, rank):
            _give(c, s.writers[i, ROW], s.writers[i, POINT], message)
    _sent(p, c, message)
    for other in range(j, count):
        r = s.readers[other]
        if r[SAME] == j:
            if r[POINT] >= 0:
                _depend(c, message, r[POINT])
            held = _hold(c, s, held, r[DEVICE], message, box)
    return held


@compiled
def _fetch(p: Problem, c: Choice, s: Scratch, value: int, j: int, total: int, held: int) -> int:
    """What one point lacks, from every device that has some of it."""
    rank, item = p.values[value, RANK], p.values[value, BYTES]
    r, box = s.readers[j], s.box[3]
    device = r[DEVICE]
    for i in range(total):
        w = s.writers[i]
        shared = overlap(w, r, rank)
        if shared == 0:
            continue
        for axis in range(rank):
            box[axis] = max(w[axis], r[axis])
            box[MOST_RANK + axis] = min(w[MOST_RANK + axis], r[MOST_RANK + axis])
        found, known = NONE, ZERO
        number = s.marks[device, HOLDING]
        while number >= 0:
            there = overlap(box, s.holdings[number], rank)
            if there == shared:
                found = s.holdings[number, BROUGHT]
                break
            known = max(known, there)
            number = s.holdings[number, NEXT]
        if found == NONE:
            if w[DEVICE] == device and _at_hand(p, c, w[ROW]):
                found = HERE
            else:
                nbytes = ZERO if w[DEVICE] == device else (shared - known) * item
                found = _copy(p, c, nbytes, w[DEVICE], device)
                _give(c, w[ROW], w[POINT], found)
                _sent(p, c, found)
            held = _hold(c, s, held, device, found, box)
        if found >= 0 and r[POINT] >= 0:
            _depend(c, found, r[POINT])
    return held


@compiled
def _reduce(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Sum partial tiles and bring the sums to their readers, one message a distinct tile."""
    rank, item = p.values[value, RANK], p.values[value, BYTES]
    first_row = p.values[value, WRITERS]
    for q in range(total):
        box = s.writers[q]
        if box[ROW] != first_row:
            break
        known = volume(box, rank) == 0
        for other in range(q):
            known = known or _equal(box, s.writers[other], rank)
        if known:
            continue
        s.stamp[0] += 1
        holders = ZERO
        for i in range(total):
            w = s.writers[i]
            if overlap(w, box, rank) and s.marks[w[DEVICE], MARK] != s.stamp[0]:
                s.marks[w[DEVICE], MARK] = s.stamp[0]
                holders += 1
        if holders == 1:
            _passed_on(p, c, s, value, q, total)
            continue
        nbytes, need, wanted = float(volume(box, rank) * item), 0.0, 0.0
        for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
            for j in range(_reader(p, c, s, place)):
                shared = overlap(box, s.readers[j], rank)
                if shared:
                    s.marks[s.readers[j, DEVICE], MARK] = s.stamp[0]
                    need = max(need, float(shared * item))
                    wanted += shared * item
        most = nbytes * p.devices.shape[0]
        moved = (holders - 1) * nbytes + max(0.0, min(wanted, most) - nbytes)
        message = _collective(p, c, s, nbytes, SUM, need, moved)
        for i in range(total):
            if overlap(s.writers[i], box, rank):
                _give(c, s.writers[i, ROW], s.writers[i, POINT], message)
        _sent(p, c, message)
        for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
            for j in range(_reader(p, c, s, place)):
                r = s.readers[j]
                if r[POINT] >= 0 and overlap(box, r, rank):
                    _depend(c, message, r[POINT])


@compiled
def _passed_on(p: Problem, c: Choice, s: Scratch, value: int, q: int, total: int) -> None:
    """Partial tiles of one device: summed there, then copied to each device that reads them."""
    rank, item = p.values[value, RANK], p.values[value, BYTES]
    box = s.writers[q]
    home = box[DEVICE]
    s.stamp[0] += 1
    for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
        for j in range(_reader(p, c, s, place)):
            r = s.readers[j]
            shared = overlap(box, r, rank)
            if shared == 0:
                continue
            if r[DEVICE] == home and _at_hand(p, c, box[ROW]):
                continue
            mark = s.marks[r[DEVICE]]
            if mark[MARK] != s.stamp[0]:
                mark[MARK] = s.stamp[0]
                mark[SENT] = _copy(p, c, shared * item, home, r[DEVICE])
                for i in range(total):
                    if overlap(s.writers[i], box, rank):
                        _give(c, s.writers[i, ROW], s.writers[i, POINT], mark[SENT])
                _sent(p, c, mark[SENT])
            if r[POINT] >= 0:
                _depend(c, mark[SENT], r[POINT])


__all__ = ["connect", "overlap"]
