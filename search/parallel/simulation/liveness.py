"""Memory of each device over a simulated step, compiled: what is there, from when to when."""

from __future__ import annotations

import numpy as np

from soapstone.search.parallel.problem.arrays import (
    AXES,
    BYTES,
    CAPACITY,
    DEVICE,
    KIND,
    LENGTH,
    NODE,
    OP,
    OPERANDS,
    OUTPUT,
    PLACE,
    POINT,
    POINTS,
    RANK,
    READERS,
    STAYS,
    TASK,
    UPDATES,
    WRITERS,
    Array,
    Choice,
    Problem,
    Scratch,
)
from soapstone.search.parallel.problem.compiling import entry
from soapstone.search.parallel.problem.geometry import inside, tile, volume
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.simulation.schedule import State


@entry
def lifetimes(p: Problem, c: Choice, s: Scratch, state: State, heads: Array, out: Array) -> int:
    """Write (device, bytes, from ns, to ns) for what each device holds; return how many rows.

    A tile is held from the start of its writer to the end of its last reader on any device, a copy
    from the writer's end to the end of its last reader there. Parameters, their copies and the
    states of updates are held at all times.

    Args:
        heads: room for a number for each device. out: room for `rows_needed` rows; their last
            column lists those of a value on one device, from that in `heads` on.
    """
    devices = p.devices.shape[0]
    end = state.free[state.free.shape[0] - 1, state.free.shape[1] - 1]
    count = 0
    for value in range(p.values.shape[0]):
        rank, item = p.values[value, RANK], p.values[value, BYTES]
        stays = p.values[value, STAYS] != 0
        first = count
        last = np.int64(0)
        for device in range(devices):
            heads[device] = -1
        for row in range(p.values[value, WRITERS], p.values[value, WRITERS + 1]):
            operand = p.writers[row]
            node = p.operands[operand, NODE]
            op, task = p.nodes[node, OP], p.nodes[node, TASK]
            for point in range(c.nodes[node, POINTS]):
                w = s.writers[count - first]
                tile(p, c, operand, point, w, s.at)
                at = c.node_at[node, point]
                w[DEVICE] = c.placed[op, at]
                w[POINT] = state.end[p.tasks[task, PLACE], at]
                start = w[POINT] - c.task_ns[task, devices] - c.task_ns[task, at]
                last = max(last, w[POINT])
                out[count, 0] = w[DEVICE]
                out[count, 1] = volume(w, rank) * item
                out[count, 2] = 0 if stays else start
                out[count, 3] = end if stays else w[POINT]
                out[count, 4] = heads[w[DEVICE]]
                heads[w[DEVICE]] = count
                count += 1
        written = last
        copies = count
        for place in range(p.values[value, READERS], p.values[value, READERS + 1]):
            operand, task = p.readers[place, 0], p.readers[place, 1]
            node = p.operands[operand, NODE]
            op = p.nodes[node, OP]
            for point in range(c.nodes[node, POINTS]):
                at = c.node_at[node, point]
                device = c.placed[op, at]
                done = end
                if task >= 0:
                    done = state.end[p.tasks[task, PLACE], at]
                last = max(last, done)
                r = s.readers[point]
                tile(p, c, operand, point, r, s.at)
                nbytes = volume(r, rank) * item
                row, copy = heads[device], np.int64(-1)
                while row >= 0:
                    if row < copies and inside(r, s.writers[row - first], rank):
                        break
                    if row >= copies and out[row, 1] == nbytes:
                        copy = row  # boxes of one size on a device are one copy
                    row = out[row, 4]
                if row >= 0:
                    continue
                if copy >= 0:
                    out[copy, 3] = max(out[copy, 3], done)
                    continue
                out[count, 0] = device
                out[count, 1] = nbytes
                out[count, 2] = 0 if stays else written
                out[count, 3] = done
                out[count, 4] = heads[device]
                heads[device] = count
                count += 1
        if not stays:
            for row in range(first, copies):
                out[row, 3] = max(out[row, 3], last)
    for op in range(p.operators.shape[0]):
        if p.operators[op, KIND] != UPDATES:
            continue
        node = p.operators[op, NODE]
        states = -1
        for operand in range(p.nodes[node, OPERANDS], p.nodes[node, OPERANDS + 1]):
            if not p.operands[operand, OUTPUT]:
                continue
            states += 1
            if states == 0:
                continue  # the parameter itself is a value
            for point in range(c.nodes[node, POINTS]):
                tile(p, c, operand, point, s.readers[0], s.at)

                rank = p.operands[operand, AXES + 1] - p.operands[operand, AXES]
                out[count, 0] = c.placed[op, c.node_at[node, point]]
                out[count, 1] = volume(s.readers[0], rank) * p.operands[operand, BYTES]
                out[count, 2] = 0
                out[count, 3] = end
                count += 1
    return count


def rows_needed(p: Problem) -> int:
    """Return how many rows `lifetimes` may write."""
    return int((len(p.writers) + len(p.readers) + len(p.operands)) * len(p.devices)) + 1


def peaks(p: Problem, c: Choice, s: Scratch, state: State) -> Array:
    """Return the most bytes that each device holds at once. int64 (devices,)."""
    rows = np.zeros((rows_needed(p), 5), np.int64)
    rows = rows[: call(lifetimes, p, c, s, state, np.zeros(len(p.devices), np.int64), rows)]
    # At one time, what comes is beside what goes: it is before it.
    order = np.argsort(np.concatenate([2 * rows[:, 2], 2 * rows[:, 3] + 1]))
    held, most = (np.zeros(len(p.devices), np.int64) for _ in range(2))
    call(take_and_give, rows, order, held, most)
    return most


@entry
def take_and_give(rows: Array, order: Array, held: Array, most: Array) -> None:
    """Take and give back rows of `lifetimes`, those from the end of the rows on to give back."""
    count = rows.shape[0]
    for i in range(order.shape[0]):
        at = order[i]
        if at < count:
            device = rows[at, 0]
            held[device] += rows[at, 1]
            most[device] = max(most[device], held[device])
        else:
            held[rows[at - count, 0]] -= rows[at - count, 1]


def most_bytes(p: Problem) -> int:
    """Return more bytes than any device ever holds: all values with a copy, and all states."""
    total = 0
    for value in range(len(p.values)):
        row = p.values[value]
        writers = row[WRITERS + 1] - row[WRITERS]
        total += 2 * int(writers) * _size(p, int(p.writers[row[WRITERS]]))
    for node in p.operators[p.operators[:, KIND] == UPDATES, NODE].tolist():
        first, last = p.nodes[node, OPERANDS : OPERANDS + 2]
        total += sum(_size(p, at) for at in range(first, last) if p.operands[at, OUTPUT])
    return total


def _size(p: Problem, operand: int) -> int:
    """Return the bytes of an operand that is not split."""
    first, last = p.operands[operand, AXES : AXES + 2]
    return int(p.operands[operand, BYTES] * np.prod(p.axes[first:last, LENGTH]))


def excess(p: Problem, c: Choice, s: Scratch, state: State) -> int:
    """Return by how many bytes the devices' capacities are passed, all together; 0 if it fits."""
    over = peaks(p, c, s, state) - p.devices[:, CAPACITY]
    return int(over[over > 0].sum())


__all__ = ["excess", "lifetimes", "most_bytes", "peaks", "rows_needed"]
