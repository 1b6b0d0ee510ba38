"""The ways in which what the backward pass reads can be had, as configurations and choices.

TensorOpt (Cai et al.) names recomputation and offloading as further configurations of operators;
its tensor reuse (section 4.2) is a choice at an edge: which copies of a tensor stay, those before
resharding, after it, or both. What is not kept is there while a block is gone through backward, so
that ways have one cost more: bytes that pass, summed in blocks, of which the most counts.
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
    """How an edge's value gets to its reader, and what of it stays: in one step, and as `Copies`
    says; or along a path in several (`paths.py`), of which the last copy stays."""

    BOTH = "both"
    BEFORE = "before"
    AFTER = "after"
    PATH = "path"


class Saving(StrEnum):
    """What memory may be saved by, at the cost of time.

    recompute: what an operator made is made again, from what its block begins with; offload: it is
    copied to the memory behind the device's, and back; copies: what another operator got in another
    layout is moved again, or kept in that layout alone.
    """

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    COPIES = "copies"


def savings(names: Collection[Saving | str]) -> list[Saving]:
    """Return what is named.

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
    """A problem, and what the numbers in its results mean.

    Attributes:
        problem: operators in order of their numbers in the model; an operator's configurations come
            as often as there are `keeps`, first all that keep what they make, and so on.
        keeps: those of each operator's results. sent: the choices of each edge.
        edges: the model's operators that each edge is between.
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
    """Return the operators whose results are kept for others: the ends of blocks.

    Were these recomputed, a block would have to be for the next one to be.
    """
    free = sorted(costs.own)
    number = {op: i for i, op in enumerate(free)}
    spine = marked_spine(len(free), [(number[a], number[b]) for a, b in costs.edges])
    return {free[i] for i in (*spine.marked, *spine.far)}


def check_behind(model: Model) -> None:
    """Raise ParallelError unless each device has a memory behind its own."""
    processor = without_backing(model.machine)
    if processor is not None:
        raise ParallelError(
            f"offload: machine {model.machine.name!r} has no memory larger than"
            f" {processor.memory!r}, where {processor.name!r} works; one needed"
            " (`host` in a cluster's description)"
        )


def _repeated(numbers: Array, blocks: list[int]) -> Array:
    """Return layouts of configurations, once for each way to keep what they make or read.

    blocks: which of the table's blocks, each as long as there are layouts, is meant.
    """
    count = int(numbers.max()) + 1
    return np.concatenate([numbers + block * count for block in blocks])


class _Table:
    """What ways cost, for a machine and the ways that there are."""

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
