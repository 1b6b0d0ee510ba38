"""The boxes of operands on devices in each configuration of an operator, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.strategy.movement import Tiles
from soapstone.ir.strategy.reshards import layout_of
from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.tables import Choices, Part
from soapstone.search.parallel.problem.arrays import BOX, Choice, Problem, Scratch
from soapstone.search.parallel.problem.compiling import entry, put
from soapstone.search.parallel.problem.geometry import tile
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.pricing import settle
from soapstone.search.parallel.simulation.liveness import whole_bytes


@entry
def boxes_table(
    p: Problem,
    c: Choice,
    s: Scratch,
    op: int,
    degrees: Array,
    placed: Array,
    operands: Array,
    out: Array,
) -> None:
    """Write the boxes of operands on devices in each configuration of one operator.

    Args:
        out: BOX (configurations, operands, devices); where there is none it is left as it is.
    """
    for row in range(degrees.shape[0]):
        c.operators[op] = degrees[row]
        put(c.placed[op], placed[row], placed.shape[1])
        for other in range(p.operators.shape[0]):
            settle(p, c, s, other)
        for i in range(operands.shape[0]):
            node = p.operands[operands[i]].node
            for point in range(c.nodes[node].points):
                device = c.placed[p.nodes[node].operator, c.node_at[node, point]]
                tile(p, c, operands[i], point, out[row, i, device], s.at)


def boxes_of(part: Part, op: int, choices: Choices, operands: Sequence[int]) -> Array:
    """Return the boxes of an operator's operands on devices in each of its configurations.

    Args:
        part: a model that contains the operator.
        op: the operator. choices: its configurations. operands: numbers of operands.

    Returns:
        BOX (configurations, operands, devices); `high` is -1 where a device has no box.
    """
    p, held = part.model.problem, part.settled
    out = np.zeros((len(choices), len(operands), len(p.devices)), BOX)
    out["high"] = -1
    numbers = np.array(operands, np.int64)
    given = (op, choices.degrees, choices.placed, numbers, out)
    call(boxes_table, p, held.choice, held.scratch, *given)
    return out


def volumes(p: Problem, operand: int, boxes: Array) -> Array:
    """Return the bytes of boxes (configurations, devices) of an operand."""
    row = p.operands[operand]
    rank = int(row["axes"]["end"] - row["axes"]["begin"])
    sides = np.maximum(boxes["high"] - boxes["low"], 0)[..., :rank]
    there = boxes["high"][..., 0] >= 0
    found: Array = np.prod(sides, axis=-1) * there * int(row["element_bytes"])
    return found


def in_memories(p: Problem, operand: int, boxes: Array, parts: bool = False) -> Array:
    """Return the bytes of boxes (configurations, devices) in the memory of each device.

    parts: whether boxes are partial sums, all of which are held. Otherwise elements that several
    devices with one memory share are counted once.
    """
    memory = p.devices["memory"]
    found: Array = volumes(p, operand, boxes) @ (memory[:, None] == memory).astype(np.int64)
    return found if parts else found.clip(max=whole_bytes(p, operand))


def grown(p: Problem, operand: int, a: Array, b: Array) -> Array:
    """Return how many bytes the box around `a` and `b` in a memory has beyond `a`: the most of any.

    Args:
        a, b: boxes (configurations, devices) of one value.
    """
    memory, mine = p.devices["memory"], in_memories(p, operand, a)
    row = p.operands[operand]
    rank, extents = int(row["axes"]["end"] - row["axes"]["begin"]), np.iinfo(np.int64).max
    found = np.zeros((len(a), len(b)), np.int64)
    for first in np.unique(memory, return_index=True)[1].tolist():
        low, high = [], []
        for boxes in (a, b):
            here = boxes[:, memory == memory[first]]
            there = here["high"][..., :1] >= 0
            low.append(np.where(there, here["low"], extents).min(1))
            high.append(here["high"].max(1))
        sides = np.maximum(high[0][:, None], high[1]) - np.minimum(low[0][:, None], low[1])
        nbytes = np.prod(np.maximum(sides, 0)[..., :rank], axis=-1) * int(row["element_bytes"])
        found = np.maximum(found, nbytes - mine[:, None, first])
    return found


def layout_in(shape: Sequence[int], boxes: Array) -> Configuration | None:
    """Return the layout that puts these boxes of a value on devices, or None if there is none."""
    there = np.flatnonzero(boxes["high"][:, 0] >= 0) if len(shape) else np.zeros(0, np.int64)
    low, high = (boxes[side][there][:, : len(shape)] for side in ("low", "high"))
    return layout_of(shape, Tiles(low, high, there.tolist()))
