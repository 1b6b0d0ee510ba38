"""The arrays that compiled code works on: a graph on a machine, a strategy, and scratch memory.

Tables are arrays of records, one for each item: compiled code reads `p.nodes[node].task`, and
Python `p.nodes[node]["task"]`, or the column `p.nodes["task"]`. A `RANGE` says where an item's
entries are in another table, or in `lists`. A small number of arrays keeps calls between compiled
functions short and their compilation fast.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.problem.compiling import integer
from soapstone.search.parallel.problem.packing import packed

UNINDEXED, AFFINE, PRODUCT = 0, 1, 2  # maps of axes: `Whole`, `Affine`, `Product` of `ir.dims`
FREE, UPDATES = 0, 1  # how an operator gets its configuration
MOST_RANK, MOST_DIMS = 8, 12
TYPES = ("float32", "float64", "float16")
MOST_EXPONENT = 40  # of the bytes of a value whose exchange is known
KNOWN = 8  # operands of a value that are compared with those after them


def record(
    names: str, of: Any = np.int64, *, ranges: str = "", by_dim: str = "", **others: Any
) -> np.dtype[Any]:
    """Return the type of a table's rows.

    Args:
        names: of numbers, separated by spaces. ranges, by_dim: names of fields that are a `RANGE`,
            or have a number for each dim. others: other fields, with their types.
    """
    fields = [(name, of) for name in names.split()]
    fields += [(name, RANGE) for name in ranges.split()]
    fields += [(name, (np.int64, (MOST_DIMS,))) for name in by_dim.split()]
    return np.dtype([*fields, *others.items()], align=True)


RANGE = record("begin end")
# `source`, `operand`: of an update, the gradient as it is made and read; `splits`: whether a dim
# may be split.
OPERATOR = record(
    "node kind source operand class_ dims",
    ranges="nodes tasks followers touched",
    by_dim="extent splits",
)
# `follows`: the dim of its operator that a dim of a node follows, or -1; `rate`: its type;
# `crosses`: it copies to or from a backing memory; `once`: its results are never in copies.
NODE = record(
    "operator task rate is_view crosses once dims",
    ranges="nested operands",
    by_dim="extent splits follows lowers",
)
# `read_inside`: by light nodes of the task that makes it.
OPERAND = record("node value is_output element_bytes read_inside", ranges="axes")
AXIS = record("map gathered extent stride offset window", ranges="dims")
# `makes`, `reads`: rows of writers, of readers; `place` in the order; `times`: rows of measured
# ones; `scale`: thousandths of the roofline where there is none.
TASK = record("operator place scale", ranges="makes reads times")
# `is_sum`: of a parameter's gradients; `lasts`: it is a parameter's or a state's next value;
# `away`: it is in the backing memory.
VALUE = record("rank is_sum lasts away element_bytes", ranges="writers readers")
READER = record("operand task")  # the task that waits, or -1: in the next step
# `memory`: that it works in, which has the `capacity`; `receives`: it copies what it is sent itself
DEVICE = record("computer kind memory capacity receives")
# Rates a ns, by type of numbers; `full`: results that fill a device.
DEVICE_KIND = record("memory_rate launch_ns full", np.float64, rates=(np.float64, (len(TYPES),)))

# What memories exchange, as a number of `exchanges.KINDS`: `members` has a bit for each of them; ns
# of values of 2^i bytes.
PROFILE = record("kind members", ns=(np.float64, (MOST_EXPONENT,)))

# `cut`: the dim with uneven tiles, or -1; `replicated`: a bit for each dim of which a point has all
SPLIT = record("points cut replicated", by_dim="degrees")
WHOLE = np.array((1, -1, 0, [1] * MOST_DIMS), SPLIT)  # a split in one point
MESSAGE = record("busy latency moved source target givers channels")
GIVER = record("row point next", np.int32)  # a point of a row of writers
LINK = record("message next", np.int32)
# Choice.top: how much is taken of each pool; whether one was too small
MESSAGES, GIVERS, SENDS, NEEDS, CHANNELS, HEADS, OVERFLOW = (integer(pool) for pool in range(7))

BOX = record("", low=(np.int64, (MOST_RANK,)), high=(np.int64, (MOST_RANK,)))
TILE = record("device row point same number", box=BOX)  # `number`: of the copy
HOLDING = record("message next", box=BOX)  # the message that brought a device a box
MARK = record("stamp member holding sent")  # of a device
COLLECTED = record("operator operator_stamp value value_stamp")
SEEN = record("operand waits")  # whether anything waits for an operand


@packed
class Problem(NamedTuple):
    """The constant data of a search.

    *Operators* have a configuration. *Nodes* are an operator's forward node and its gradient nodes.
    *Tasks* are what devices run: an operator's forward node, or all its gradient nodes. *Values*
    have writers and readers, which are *operands* of nodes.
    """

    operators: Array
    nodes: Array
    flops: Array  # of each node; of one that crosses, ns
    operands: Array  # a node's inputs before its outputs
    axes: Array
    tasks: Array
    order: Array  # tasks in the order in which devices run them
    values: Array
    writers: Array  # operands
    makers: Array  # (writers): tasks
    readers: Array
    lists: Array
    devices: Array
    kinds: Array  # of devices
    route_ptr: Array  # channels from one device to another, (devices * devices + 1)
    route: Array
    latency_ns: Array  # (devices, devices)
    ns_per_byte: Array  # (devices, devices)
    read_ns: Array  # (devices, devices): a byte that another device of one memory made
    messages: Array  # PROFILE
    times: Array  # (rows, MOST_DIMS + devices): degrees, and the measured ns of each point
    begin_ns: Array  # (1): before the first task
    slower: Array  # (1): thousandths by which tasks are slower while all others of a computer work

    @property
    def free(self) -> list[int]:
        """The numbers of the operators that have a configuration of their own."""
        free: list[int] = np.flatnonzero(self.operators["kind"] == FREE).tolist()
        return free

    def makers_of(self, value: int) -> set[int]:
        """Return the tasks that make a value."""
        return set(self.makers[slice(*self.values[value]["writers"])].tolist())

    def readers_of(self, value: int) -> Array:
        """Return the rows of `readers` of a value."""
        return self.readers[slice(*self.values[value]["readers"])]


@packed
class Choice(NamedTuple):
    """A strategy, and everything derived from it before a simulation."""

    operators: Array  # SPLIT
    placed: Array  # (operators, devices): the device of each point
    cuts: Array  # (operators, devices + 1): boundaries of uneven tiles
    nodes: Array  # SPLIT, but for cuts
    node_at: Array  # (nodes, devices): the operator's point that runs a node's point
    task_ns: Array  # (tasks, devices + 1); last: exchange before results are final, 0 for none
    top: Array
    send_at: Array  # (writers): where the heads of its points' lists begin, -1: all are empty
    need_at: Array  # (readers): likewise
    head: Array  # first send of a writer's point, first need of a reader's point
    messages: Array
    givers: Array  # whose ends a message waits for
    sends: Array  # LINK: those that a point is the last giver of
    needs: Array  # LINK: what a point waits for
    channels: Array  # of collectives, each list ended by -1

    @property
    def chosen(self) -> tuple[Array, Array, Array]:
        """The independent data: operators, devices, uneven tiles."""
        return self.operators, self.placed, self.cuts

    @property
    def messages_only(self) -> Choice:
        """The same without room to record who waits for which message."""
        no = {name: getattr(self, name)[:0] for name in ("givers", "sends", "needs")}
        return self._replace(**no)

    @property
    def live(self) -> Array:
        """The messages in use."""
        return self.messages[: self.top[MESSAGES]]


@packed
class Scratch(NamedTuple):
    """Scratch memory."""

    box: Array  # (4)
    at: Array  # (most dims)
    writers: Array  # TILE
    readers: Array  # TILE
    holdings: Array
    marks: Array  # (devices)
    seen: Array  # (channels): stamps
    stamp: Array  # (1)
    lists: Array  # COLLECTED
    known: Array  # (KNOWN)
    collected: Array  # (2): how many operators and values are collected
    ready_at: Array  # (operands): the row of tiles that are laid ready, or -1
    ready: Array  # (rows, points, 1 + 2 ranks): a point's device, its intervals
    ready_points: Array  # (rows)
    ready_sums: Array  # (rows): whether they are partial results
