"""The execution simulator: when tasks and messages run, in integer time, compiled.

Every device runs its tasks in the order of `Problem.order`, as the executors' compiled steps do; a
task begins when its device is free and its inputs have arrived. Channels take messages in the order
of their senders. This is Jia, section 3.4.2, with that fixed order in place of the order in which
tasks become ready (assumption A3). So a simulation is one pass without an event queue, and its
state between two tasks is just when devices and channels become free.

*Delta simulation* (section 3.4.3) uses this: a pass can begin at the first task that a change
affects, from the state kept there by the pass before the change. Full and delta simulation are the
same function, and their results are equal bit by bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import Choice, Problem, Scratch, record
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, entry, put, span
from soapstone.search.parallel.problem.packing import packed

PASSED = NONE  # the result of a pass that was stopped
# A message of the proposal's pass, with the arrival and begin before it.
LOGGED = record("message arrival began")


@packed
class State(NamedTuple):
    """The pass of the accepted strategy, and that of a proposal.

    Attributes:
        end, trial_end: (tasks, devices), when points have ended and their results are final; rows
            are places in the order.
        arrival: (messages). began: when a message took its channels.
        free, trial_free: (tasks + 1, devices + channels + 1), before each task: when devices and
            channels become free, and the latest time so far.
        work: (devices), what is left to be done after a place.
        lists: scratch for the places of a task's lists of needs.
        log: LOGGED (messages). logged: (1), the number of its entries.
    """

    end: Array
    trial_end: Array
    arrival: Array
    began: Array
    free: Array
    trial_free: Array
    work: Array
    lists: Array
    log: Array
    logged: Array


def room(p: Problem, messages: int, more: int = 0) -> State:
    """Return a state with room for a number of messages, and for `more` channels."""
    tasks, devices = len(p.tasks), len(p.devices)
    reads = int((p.tasks["reads"]["end"] - p.tasks["reads"]["begin"]).max(initial=0))
    wide = devices + int(p.route.max(initial=0)) + 2 + more
    free = np.zeros((tasks + 1, wide), np.int64)
    free[0, :devices] = p.begin_ns[0]
    free[0, wide - 1] = p.begin_ns[0]
    return State(
        end=np.zeros((tasks, devices), np.int64),
        trial_end=np.zeros((tasks, devices), np.int64),
        arrival=np.zeros(messages, np.int64),
        began=np.zeros(messages, np.int64),
        free=free,
        trial_free=np.zeros((tasks + 1, wide), np.int64),
        work=np.zeros(devices, np.int64),
        lists=np.zeros(reads + 1, np.int64),
        log=np.zeros(messages, LOGGED),
        logged=np.zeros(1, np.int64),
    )


@compiled
def pass_on(p: Problem, c: Choice, message: Any, free: Array, first: int, begins: int) -> int:
    """Make a message take its channels once all are free; return when it begins.

    Args:
        free: when channels become free, from place `first` on.
    """
    source, target = message.source, message.target
    if source < 0:
        at = message.channels
        while c.channels[at] >= 0:
            begins = max(begins, free[first + c.channels[at]])
            at += 1
        at = message.channels
        while c.channels[at] >= 0:
            free[first + c.channels[at]] = begins + message.busy
            at += 1
    elif source != target:
        pair = source * p.devices.shape[0] + target
        for at in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            begins = max(begins, free[first + p.route[at]])
        for at in range(p.route_ptr[pair], p.route_ptr[pair + 1]):
            free[first + p.route[at]] = begins + message.busy
    return begins


@compiled
def _send(p: Problem, c: Choice, t: State, free: Array, message: int, first: int) -> int:
    """Send a message; return when it arrives."""
    row = c.messages[message]
    begins = ZERO
    number = row.givers
    while number >= 0:
        giver = c.givers[number]
        place = p.tasks[p.makers[giver.row]].place
        ended = t.trial_end[place, giver.point] if place >= first else t.end[place, giver.point]
        begins = max(begins, ended)
        number = giver.next
    begins = pass_on(p, c, row, free, p.devices.shape[0], begins)
    arrives = begins
    if row.source < 0:
        arrives += row.busy
        for device in range(p.devices.shape[0]):
            if row.target >= 0 and (row.target >> device) & ONE:  # its part is work of each member
                free[device] += row.busy
                arrives = max(arrives, free[device])
    elif row.source != row.target:
        arrives += row.busy + row.latency
        if p.devices[row.target].receives:  # it is work of the receiver, be it idle or not
            free[row.target] += row.busy + row.latency
            arrives = max(arrives, free[row.target])
    logged = t.log[t.logged[0]]
    t.logged[0] += 1
    logged.message, logged.arrival, logged.began = message, t.arrival[message], t.began[message]
    t.arrival[message], t.began[message] = arrives, begins
    return arrives


@compiled
def _beside(p: Problem, free: Array, device: int, begins: int, ends: int) -> int:
    """Return when a task ends that would end so alone; delay devices that work beside it.

    The devices of one computer share caches, memory and power. While all others work, a task takes
    `slower` thousandths longer; it and what they run then are delayed equally.
    """
    devices, latest, slower = p.devices.shape[0], free.shape[0] - 1, p.slower[0]
    others = ZERO
    for other in range(devices):
        others += other != device and p.devices[other].computer == p.devices[device].computer
    late = ZERO
    for other in range(devices):
        if other == device or p.devices[other].computer != p.devices[device].computer:
            continue
        both = min(ends, free[other]) - begins
        if both > 0:
            lost = both * slower // (1000 * others)
            free[other] += lost
            free[latest] = max(free[latest], free[other])
            late += lost
    return ends + late


@compiled
def _lists(p: Problem, c: Choice, t: State, task: int) -> int:
    """Record the places of the lists of a task's needs; return their number."""
    count = ZERO
    for at in span(p.tasks[task].reads):
        heads = c.need_at[p.lists[at]]
        if heads >= 0:
            t.lists[count] = heads
            count += 1
    return count


