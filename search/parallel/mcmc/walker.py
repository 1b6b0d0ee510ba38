"""A Markov chain with its arrays: set to a strategy, walked, descended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.ir.dims import Operand
from soapstone.ir.graph import Node
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array
from soapstone.search.parallel.mcmc import chain, proposals
from soapstone.search.parallel.mcmc.chain_arrays import AFFORDED, RUN, Chain
from soapstone.search.parallel.problem.arrays import MOST_DIMS, SPLIT
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
    """One chain over the strategies of a model.

    Attributes:
        tight: whether strategies may exceed the devices' memories.
        step_ns: the time of a step of the last strategy that was set as a whole.
        seconds: spent on proposals.
    """

    def __init__(
        self, model: Model, moves: Mapping[int, float], temperature: float, delta: bool, seed: int
    ) -> None:
        self.model, self.delta = model, delta
        self.settled = Settled(model)
        self.chain = _chain(model, moves, seed)
        self.temperature = temperature / len(self.chain.free)
        self.tight = most_bytes(model.problem) > int(model.problem.devices["capacity"].min())
        self.fitting: tuple[int, tuple[Array, ...]] | None = None  # the best one that was checked
        self.step_ns, self.seconds = 0, 0.0
        self._room()

    def _room(self) -> None:
        p, c = self.model.problem, self.settled.choice
        self.backup = empty(p, 1)
        self.state = schedule.room(p, len(c.messages))

    def load(self) -> None:
        """Compile or load the chain's code, before any clock runs."""
        self.begin({})
        none, row = np.zeros((0, 1), np.int64), np.zeros(1, np.int64)
        self._run(chain.walk, 0.0, 0, self.delta)
        self._run(chain.descend, none[:, 0], np.zeros(0, SPLIT), none, row, 0, self.delta)
        self.seconds = 0.0

    def begin(self, configurations: Mapping[str, Configuration]) -> int:
        """Start from a strategy; return its cost in ns."""
        self.settled.set(configurations)
        cost = self._pass()
        self.run["cost"] = self.run["best"] = cost
        call(chain.keep_best, self.settled.choice, self.chain, cost)
        self._check_each(cost > self.step_ns)
        self._note()
        return cost

    def _check_each(self, each: bool) -> None:
        """Set whether memory is checked at every accepted change, or at times for the best."""
        self.run["scarce"] = each

    def _note(self) -> None:
        self.fitting = self.best_ns, tuple(each.copy() for each in self.chain.chosen)

    def _verify(self) -> None:
        """Return to the best strategy that fits if a better one does not; check each from now."""
        if not self.tight or self.run["scarce"] or self.fitting is None:
            return
        cost, fitting = self.fitting
        if self.best_ns == cost:
            return
        held = self.settled
        now = [each.copy() for each in held.choice.chosen]
        self.restore(held)
        if self._pass() == self.best_ns:
            self._note()
            held.restore(*now)
            self._pass()
            return
        self.run["cost"] = self.run["best"] = cost
        for kept, best in zip(self.chain.chosen, fitting):
            kept[:] = best
        self._check_each(True)
        self.return_to_best()

    def visit(self) -> None:
        """Simulate the strategy whose configurations are set; the best one is kept.

        Later strategies are compared with the best.
        """
        self.settled.settle()
        cost = self._pass()
        if cost < self.best_ns:
            call(chain.keep_best, self.settled.choice, self.chain, cost)
        self.run["cost"] = self.best_ns

    def return_to_best(self) -> None:
        """Return to the best strategy."""
        self.restore(self.settled)
        self.run["cost"] = self._pass()

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
        """Make proposals, at a multiple `heat` of the temperature."""
        target = self.proposals + proposals
        while (left := target - self.proposals) > 0:
            temperature = heat * self.temperature * float(self.best_ns % UNFIT)
            self._run(chain.walk, temperature, left, self.delta)
        self._verify()

    def descend(self, group: Array, degrees: Array, placed: Array) -> None:
        """Try some configurations for a group of equal operators; keep those that are faster."""
        row = np.zeros(1, np.int64)
        while row[0] < len(degrees):
            self._run(chain.descend, group, degrees, placed, row, len(degrees), self.delta)
        self._verify()

    def _run(self, function: object, *args: object) -> None:
        """Run compiled code until it ends, serving what it stops for."""
        began = time.perf_counter()
        p, held = self.model.problem, self.settled
        where = (p, held.choice, self.backup, held.scratch, self.state, self.chain)
        done = call(function, *where, *args)  # type: ignore[arg-type]
        if done == chain.FULL:
            held.grow()
            held.settle()
            self._pass()
        elif done == chain.CHECK:
            cost = int(self.run["passed"])
            allowed = int(self.run["threshold"])
            # The pass under trial is what memory is counted for.
            trial = self.state._replace(end=self._ends(), free=self.state.trial_free)
            cost += _unfit_ns(excess(p, held.choice, held.scratch, trial))
            call(chain.decide, *where, min(cost, allowed + 1))
        self.seconds += time.perf_counter() - began

    def _ends(self) -> Array:
        """Return when points end in the simulation of a proposal, from its first place on."""
        first = int(self.run["first"])
        return np.concatenate([self.state.end[:first], self.state.trial_end[first:]])

    @property
    def run(self) -> Any:
        """Costs and counts: `chain_arrays.RUN`."""
        return self.chain.run[0]

    @property
    def proposals(self) -> int:
        """The number of strategies proposed so far."""
        return int(self.run["proposals"])

    @property
    def best_ns(self) -> int:
        """The time of a step of the best strategy so far."""
        return int(self.run["best"])

    def restore(self, settled: Settled) -> None:
        """Set the best strategy in arrays of the same model."""
        settled.restore(*self.chain.chosen)


def _unfit_ns(nbytes: int) -> int:
    return UNFIT + NS_PER_BYTE * nbytes if nbytes else 0


def _chain(model: Model, moves: Mapping[int, float], seed: int) -> Chain:
    p = model.problem
    operators = len(p.operators)
    free = p.free
    if not free:
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
    peers = _peers(model, set(free))
    peer_ptr = np.cumsum([0, *(len(peers[op]) for op in range(operators))])
    devices = len(p.devices)
    random = np.random.SeedSequence(seed).generate_state(1, np.uint64) | np.uint64(1)
    return Chain(
        random=random,
        run=np.zeros(1, RUN),
        weights=proposals.cumulative(dict(moves)),
        free=np.array(free, np.int64),
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
        best=np.zeros(operators, SPLIT),
        best_placed=np.zeros((operators, devices), np.int64),
        best_cuts=np.zeros((operators, devices + 1), np.int64),
        load=np.zeros((2, devices), np.int64),
        moves=np.zeros((proposals.MOVES, 2), np.int64),
    )


def _peers(model: Model, free: set[int]) -> list[list[tuple[int, tuple[int, ...]]]]:
    """Return, for each operator, the nearest free ones before or after it.

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

    Of several dims, the outermost with an extent beyond 1 is taken.
    """
    dims = model.graph.signature(node).dims
    place = {dim.name: j for j, dim in enumerate(dims) if dim.extent > 1}
    follows = model.problem.nodes[number]["follows"]
    axes = ([place[name] for name in axis.dims if name in place] for axis in operand.axes)
    return [int(follows[found[0]]) if found else -1 for found in axes]


def _lined(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    dims = [-1] * MOST_DIMS
    for mine, other in pairs:
        if mine >= 0:
            dims[mine] = other
    return tuple(dims)
