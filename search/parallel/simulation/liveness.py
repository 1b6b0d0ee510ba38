"""Memory of devices over a simulated step, compiled: what is held, from when to when.

Devices that share a memory hold its contents together.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.arrays import UPDATES, Choice, Problem, Scratch, record
from soapstone.search.parallel.problem.compiling import NONE, ONE, ZERO, compiled, entry, span
from soapstone.search.parallel.problem.geometry import overlap, tile, volume
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.simulation.schedule import State

# What a memory holds from when to when, in ns; `next`: another of one value in the memory, or -1.
HELD = record("memory nbytes begin end next")


@compiled
def _hold(out: Array, heads: Array, count: int, memory: int, nbytes: int, begin: int) -> None:
    held = out[count]
    held.memory, held.nbytes, held.begin, held.next = memory, nbytes, begin, heads[memory]
    heads[memory] = count


@compiled
def _hold_states(
    p: Problem, c: Choice, s: Scratch, heads: Array, out: Array, count: int, end: int
) -> int:
    """Write the states of updates, which are held at all times; return the number of rows."""
    for op in range(p.operators.shape[0]):
        if p.operators[op].kind != UPDATES:
            continue
        node = p.operators[op].node
        states = NONE
        for number in span(p.nodes[node].operands):
            operand, box = p.operands[number], s.readers[0].box
            if not operand.is_output:
                continue
            states += ONE
            if states == 0:
                continue  # the parameter itself is a value
            for point in range(c.nodes[node].points):
                tile(p, c, number, point, box, s.at)
                nbytes = volume(box, operand.axes.end - operand.axes.begin) * operand.element_bytes
                device = c.placed[op, c.node_at[node, point]]
                _hold(out, heads, count, p.devices[device].memory, nbytes, ZERO)
                out[count].end = end
                count += 1
    return count


@entry
def lifetimes(p: Problem, c: Choice, s: Scratch, state: State, heads: Array, out: Array) -> int:
    """Write what each memory holds; return the number of rows.

    A tile is held from the start of its writer to the end of its last reader on any device; a copy
    in another memory from the writer's end to the end of its last reader there. Parameters, their
    copies and the states of updates are held at all times; what is offloaded is never held.

    Args:
        heads: scratch, a number for each device. out: HELD, `rows_needed` rows.
    """
    devices = p.devices.shape[0]
    end = state.free[state.free.shape[0] - 1, state.free.shape[1] - 1]
    count = ZERO
    for number in range(p.values.shape[0]):
        value = p.values[number]
        if value.away != 0:
            continue
        stays = value.lasts != 0
        first, last = count, ZERO
        for device in range(devices):
            heads[device] = NONE
        for row in span(value.writers):
            operand = p.writers[row]
            node = p.operands[operand].node
            op, task = p.nodes[node].operator, p.nodes[node].task
            for point in range(c.nodes[node].points):
                box = s.writers[count - first].box
                tile(p, c, operand, point, box, s.at)
                at = c.node_at[node, point]
                done = state.end[p.tasks[task].place, at]
                start = done - c.task_ns[task, devices] - c.task_ns[task, at]
                last = max(last, done)
                nbytes = volume(box, value.rank) * value.element_bytes
                memory = p.devices[c.placed[op, at]].memory
                _hold(out, heads, count, memory, nbytes, ZERO if stays else start)
                out[count].end = end if stays else done
                count += 1
        written = last
        copies = count
        for place in span(value.readers):
            operand, task = p.readers[place].operand, p.readers[place].task
            node = p.operands[operand].node
            for point in range(c.nodes[node].points):
                at = c.node_at[node, point]
                memory = p.devices[c.placed[p.nodes[node].operator, at]].memory
                done = end
                if task >= 0:
                    done = state.end[p.tasks[task].place, at]
                last = max(last, done)
                box = s.readers[point].box
                tile(p, c, operand, point, box, s.at)
                elements = volume(box, value.rank)
                nbytes, there = elements * value.element_bytes, ZERO
                row, copy = heads[memory], NONE
                while row >= 0 and there < elements:
                    if row < copies:  # tiles of several devices are beside each other
                        there += overlap(box, s.writers[row - first].box, value.rank)
                    elif out[row].nbytes == nbytes:
                        copy = row  # boxes of one size in a memory are one copy
                    row = out[row].next
                if there >= elements:
                    continue
                if copy >= 0:
                    out[copy].end = max(out[copy].end, done)
                    continue
                _hold(out, heads, count, memory, nbytes, ZERO if stays else written)
                out[count].end = done
                count += 1
        if not stays:
            for row in range(first, copies):
                out[row].end = max(out[row].end, last)
    return _hold_states(p, c, s, heads, out, count, end)


def rows_needed(p: Problem) -> int:
    """Return the largest number of rows that `lifetimes` may write."""
    return int((len(p.writers) + len(p.readers) + len(p.operands)) * len(p.devices)) + 1


def peaks(p: Problem, c: Choice, s: Scratch, state: State) -> Array:
    """Return the most bytes that the memory of each device holds at once. int64 (devices,)."""
    rows = np.zeros(rows_needed(p), HELD)
    rows = rows[: call(lifetimes, p, c, s, state, np.zeros(len(p.devices), np.int64), rows)]
    # At one time, what comes is beside what goes: it is before it.
    order = np.argsort(np.concatenate([2 * rows["begin"], 2 * rows["end"] + 1]))
    held, most = (np.zeros(len(p.devices), np.int64) for _ in range(2))
    call(take_and_give, rows, order, held, most)
    found: Array = most[p.devices["memory"]]
    return found


def beyond(p: Problem, peaks: Array) -> int:
    """Return the bytes by which peaks (devices,) exceed the memories, counting each memory once."""
    _, first = np.unique(p.devices["memory"], return_index=True)
    return int(np.maximum(peaks - p.devices["capacity"], 0)[first].sum())


@entry
def take_and_give(rows: Array, order: Array, held: Array, most: Array) -> None:
    """Process rows of `lifetimes` in order; numbers beyond the rows stand for their releases."""
    count = rows.shape[0]
    for i in range(order.shape[0]):
        at = order[i]
        if at < count:
            memory = rows[at].memory
            held[memory] += rows[at].nbytes
            most[memory] = max(most[memory], held[memory])
        else:
            held[rows[at - count].memory] -= rows[at - count].nbytes


def most_bytes(p: Problem) -> int:
    """Return an upper bound of the bytes on any device: all values twice, and all states."""
    total = 0
    for begin, end in p.values["writers"].tolist():
        total += 2 * (end - begin) * whole_bytes(p, int(p.writers[begin]))
    for node in p.operators["node"][p.operators["kind"] == UPDATES].tolist():
        operands = range(*p.nodes[node]["operands"])
        total += sum(whole_bytes(p, at) for at in operands if p.operands[at]["is_output"])
    return total


def whole_bytes(p: Problem, operand: int) -> int:
    """Return the bytes of an operand that is not split."""
    row = p.operands[operand]
    return int(row["element_bytes"] * np.prod(p.axes["extent"][slice(*row["axes"])]))


def excess(p: Problem, c: Choice, s: Scratch, state: State) -> int:
    """Return the bytes by which all memories together are exceeded; 0 if the strategy fits."""
    return beyond(p, peaks(p, c, s, state))
