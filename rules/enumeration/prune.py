"""Pruning: of all pairs of equal graphs, those from which the others follow.

Jia et al., TASO, section 2.5. A pair is a rule in each direction in which it brings no variable
that is not there already. Applying a rule replaces tensors that match its source by its target;
operators that something still reads stay. Pairs are dropped where they follow from others:

- *Renaming*: the pair is another one with variables put for its variables. The one of most
  variables is kept.
- *Common subgraph, first form*: an operator common to both graphs can be a variable, and the graphs
  are still equal. That pair is emitted if it is not in the space itself.
- *Common subgraph, second form*: an operator makes an output of both from equal operands. The
  operands are rewritten instead, and likewise outputs that can be rewritten one after another.
- *Spanning forest*: in a class of equal graphs, a pair that other pairs connect.

Nothing is lost, since nothing follows from itself in a circle: each dropped pair follows from kept
ones and from pairs that come before it in the order by (operators of both graphs, fewer variables
later). Pairs that a common subgraph cuts have fewer operators left, so they connect a class from
that place in the order on; each pair is met in its place, and dropped only where what has come
before connects its graphs, in every direction in which it could be used itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.ir.term import Term
from soapstone.rules.algebra.canonical import Sides
from soapstone.rules.enumeration.cuts import UNCUT, Pairs, Queries, scan
from soapstone.rules.enumeration.engine import Enumeration
from soapstone.rules.enumeration.general import WIDTH, most_general, patterns
from soapstone.rules.enumeration.pairs import Nodes, new_scratch, new_view, ordered_outputs
from soapstone.rules.enumeration.reduce import Reducer
from soapstone.rules.enumeration.spanning import CUT_BIT, span
from soapstone.search.rules.proof import Candidate

Progress = Callable[[str, int, "int | None"], None]
_PAIRS = 1 << 17  # of one compiled call, about
_VARIABLES = 64  # more than any pair has


@dataclass(frozen=True)
class Counts:
    """How many pairs of equal graphs are left after each step (the paper's Table 2.3).

    Attributes:
        initial: pairs with a usable direction.
        after_renaming: those that no renaming of variables makes equal.
        after_common_subgraph: the most general of those without a common subgraph.
        candidates: those kept to connect their classes, and terms equal to a part of themselves.
    """

    initial: int
    after_renaming: int
    after_common_subgraph: int
    candidates: int


def candidates(
    enumeration: Enumeration, progress: Progress | None = None
) -> tuple[list[Candidate], Counts]:
    """Return the candidates that are left of an enumeration, and how many pairs there were."""
    say = progress or (lambda stage, done, total: None)
    reducer = Reducer(enumeration.space)
    nodes = nodes_of(enumeration)
    pairs, queries = _scanned(enumeration, nodes, say)
    valid = pairs.cut >= UNCUT
    known = np.unique(pairs.key[valid])
    beyond = _cut_inputs(enumeration, nodes, pairs, queries, known, reducer, say)
    weight, distinct = _weights(enumeration, nodes, pairs)
    kept = _spanned(enumeration, pairs, weight)
    chosen = _sides(enumeration, nodes, pairs, kept)
    collapses = [((term,), (part,)) for term, part in enumeration.collapses]
    found = reducer.candidates(chosen + beyond, collapses, say)
    return found, Counts(int(valid.sum()), len(known), distinct, len(found))


def nodes_of(enumeration: Enumeration) -> Nodes:
    """Return what compiled code reads of an enumeration."""
    space, terms = enumeration.space, enumeration.terms
    symmetric = np.array(enumeration.built.table.symmetric, np.bool_)
    leaves = [each.term for each in space.inputs]
    variable = np.array([leaf.is_variable for leaf in leaves], np.bool_)
    bit = np.where(variable, np.int64(1) << np.arange(len(variable), dtype=np.int64), 0)

    def direct(operand: Array) -> Array:
        inner = (operand < 0) | (operand >= terms.inputs)
        return np.where(inner, 0, bit[np.where(inner, 0, operand)])

    fixed = [sum(int(bit[leaves.index(leaf)]) for leaf in set(u.fixed)) for u in space.operators]
    used = enumeration.built.operator.astype(np.int32)
    marks = [
        [_number(f"{'_' if leaf.is_variable else leaf} {what(each.shape)}") for what in (str, len)]
        for leaf, each in zip(leaves, space.inputs)
    ]
    exact, loose = np.array(marks, np.uint64).reshape(-1, 2).T.copy()
    hashes = np.array([_number(str(use)) for use in space.operators], np.uint64)
    return Nodes(
        *(terms.inputs, used, hashes, symmetric, terms.a, terms.b, terms.first, terms.outputs),
        direct(terms.a) | direct(terms.b) | np.array(fixed, np.int64)[used],
        *(terms.value, terms.node, variable, exact, loose),
    )


def outputs_by_value(
    enumeration: Enumeration, nodes: Nodes, graphs: Array
) -> list[tuple[Term, ...]]:
    """Return the outputs of graphs, in an order that is the same for equal graphs."""
    width = 2 * enumeration.graphs.shape[1]
    found = np.full((len(graphs), width), -1, np.int64)
    ordered_outputs(enumeration.graphs, graphs, new_view(1, width // 2), nodes, found)
    return [
        tuple(enumeration.term(tensor) for tensor in row if tensor >= 0) for row in found.tolist()
    ]


def _sides(enumeration: Enumeration, nodes: Nodes, pairs: Pairs, chosen: Array) -> list[Sides]:
    left = outputs_by_value(enumeration, nodes, pairs.left[chosen])
    return list(zip(left, outputs_by_value(enumeration, nodes, pairs.right[chosen])))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _chunks(starts: Array, pairs: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield runs of classes with about so many pairs: first and last class, and pair."""
    sizes = np.diff(starts)
    ends = np.cumsum(sizes * (sizes - 1) // 2)
    first = before = 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, before + pairs, "right")))
        end = int(ends[last - 1])
        yield first, last, before, end
        first, before = last, end


