"""A Markov chain with everything it works on: begun from a strategy, walked, descended."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np

from soapstone.ir.configuration import Configuration
from soapstone.ir.dims import Operand
from soapstone.ir.graph import Node
from soapstone.search.parallel.mcmc import chain, proposals
from soapstone.search.parallel.mcmc.chain_arrays import AFFORDED, Chain
from soapstone.search.parallel.problem.arrays import (
    CAPACITY,
    DEGREES,
    FREE,
    FROM,
    KIND,
    MOST_DIMS,
    Array,
)
from soapstone.search.parallel.problem.choice import Settled, empty
from soapstone.search.parallel.problem.groups import classes, sharing
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model
from soapstone.search.parallel.simulation import schedule
from soapstone.search.parallel.simulation.liveness import excess, most_bytes

# What a strategy that does not fit costs more, and each of its bytes over a device's capacity: so
# that it is worse than any that fits, and chains leave it.
UNFIT = 1 << 40
NS_PER_BYTE = 1


class Walker:
    """One chain over strategies of a model.

    Attributes:
        tight: whether strategies may not fit the devices' memories.
        step_ns: the time of a step of the strategy set last as a whole.
        seconds: spent on proposals.
    """

    def __init__(
        self, model: Model, moves: Mapping[int, float], temperature: float, delta: bool, seed: int
    ) -> None:
        self.model, self.delta = model, delta
        self.settled = Settled(model)
        self.chain = _chain(model, moves, seed)
        self.temperature = temperature / len(self.chain.free)
        self.tight = most_bytes(model.problem) > int(model.problem.devices[:, CAPACITY].min())
        self.fitting: tuple[int, Array, Array, Array] | None = None  # the best one that was checked
        self.step_ns, self.seconds = 0, 0.0
        self._room()

    def _room(self) -> None:
        p, c = self.model.problem, self.settled.choice
        self.backup = empty(p, 1)
        self.state = schedule.room(p, len(c.messages))

    def load(self) -> None:
        """Compile what walks and descends, or load it, before any clock runs."""
        self.begin({})
        none = np.zeros((0, 1), np.int64)
        self._run(chain.walk, 0.0, 0, self.delta)
        self._run(chain.descend, none[:, 0], none, none, np.zeros(1, np.int64), 0, self.delta)
        self.seconds = 0.0

    def begin(self, configurations: Mapping[str, Configuration]) -> int:
        """Start from a strategy; return its cost in ns."""
        self.settled.set(configurations)
        cost = self._pass()
        self.chain.cost[:] = cost
        call(chain.keep_best, self.settled.choice, self.chain, cost)
        self._check_each(cost > self.step_ns)
        self._note()
        return cost

    def _check_each(self, each: bool) -> None:
        """Say whether every accepted change is checked to fit, or only what is best by and by."""
        self.chain.pending[0] = each

    def _note(self) -> None:
        k = self.chain
        self.fitting = self.best_ns, k.best.copy(), k.best_placed.copy(), k.best_cuts.copy()

    def _verify(self) -> None:
        """Go back to the best strategy that fits if a better one does not; check each from now."""
        if not self.tight or self.chain.pending[0] or self.fitting is None:
            return
        if self.best_ns == self.fitting[0]:
            return
        k, held = self.chain, self.settled
        now = held.choice.operators.copy(), held.choice.placed.copy(), held.choice.cuts.copy()
        self.restore(held)
        if self._pass() == self.best_ns:
            self._note()
            held.restore(*now)
            self._pass()
            return
        k.cost[:], k.best[:], k.best_placed[:], k.best_cuts[:] = self.fitting
        self._check_each(True)
        self.again()

    def visit(self) -> None:
        """Derive and judge the strategy whose configurations are set; the best one stays known.

        Later ones are compared with the best.
        """
        self.settled.settle()
        cost = self._pass()
        if cost < self.best_ns:
            call(chain.keep_best, self.settled.choice, self.chain, cost)
        self.chain.cost[0] = self.best_ns

    def again(self) -> None:
        """Go back to the best."""
        self.restore(self.settled)
        self.chain.cost[0] = self._pass()

    def _pass(self) -> int:
        """Simulate what is set, as the accepted strategy; return its cost."""
        p, c = self.model.problem, self.settled.choice
        if len(self.state.arrival) < len(c.messages):
            self._room()
        step = int(call(schedule.simulate, p, c, self.state, 0, -1))
        call(schedule.accept, p, self.state, 0)
        call(chain.weigh, p, c, self.chain)
        self.step_ns = step
        return step + self._penalty()

    def _penalty(self) -> int:
        if not self.tight:
            return 0
        p, held = self.model.problem, self.settled
        return _unfit_ns(excess(p, held.choice, held.scratch, self.state))

    def walk(self, proposals: int, heat: float = 1.0) -> None:
        """Make so many proposals, at so many times the temperature."""
        target = self.proposals + proposals
        while (left := target - self.proposals) > 0:
            temperature = heat * self.temperature * float(self.best_ns % UNFIT)
            self._run(chain.walk, temperature, left, self.delta)
        self._verify()

    def descend(self, group: Array, degrees: Array, placed: Array) -> None:
        """Give a group of equal operators each of some configurations; keep what is faster."""
        row = np.zeros(1, np.int64)
        while row[0] < len(degrees):
            self._run(chain.descend, group, degrees, placed, row, len(degrees), self.delta)
        self._verify()

    def _run(self, function: object, *args: object) -> None:
        """Run compiled code until it stops, and do what it stopped for."""
        began = time.perf_counter()
        p, held = self.model.problem, self.settled
        where = (p, held.choice, self.backup, held.scratch, self.state, self.chain)
        done = call(function, *where, *args)  # type: ignore[arg-type]
        if done == chain.FULL:
            held.grow()
            held.settle()
            self._pass()
        elif done == chain.CHECK:
            cost = int(self.chain.pending[3])
            allowed = int(self.chain.pending[1])
            # The pass under trial is what memory is counted for.
            trial = self.state._replace(end=self._ends(), free=self.state.trial_free)
            cost += _unfit_ns(excess(p, held.choice, held.scratch, trial))
            call(chain.decide, *where, min(cost, allowed + 1))
        self.seconds += time.perf_counter() - began

    def _ends(self) -> Array:
        """Return when points end in the pass under trial, which begins at its first place."""
        first = int(self.chain.pending[2])
        return np.concatenate([self.state.end[:first], self.state.trial_end[first:]])

    @property
    def proposals(self) -> int:
        return int(self.chain.counts[0])

    @property
    def best_ns(self) -> int:
        return int(self.chain.cost[1])

    def restore(self, settled: Settled) -> None:
        """Set the best strategy in arrays of the same model."""
        settled.restore(self.chain.best, self.chain.best_placed, self.chain.best_cuts)


def _unfit_ns(nbytes: int) -> int:
    return UNFIT + NS_PER_BYTE * nbytes if nbytes else 0


def _chain(model: Model, moves: Mapping[int, float], seed: int) -> Chain:
    p = model.problem
    operators = len(p.operators)
    free = np.nonzero(p.operators[:, KIND] == FREE)[0]
    if not free.size:
        raise ParallelError(f"graph {model.graph.name!r} has no operator to choose for")
    group_of = np.zeros((operators, 2), np.int64)
    groups: list[list[int]] = []
    for column, keys in enumerate((classes(model), sharing(model))):
        number: dict[object, int] = {}
        for op, key in keys.items():
            group_of[op, column] = number.setdefault(key, len(groups))
            if group_of[op, column] == len(groups):
                groups.append([])
            groups[group_of[op, column]].append(op)
    ptr = np.cumsum([0, *map(len, groups)])
    peers = _peers(model, set(free.tolist()))
    peer_ptr = np.cumsum([0, *(len(peers[op]) for op in range(operators))])
    devices = len(p.devices)
    random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    return Chain(
        random=random,
        cost=np.zeros(2, np.int64),
        counts=np.zeros(8, np.int64),
        weights=proposals.cumulative(dict(moves)),
        free=free.astype(np.int64),
        group_of=group_of,
        group_ptr=ptr.astype(np.int64),
        members=np.array([op for group in groups for op in group], np.int64),
        peer_ptr=peer_ptr.astype(np.int64),
        peers=np.array([peer for each in peers for peer, _ in each], np.int64),
        axes=np.array([dims for each in peers for _, dims in each], np.int64).reshape(
            -1, MOST_DIMS
        ),
        path=np.zeros((2, AFFORDED), np.int64),
        divisors=np.array([n for n in range(1, devices + 1) if devices % n == 0], np.int64),
        best=np.zeros((operators, DEGREES + MOST_DIMS), np.int64),
        best_placed=np.zeros((operators, devices), np.int64),
        best_cuts=np.zeros((operators, devices + 2), np.int64),
        load=np.zeros((2, devices), np.int64),
        pending=np.zeros(5, np.int64),
        moves=np.zeros((proposals.MOVES, 2), np.int64),
    )


def _peers(model: Model, free: set[int]) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return, for each operator, the free ones before or after it, past those that follow.

    With each, for the dims of the operator, the dim of the other that indexes the same axis of the
    value that both have, or -1.
    """
    source: dict[str, dict[int, list[int]]] = {}  # makers of a value, with the dims of its axes
    found: list[dict[int, tuple[int, ...]]] = [{} for _ in model.operators]
    number = {node.name: i for i, node in enumerate(model.nodes)}
    for mine, item in enumerate(model.operators):
        if mine not in free:
            continue
        before: dict[int, list[tuple[int, int]]] = {}
        for node in item.ahead:
            for name, operand in zip(node.inputs, model.graph.signature(node).inputs):
                for other, dims in source.get(name, {}).items():
                    if other != mine:
                        ours = _dims(model, number[node.name], node, operand)
                        before.setdefault(other, []).extend(zip(ours, dims))
        for other, pairs in before.items():
            found[mine][other] = _lined(pairs)
            found[other][mine] = _lined([(b, a) for a, b in pairs])
        for node in item.ahead:
            for name, operand in zip(node.outputs, model.graph.signature(node).outputs):
                source[name] = {mine: _dims(model, number[node.name], node, operand)}
    return [sorted(peers.items()) for peers in found]


def _dims(model: Model, number: int, node: Node, operand: Operand) -> list[int]:
    """Return which of its operator's dims indexes each axis of a node's operand, or -1.

    Of several the outermost counts that there is something to cut of.
    """
    dims = model.graph.signature(node).dims
    place = {dim.name: j for j, dim in enumerate(dims) if dim.extent > 1}
    row = model.problem.nodes[number]
    axes = ([place[name] for name in axis.dims if name in place] for axis in operand.axes)
    return [int(row[FROM + found[0]]) if found else -1 for found in axes]


def _lined(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    dims = [-1] * MOST_DIMS
    for mine, other in pairs:
        if mine >= 0:
            dims[mine] = other
    return tuple(dims)


__all__ = ["NS_PER_BYTE", "UNFIT", "Walker"]
