"""Coordinate descent: one group of operators after another tries every ordered placement.

With few devices, it tries every placement.

Groups are the operators of a class; those that share parameters (the steps of a recurrent layer,
whose first is often of another class); the unions of both; and single operators. So the repeated
parts of a network are settled together first, and individually later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.configurations import (
    degrees_of,
    every_placement,
    placements,
    rows,
)
from soapstone.search.parallel.problem.groups import classes, sharing
from soapstone.search.parallel.problem.prepare import Model

Listed = dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]

EVERY = 64  # placements of a configuration, of which all are tried
AT_ONCE = 256  # configurations tried of a group in one round
MATTERS = 0.999  # of a cost: what is above is no better
GIVE_UP = 6  # groups of a kind, the costliest come first, after which others are not tried


def groups_of(model: Model) -> Iterator[list[Array]]:
    """Yield groups of operators, coarse ones first, each once."""
    equal, shared = classes(model), sharing(model)
    both = {op: (key, shared[op]) for op, key in equal.items()}
    single = {op: op for op in equal}
    known: set[tuple[int, ...]] = set()
    for keys in (equal, shared, both, single):
        found: dict[object, list[int]] = {}
        for op, key in keys.items():
            found.setdefault(key, []).append(op)
        new = [tuple(group) for group in found.values() if tuple(group) not in known]
        known.update(new)
        yield [np.array(group, np.int64) for group in new]


class Descent:
    """A descent through the groups of a model.

    Args:
        choices: configurations by class of operator, in place of ordered placements.
    """

    def __init__(self, walker: Walker, seed: int, choices: Listed | None = None) -> None:
        self.walker, self.random = walker, np.random.default_rng(seed)
        self.model = walker.model
        self.choices = {} if choices is None else choices

    def run(self, go_on: Callable[[], bool]) -> None:
        """Try configurations for each group until nothing improves or `go_on` returns False."""
        for groups in groups_of(self.model):
            work = self.walker.settled.choice.task_ns[:, 0]
            tasks = self.model.problem.tasks["operator"]
            cost = {int(op): int(work[tasks == op].sum()) for group in groups for op in group}
            groups.sort(key=lambda group: -sum(cost[int(op)] for op in group))
            vain = 0
            for group in groups:
                before = self.walker.best_ns
                if vain == GIVE_UP:
                    break
                degrees, placed = self._table(int(group[0]))
                for first in range(0, len(degrees), 16):
                    if not go_on():
                        return
                    part = slice(first, first + 16)
                    self.walker.descend(group, degrees[part], placed[part])
                vain = 0 if self.walker.best_ns < MATTERS * before else vain + 1

    def _table(self, op: int) -> tuple[Array, Array]:
        """Return configurations for an operator in random order, at most `AT_ONCE`."""
        p = self.model.problem
        number, devices = int(p.operators[op]["class_"]), len(p.devices)
        if number not in self.choices:
            points = {n for n in range(1, devices + 1) if devices % n == 0}
            self.choices[number] = [
                (degrees, where)
                for degrees in degrees_of(p, op, points)
                for where in _placements(int(np.prod(degrees)), devices)
            ]
        choices = self.choices[number]
        picked = self.random.permutation(len(choices))[:AT_ONCE]
        return rows([choices[i] for i in picked], devices)


def _placements(points: int, devices: int) -> Iterator[tuple[int, ...]]:
    """Yield devices for points: every placement if there are few, else ordered ones."""
    if devices**points <= EVERY:
        return every_placement(points, devices)
    return placements(points, devices)