@compiled
def _begins(c: Choice, t: State, lists: int, point: int, free: int) -> int:
    """Return when a point begins: its device is free, and its inputs have arrived."""
    begins = free
    for i in range(lists):
        need = c.head[t.lists[i] + point]
        while need >= 0:
            begins = max(begins, t.arrival[c.needs[need].message])
            need = c.needs[need].next
    return begins


@compiled
def _ended(
    p: Problem, c: Choice, t: State, free: Array, task: int, final: int, place: int, first: int
) -> None:
    """Make the results of a task final, and send them."""
    devices, latest = p.devices.shape[0], free.shape[0] - 1
    points = c.operators[p.tasks[task].operator].points
    free[latest] = max(free[latest], final)
    if c.task_ns[task, devices] > 0:  # an exchange among all points before results are final
        final += c.task_ns[task, devices]
        for point in range(points):
            t.trial_end[place, point] = final
    for at in span(p.tasks[task].makes):
        heads = c.send_at[p.lists[at]]
        if heads < 0:
            continue
        for point in range(points):
            send = c.head[heads + point]
            while send >= 0:
                arrives = _send(p, c, t, free, c.sends[send].message, first)
                free[latest] = max(free[latest], arrives)
                send = c.sends[send].next


@entry
def simulate(p: Problem, c: Choice, t: State, first: int, limit: int) -> int:
    """Return the time of a step in ns, or PASSED as soon as it must exceed `limit`.

    Args:
        first: the place in the order at which to begin, 0 for a full simulation. What comes before
            must be as in the accepted pass.
        limit: negative for none.
    """
    devices = p.devices.shape[0]
    tasks = p.order.shape[0]
    free = t.trial_free[first]
    put(free, t.free[first], t.free.shape[1])
    t.logged[0] = 0
    for device in range(devices):
        t.work[device] = 0
    for place in range(first, tasks):
        task = p.order[place]
        op = p.tasks[task].operator
        for point in range(c.operators[op].points):
            t.work[c.placed[op, point]] += c.task_ns[task, point]
    if limit >= 0:
        for device in range(devices):
            if free[device] + t.work[device] > limit:
                return PASSED
    for place in range(first, tasks):
        before = free
        free = t.trial_free[place + 1]
        put(free, before, t.free.shape[1])
        task = p.order[place]
        op = p.tasks[task].operator
        final = ZERO
        lists = _lists(p, c, t, task)
        for point in range(c.operators[op].points):
            device = c.placed[op, point]
            begins = _begins(c, t, lists, point, free[device])
            ends = begins + c.task_ns[task, point]
            if p.slower[0] > 0:
                ends = _beside(p, free, device, begins, ends)
            free[device] = ends
            t.trial_end[place, point] = ends
            t.work[device] -= c.task_ns[task, point]
            final = max(final, ends)
            if limit >= 0 and ends + t.work[device] > limit:
                return PASSED
        _ended(p, c, t, free, task, final, place, first)
    result: int = free[t.free.shape[1] - 1]
    if limit >= 0 and result > limit:
        return PASSED
    return result


