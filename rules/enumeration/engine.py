"""The enumeration of a space: all its graphs, those that compute the same tensors side by side.

Every term is evaluated once, and a graph is a set of terms (TASO, section 2.3.2, Algorithm 1).
Filters that lose nothing: interchangeable inputs are used in order; no tensor is computed twice,
nor what an input is; every output has another form, since an operator that both graphs of a pair
apply to equal operands can be removed from both (section 2.5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term
from soapstone.rules.enumeration import graphs as walks
from soapstone.rules.enumeration.apart import values_apart
from soapstone.rules.enumeration.levels import Built, build
from soapstone.rules.enumeration.propose import Terms, is_prefix
from soapstone.rules.enumeration.protocol import Evaluator, Progress
from soapstone.rules.enumeration.space import Kind, Space
from soapstone.rules.enumeration.typetable import term_of
from soapstone.search.rules.shapes import Type

Array = NDArray[Any]
_STEPS = 20_000_000  # of one compiled call
_GRAPHS = 1 << 20  # written by one


@dataclass(frozen=True)
class Enumeration:
    """All graphs of a space that share their fingerprint with another, and their terms.

    Tensors 0 .. `inputs` - 1 are the inputs; outputs of a node are adjacent tensors. Nodes are in
    topological order: first those of one operator, then those that need one other node, and so on.

    Attributes:
        node_op: int16 (nodes), index in `space.operators`.
        node_a, node_b: int32 (nodes), operand tensors; `node_b` is -1 if there is none.
        node_closure: int32 (nodes, max_operators), the other nodes that it needs, ascending, then
            -1.
        node_first: int32 (nodes), its first output; node_outputs: int8, how many.
        node_mask: int64 (nodes), the inputs that it needs, as bits.
        node_handle: int32 (nodes), what the evaluator calls its operator on such operands.
        tensor_value: uint64 (tensors), equal where tensors are equal, split trees included.
        tensor_node: int32 (tensors), -1 for inputs.
        tensor_type: int32 (tensors), index in `types` and `kinds`.
        graphs: int32 (graphs, max_operators), ascending nodes, then -1; those of equal fingerprint
            are adjacent, smaller first, and of each fingerprint there are several.
        fingerprints: uint64 (graphs), ascending.
        starts: int64 (groups + 1), where each fingerprint begins, and the end.
        counts: (2, max_operators + 1), all graphs by operators; those with other forms of each
            output.
        collapsed: operators, operands, output, equal tensor (int32, 5 columns) of each node that
            is not among the nodes since it equals an input, or a tensor that it needs.
        part, parts: which part of the space this is, by fingerprint, of how many.
    """

    space: Space
    evaluator: Evaluator
    types: tuple[Type, ...]
    kinds: tuple[Kind, ...]
    inputs: int
    node_op: Array
    node_a: Array
    node_b: Array
    node_closure: Array
    node_first: Array
    node_outputs: Array
    node_mask: Array
    node_handle: Array
    tensor_value: Array
    tensor_node: Array
    tensor_type: Array
    graphs: Array
    fingerprints: Array
    starts: Array
    counts: Array
    collapsed: Array
    part: int = 0
    parts: int = 1
    _terms: dict[int, Term] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return (
            f"<{self.space.name}: {len(self.node_op)} terms, {self.counts[0].sum()} graphs,"
            f" {len(self.graphs)} in {len(self.starts) - 1} groups>"
        )

    def term(self, tensor: int) -> Term:
        """Return what a tensor is, as a term."""
        tensor = int(tensor)
        if tensor < self.inputs:
            return self.space.inputs[tensor].term
        if tensor not in self._terms:
            node = self.tensor_node[tensor]
            output = tensor - int(self.node_first[node])
            self._terms[tensor] = self._made(
                self.node_op[node], self.node_a[node], self.node_b[node], output
            )
        return self._terms[tensor]

    def _made(self, operator: int, a: int, b: int, output: int) -> Term:
        operands = [self.term(tensor) for tensor in (a, b) if tensor >= 0]
        return term_of(self.space.operators[operator], output, operands)

    def outputs(self, graph: int) -> tuple[int, ...]:
        """Return the tensors that a graph computes and does not use, in order of its nodes."""
        out = np.empty(2 * self.graphs.shape[1], np.int64)
        count = walks.outputs_of(self.graphs[graph], self._arrays, out)
        return tuple(out[:count].tolist())

    @cached_property
    def _arrays(self) -> Terms:
        return Terms(
            self.inputs,
            self.node_a,
            self.node_b,
            self.node_closure,
            self.node_first,
            self.node_outputs,
            self.node_mask,
            self.tensor_value,
            self.tensor_node,
            self.tensor_type,
        )

    @cached_property
    def collapses(self) -> list[tuple[Term, Term]]:
        """The terms that are equal to an input or to one of their own subterms, and that one."""
        return [
            (self._made(operator, a, b, output), self.term(tensor))
            for operator, a, b, output, tensor in self.collapsed.tolist()
        ]


def enumerate_space(
    space: Space, evaluator: Evaluator, progress: Progress | None = None
) -> Enumeration:
    """Return all graphs of a space that may be equal to another.

    Raises:
        GraphError: the evaluator cannot evaluate an operator; or there are more than 62 inputs.
    """
    return next(iter(enumerate_parts(space, evaluator, progress=progress, most_graphs=None)))


def enumerate_parts(
    space: Space,
    evaluator: Evaluator,
    *,
    most_graphs: int | None = 20_000_000,
    skip: Collection[int] = (),
    progress: Progress | None = None,
) -> Iterator[Enumeration]:
    """Yield the graphs of a space in parts, by fingerprint, so that memory is bounded.

    Graphs that may be equal are in one part. Each part is an enumeration over the same terms, of at
    most about `most_graphs` graphs before those without an equal are left out; `skip` names parts,
    by their number, that are not needed. Counts are those of the part; collapses are in part 0.

    Raises:
        GraphError: the evaluator cannot evaluate an operator; or there are more than 62 inputs.
    """
    check(space)
    built = build(space, evaluator, space.max_operators, progress)
    values_apart(built.terms, built.handle, evaluator, progress)
    good = walks.with_other_form(built.terms, signatures_of(built))
    parts = 1
    if most_graphs is not None:
        counts = all_graphs(built, good, part=-1, progress=progress)[2]
        parts = max(1, -(-int(counts[1].sum()) // most_graphs))
    for part in range(parts):
        if part not in skip:
            prints, graphs, counts = all_graphs(
                built, good, parts=parts, part=part, progress=progress
            )
            order, starts = grouped(prints, graphs, built.terms)
            prints, graphs = prints[order], graphs[order]
            yield finish(built, evaluator, prints, graphs, starts, counts, part, parts)


def check(space: Space) -> None:
    """Check that a space can be enumerated.

    Raises:
        GraphError: it has too many inputs or operators, or no operator.
    """
    if len(space.inputs) > 62:
        raise GraphError(f"space {space.name}: {len(space.inputs)} inputs found, at most 62 needed")
    if not space.operators or not 1 <= space.max_operators <= 8:
        raise GraphError(
            f"space {space.name}: {len(space.operators)} operators and graphs of at most"
            f" {space.max_operators} found, some operators and 1 to 8 needed"
        )


def signatures_of(built: Built) -> Array:
    """Return for each tensor a number of its operator, output and operand values."""
    symmetric = built.table.symmetric
    return walks.signatures(built.terms, built.operator, np.array(symmetric, np.bool_))


def all_graphs(
    built: Built,
    good: Array,
    *,
    parts: int = 1,
    part: int = 0,
    progress: Progress | None = None,
) -> tuple[Array, Array, Array]:
    """Return fingerprints, graphs and counts of all graphs whose outputs are good.

    Of those, only the ones whose fingerprint is of a part, if there are several parts; part -1 has
    none, and its counts are those of all.
    """
    space, terms = built.table.space, built.terms
    most, nodes = space.max_operators, built.starts[-1]
    groups = walks.groups_of(terms, nodes)
    stack = walks.new_stack(most)
    counts = np.zeros((2, most + 1), np.int64)
    found_prints, found_graphs = [], []
    roots = max(built.starts[1], 1)
    while stack.depth[0] >= 0:
        prints = np.empty(_GRAPHS, np.uint64)
        graphs = np.empty((_GRAPHS, most), np.int32)
        written = walks.walk(
            stack,
            most,
            terms,
            groups,
            good,
            built.classes,
            parts,
            part,
            counts,
            prints,
            graphs,
            _STEPS,
        )
        found_prints.append(prints[:written].copy())
        found_graphs.append(graphs[:written].copy())
        if progress is not None:
            done = roots if stack.depth[0] < 0 else min(int(stack.chosen[0]), roots)
            progress("graphs", done, roots)
    return np.concatenate(found_prints), np.concatenate(found_graphs), counts


def grouped(prints: Array, graphs: Array, terms: Terms) -> tuple[Array, Array]:
    """Return the order of graphs by fingerprint and size, and where groups of several begin.

    Graphs whose output values are not those of the first of their group are left out.
    """
    sizes = (graphs >= 0).sum(axis=1)
    order = np.lexsort((sizes, prints))
    order = order[_several(prints[order])]
    same = np.zeros(len(order), np.bool_)
    walks.same_outputs(graphs, order, prints, terms, same)
    order = order[same]
    order = order[_several(prints[order])]
    ordered = prints[order]
    new = np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]
    return order, np.append(np.nonzero(new)[0], len(order)).astype(np.int64)


def _several(ordered: Array) -> Array:
    """Return whether each number of an ascending array is there more than once."""
    same = ordered[1:] == ordered[:-1]
    return np.asarray((np.append(same, False) | np.append(False, same))[: len(ordered)])


def finish(
    built: Built,
    evaluator: Evaluator,
    prints: Array,
    graphs: Array,
    starts: Array,
    counts: Array,
    part: int = 0,
    parts: int = 1,
) -> Enumeration:
    """Return the enumeration of these graphs over these nodes."""
    terms, table = built.terms, built.table
    closure = np.full((len(terms.a), table.space.max_operators), -1, np.int32)
    closure[:, : terms.closure.shape[1]] = terms.closure[:, : closure.shape[1]]
    collapses = built.collapses
    used = [part == 0 and is_prefix(mask, built.classes) for mask in collapses.mask.tolist()]
    columns = [column[used].astype(np.int32) for column in collapses[:5]]
    return Enumeration(
        table.space,
        evaluator,
        tuple(table.types),
        tuple(table.kinds),
        terms.inputs,
        built.operator,
        terms.a,
        terms.b,
        closure,
        terms.first,
        terms.outputs,
        terms.mask,
        built.handle,
        terms.value,
        terms.node,
        terms.type,
        graphs,
        prints,
        starts,
        counts,
        np.array(columns, np.int32).T.copy(),
        part,
        parts,
    )


__all__ = ["Enumeration", "Evaluator", "Progress", "enumerate_parts", "enumerate_space"]
