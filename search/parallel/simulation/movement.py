"""The movement of one value: copies between devices, and collectives, compiled.

A tile that is already on a device is not sent there again, whichever operator needs it.

If three or more devices need one box, that is a broadcast or an all-gather. If the tiles of several
devices are partial results, it is a reduction: to one device, scattered, or to all.
"""

from __future__ import annotations

from soapstone.search.parallel.problem.arrays import Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import NONE, ZERO, compiled, span
from soapstone.search.parallel.problem.geometry import inside, overlap, same_box, volume
from soapstone.search.parallel.simulation.collectives import FROM_ONE, SUM
from soapstone.search.parallel.simulation.holders import (
    at_hand,
    at_home,
    collect_reader,
    collect_writers,
    held_by,
    hold,
    nearest,
    number_copies,
    repeats,
)
from soapstone.search.parallel.simulation.messages import (
    HERE,
    all_empty,
    depend,
    new_collective,
    new_copy,
    new_message,
    noted,
    send_from_all,
    send_last,
    wait_for,
)

ENOUGH = 3  # devices that need one box, for a collective


@compiled
def connect(p: Problem, c: Choice, s: Scratch, value: int) -> None:
    """Rebuild the messages of a value, at the top of the pools."""
    devices = p.devices.shape[0]
    for row in span(p.values[value].writers):
        c.send_at[row] = NONE
    for place in span(p.values[value].readers):
        c.need_at[place] = NONE
    total, sums = collect_writers(p, c, s, value)
    for device in range(devices):
        s.marks[device].holding = -1
    if sums or p.values[value].is_sum:
        _reduce(p, c, s, value, total)
    elif total:
        _distribute(p, c, s, value, total)
    for row in span(p.values[value].writers):
        if c.send_at[row] >= 0 and all_empty(c, c.send_at[row], devices):
            c.send_at[row] = NONE
    for place in span(p.values[value].readers):
        if c.need_at[place] >= 0 and all_empty(c, c.need_at[place], devices):
            c.need_at[place] = NONE


@compiled
def _distribute(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Bring final tiles to their readers."""
    rank = p.values[value].rank
    held, kept = ZERO, ZERO
    copied = number_copies(p, c, s, value, total)
    for place in span(p.values[value].readers):
        # The first to read a tile on a device waits for it; those after it find it there.
        if repeats(p, c, s, p.readers[place].operand, 1 if p.readers[place].task >= 0 else 0, kept):
            continue
        kept += 1
        count = collect_reader(p, c, s, place)
        for j in range(count):
            r = s.readers[j]
            r.same = -2
            r.number = nearest(s, total, r.device) if copied else ZERO
            if volume(r.box, rank) == 0:
                continue
            message = held_by(s, r.device, r.box, rank)
            if message == NONE:
                at = at_home(s, r, total, rank) if copied else j if j < total else 0
                w = s.writers[at]
                if w.device == r.device and inside(r.box, w.box, rank):
                    message = HERE
                    if not at_hand(p, c, w.row):
                        message = new_message(c, ZERO, ZERO, ZERO, r.device, r.device)
                        wait_for(c, w, message)
                        send_last(p, c, message)
                    held = hold(c, s, held, r.device, message, w.box)
            if message == NONE:
                r.same = -1
            elif message >= 0 and r.point >= 0:
                depend(c, message, r.point)
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
                if alike and same_box(s.readers[j].box, r.box, rank):
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
    message = new_collective(p, c, s, nbytes, FROM_ONE, nbytes, wanted)
    send_from_all(p, c, s, box, rank, total, message, copy)
    for other in range(j, count):
        r = s.readers[other]
        if r.same == j:
            if r.point >= 0:
                depend(c, message, r.point)
            held = hold(c, s, held, r.device, message, box)
    return held


@compiled
def _fetch(p: Problem, c: Choice, s: Scratch, value: int, j: int, total: int, held: int) -> int:
    """Copy what one point lacks from every device that has some of it."""
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
        message, held_there = NONE, ZERO
        number = s.marks[device].holding
        while number >= 0:
            there = overlap(box, s.holdings[number].box, rank)
            if there == shared:
                message = s.holdings[number].message
                break
            held_there = max(held_there, there)
            number = s.holdings[number].next
        if message == NONE:
            if w.device == device and at_hand(p, c, w.row):
                message = HERE
            else:
                nbytes = ZERO if w.device == device else (shared - held_there) * item
                message = new_copy(p, c, nbytes, w.device, device)
                wait_for(c, w, message)
                send_last(p, c, message)
            held = hold(c, s, held, device, message, box)
        if message >= 0 and r.point >= 0:
            depend(c, message, r.point)
    return held


@compiled
def _reduce(p: Problem, c: Choice, s: Scratch, value: int, total: int) -> None:
    """Sum partial tiles and send the sums to their readers, one message for each distinct tile."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    first_row = p.values[value].writers.begin
    count, here = ZERO, NONE  # the reader whose tiles are collected
    for q in range(total):
        box = s.writers[q].box
        if s.writers[q].row != first_row:
            break
        known = volume(box, rank) == 0
        for other in range(q):
            known = known or same_box(box, s.writers[other].box, rank)
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
                count, here = collect_reader(p, c, s, place), place
            for j in range(count):
                shared = overlap(box, s.readers[j].box, rank)
                if shared:
                    s.marks[s.readers[j].device].stamp = s.stamp[0]
                    need = max(need, float(shared * item))
                    wanted += shared * item
        most = nbytes * p.devices.shape[0]
        moved = (holders - 1) * nbytes + max(0.0, min(wanted, most) - nbytes)
        message = new_collective(p, c, s, nbytes, SUM, need, moved)
        send_from_all(p, c, s, box, rank, total, message, ZERO)
        for place in span(p.values[value].readers):
            if not noted(c):
                break
            if place != here:
                count, here = collect_reader(p, c, s, place), place
            for j in range(count):
                r = s.readers[j]
                if r.point >= 0 and overlap(box, r.box, rank):
                    depend(c, message, r.point)


@compiled
def _passed_on(p: Problem, c: Choice, s: Scratch, value: int, q: int, total: int) -> None:
    """Sum the partial tiles of one device there, then copy them to each device that reads them."""
    rank, item = p.values[value].rank, p.values[value].element_bytes
    home, row, box = s.writers[q].device, s.writers[q].row, s.writers[q].box
    s.stamp[0] += 1
    for place in span(p.values[value].readers):
        for j in range(collect_reader(p, c, s, place)):
            r = s.readers[j]
            shared = overlap(box, r.box, rank)
            if shared == 0:
                continue
            if r.device == home and at_hand(p, c, row):
                continue
            mark = s.marks[r.device]
            if mark.stamp != s.stamp[0]:
                mark.stamp = s.stamp[0]
                mark.sent = new_copy(p, c, shared * item, home, r.device)
                send_from_all(p, c, s, box, rank, total, mark.sent, ZERO)
            if r.point >= 0:
                depend(c, mark.sent, r.point)
