"""Exact comparison of both sides of an equation, element by element, as polynomials.

A law is validated at one size after another (Jia et al., TASO, section 2.4); this is the loop over
sizes, compiled. A program lists the nodes of both sides; an instance says which structure
(`structure.py`) each node has at one size. Every element of every variable is an unknown, and every
element of a node is a polynomial: ascending keys, each the packed, sorted numbers of a monomial's
unknowns, with integer coefficients over the node's common denominator. A maximum becomes a new
unknown, numbered by its exact content: the set of what it is the maximum of, maxima among them
flattened; relu(p) is max{p, 0}. Equal forms are equal functions, and of polynomials without maxima
also conversely. What does not fit 64 bits is handed back, for `counterexamples.py`, which has no
limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from soapstone.cache.compiled import linked, njit
from soapstone.ir.tensor import Array
from soapstone.rules.algebra.structure import Structure
from soapstone.rules.laws.maxima import MOST, Store, gather, maximum
from soapstone.rules.laws.monomial import (
    collect,
    degree as degree_of,
    divisor as common_divisor,
    product,
)

EQUAL, DIFFERENT, TOO_LARGE = 0, 1, 2
VARIABLE = -2  # as the first operand of a node
NONE = -1
SUM, SUM_RELU, RELU, MAX = range(4)
_KINDS = {"sum": SUM, "sum+relu": SUM_RELU, "relu": RELU, "max": MAX}
_LIMIT = 4e18


class Program(NamedTuple):
    """Both sides of an equation as one graph: operands of nodes, in order, and the two roots."""

    first: NDArray[np.int32]
    second: NDArray[np.int32]
    left: int
    right: int


class Result(NamedTuple):
    """How a comparison ended: sides are equal, differ at an element, or are too large."""

    outcome: int
    instance: int
    element: int


class Structures(NamedTuple):
    """Structures (index maps of operators), concatenated for the compiled loop."""

    kinds: Array
    denominators: Array
    first: Array  # of a structure's starts
    starts: Array
    a: Array  # of entries
    b: Array
    numerators: Array


class Pool:
    """A growing concatenation of structures, in which each is found by a key."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._kinds: list[int] = []
        self._denominators: list[int] = []
        self._first = [0]  # of a structure's starts
        self._starts = np.zeros(1 << 10, np.int64)
        self._a, self._b = (np.zeros(1 << 10, np.int32) for _ in range(2))
        self._numerators = np.zeros(1 << 10, np.int64)
        self.entries = 0

    def number(self, key: Hashable, make: Callable[[], Structure]) -> int:
        """Return the number by which instances name a structure, made where the key is new."""
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = self._add(make())
        return found

    def _add(self, structure: Structure) -> int:
        outputs = math.prod(structure.shape)
        first, entries = self._first[-1], self.entries
        self._starts = _room(self._starts, first + outputs + 1)
        counts = np.bincount(structure.out, minlength=outputs)
        self._starts[first] = entries
        np.cumsum(counts, out=self._starts[first + 1 : first + 1 + outputs])
        self._starts[first + 1 : first + 1 + outputs] += entries
        self._first.append(first + outputs + 1)
        self.entries += len(structure.a)
        self._a, self._b, self._numerators = (
            _room(part, self.entries) for part in (self._a, self._b, self._numerators)
        )
        self._a[entries : self.entries] = structure.a
        self._b[entries : self.entries] = structure.b
        self._numerators[entries : self.entries] = structure.numerator
        self._kinds.append(_KINDS[structure.kind])
        self._denominators.append(structure.denominator)
        return len(self._kinds) - 1

    def arrays(self) -> Structures:
        """Return all structures so far."""
        return Structures(
            np.array(self._kinds, np.int8),
            np.array(self._denominators, np.int64),
            np.array(self._first, np.int64),
            self._starts,
            self._a,
            self._b,
            self._numerators,
        )


def _room(array: NDArray[Any], size: int) -> NDArray[Any]:
    """Return an array of at least some size that begins with this one."""
    if size <= len(array):
        return array
    larger = np.zeros(max(size, 2 * len(array)), array.dtype)
    larger[: len(array)] = array
    return larger


