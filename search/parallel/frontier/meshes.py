"""Configurations by device meshes and tensor maps.

Cai et al., TensorOpt, section 2.1: the devices are an array of some shape, a *mesh*, in row-major
order, and each of its axes splits one dim of the operator, or none. Every operator has a mesh of
its own, with no restriction between operators (section 4.2). An axis that splits nothing leaves the
devices beyond its first idle. What an axis splits may be computed whole on each of its devices, if
that is asked for (redundant computation): only the backward pass is split then.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from soapstone.search.parallel.exact.tables import Choices
from soapstone.search.parallel.problem.arrays import MOST_DIMS, SPLIT, Problem
from soapstone.search.parallel.problem.configurations import rows
from soapstone.search.parallel.problem.geometry import complete, legal
from soapstone.search.parallel.problem.packing import call
from soapstone.search.parallel.problem.prepare import Model

Mesh = tuple[int, ...]
NO_DIM = -1


def meshes(devices: int) -> Iterator[Mesh]:
    """Yield all mesh shapes of a number of devices: its ordered factorisations, factors above 1."""
    yield (devices,) if devices > 1 else ()
    for first in range(2, devices // 2 + 1):
        if devices % first == 0:
            for rest in meshes(devices // first):
                yield (first, *rest)


def tensor_maps(mesh: Mesh, dims: int) -> Iterator[tuple[int, ...]]:
    """Yield the dim that each axis of a mesh splits, no dim twice, or NO_DIM.

    Two axes beside each other that both split nothing would be one axis of a smaller mesh.
    """
    for found in itertools.product((NO_DIM, *range(dims)), repeat=len(mesh)):
        used = [dim for dim in found if dim != NO_DIM]
        idle = any(a == b == NO_DIM for a, b in itertools.pairwise(found))
        if len(set(used)) == len(used) and not idle:
            yield found


def configurations(p: Problem, op: int, replicate: bool = False) -> Choices:
    """Return all legal configurations of an operator by meshes that split it into equal parts.

    replicate: also those that compute the same on several devices; they come last.
    """
    row, devices = p.operators[op], len(p.devices)
    dims, node = int(row["dims"]), int(row["node"])
    able = [dim for dim in range(dims) if row["splits"][dim] and row["extent"][dim] > 1]
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    padded = np.ones(MOST_DIMS, np.int64)
    for mesh in meshes(devices):
        for places in tensor_maps(mesh, len(able)):
            degrees = [1] * dims
            for axis, place in enumerate(places):
                if place != NO_DIM:
                    degrees[able[place]] = mesh[axis]
            padded[:dims] = degrees
            if any(row["extent"][dim] % degrees[dim] for dim in able):
                continue
            if call(legal, p, node, padded):
                found[
                    tuple(degrees), devices_of(mesh, [able[p] if p >= 0 else p for p in places])
                ] = None
    made = Choices(*rows(list(found), devices))
    return _with_copies(p, node, made) if replicate else made


def _with_copies(p: Problem, node: int, choices: Choices) -> Choices:
    """Return configurations, and each of them with all of some of its split dims at each point."""
    whole, some = [made.copy() for made in choices.degrees], list(choices.placed)
    for split, placed in zip(choices.degrees, choices.placed):
        dims = (1 << np.flatnonzero(split["degrees"] > 1)).tolist()
        for count in range(1, len(dims) + 1):
            for taken in itertools.combinations(dims, count):
                if call(complete, p, node, split["degrees"].copy(), sum(taken)):
                    whole.append(split.copy())
                    whole[-1]["replicated"] = sum(taken)
                    some.append(placed)
    return Choices(np.array(whole, SPLIT), np.array(some))


def configurations_of(model: Model, replicate: bool = False) -> dict[int, Choices]:
    """Return the configurations of each operator that has its own; those of a class share them."""
    p = model.problem
    replicate &= len(np.unique(p.devices["memory"])) > 1  # in one they read each other's results
    kind: dict[int, object] = {op: int(p.operators[op]["class_"]) for op in p.free}
    for op in p.free if replicate else ():  # of a class, results of some may be left of a run
        alone = p.nodes["once"][p.lists[slice(*p.operators[op]["nodes"])]]
        kind[op] = kind[op], tuple(alone.tolist())
    first = {number: op for op, number in reversed(kind.items())}
    made = {number: configurations(p, op, replicate) for number, op in first.items()}
    return {op: made[number] for op, number in kind.items()}


def devices_of(mesh: Mesh, split: Sequence[int]) -> tuple[int, ...]:
    """Return the device of each point, row-major over the dims, of a tensor map."""
    numbers = np.arange(int(np.prod(mesh))).reshape(mesh)
    taken = numbers[tuple(0 if dim == NO_DIM else slice(None) for dim in split)]
    return tuple(
        taken.transpose(np.argsort([dim for dim in split if dim != NO_DIM])).ravel().tolist()
    )
