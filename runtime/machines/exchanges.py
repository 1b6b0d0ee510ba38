"""What ranks exchange, by kind and by who takes part: what is worth measuring of their machine."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import NamedTuple

from soapstone.runtime.machines.machine import Link, Machine

COPY, GATHER, SCATTER, SUM = KINDS = ("copy", "gather", "scatter", "sum")
_LONG = 1 << 20  # bytes from which on bandwidth counts more than latency


class Exchange(NamedTuple):
    """What some ranks do together: each receives what it lacks of a value.

    kind: copy, each of two the other's value in turn; gather, all the first one's; scatter, each
    its part of the sum of what all have; sum, each all of that. members: memories, by number.
    """

    kind: str
    members: tuple[int, ...]


def exchanges(machine: Machine) -> list[Exchange]:
    """What may be exchanged in a machine whose ranks have a memory each.

    Copies between any two; sums, and what one has and all need, along lines of arrays of all ranks:
    what splits a dim of an operator is an axis of such an array (TensorOpt, section 2.1).
    """
    count = len(machine.memories)
    pairs = itertools.combinations(range(count), 2)
    found = [Exchange(COPY, pair) for pair in pairs]
    for size in range(2, count + 1):
        for stride in range(1, count // size + 1):
            if count % (size * stride):
                continue
            for first in range(count):
                if first % (size * stride) < stride:
                    line = tuple(range(first, first + size * stride, stride))
                    found += [Exchange(kind, line) for kind in (GATHER, SCATTER, SUM)[size == 2 :]]
    return list(dict.fromkeys(found))


def links_of(machine: Machine, times: Mapping[Exchange, Mapping[int, float]]) -> tuple[Link, ...]:
    """The links between memories of ranks, by the times of copies.

    Latency is the time of the shortest, bandwidth that of what long ones take beyond it.
    """
    links = []
    for each, by_size in times.items():
        if each.kind == COPY:
            latency = min(by_size.values())
            rates = [n / max(ns - latency, 1e-3) for n, ns in by_size.items() if n >= _LONG]
            one, two = (machine.memories[member].name for member in each.members)
            about = latency / 1e9, statistics.median(rates) * 1e9
            links += [Link(one, two, *about), Link(two, one, *about)]
    return tuple(links)
