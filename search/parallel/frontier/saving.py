"""The ways to provide what the backward pass reads: keep, recompute, offload or reshard again.

In TensorOpt (Cai et al.), recomputation and offloading are further configurations of an operator.
Its tensor reuse (section 4.2) is a choice at an edge: which copies of a tensor are kept, those
before resharding, after it, or both. What is not kept exists only while the backward pass goes
through its block. So there is one more cost: transient bytes, summed within each block, of which
the largest block counts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from soapstone.engine.mapper import without_backing
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.tensor import Array
from soapstone.search.parallel.frontier.costs import Costs, Own
from soapstone.search.parallel.frontier.edges import Moving
from soapstone.search.parallel.frontier.paths import copy_ns
from soapstone.search.parallel.frontier.spine import marked_spine
from soapstone.search.parallel.frontier.tables import INFEASIBLE, Edge, Monoid, Operator, Problem
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.problem.timing import crossing_ns

MEMORY, TIME, NETWORK, PASSING = range(4)  # coordinates


class Sent(StrEnum):
    """How an edge's value gets to its reader, and which copies are kept until the backward pass.

    In one step: the copies on both sides of it, only those before it, or only those after it. Along
    a path of several steps (`paths.py`), the last copy is kept.
    """

    BOTH = "both"
    BEFORE = "before"
    AFTER = "after"
    PATH = "path"


class Saving(StrEnum):
    """A technique that saves memory at the cost of time.

    recompute: an operator's results are computed again, from the inputs of its block. offload: they
    are copied to the backing memory of the device's memory, and back. copies: a value that another
    operator reads in another layout is moved again, or kept in that layout alone.
    """

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COPIES = "copies"


def savings(names: Collection[Saving | str]) -> list[Saving]:
    """Return the techniques of the given names.

    Raises:
        ParallelError: a name is none of them.
    """
    try:
        return [Saving(each) for each in names]
    except ValueError:
        known = ", ".join(Saving)
        raise ParallelError(f"saving {list(names)} found, some of {known} needed") from None


@dataclass(frozen=True)
class Ways:
    """An abstract problem, and what the numbers in its results mean.

    Attributes:
        problem: its operators are those of the model in order. The configurations of an operator
            are repeated for each of `keeps`: first all of them that keep their results, and so on.
        keeps: the ways in which operators' results may be provided to the backward pass.
        sent: for each edge, the ways to send its value, which are its choices.
        edges: the writer and the reader of each edge, as operators of the model.
    """

    problem: Problem
    keeps: tuple[Keep, ...]
    sent: tuple[tuple[Sent, ...], ...]
    edges: tuple[tuple[int, int], ...]


def ways_of(
    model: Model, costs: Costs, saving: Collection[Saving] = (), network: bool = False
) -> Ways:
    """Return the abstract problem of a model: memory and time, by operator and edge.

    Args:
        network: time on the network is a cost too.

    Raises:
        ParallelError: offloading, and a device without a memory behind its own.
    """
    number = {op: i for i, op in enumerate(sorted(costs.own))}
    ends, keeps = bounds(costs), [Keep.KEEP]
    if Saving.RECOMPUTE in saving:
        keeps.append(Keep.RECOMPUTE)
    if Saving.OFFLOAD in saving:
        check_behind(model)
        keeps.append(Keep.OFFLOAD)
    used = [MEMORY, TIME, *[NETWORK] * network, *[PASSING] * bool(saving)]
    table = _Table(model, tuple(keeps), Saving.COPIES in saving, used)
    own = {(id(costs.own[op]), op in ends): costs.own[op] for op in number}
    made = {key: table.operator(each, key[1]) for key, each in own.items()}
    moving = {id(each): table.edge(each) for each in costs.edges.values()}
    operators = [
        Operator(model.operators[op].name, made[id(costs.own[op]), op in ends]) for op in number
    ]
    edges, sent = [], []
    for (a, b), between in costs.edges.items():
        rows = _repeated(between.mine, [table.row(keep, a in ends) for keep in keeps])
        columns = _repeated(between.others, [int(keep is Keep.RECOMPUTE) for keep in keeps])
        choices, found = moving[id(between)]
        edges.append(Edge(number[a], number[b], rows, columns, found))
        sent.append(choices)
    monoids: list[Monoid] = ["max" if cost == PASSING else "sum" for cost in used]
    memory = MEMORY, len(used) - 1
    totals = (memory, *((at,) for at in range(1, len(used) - 1))) if saving else None
    problem = Problem(operators, edges, tuple(monoids), totals=totals)
    return Ways(problem, tuple(keeps), tuple(sent), tuple(costs.edges))


def bounds(costs: Costs) -> set[int]:
    """Return the operators whose results are always kept: the last ones of blocks.

    If these were recomputed, recomputing a block would need that of the block before it.
    """
    free = sorted(costs.own)
    number = {op: i for i, op in enumerate(free)}
    spine = marked_spine(len(free), [(number[a], number[b]) for a, b in costs.edges])
    return {free[i] for i in (*spine.marked, *spine.far)}


def check_behind(model: Model) -> None:
    """Raise ParallelError unless each device's memory has a backing memory, to offload to."""
    processor = without_backing(model.machine)
    if processor is not None:
        raise ParallelError(
            f"offload: machine {model.machine.name!r} has no memory larger than"
            f" {processor.memory!r}, where {processor.name!r} works; one needed"
            " (`host` in a cluster's description)"
        )


