"""The arrays that compiled code works on: a graph on a machine, a strategy, and room to work in.

Tables are two-dimensional integers, a row an item; the constants below are their columns. A column
and the one after it may hold the range of an item's entries in another table or in `lists`. Few
arrays keep calls between compiled functions short, and their compilation fast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.search.parallel.problem.compiling import integer
from soapstone.search.parallel.problem.packing import packed

Array = np.ndarray[Any, np.dtype[Any]]

WHOLE, AFFINE, PRODUCT = 0, 1, 2  # kinds of axis maps
FREE, UPDATES = 0, 1  # how an operator gets its configuration
MOST_RANK, MOST_DIMS = 8, 12

# Problem.operators
NODE, DIMS, KIND, SOURCE, OPERAND, CLASS = 0, 1, 2, 3, 4, 5
NODES, TASKS, FOLLOWERS, TOUCHED = 6, 8, 10, 12  # ranges
EXTENT, OK, FROM, LOWERS = 16, 28, 40, 52  # a column a dim; FROM and LOWERS of nodes only
# Problem.nodes: DIMS, EXTENT, OK, FROM, LOWERS and
OP, TASK, RATE, LOOKS, NESTED, OPERANDS = 0, 2, 3, 4, 6, 8
# Problem.operands: NODE and
VALUE, OUTPUT, BYTES, AXES, INSIDE = 1, 2, 3, 4, 6  # INSIDE: read by light nodes of its task
# Problem.axes
MAP, GATHERED, LENGTH, STRIDE, OFFSET, WINDOW, MAPPED = 0, 1, 2, 3, 4, 5, 6
# Problem.tasks: OP and
MAKES, READS, PLACE = 1, 3, 5  # rows of writers, of readers; its place in the order
TIMES, SCALE = 6, 8  # rows of measured times; thousandths of the roofline where there is none
# Problem.values: BYTES and
RANK, FAN, STAYS, WRITERS, READERS = 0, 1, 2, 4, 6
# Problem.devices
GROUP, OF_KIND, CAPACITY, TAKES = 0, 1, 2, 3  # TAKES: it copies what it is sent itself
# Problem.kinds; RATES: a column a type
MEMORY_RATE, LAUNCH, FULL, RATES = 0, 1, 2, 3
TYPES = ("float32", "float64", "float16")
# Choice.operators and Choice.nodes
POINTS, DEGREES = 0, 1
# Choice.messages
BUSY, LATENCY, MOVED, FROM_DEVICE, TO_DEVICE, GIVERS, CHANNELS = range(7)
# Choice.top: how much is taken of each pool; whether one was too small
MESSAGE, GIVER, SEND, NEED, CHANNEL, HEAD, OVERFLOW = (integer(pool) for pool in range(7))
# Scratch.writers, Scratch.readers: a box, then
DEVICE, ROW, POINT, SAME = 2 * MOST_RANK, 2 * MOST_RANK + 1, 2 * MOST_RANK + 2, 2 * MOST_RANK + 3
# Scratch.holdings: a box, then the message that brought it, and the next holding of the device
BROUGHT, NEXT = 2 * MOST_RANK, 2 * MOST_RANK + 1
KNOWN = 8
# Choice.cuts
CUT, BOUNDS = 0, 1
# Scratch.marks: of devices
MARK, MEMBER, HOLDING, SENT = 0, 1, 2, 3


@packed
class Problem(NamedTuple):
    """What never changes during a search.

    *Operators* have a configuration. *Nodes* are an operator's forward node and its gradient nodes.
    *Tasks* are what devices run: an operator's forward node, or all its gradient nodes. *Values*
    have writers and readers, which are *operands* of nodes.
    """

    operators: Array
    nodes: Array
    flops: Array  # of each node
    operands: Array  # a node's inputs before its outputs
    axes: Array
    tasks: Array
    order: Array  # tasks in the order in which devices run them
    values: Array
    writers: Array  # operands
    makers: Array  # (writers): tasks
    readers: Array  # (readers, 2): operand, and the task that waits or -1: in the next step
    lists: Array
    devices: Array
    kinds: Array  # of devices: rates a ns, ns of a launch, results that fill it
    route_ptr: Array  # channels from one device to another, (devices * devices + 1)
    route: Array
    latency_ns: Array  # (devices, devices)
    ns_per_byte: Array  # (devices, devices)
    read_ns: Array  # (devices, devices): a byte that another device of one memory made
    times: Array  # (rows, MOST_DIMS + devices): degrees, and the measured ns of each point
    begin_ns: Array  # (1): before the first task
    slower: Array  # (1): thousandths by which tasks are slower while all others of a computer work


@packed
class Choice(NamedTuple):
    """A strategy, and what follows from it before any simulation."""

    operators: Array  # points, degrees
    placed: Array  # (operators, devices): the device of each point
    cuts: Array  # (operators, devices + 2): a dim with uneven tiles or -1, and their boundaries
    nodes: Array  # points, degrees
    node_at: Array  # (nodes, devices): the operator's point that runs a node's point
    task_ns: Array  # (tasks, devices + 1); last: exchange before results are final, 0 for none
    top: Array
    send_at: Array  # (writers): where the heads of its points' lists begin, -1: all are empty
    need_at: Array  # (readers): likewise
    head: Array  # first send of a writer's point, first need of a reader's point
    messages: Array
    givers: Array  # (pool, 3): row of writers, point, next: whose ends a message waits for
    sends: Array  # (pool, 2): message, next: those that a point is the last giver of
    needs: Array  # (pool, 2): message, next: what a point waits for
    channels: Array  # of collectives, each list ended by -1


@packed
class Scratch(NamedTuple):
    """Room to work in."""

    box: Array  # (4, 2 * rank)
    at: Array  # (most dims)
    writers: Array
    readers: Array
    holdings: Array
    marks: Array  # (devices, 4)
    seen: Array  # (channels): stamps
    stamp: Array  # (1)
    lists: Array  # (4, operators or values): collected, their stamps
    known: Array  # (KNOWN, 2): operands of a value seen last, and whether anything waits for them
    collected: Array  # (2): how many operators and values are collected