@entry
def arrange(
    p: Problem, c: Choice, t: State, ptr: Array, after: Array, need: Array, order: Array
) -> None:
    """Write the tasks in an order in which no device waits while it has something to do.

    Of the tasks whose predecessors are in the order, the one that can begin first is next; of
    several, the first in program order. Ranks of MPI order operations likewise
    (`runtime.tracing.list_scheduling`).

    Args:
        ptr, after: successors of each task. need: the number of predecessors of each; overwritten.
    """
    free = t.trial_free[0]
    put(free, t.free[0], t.free.shape[1])
    t.logged[0] = 0
    for number in range(order.shape[0]):
        first, soonest = NONE, ZERO
        for place in range(order.shape[0]):
            task = p.order[place]
            if need[task] != 0:
                continue
            op = p.tasks[task].operator
            lists = _lists(p, c, t, task)
            begins = ZERO
            for point in range(c.operators[op].points):
                device = c.placed[op, point]
                begins = max(begins, _begins(c, t, lists, point, free[device]))
            if first < 0 or begins < soonest:
                first, soonest = task, begins
        order[number] = first
        need[first] = -1
        for at in range(ptr[first], ptr[first + 1]):
            need[after[at]] -= 1
        op, place, final = p.tasks[first].operator, p.tasks[first].place, ZERO
        lists = _lists(p, c, t, first)
        for point in range(c.operators[op].points):
            device = c.placed[op, point]
            ends = _begins(c, t, lists, point, free[device]) + c.task_ns[first, point]
            free[device] = ends
            t.trial_end[place, point] = ends
            final = max(final, ends)
        _ended(p, c, t, free, first, final, place, ZERO)


@entry
def accept(p: Problem, t: State, first: int) -> None:
    """Make the pass that was simulated from `first` on the accepted one."""
    for place in range(first, p.order.shape[0]):
        put(t.end[place], t.trial_end[place], t.end.shape[1])
        put(t.free[place + 1], t.trial_free[place + 1], t.free.shape[1])


@compiled
def reject(t: State) -> None:
    """Discard the pass that was simulated, and restore the arrivals of messages."""
    for number in range(t.logged[0] - 1, -1, -1):
        logged = t.log[number]
        t.arrival[logged.message], t.began[logged.message] = logged.arrival, logged.began


@compiled
def first_affected(p: Problem, s: Scratch) -> int:
    """Return the first place that the collected change may alter.

    That is the first of the changed operators' tasks and of those that send what they read.
    """
    first = p.order.shape[0]
    for i in range(s.collected[0]):
        op = s.lists[i].operator
        for task in span(p.operators[op].tasks):
            first = min(first, p.tasks[task].place)
    for i in range(s.collected[1]):
        value = s.lists[i].value
        for row in span(p.values[value].writers):
            first = min(first, p.tasks[p.makers[row]].place)
    return int(first)