def _repeated(numbers: Array, blocks: list[int]) -> Array:
    """Return the layouts of configurations, repeated for each way to provide their results.

    blocks: which of the table's blocks, each as long as there are layouts, is meant.
    """
    count = int(numbers.max()) + 1
    return np.concatenate([numbers + block * count for block in blocks])


class _Table:
    """The costs of operators and edges, for the given ways and the machine."""

    def __init__(
        self, model: Model, keeps: tuple[Keep, ...], copies: bool, used: list[int]
    ) -> None:
        self.model, self.keeps, self.copies, self.used = model, keeps, copies, used
        self.launch_ns = float(model.problem.kinds[0]["launch_ns"])

    def row(self, keep: Keep, end: bool) -> int:
        """Return which block of an edge's rows a maker's way has.

        What a block ends with is kept for others though it be made again for its own gradients.
        """
        return 0 if keep is Keep.RECOMPUTE and end else self.keeps.index(keep)

    def operator(self, own: Own, end: bool) -> Array:
        """Return costs (configurations, 1, coordinates) of an operator.

        end: whether a block ends with it, so that what others read of it is kept.
        """
        found = []
        for keep in self.keeps:
            made, longer = np.zeros_like(own.kept), np.zeros_like(own.time)
            if keep is Keep.RECOMPUTE:
                made, longer = own.inner if end else own.kept, own.ahead
            elif keep is Keep.OFFLOAD:
                made = own.kept
                longer = self._crossed(made)
            network = own.time - own.compute + (longer if keep is Keep.OFFLOAD else 0)
            held = own.fixed + np.maximum(own.kept - made, own.waiting)
            costs = np.stack([held, own.time + longer, network, made], -1)
            if keep is not Keep.KEEP and ((end and keep is Keep.RECOMPUTE) or not own.passes):
                costs[made == 0] = INFEASIBLE  # nothing that could be had otherwise
            found.append(costs)
        return np.ascontiguousarray(np.concatenate(found)[:, None, self.used])

    def edge(self, moving: Moving) -> tuple[tuple[Sent, ...], Array]:
        """Return the choices of an edge, and what they cost.

        (layouts of the maker by way, layouts of the reader kept or recomputed, choices,
        coordinates). What the reader's backward pass, or its recomputation, reads stays as a copy;
        what the maker does not keep is moved again.
        """
        blocks = [
            [self._block(moving, keep, again) for again in self._readers] for keep in self.keeps
        ]
        choices = list(Sent)
        found = np.concatenate([np.concatenate(row, 1) for row in blocks])
        there = [0, *(i for i in (1, 2, 3) if (found[:, :, i] < INFEASIBLE).any())]
        found = np.insert(found[:, :, there], NETWORK, found[:, :, there, TIME], axis=-1)
        found = np.ascontiguousarray(found[..., self.used])
        return tuple(choices[i] for i in there), found

    @property
    def _readers(self) -> tuple[bool, ...]:
        return (False, True) if Keep.RECOMPUTE in self.keeps else (False,)

    def _block(self, moving: Moving, keep: Keep, again: bool) -> Array:
        """Return costs (layouts, layouts, 4 choices, 3 coordinates) for a way of the maker's.

        again: whether the reader is recomputed.
        """
        once = moving.ahead + moving.back
        found = np.full((*once.shape, len(Sent), 3), INFEASIBLE)
        read = moving.again or again
        held = (moving.sole + (moving.passed if again else 0))[:, None]
        copies = moving.copies if read else np.zeros_like(once)
        if keep is not Keep.KEEP:
            late = once + (moving.ahead if read else 0)
            if keep is Keep.OFFLOAD:
                late = late + self._crossed(moving.sole)[:, None]
            found[:, :, 0] = np.stack(
                np.broadcast_arrays(0, late, copies + held if read else 0), -1
            )
            return found
        stays = moving.copies if read else moving.stays
        found[:, :, 0] = np.stack(np.broadcast_arrays(held + stays, once, 0), -1)
        if self.copies and read:
            before = held + moving.stays, once + moving.ahead + self._copied(moving.tile)[:, None]
            found[:, :, 1] = np.stack(
                np.broadcast_arrays(*before, copies + moving.tile[:, None]), -1
            )
            if (moving.whole < INFEASIBLE).any():
                after = moving.whole[None], once + self._copied(moving.whole)[None]
                found[:, :, 2] = np.stack(np.broadcast_arrays(*after, 0), -1)
                found[:, moving.whole >= INFEASIBLE, 2] = INFEASIBLE
            found[:, :, 1:][moving.copies == 0] = INFEASIBLE  # one copy, whatever is kept
        if moving.routed is not None:
            way = moving.routed
            made, at = np.arange(len(once))[:, None], np.arange(once.shape[1])
            there = moving.copies[way.through, at] + moving.tile[way.through] * (
                way.through != made
            )
            path = held + (there if read else 0), way.ahead + way.back
            found[:, :, 3] = np.stack(np.broadcast_arrays(*path, 0), -1)
            found[way.ahead + way.back >= once, 3] = INFEASIBLE
        return found

    def _copied(self, nbytes: Array) -> Array:
        """Return the ns of a copy in a device's memory."""
        copied: Array = copy_ns(self.model, np.minimum(nbytes, INFEASIBLE >> 8))
        return copied

    def _crossed(self, nbytes: Array) -> Array:
        """Return the ns of a copy to the memory behind a device's, and of one back."""
        once = self.launch_ns + crossing_ns(self.model.machine, nbytes)
        return np.where(nbytes > 0, 2 * once, 0).astype(np.int64)
