"""Validation of laws: exactly, for all parameters' values and all sizes within some bounds.

Jia et al. (TASO, section 2.4) validate operator properties by executing them symbolically on all
small tensors, and find wrong properties so. `bounds.py` says up to which extents and why these are
enough, `sizes.py` lists the sizes, `slices.py` leaves out
those that others decide, `polynomial.py` compares both sides as polynomials in the elements of all
variables, and `counterexamples.py` says where they differ.
Laws of operators that are no polynomials are compared by `symbolic.py`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from soapstone.ir.law import Law
from soapstone.ir.term import Term, Value, subterms
from soapstone.rules.algebra.structure import POLYNOMIAL
from soapstone.rules.laws.bounds import covered, sweeps
from soapstone.rules.laws.columns import Column, apply, distinct
from soapstone.rules.laws.counterexamples import (
    Counterexample,
    Untyped,
    constant_structure,
    refute,
    structure_of,
)
from soapstone.rules.laws.polynomial import (
    EQUAL,
    NONE,
    VARIABLE,
    Pool,
    Program,
    Structures,
    compare,
)
from soapstone.rules.laws.sizes import (
    Limit,
    Sizes,
    one_sided,
    parameter_values,
    rank_choices,
    sizes,
)
from soapstone.rules.laws.slices import needed
from soapstone.rules.workers import Progress, spawned
from soapstone.search.rules import language
from soapstone.search.rules.shapes import extents

if TYPE_CHECKING:
    from soapstone.rules.laws.symbolic import Difference, Symbolic

LIMIT = 4
_CHUNK = 1 << 17
_MOST_ENTRIES = 1 << 24
Rows: TypeAlias = "NDArray[np.int64]"


@dataclass(frozen=True)
class Validation:
    """What was found of a law: how many obligations (parameters and sizes), and what refutes it.

    `compared`: at how many of them both sides were; the others have these as their slices.
    `covered`: of a law that holds, which parameters and extents these are, and why they suffice.
    """

    law: Law
    obligations: int
    compared: int
    counterexample: object | None  # it prints
    seconds: float
    covered: str = ""

    @property
    def holds(self) -> bool:
        """Whether it was said of some sizes, and holds at all of them."""
        return self.obligations > 0 and self.counterexample is None

    def __str__(self) -> str:
        if self.counterexample is not None:
            return f"{self.law.name}: {self.law} is wrong: {self.counterexample}"
        if not self.obligations:
            return f"{self.law.name}: {self.law} is said of no sizes: its sides are never typed"
        text = f"{self.law.name}: holds at {self.obligations} sizes, {self.compared} compared"
        return f"{text}: {self.covered}" if self.covered else text


def is_polynomial(law: Law) -> bool:
    """Return whether every operator of a law has a structure."""
    return all(term.symbol in POLYNOMIAL for term in subterms(law.sides) if term.operands)


def validate(law: Law, limit: int = LIMIT) -> Validation:
    """Return whether a law holds for all parameters and all extents up to a limit, exactly."""
    start = time.perf_counter()
    polynomial = is_polynomial(law)
    check: Callable[[Sizes, Rows], tuple[int, object | None]]
    if polynomial:
        tasks, check = list(_tasks(law, limit)), _polynomial
    else:
        from soapstone.rules.laws.symbolic import Symbolic

        every = itertools.product(parameter_values(law), rank_choices(law, limit))
        tasks, check = [(*each, limit) for each in every], partial(_symbolic, Symbolic())
    obligations = compared = 0
    for bindings, ranks, most in tasks:
        found = sizes(law, bindings, ranks, most)
        if found is not None and len(found):
            rows = needed(found)
            place, counterexample = check(found, rows)
            if counterexample is not None:
                place, obligations = place + 1, obligations + int(rows[place]) + 1
                seconds = time.perf_counter() - start
                return Validation(law, obligations, compared + place, counterexample, seconds)
            obligations, compared = obligations + len(found), compared + len(rows)
    untyped = _untyped(law, tasks) if polynomial and not obligations else None
    said = covered(law, limit) if obligations else ""
    return Validation(law, obligations, compared, untyped, time.perf_counter() - start, said)


def _polynomial(sizes: Sizes, rows: Rows) -> tuple[int, Counterexample | None]:
    """Return which of some sizes is the first at which polynomials differ, and how."""
    part = sizes.only(rows)
    return (len(rows), None) if _congruent(part) else _first_difference(part)


def _symbolic(computed: Symbolic, sizes: Sizes, rows: Rows) -> tuple[int, Difference | None]:
    """Return which of some sizes is the first at which expressions differ, and how."""
    for place, row in enumerate(rows.tolist()):
        difference = computed.difference(sizes.sides, sizes.at(row))
        if difference is not None:
            return place, difference
    return len(rows), None


def _untyped(
    law: Law, tasks: Sequence[tuple[dict[str, Value], dict[Term, int], Limit]]
) -> Untyped | None:
    """Return sizes that show why a law is said of none, if a side is ever typed."""
    for bindings, ranks, most in tasks:
        found = one_sided(law, bindings, ranks, most)
        if found is not None:
            shapes = {str(leaf): extents(type_) for leaf, type_ in found[0].items()}
            left, right = (None if side is None else extents(side) for side in found[1:])
            return Untyped(bindings, shapes, left, right)
    return None


def validate_all(
    laws: Sequence[Law] | None = None,
    processes: int = 2,
    progress: Progress | None = None,
    limit: int = LIMIT,
) -> tuple[Validation, ...]:
    """Return the validation of laws, by default all that operators declare, in their order."""
    laws = language.laws() if laws is None else tuple(laws)
    found: dict[int, Validation] = {}
    if processes <= 1:
        for number, law in enumerate(laws):
            found[number] = validate(law, limit)
            if progress is not None:
                progress(law.name, len(found), len(laws))
        return tuple(found.values())
    # The largest laws start first, so that processes end together.
    order = sorted(range(len(laws)), key=lambda number: -_weight(laws[number]))
    with spawned(processes) as pool:
        waiting = {pool.submit(validate, laws[number], limit): number for number in order}
        for done in as_completed(waiting):
            number = waiting[done]
            found[number] = done.result()
            if progress is not None:
                progress(laws[number].name, len(found), len(laws))
    return tuple(replace(found[number], law=law) for number, law in enumerate(laws))


def _weight(law: Law) -> int:
    leaves = sum(not term.operands for term in subterms(law.sides))
    convolution = any(term.symbol == "conv2d" for term in subterms(law.sides))
    return (leaves + 3 * convolution) * max(1, len(law.ranks))


def _tasks(law: Law, limit: int) -> Iterator[tuple[dict[str, Value], dict[Term, int], Limit]]:
    for sweep in sweeps(law, limit):
        for bindings in parameter_values(law, sweep.values):
            for ranks in rank_choices(law):
                yield bindings, ranks, sweep.limit


def _congruent(sizes: Sizes) -> bool:
    """Return whether both sides are one operator on operands that are equal, seen at all sizes.

    So an equation in a context is compared without the context.
    """
    left, right = sizes.sides
    if (left.symbol, left.parameters) != (right.symbol, right.parameters) or not left.operands:
        return False
    for pair in zip(left.operands, right.operands):
        if pair[0] == pair[1]:
            continue
        every = set(subterms(pair))
        kept = [(leaf, c) for leaf, c in zip(sizes.leaves, sizes.columns) if leaf in every]
        keys = np.zeros(len(sizes), np.int64)
        for _, column in kept:
            _, keys = distinct(keys, column)
        _, rows = np.unique(keys, return_index=True)
        leaves, columns = tuple(leaf for leaf, _ in kept), tuple(c[rows] for _, c in kept)
        part = replace(sizes, sides=pair, leaves=leaves, columns=columns)
        types = dict(zip(leaves, columns))
        for term in subterms(pair):
            if term.operands:
                types[term] = apply(term, sizes.types, [types[each] for each in term.operands])
        if not np.array_equal(types[pair[0]], types[pair[1]]):
            return False
        if not _congruent(part) and _first_difference(part)[1] is not None:
            return False
    return True


def _first_difference(sizes: Sizes) -> tuple[int, Counterexample | None]:
    """Return the first size at which the sides differ, and how; else how many there are."""
    for start in range(0, len(sizes), _CHUNK):
        chunk = tuple(column[start : start + _CHUNK] for column in sizes.columns)
        part = replace(sizes, columns=chunk)
        program, pool, instances = compiled(part)
        row = 0
        while row < len(instances):
            result = compare(program, pool, instances, row)
            if result.outcome == EQUAL:
                break
            counterexample = refute(part.sides, part.at(result.instance), sizes.bindings)
            if counterexample is not None:
                return start + result.instance, counterexample
            row = result.instance + 1
    return len(sizes), None


_pool = Pool()


def compiled(sizes: Sizes) -> tuple[Program, Structures, NDArray[np.int32]]:
    """Return sizes as the compiled loop takes them: program, pool of structures, instances."""
    global _pool
    if _pool.entries > _MOST_ENTRIES:
        _pool = Pool()
    nodes = list(subterms(sizes.sides))
    where = {term: number for number, term in enumerate(nodes)}
    types: dict[Term, Column] = dict(zip(sizes.leaves, sizes.columns))
    instances = np.zeros((len(sizes), len(nodes)), np.int32)
    for number, term in enumerate(nodes):
        operands = [types[operand] for operand in term.operands]
        if operands:
            types[term] = apply(term, sizes.types, operands)
        columns = operands or [types[term]]
        several, rows = distinct(*columns)
        numbers = np.zeros(len(several[0]), np.int32)
        for at, key in enumerate(zip(*(column.tolist() for column in several))):
            of = [sizes.types.all[index] for index in key]
            if term.is_variable:
                numbers[at] = math.prod(extents(of[0]))
            else:
                make = partial(structure_of if operands else constant_structure, term, of)
                known = (term.symbol, term.parameters, key, sizes.types.split_trees)
                numbers[at] = _pool.number(known, make)
        instances[:, number] = numbers[rows]
    operand = [[VARIABLE] if t.is_variable else [where[o] for o in t.operands] for t in nodes]
    first_operand, second = zip(*((*each, NONE, NONE)[:2] for each in operand))
    program = Program(
        np.array(first_operand, np.int32),
        np.array(second, np.int32),
        where[sizes.sides[0]],
        where[sizes.sides[1]],
    )
    return program, _pool.arrays(), instances
