"""Builds the arrays of branch and bound (`exact_arrays.Tree`) from a model and its space."""

from __future__ import annotations

import itertools

import numpy as np

from soapstone.ir.tensor import Array, Role
from soapstone.search.parallel.bounds.operator_costs import operator_costs
from soapstone.search.parallel.exact.exact_arrays import EDGE, FLAGS, Path, Tree
from soapstone.search.parallel.exact.space import Space
from soapstone.search.parallel.exact.tables import NEVER, Choices, Pair, passes, relation
from soapstone.search.parallel.problem.arrays import UPDATES
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import Model

LEAVES = 4096  # strategies kept before they are simulated
MOST_PAIRS = 30_000_000  # of neighbours' configurations


def place_of(model: Model, op: int, which: int) -> float:
    """Return the place of an operator's task in the order of tasks.

    It is the first of its tasks if the operator lacks the one that is asked for.

    which: 0 for the forward pass, 1 for the backward pass.
    """
    p = model.problem
    task = passes(model, op)[which]
    if task >= 0:
        return float(p.tasks[task]["place"])
    mine = [int(p.tasks[t]["place"]) for t, (owner, _) in enumerate(model.tasks) if owner == op]
    return float(min(mine))


class Encoder:
    """Builds the arrays that `branching.py` works on.

    Args:
        model: the whole model. space: the configurations of its operators.
        order: the operators in the order in which they get configurations.
        edges: pairs of operators, of which the second reads the first.
    """

    def __init__(
        self, model: Model, space: Space, order: list[int], edges: list[tuple[int, int]]
    ) -> None:
        self.model, self.space, self.order = model, space, order
        self.number = {op: i for i, op in enumerate(order)}
        self.edges = sorted((self.number[a], self.number[b]) for a, b in edges)
        self.kept = [space.first[space.kind(op)] for op in order]
        self.choices = [space.choices[space.kind(op)] for op in order]
        self.devices = len(model.problem.devices)
        self.source = [space.images[space.kind(op)].argmin(axis=0) for op in order]
        self.kind = [
            np.searchsorted(kept, space.images[space.kind(op)].min(axis=0))
            for kept, op in zip(self.kept, order)
        ]
        self.sharing = self._sharing()
        self._check()

    def _check(self) -> None:
        pairs = sum(len(self.kept[a]) * len(self.choices[b]) for a, b in self.edges)
        if pairs > MOST_PAIRS:
            raise ParallelError(
                f"graph {self.model.graph.name!r}: {pairs:,} pairs of neighbours' configurations on"
                f" {self.devices} devices found, {MOST_PAIRS:,} at most for an exhaustive search"
            )

    def _kept(self, i: int) -> Choices:
        rows = self.kept[i]
        return Choices(self.choices[i].degrees[rows], self.choices[i].placed[rows])

    def _sharing(self) -> list[list[int]]:
        """Return, for each operator, all that read one of its parameters, itself included."""
        roles = self.model.graph.roles
        read = [
            {
                name
                for node in self.model.operators[op].ahead
                for name in node.inputs
                if roles.get(name) is Role.PARAMETER
            }
            for op in self.order
        ]
        return [
            [j for j, theirs in enumerate(read) if i == j or mine & theirs]
            for i, mine in enumerate(read)
        ]

    def levels(self) -> list[int]:
        """Return the numbers of operators after which partial strategies may be simulated.

        Operators that share parameters are all before or all after such a place.
        """
        count = len(self.order)
        found = [0]
        for level in range(2, count):
            whole = all(max(group) < level for group in self.sharing[:level])
            if whole and level >= found[-1] + 2:
                found.append(level)
        return [*found[1:], count]

    def tree(self) -> Tree:
        """Return all tables of the search."""
        count, devices, space = len(self.order), self.devices, self.space
        sizes = [len(each) for each in self.choices]
        first = np.cumsum([0, *sizes]).astype(np.int64)
        kept_first = np.cumsum([0, *map(len, self.kept)]).astype(np.int64)
        rows, kept = int(first[-1]), int(kept_first[-1])
        flags = self._flags()
        times = np.zeros((3, rows, devices), np.int64)  # ahead, back, tail
        late = np.zeros((2, rows), np.int64)
        updates = np.zeros((2, rows, devices), np.int64)  # themselves, and what comes after
        for i in range(count):
            mine = slice(first[i], first[i + 1])
            self._own(i, times[:, mine], late[:, mine], updates[:, mine])
        if not self._in_reverse():
            updates[1] = 0
        delays, marks = self._delays()
        partner, joint_first, joint, joint_lasts = self._joint()
        edges = np.array([(*ends, *where) for ends, where in zip(self.edges, marks)], EDGE)
        before = [[e for e, (_, b) in enumerate(self.edges) if b == i] for i in range(count)]
        after = [[e for e, (a, _) in enumerate(self.edges) if a == i] for i in range(count)]
        renamings = space.renamings
        same = (renamings[:, renamings] == np.arange(devices)).all(axis=2)
        return Tree(
            first=first,
            kept_first=kept_first,
            kept=np.concatenate([first[i] + self.kept[i] for i in range(count)]),
            kind=np.concatenate(self.kind).astype(np.int64),
            turned=np.concatenate(self.source).astype(np.int64),
            image=np.concatenate(
                [space.images[space.kind(op)] for op in self.order], axis=1
            ).T.copy(),
            renamings=renamings,
            opposite=same.argmax(axis=1).astype(np.int64),
            points=np.concatenate([each.degrees["points"] for each in self.choices]),
            placed=np.concatenate([each.placed for each in self.choices]),
            ahead=times[0],
            back=times[1],
            ahead_late=late[0],
            back_late=late[1],
            tail=times[2],
            updates=updates[0],
            lasts=updates[1],
            flags=flags,
            edges=edges,
            before_ptr=np.cumsum([0, *map(len, before)]).astype(np.int64),
            before=np.array([e for each in before for e in each], np.int64),
            after_ptr=np.cumsum([0, *map(len, after)]).astype(np.int64),
            after=np.array([e for each in after for e in each], np.int64),
            delays=delays,
            alive=np.ones(sum(len(self.kept[a]) * sizes[b] for a, b in self.edges), np.uint8),
            partner=partner,
            joint_first=joint_first,
            joint=joint,
            joint_lasts=joint_lasts if updates[1].any() else 0 * joint_lasts,
            shared=np.zeros((kept, devices), np.int64),
            start=np.zeros((kept, devices), np.int64),
            leave=np.zeros((kept, devices), np.int64),
            reach=np.zeros((kept, devices, devices), np.int64),
            rest=np.zeros((kept, devices, devices), np.int64),
        )

    def _flags(self) -> Array:
        """Return `Tree.flags`."""
        p = self.model.problem
        flags = np.zeros(len(self.order), FLAGS)
        ahead, back = -1.0, float(len(p.tasks))
        for i, op in enumerate(self.order):
            first, last = passes(self.model, op)
            flags[i]["backward"] = last >= 0
            begins, ends = place_of(self.model, op, 0), place_of(self.model, op, 1)
            if first >= 0 and last >= 0:
                if begins > ahead and ends < back:
                    flags[i]["ordered"] = 1
                    ahead, back = begins, ends
                flags[i]["itself"] = any(
                    first in p.makers_of(value) and last in p.readers_of(value)["task"]
                    for value in range(len(p.values))
                )
        return flags

    def _updates_last(self) -> bool:
        """Return whether devices run all updates after everything else."""
        p = self.model.problem
        update = p.operators[p.tasks["operator"]]["kind"] == UPDATES
        places = p.tasks["place"]
        return bool(places[update].min(initial=len(places)) > places[~update].max(initial=-1))

    def _in_reverse(self) -> bool:
        """Return whether every device runs updates in the reverse order of operators."""
        p = self.model.problem
        places: dict[int, list[int]] = {}
        for task in range(len(p.tasks)):
            k = p.tasks[task]["operator"]
            if p.operators[k]["kind"] == UPDATES:
                maker = int(p.nodes[p.operands[p.operators[k]["source"]]["node"]]["operator"])
                places.setdefault(self.number[maker], []).append(int(p.tasks[task]["place"]))
        makers = sorted(places)
        return all(max(places[b]) < min(places[a]) for a, b in itertools.pairwise(makers))

    def _own(self, i: int, times: Array, late: Array, updates: Array) -> None:
        """Write what an operator costs by itself; of shared parameters the updates alone."""
        op, p = self.order[i], self.model.problem
        small, own = operator_costs(self.model, [op], [self._kept(i)])
        mine = next(k for k, item in enumerate(small.operators) if item.source is None)
        first, last = passes(small, mine)
        kind, names = self.kind[i], self.space.renamings[self.source[i]]
        if first >= 0:
            times[0], late[0] = own.times[kind, first], own.exchanges[kind, first]
        if last >= 0:
            times[1], late[1] = own.times[kind, last], own.exchanges[kind, last]
            if len(self.sharing[i]) == 1:
                times[2] = own.tails[kind] - late[1][:, None]
        if not self._updates_last():
            return
        name_of = {item.name: k for k, item in enumerate(small.operators)}
        for k in range(len(p.operators)):
            if p.operators[k]["kind"] != UPDATES:
                continue
            maker = p.nodes[p.operands[p.operators[k]["source"]]["node"]]["operator"]
            if maker == op:
                table = own.updates[kind, name_of[self.model.operators[k].name]]
                updates[0] += np.take_along_axis(table, names, axis=1)
        if len(self.sharing[i]) == 1:
            updates[1] = np.take_along_axis(own.lasts[kind], names, axis=1)

    def _delays(self) -> tuple[Array, list[tuple[int, int]]]:
        """Return the delays of all pairs, and where those of each edge, and its marks, begin."""
        known: dict[tuple[object, ...], int] = {}
        parts: list[Array] = []
        where: list[tuple[int, int]] = []
        top = marks = 0
        for a, b in self.edges:
            ends = self.order[a], self.order[b]
            pair = Pair(self.model, ends)
            key = (*relation(self.model, ends), *relation(self.model, ends, True), pair.shared)
            if key not in known:
                made = pair.delays(self._kept(a), self.choices[b])
                parts.append(made.reshape(-1, *made.shape[2:]))
                known[key] = top
                top += len(parts[-1])
            where.append((known[key], marks))
            marks += len(self.kept[a]) * len(self.choices[b])
        none = np.full((1, 2, self.devices, self.devices), NEVER, np.int64)
        return np.concatenate(parts or [none]), where

    def _joint(self) -> tuple[Array, Array, Array, Array]:
        """Return tails, and `lasts`, of operators that share parameters with one other only."""
        count = len(self.order)
        partner, begin = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        known: dict[tuple[object, ...], int] = {}
        none = np.zeros((1, self.devices), np.int64)
        parts, top = [(none, none)], 1
        for b, group in enumerate(self.sharing):
            a = group[0]
            if len(group) != 2 or a == b or self.sharing[a] != group:
                continue
            ends = self.order[a], self.order[b]
            inputs = [[*node.inputs] for op in ends for node in self.model.operators[op].ahead[:1]]
            shared = tuple(
                (i, j)
                for (i, x), (j, y) in itertools.product(*map(enumerate, inputs))
                if x == y and self.model.graph.roles.get(x) is Role.PARAMETER
            )
            key = (shared, *relation(self.model, ends), *relation(self.model, ends, True))
            if key not in known:
                _, own = operator_costs(self.model, ends, [self._kept(a), self.choices[b]])
                parts.append((own.tails, own.lasts))
                known[key] = top
                top += len(own.tails)
            partner[b], begin[b] = a, known[key]
        tails, lasts = (np.concatenate(each) for each in zip(*parts))
        return partner, begin, tails, lasts


def path_of(x: Tree) -> Path:
    """Return the path through a tree that has no step yet."""
    operators, devices = len(x.flags), x.placed.shape[1]
    follow = np.full((operators + 1, devices, devices + 1), NEVER, np.int64)
    follow[0, np.arange(devices), np.arange(devices)] = 0
    return Path(
        chosen=np.zeros(operators, np.int64),
        cursor=np.zeros(operators + 1, np.int64),
        fixed=np.ones((operators + 1, len(x.opposite)), np.int64),
        end=np.zeros((operators, devices), np.int64),
        free=np.zeros((operators + 1, devices), np.int64),
        away=np.zeros((operators, devices, devices + 1), np.int64),
        follow=follow,
        load=np.zeros((operators + 1, devices), np.int64),
        work=np.zeros((operators + 1, devices), np.int64),
        grid=np.zeros((4, devices, devices), np.int64),
        begin=np.zeros(x.start.shape, np.int64),
        leave=np.zeros(x.start.shape, np.int64),
        least=np.zeros(x.rest.shape, np.int64),
        counts=np.zeros(3, np.int64),
        leaves=np.zeros((LEAVES, operators), np.int64),
    )