def _scanned(enumeration: Enumeration, nodes: Nodes, say: Progress) -> tuple[Pairs, Queries]:
    """Return all pairs of equal graphs, and the queries about nodes that they have in common."""
    starts, most = enumeration.starts, enumeration.graphs.shape[1]
    view = new_view(int(np.diff(starts).max(initial=2)), most)
    scratch = new_scratch(enumeration.terms.inputs, most)
    types = [
        [_number(f"_ {type_.shape}"), _number(f"_ {len(type_.shape)}")]
        for type_ in enumeration.built.table.types
    ]
    marks = np.array(types, np.uint64).reshape(-1, 2)
    found: list[Pairs] = []
    asked: list[Queries] = []
    for first, last, before, end in _chunks(starts, _PAIRS):
        count = end - before
        pairs = _new_pairs(count)
        queries = _new_queries(count * most)
        number = scan(
            *(enumeration.graphs, starts[first : last + 1], nodes, enumeration.terms.type),
            *(marks, view, scratch, pairs, queries),
        )
        queries = Queries(*(column[:number].copy() for column in queries))
        found.append(pairs)
        asked.append(queries._replace(pair=queries.pair + before))
        say("pairs", last, len(starts) - 1)
    return (
        Pairs(*map(np.concatenate, zip(*found))) if found else _new_pairs(0),
        Queries(*map(np.concatenate, zip(*asked))) if asked else _new_queries(0),
    )


def _new_pairs(count: int) -> Pairs:
    columns = (np.int32, np.int32, np.int16, np.uint64, np.int8, np.int8)
    return Pairs(*(np.zeros(count, column) for column in columns))


def _new_queries(count: int) -> Queries:
    columns = (np.int64, np.int32, np.int16, np.uint64, np.uint64)
    return Queries(*(np.zeros(count, column) for column in columns))


