"""What has to move for one value: copies between devices, and collectives, compiled.

A *message* is a copy from one device to another, or a collective among several. It is sent when the
last of the points that it waits for has ended, takes its channels, and when it arrives the points
that depend on it have what they need. A tile that is already on a device
is not sent there again, whichever operator needs it.

Where three devices or more need one box, that is a broadcast or an all-gather; where the tiles of
several devices are partial results, it is a reduction: to one, scattered, or to all.

Which points a message waits for, and which wait for it, is noted if a choice has room for that:
what all messages take together follows from the messages alone (`Choice.messages_only`). Tiles that
are laid ready (`Scratch.ready`) are taken as they are.
"""

from __future__ import annotations

from typing import Any

from soapstone.search.parallel.problem.arrays import (
    CHANNELS,
    GIVERS,
    HEADS,
    KNOWN,
    MESSAGES,
    NEEDS,
    OVERFLOW,
    SENDS,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, integer, span
from soapstone.search.parallel.problem.geometry import inside, partial, tile, volume
from soapstone.search.parallel.simulation.collectives import (
    FROM_ONE,
    SUM,
    collective_ns,
    copy_ns,
)

HERE = integer(-2)  # in place of a message: nothing has to be waited for
ENOUGH = 3  # devices that need one box, for a collective


@compiled
def overlap(a: Any, b: Any, rank: int) -> int:
    """Return how many elements two boxes share."""
    result = 1
    for axis in range(rank):
        low, high = max(a.low[axis], b.low[axis]), min(a.high[axis], b.high[axis])
        if low >= high:
            return 0
        result *= high - low
    return result


@compiled
def _equal(a: Any, b: Any, rank: int) -> bool:
    for axis in range(rank):
        if a.low[axis] != b.low[axis] or a.high[axis] != b.high[axis]:
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
    return int(number)


@compiled
def _noted(c: Choice) -> bool:
    """Return whether it is noted who waits for which message."""
    return bool(c.givers.shape[0] > 0)


@compiled
def _message(c: Choice, busy: int, latency: int, nbytes: int, source: int, target: int) -> int:
    number = _take(c, MESSAGES, c.messages.shape[0])
    row = c.messages[number]
    row.busy, row.latency, row.moved = busy, latency, nbytes
    row.source, row.target = source, target
    row.givers = row.channels = -1
    return number


@compiled
def _give(c: Choice, w: Any, message: int) -> None:
    """Let a message wait for a writer's point."""
    if not _noted(c):
        return
    number = _take(c, GIVERS, c.givers.shape[0])
    if c.top[OVERFLOW]:
        return
    giver = c.givers[number]
    giver.row, giver.point, giver.next = w.row, w.point, c.messages[message].givers
    c.messages[message].givers = number


@compiled
def _link(c: Choice, links: Any, number: int, message: int, at: int) -> None:
    """Put a message before the list whose head is at a place."""
    if c.top[OVERFLOW]:
        return
    links[number].message, links[number].next = message, c.head[at]
    c.head[at] = number


@compiled
def _sent(p: Problem, c: Choice, message: int) -> None:
    """Let a message be sent by the last of those that it waits for."""
    if not _noted(c):
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
def _from_all(
    p: Problem, c: Choice, s: Scratch, box: Any, rank: int, total: int, message: int, copy: int
) -> None:
    """Let a message wait for all that has a part of a box, and be sent by the last of them.

    copy: the number of the one that is sent.
    """
    if not _noted(c):
        return
    for i in range(total):
        if s.writers[i].number == copy and overlap(s.writers[i].box, box, rank):
            _give(c, s.writers[i], message)
    _sent(p, c, message)


@compiled
def _depend(c: Choice, message: int, at: int) -> None:
    """Let a reader's point wait for a message; `at` is where the head of its list is."""
    if not _noted(c):
        return
    _link(c, c.needs, _take(c, NEEDS, c.needs.shape[0]), message, at)


@compiled
def _hold(c: Choice, s: Scratch, count: int, device: int, message: int, box: Any) -> int:
    """Note that a device has a box once a message has arrived; a full table is as a full pool."""
    if count >= s.holdings.shape[0]:
        c.top[OVERFLOW] = 1
        return count
    row = s.holdings[count]
    row.box = box
    row.message, row.next = message, s.marks[device].holding
    s.marks[device].holding = count
    return count + 1


@compiled
def _at_hand(p: Problem, c: Choice, row: int) -> bool:
    """Return whether a writer's results are final on its device as soon as it has ended.

    What comes after it there need not wait: devices run tasks in order.
    """
    task = p.makers[row]
    return bool(c.task_ns[task, p.devices.shape[0]] == 0)


@compiled
def _held(s: Scratch, device: int, box: Any, rank: int) -> int:
    """Return the message that brings a device a box, HERE if it needs none, or -1."""
    number = s.marks[device].holding
    while number >= 0:
        if inside(box, s.holdings[number].box, rank):
            return int(s.holdings[number].message)
        number = s.holdings[number].next
    return -1


@compiled
def _collective(
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
    number = _message(c, busy, ZERO, int(moved), NONE, receivers)
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
def _copy(p: Problem, c: Choice, nbytes: int, source: int, target: int) -> int:
    if source == target:
        return _message(c, ZERO, ZERO, ZERO, source, target)
    busy, latency = copy_ns(p, source, target, nbytes)
    return _message(c, busy, latency, nbytes, source, target)


@compiled
def _heads(c: Choice, devices: int) -> int:
    """Take empty lists, one a device; return where their heads begin, -1 if nothing is noted."""
    if not _noted(c):
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
    for row in span(p.values[value].writers):
        c.send_at[row] = NONE
    for place in span(p.values[value].readers):
        c.need_at[place] = NONE
    total, sums = _writers(p, c, s, value)
    for device in range(devices):
        s.marks[device].holding = -1
    if sums or p.values[value].is_sum:
        _reduce(p, c, s, value, total)
    elif total:
        _distribute(p, c, s, value, total)
    for row in span(p.values[value].writers):
        if c.send_at[row] >= 0 and _none(c, c.send_at[row], devices):
            c.send_at[row] = NONE
    for place in span(p.values[value].readers):
        if c.need_at[place] >= 0 and _none(c, c.need_at[place], devices):
            c.need_at[place] = NONE


@compiled
def _writers(p: Problem, c: Choice, s: Scratch, value: int) -> tuple[int, bool]:
    """Collect the tiles of a value's writers; return how many, and whether they are partial.

    The last writers come first. Of those with the same tiles on the same devices only the last
    counts: devices run tasks in order, and add up what they have.
    """
    total, kept, sums = ZERO, ZERO, False
    for row in span(p.values[value].writers):
        operand = p.writers[row]
        node = p.operands[operand].node
        op = p.nodes[node].operator
        if p.values[value].is_sum and _at_hand(p, c, row):
            if _known(p, c, s, operand, ZERO, kept):
                continue
            kept += 1
        c.send_at[row] = _heads(c, p.devices.shape[0])
        ready = s.ready_at[operand]
        if ready >= 0:
            sums = sums or s.ready_sums[ready] > 0
            for point in range(s.ready_points[ready]):
                w = s.writers[total]
                _take_ready(s, ready, point, p.values[value].rank, w)
                w.row, w.point, w.number = row, point, ZERO
                total += 1
            continue
        sums = sums or partial(p, c, operand)
        for point in range(c.nodes[node].points):
            w = s.writers[total]
            tile(p, c, operand, point, w.box, s.at)
            w.row, w.number = row, ZERO
            w.point = c.node_at[node, point]
            w.device = c.placed[op, w.point]
            total += 1
    return total, sums


@compiled
def _take_ready(s: Scratch, row: int, point: int, rank: int, made: Any) -> None:
    """Write a tile that is laid ready."""
    made.device = s.ready[row, point, 0]
    for axis in range(rank):
        made.box.low[axis] = s.ready[row, point, 1 + 2 * axis]
        made.box.high[axis] = s.ready[row, point, 2 + 2 * axis]


@compiled
def _reader(p: Problem, c: Choice, s: Scratch, place: int) -> int:
    """Collect the tiles of one reader; return how many. `point` is its list of needs, or -1."""
    operand, task = p.readers[place].operand, p.readers[place].task
    node = p.operands[operand].node
    op = p.nodes[node].operator
    ready = s.ready_at[operand]
    if ready >= 0:
        rank = p.values[p.operands[operand].value].rank
        for point in range(s.ready_points[ready]):
            _take_ready(s, ready, point, rank, s.readers[point])
            s.readers[point].point = -1
        return int(s.ready_points[ready])
    if task >= 0 and c.need_at[place] < 0:
        c.need_at[place] = _heads(c, p.devices.shape[0])
    for point in range(c.nodes[node].points):
        r = s.readers[point]
        tile(p, c, operand, point, r.box, s.at)
        at = c.node_at[node, point]
        r.device = c.placed[op, at]
        r.point = c.need_at[place] + at if task >= 0 else -1
    return int(c.nodes[node].points)


@compiled
def _same(p: Problem, c: Choice, operand: int, other: int) -> bool:
    """Return whether two operands, of equal operators, have equal tiles on equal devices."""
    node, before = p.operands[operand].node, p.operands[other].node
    op, first = p.nodes[node].operator, p.nodes[before].operator
    mine, theirs, split = p.operators[op], p.operators[first], c.operators[op]
    if (
        c.nodes[node].points != c.nodes[before].points
        or mine.class_ != theirs.class_
        or mine.nodes.end - mine.nodes.begin != theirs.nodes.end - theirs.nodes.begin
        or p.lists[mine.nodes.begin] - node != p.lists[theirs.nodes.begin] - before
        or p.nodes[node].operands.begin - operand != p.nodes[before].operands.begin - other
        or split.cut != c.operators[first].cut
        or c.nodes[node].replicated != c.nodes[before].replicated
    ):
        return False
    for dim in range(p.nodes[node].dims):
        if c.nodes[node].degrees[dim] != c.nodes[before].degrees[dim]:
            return False
    for point in range(c.nodes[node].points):
        if c.placed[op, c.node_at[node, point]] != c.placed[first, c.node_at[before, point]]:
            return False
    if split.cut >= 0:
        for i in range(split.degrees[split.cut] + 1):
            if c.cuts[op, i] != c.cuts[first, i]:
                return False
    return True


@compiled
def _known(p: Problem, c: Choice, s: Scratch, operand: int, waits: int, count: int) -> bool:
    """Return whether an operand is the same as one of the last kept ones; else keep it."""
    for i in range(max(ZERO, count - KNOWN), count):
        kept = s.known[i % KNOWN]
        if kept.waits == waits and _same(p, c, operand, kept.operand):
            return True
    kept = s.known[count % KNOWN]
    kept.operand, kept.waits = operand, waits
    return False


@compiled
def _numbered(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> bool:
    """Number the copies of each final tile of a value; return whether there are several."""
    operand, rank, several = p.writers[p.values[value].writers.begin], p.values[value].rank, ZERO
    if s.ready_at[operand] < 0 and c.nodes[p.operands[operand].node].replicated == 0:
        return False
    for i in range(1, total):
        several += _equal(s.writers[0].box, s.writers[i].box, rank)
    if several == 0:
        return False
    for i in range(total):
        for j in range(i):
            s.writers[i].number += _equal(s.writers[i].box, s.writers[j].box, rank)
    return True


@compiled
def _nearest(s: Scratch, total: int, device: int) -> int:
    """Return the number of the copy that a device reads (`Replicas`)."""
    found, least = s.writers[0].number, abs(s.writers[0].device - device)
    for i in range(1, total):
        away = abs(s.writers[i].device - device)
        if away < least or (away == least and s.writers[i].number < found):
            found, least = s.writers[i].number, away
    return int(found)


@compiled
def _at_home(s: Scratch, r: Any, total: int, rank: int) -> int:
    """Return a tile of a copy, by its place, that a reader's device has made all it reads in."""
    for i in range(total):
        w = s.writers[i]
        if w.device == r.device and w.number == r.number and inside(r.box, w.box, rank):
            return i
    return 0


@compiled
def _distribute(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Bring final tiles to their readers."""
    rank = p.values[value].rank
    held, kept = ZERO, ZERO
    copied = _numbered(p, c, s, value, total)
    for place in span(p.values[value].readers):
        # The first to read a tile on a device waits for it; those after it find it there.
        if _known(p, c, s, p.readers[place].operand, 1 if p.readers[place].task >= 0 else 0, kept):
            continue
        kept += 1
        count = _reader(p, c, s, place)
        for j in range(count):
            r = s.readers[j]
            r.same = -2
            r.number = _nearest(s, total, r.device) if copied else ZERO
            if volume(r.box, rank) == 0:
                continue
            found = _held(s, r.device, r.box, rank)
            if found == NONE:
                at = _at_home(s, r, total, rank) if copied else j if j < total else 0
                w = s.writers[at]
                if w.device == r.device and inside(r.box, w.box, rank):
                    found = HERE
                    if not _at_hand(p, c, w.row):
                        found = _message(c, ZERO, ZERO, ZERO, r.device, r.device)
                        _give(c, w, found)
                        _sent(p, c, found)
                    held = _hold(c, s, held, r.device, found, w.box)
            if found == NONE:
                r.same = -1
            elif found >= 0 and r.point >= 0:
                _depend(c, found, r.point)
        for j in range(count):
            if s.readers[j].same != -1:
                continue
            s.readers[j].same = j
            s.stamp[0] += 1
            s.marks[s.readers[j].device].stamp = s.stamp[0]
            devices = 1
            for other in range(j + 1, count):
                r = s.readers[other]
                alike = r.same == -1 and r.number == s.readers[j].number
                if alike and _equal(s.readers[j].box, r.box, rank):
                    r.same = j
                    if s.marks[r.device].stamp != s.stamp[0]:
                        s.marks[r.device].stamp = s.stamp[0]
                        devices += 1
            if devices >= ENOUGH:
                held = _gather(p, c, s, value, j, count, total, held)
            else:
                for other in range(j, count):
                    if s.readers[other].same == j:
                        held = _fetch(p, c, s, value, other, total, held)


@compiled
def _gather(
    p: Problem, c: Choice, s: Scratch, value: int, j: int, count: int, total: int, held: int
) -> int:
    """One box for many devices: a broadcast or an all-gather."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    box, copy = s.readers[j].box, s.readers[j].number
    nbytes = float(volume(box, rank) * item)
    wanted = 0.0
    for device in range(p.devices.shape[0]):
        if s.marks[device].stamp == s.stamp[0]:
            wanted += nbytes
    for i in range(total):
        shared = overlap(s.writers[i].box, box, rank) if s.writers[i].number == copy else ZERO
        if shared and s.marks[s.writers[i].device].stamp == s.stamp[0]:
            wanted -= shared * item
    for i in range(total):
        if s.writers[i].number == copy and overlap(s.writers[i].box, box, rank):
            s.marks[s.writers[i].device].stamp = s.stamp[0]
    message = _collective(p, c, s, nbytes, FROM_ONE, nbytes, wanted)
    _from_all(p, c, s, box, rank, total, message, copy)
    for other in range(j, count):
        r = s.readers[other]
        if r.same == j:
            if r.point >= 0:
                _depend(c, message, r.point)
            held = _hold(c, s, held, r.device, message, box)
    return held


@compiled
def _fetch(p: Problem, c: Choice, s: Scratch, value: int, j: int, total: int, held: int) -> int:
    """What one point lacks, from every device that has some of it."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    r, box = s.readers[j], s.box[3]
    device = r.device
    for i in range(total):
        w = s.writers[i]
        shared = overlap(w.box, r.box, rank) if w.number == r.number else ZERO
        if shared == 0:
            continue
        for axis in range(rank):
            box.low[axis] = max(w.box.low[axis], r.box.low[axis])
            box.high[axis] = min(w.box.high[axis], r.box.high[axis])
        found, known = NONE, ZERO
        number = s.marks[device].holding
        while number >= 0:
            there = overlap(box, s.holdings[number].box, rank)
            if there == shared:
                found = s.holdings[number].message
                break
            known = max(known, there)
            number = s.holdings[number].next
        if found == NONE:
            if w.device == device and _at_hand(p, c, w.row):
                found = HERE
            else:
                nbytes = ZERO if w.device == device else (shared - known) * item
                found = _copy(p, c, nbytes, w.device, device)
                _give(c, w, found)
                _sent(p, c, found)
            held = _hold(c, s, held, device, found, box)
        if found >= 0 and r.point >= 0:
            _depend(c, found, r.point)
    return held


@compiled
def _reduce(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Sum partial tiles and bring the sums to their readers, one message a distinct tile."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    first_row = p.values[value].writers.begin
    count, here = ZERO, NONE  # the reader whose tiles are collected
    for q in range(total):
        box = s.writers[q].box
        if s.writers[q].row != first_row:
            break
        known = volume(box, rank) == 0
        for other in range(q):
            known = known or _equal(box, s.writers[other].box, rank)
        if known:
            continue
        s.stamp[0] += 1
        holders = ZERO
        for i in range(total):
            w = s.writers[i]
            if overlap(w.box, box, rank) and s.marks[w.device].stamp != s.stamp[0]:
                s.marks[w.device].stamp = s.stamp[0]
                holders += 1
        if holders == 1:
            _passed_on(p, c, s, value, q, total)
            here = NONE
            continue
        nbytes, need, wanted = float(volume(box, rank) * item), 0.0, 0.0
        for place in span(p.values[value].readers):
            if place != here:
                count, here = _reader(p, c, s, place), place
            for j in range(count):
                shared = overlap(box, s.readers[j].box, rank)
                if shared:
                    s.marks[s.readers[j].device].stamp = s.stamp[0]
                    need = max(need, float(shared * item))
                    wanted += shared * item
        most = nbytes * p.devices.shape[0]
        moved = (holders - 1) * nbytes + max(0.0, min(wanted, most) - nbytes)
        message = _collective(p, c, s, nbytes, SUM, need, moved)
        _from_all(p, c, s, box, rank, total, message, ZERO)
        for place in span(p.values[value].readers):
            if not _noted(c):
                break
            if place != here:
                count, here = _reader(p, c, s, place), place
            for j in range(count):
                r = s.readers[j]
                if r.point >= 0 and overlap(box, r.box, rank):
                    _depend(c, message, r.point)


@compiled
def _passed_on(p: Problem, c: Choice, s: Scratch, value: int, q: int, total: int) -> None:
    """Partial tiles of one device: summed there, then copied to each device that reads them."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    home, row, box = s.writers[q].device, s.writers[q].row, s.writers[q].box
    s.stamp[0] += 1
    for place in span(p.values[value].readers):
        for j in range(_reader(p, c, s, place)):
            r = s.readers[j]
            shared = overlap(box, r.box, rank)
            if shared == 0:
                continue
            if r.device == home and _at_hand(p, c, row):
                continue
            mark = s.marks[r.device]
            if mark.stamp != s.stamp[0]:
                mark.stamp = s.stamp[0]
                mark.sent = _copy(p, c, shared * item, home, r.device)
                _from_all(p, c, s, box, rank, total, mark.sent, ZERO)
            if r.point >= 0:
                _depend(c, mark.sent, r.point)