class _Scratch(NamedTuple):
    """Memory for one size: monomials of nodes, where elements end, a sum, and maxima."""

    keys: Array
    coefs: Array
    ends: Array
    sum_keys: Array
    sum_coefs: Array
    store: Store


@cache
def _scratch() -> _Scratch:
    nodes, maxima = (20, 20, 16, 17, 17), (18, 18, 16, 16, 16, 16, 14, 14, 14, 3)
    store = Store(*(np.zeros(1 << size, np.int64) for size in maxima))
    keys, coefs, ends, sum_keys, sum_coefs = (np.zeros(1 << size, np.int64) for size in nodes)
    return _Scratch(keys, coefs, ends, sum_keys, sum_coefs, store)


def compare(
    program: Program, structures: Structures, instances: NDArray[np.int32], begin: int = 0
) -> Result:
    """Return the first instance, from `begin` on, at which the sides are not seen to be equal.

    instances: (sizes, nodes); for a variable, how many elements it has; else its structure.
    """
    return Result(*_compare(program, structures, instances, begin, _scratch()))


@njit(nogil=True)
def _compare(program, structures, instances, begin, scratch):  # type: ignore[no-untyped-def]
    first, second, left, right = program
    kinds, denominators, start_of, starts, entry_a, entry_b, numerators = structures
    keys, coefs, ends, sum_keys, sum_coefs, store = scratch
    nodes = len(first)
    base = np.zeros(nodes + 1, np.int64)  # of a node's elements in `ends`
    den = np.ones(nodes, np.int64)
    degree = np.zeros(nodes, np.int64)
    largest = np.ones(nodes, np.float64)
    members = np.zeros(MOST, np.int64)
    one_key, one_coef = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for instance in range(begin, len(instances)):
        unknowns, bits = _unknowns(first, instances[instance], kinds, start_of)
        highest = 63 // bits
        store.counts[:] = 0
        store.first[0] = 0
        unknown = 0
        top = 0
        place = 0
        for node in range(nodes):
            which = instances[instance, node]
            base[node] = place
            if first[node] == VARIABLE:
                if place + which >= len(ends) or top + which > len(keys):
                    return TOO_LARGE, instance, 0
                ends[place] = top
                for _ in range(which):
                    unknown += 1
                    keys[top], coefs[top] = unknown, 1
                    top += 1
                    place += 1
                    ends[place] = top
                place += 1
                den[node], degree[node], largest[node] = 1, 1, 1.0
                continue
            a, b = first[node], second[node]
            den_a = den[a] if a >= 0 else 1
            den_b = den[b] if b >= 0 else 1
            scale = denominators[which]
            size_a = max(largest[a], float(den_a)) if a >= 0 else 1.0
            size_b = max(largest[b], float(den_b)) if b >= 0 else 1.0
            total_degree = (degree[a] if a >= 0 else 0) + (degree[b] if b >= 0 else 0)
            whole = float(den_a) * float(den_b) * float(scale)
            if whole > _LIMIT or size_a * size_b > _LIMIT or total_degree > highest:
                return TOO_LARGE, instance, 0
            common = den_a * den_b * scale
            kind = kinds[which]
            outputs = start_of[which + 1] - start_of[which] - 1
            if place + outputs >= len(ends):
                return TOO_LARGE, instance, 0
            ends[place] = top
            node_from = top
            for output in range(outputs):
                lo, hi = starts[start_of[which] + output], starts[start_of[which] + output + 1]
                terms = 0
                if kind <= SUM_RELU:
                    bound = 0.0
                    sorted_yet = True
                    for entry in range(lo, hi):
                        x, y = entry_a[entry], entry_b[entry]
                        factor = numerators[entry]
                        bound = max(bound, abs(float(factor)))
                        a_from = ends[base[a] + x] if x >= 0 else 0
                        a_to = ends[base[a] + x + 1] if x >= 0 else 1
                        b_from = ends[base[b] + y] if y >= 0 else 0
                        b_to = ends[base[b] + y + 1] if y >= 0 else 1
                        if terms + (a_to - a_from) * (b_to - b_from) > len(sum_keys):
                            return TOO_LARGE, instance, 0
                        for i in range(a_from, a_to):
                            key_a = keys[i] if x >= 0 else np.int64(0)
                            coef_a = (coefs[i] if x >= 0 else den_a) * factor
                            for j in range(b_from, b_to):
                                key = key_a
                                coef = coef_a * den_b
                                if y >= 0:
                                    key = product(key_a, keys[j], bits)
                                    coef = coef_a * coefs[j]
                                if terms and key <= sum_keys[terms - 1]:
                                    sorted_yet = False
                                sum_keys[terms], sum_coefs[terms] = key, coef
                                terms += 1
                    if size_a * size_b * bound * max(terms, 1) > _LIMIT:
                        return TOO_LARGE, instance, 0
                    if not sorted_yet:
                        terms = collect(sum_keys, sum_coefs, terms)
                if kind >= SUM_RELU:
                    kept = store.counts[0], store.counts[1]
                    size = 0
                    if kind == SUM_RELU:
                        size = gather(
                            *(members, size, sum_keys, sum_coefs, 0, terms, common),
                            *(unknowns, bits, store),
                        )
                    else:
                        for entry in range(lo, hi):
                            at = base[a] + entry_a[entry]
                            if size >= 0:
                                size = gather(
                                    *(members, size, keys, coefs, ends[at], ends[at + 1]),
                                    *(common, unknowns, bits, store),
                                )
                    if kind != MAX and size >= 0:  # and zero
                        size = gather(
                            members, size, one_key, one_coef, 0, 0, 1, unknowns, bits, store
                        )
                    if size >= 0:
                        size = maximum(
                            *(members, size, common, unknowns, bits, sum_keys, sum_coefs),
                            *(kept, store),
                        )
                    if size < 0:
                        return TOO_LARGE, instance, 0
                    terms = size
                if top + terms > len(keys):
                    return TOO_LARGE, instance, 0
                for i in range(terms):
                    keys[top], coefs[top] = sum_keys[i], sum_coefs[i]
                    top += 1
                place += 1
                ends[place] = top
            place += 1
            divisor = common_divisor(coefs, node_from, top, common)
            most = 1.0
            for i in range(node_from, top):
                if divisor > 1:
                    coefs[i] //= divisor
                most = max(most, abs(float(coefs[i])))
            den[node] = common // divisor
            degree[node] = total_degree
            if kind >= SUM_RELU:
                degree[node] = 0
                for i in range(node_from, top):
                    degree[node] = max(degree[node], degree_of(keys[i], bits))
            largest[node] = most
        base[nodes] = place
        found = _differing(left, right, base, den, ends, keys, coefs)
        if found >= 0:
            return DIFFERENT, instance, found
    return EQUAL, len(instances), 0


@linked()
def _unknowns(first, row, kinds, start_of):  # type: ignore[no-untyped-def]
    """Return how many unknowns the variables are, and the bits of one's number, maxima's too."""
    unknowns = maxima = 0
    for node in range(len(first)):
        which = row[node]
        if first[node] == VARIABLE:
            unknowns += which
        elif kinds[which] != SUM:
            maxima += start_of[which + 1] - start_of[which] - 1
    bits = 1
    while (1 << bits) <= unknowns + maxima:
        bits += 1
    return unknowns, bits


@linked()
def _differing(left, right, base, den, ends, keys, coefs):  # type: ignore[no-untyped-def]
    """Return the first element in which two nodes differ, -1 where there is none."""
    outputs = base[left + 1] - base[left] - 1
    if outputs != base[right + 1] - base[right] - 1:
        return 0
    for output in range(outputs):
        p, q = base[left] + output, base[right] + output
        terms = ends[p + 1] - ends[p]
        if terms != ends[q + 1] - ends[q] or den[left] != den[right]:
            return output
        for i in range(terms):
            u, v = ends[p] + i, ends[q] + i
            if keys[u] != keys[v] or coefs[u] != coefs[v]:
                return output
    return -1