def _cut_inputs(
    enumeration: Enumeration,
    nodes: Nodes,
    pairs: Pairs,
    queries: Queries,
    known: Array,
    reducer: Reducer,
    say: Progress,
) -> list[Sides]:
    """Cut the pairs that are equal with a variable for a common node; return those not known."""
    _, first, inverse = np.unique(queries.exact, return_index=True, return_inverse=True)
    good = np.zeros(len(first), np.bool_)
    general: list[Sides] = []
    sides = _sides(enumeration, nodes, pairs, queries.pair[first])
    for number, (query, (left, right)) in enumerate(zip(first.tolist(), sides)):
        node = int(queries.node[query])
        begin = int(enumeration.terms.first[node])
        tensors = range(begin, begin + int(enumeration.terms.outputs[node]))
        parts = [enumeration.term(tensor) for tensor in tensors]
        general.append(reducer.generalised(left, right, parts))
        good[number] = reducer.equal(general[-1])
        if number % 1000 == 0:
            say("common subgraphs", number, len(first))
    holds = good[inverse]
    inside = np.isin(queries.loose, known)
    beyond = np.flatnonzero(holds & ~inside)
    pairs.cut[queries.pair[beyond]] = 0
    smaller = np.flatnonzero(holds & inside)
    smaller = smaller[np.argsort(-queries.size[smaller], kind="stable")]  # the least is last
    pairs.cut[queries.pair[smaller]] = queries.size[smaller]
    _, new = np.unique(queries.loose[beyond], return_index=True)
    return [general[inverse[query]] for query in beyond[new].tolist()]


def _weights(enumeration: Enumeration, nodes: Nodes, pairs: Pairs) -> tuple[Array, int]:
    """Return each pair's place in the order, and how many of the uncut are the most general."""
    counts = (enumeration.graphs >= 0).sum(axis=1)
    uncut = np.flatnonzero(pairs.cut == UNCUT)
    left, right = pairs.left[uncut], pairs.right[uncut]
    skeletons = np.zeros(len(uncut), np.uint64)
    swapped = np.zeros(len(uncut), np.int8)
    lists = np.zeros((len(uncut), 2, WIDTH), np.int8)
    most = enumeration.graphs.shape[1]
    patterns(
        *(enumeration.graphs, left, right, nodes, new_view(2, most)),
        *(new_scratch(enumeration.terms.inputs, most), skeletons, swapped, lists),
    )
    size = counts[left] + counts[right]
    variables = pairs.variables[uncut]
    order = np.lexsort((-variables, skeletons))
    ordered = skeletons[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(order)]
    found = np.zeros(len(uncut), np.int64)
    most_general(
        *(np.append(np.flatnonzero(new), len(order)), lists[order], swapped[order]),
        *(pairs.ways[uncut][order], variables[order], size[order], enumeration.terms.inputs, found),
    )
    general = np.zeros(len(uncut), np.int64)
    general[order] = found
    weight = (pairs.cut.astype(np.int64) * _VARIABLES + _VARIABLES - 1) * 2 + CUT_BIT
    counted = np.where(general > 0, general, variables)
    weight[uncut] = (size * _VARIABLES + _VARIABLES - 1 - counted) * 2
    weight[uncut] += np.where(general > 0, CUT_BIT, 0)
    return weight, len(np.unique(pairs.key[uncut[general == 0]]))


def _spanned(enumeration: Enumeration, pairs: Pairs, weight: Array) -> Array:
    """Return the pairs that are kept."""
    starts = enumeration.starts
    kept = []
    for first, last, before, end in _chunks(starts, 8 * _PAIRS):
        chosen = np.flatnonzero(pairs.cut[before:end] >= UNCUT) + before
        group = np.searchsorted(starts, pairs.left[chosen], "right")
        chosen = chosen[np.lexsort((pairs.key[chosen], weight[chosen], group))]
        keep = np.zeros(len(chosen), np.bool_)
        span(
            *(starts[first : last + 1], pairs.left[chosen], pairs.right[chosen]),
            *(pairs.ways[chosen], weight[chosen], keep),
        )
        kept.append(chosen[keep])
    return np.concatenate(kept) if kept else np.zeros(0, np.int64)
