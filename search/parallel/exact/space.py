"""The space of an exhaustive search: every configuration of equal parts on any devices.

Configurations cut dims of the results; devices that can be exchanged without any difference rename
them into each other, so that of all that are alike one stands for the others.
"""

from __future__ import annotations

import itertools

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.search.parallel.exact.tables import Choices
from soapstone.search.parallel.problem.arrays import Problem
from soapstone.search.parallel.problem.configurations import degrees_of, every_placement, rows
from soapstone.search.parallel.problem.operators import ParallelError
from soapstone.search.parallel.problem.prepare import Model

MOST = 20_000  # configurations of an operator


def interchangeable(p: Problem) -> list[list[int]]:
    """Return groups of devices any two of which can be exchanged without a difference."""
    devices = len(p.devices)
    groups: list[list[int]] = []
    for device in range(devices):
        for group in groups:
            if _alike(p, group[0], device):
                group.append(device)
                break
        else:
            groups.append([device])
    return groups


def _alike(p: Problem, a: int, b: int) -> bool:
    devices = len(p.devices)
    if any(p.devices[name][a] != p.devices[name][b] for name in ("computer", "kind")):
        return False
    swapped = np.arange(devices)
    swapped[[a, b]] = b, a
    for matrix in (p.latency_ns, p.ns_per_byte):
        if (matrix[np.ix_(swapped, swapped)] != matrix).any():
            return False
    renamed: dict[int, int] = {}  # channels, which must be shared in the same way
    for x, y in itertools.product(range(devices), repeat=2):
        mine = _route(p, x, y)
        theirs = _route(p, int(swapped[x]), int(swapped[y]))
        if len(mine) != len(theirs):
            return False
        if any(renamed.setdefault(c, d) != d for c, d in zip(mine, theirs)):
            return False
    return len(set(renamed.values())) == len(renamed)


def _route(p: Problem, source: int, target: int) -> list[int]:
    pair = source * len(p.devices) + target
    return [int(c) for c in p.route[p.route_ptr[pair] : p.route_ptr[pair + 1]]]


def permutations(p: Problem) -> Array:
    """Return the renamings of devices that make no difference; the first leaves all as it is."""
    groups = interchangeable(p)
    found = []
    for orders in itertools.product(*(itertools.permutations(group) for group in groups)):
        names = np.arange(len(p.devices))
        for group, order in zip(groups, orders):
            names[group] = order
        found.append(names)
    return np.array(found)


def splits(p: Problem, op: int) -> list[tuple[int, ...]]:
    """Return the degrees of an operator that make equal parts of its results."""
    points = range(1, len(p.devices) + 1)
    return list(degrees_of(p, op, points, reduced=False, equal=True))


def check_space(model: Model) -> None:
    """Raise ParallelError, naming the operator, if one has too many configurations."""
    p, devices = model.problem, len(model.problem.devices)
    for op in p.free:
        count = sum(float(devices) ** np.prod(degrees) for degrees in splits(p, op))
        if count > MOST:
            raise ParallelError(
                f"{model.operators[op].node.label}: {count:.3g} configurations on {devices} devices"
                f" found, {MOST:,} at most for an exhaustive search"
            )


class Space:
    """Every configuration of each operator, and how devices' renamings permute them.

    Attributes:
        free: the operators that have a configuration of their own.
        renamings: (renamings, devices), the first leaves all as it is.
        listed: configurations by kind of operator, degrees and devices; choices: as rows.
        images: (renamings, configurations), the number that each becomes. first: those that no
            renaming makes an earlier one of.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        p, devices = model.problem, len(model.problem.devices)
        self.free = p.free
        self.renamings = permutations(p)
        self.listed: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        self.choices: dict[int, Choices] = {}
        self.images: dict[int, Array] = {}
        self.first: dict[int, Array] = {}
        for op in self.free:
            kind = self.kind(op)
            if kind in self.choices:
                continue
            self.listed[kind] = listed = [
                (degrees, where)
                for degrees in splits(p, op)
                for where in every_placement(int(np.prod(degrees)), devices)
            ]
            self.choices[kind] = Choices(*rows(listed, devices))
            self.images[kind] = self._renamed(listed)
            self.first[kind] = np.unique(self.images[kind].min(axis=0))

    def kind(self, op: int) -> int:
        """Return the class of an operator; those of one class share choices."""
        return int(self.model.problem.operators[op]["class_"])

    def size(self, op: int) -> int:
        """Return how many choices an operator has."""
        return len(self.choices[self.kind(op)])

    def _renamed(self, listed: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Array:
        number = {item: i for i, item in enumerate(listed)}
        return np.array(
            [
                [number[degrees, tuple(int(names[d]) for d in where)] for degrees, where in listed]
                for names in self.renamings
            ]
        )
