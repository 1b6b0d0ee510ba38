"""The enumeration of a space: all its graphs, those that compute the same tensors side by side.

Every term is evaluated once, and a graph is a set of terms (TASO, section 2.3.2, Algorithm 1).
Filters that lose nothing: interchangeable inputs are used in order; no tensor is computed twice,
nor what an input is; every output has another form, since an operator that both graphs of a pair
apply to equal operands can be removed from both (section 2.5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.ir.term import Term
from soapstone.rules.enumeration import graphs as walks
from soapstone.rules.enumeration.compare import values_apart
from soapstone.rules.enumeration.levels import Built, build
from soapstone.rules.enumeration.propose import Terms, is_prefix
from soapstone.rules.enumeration.protocol import Evaluator
from soapstone.rules.enumeration.space import Space
from soapstone.rules.enumeration.typetable import term_of
from soapstone.rules.workers import Progress

_STEPS = 20_000_000  # of one compiled call
_GRAPHS = 1 << 20  # written by one


@dataclass(frozen=True)
class Enumeration:
    """All graphs of a space that share their fingerprint with another, and their terms.

    Attributes:
        built: the nodes and tensors. Tensors 0 .. `terms.inputs` - 1 are the inputs; outputs of a
            node are adjacent tensors. Nodes are in topological order: first those of one operator,
            then those that need one other node, and so on.
        graphs: int32 (graphs, max_operators), ascending nodes, then -1; those of equal fingerprint
            are adjacent, smaller first, and of each fingerprint there are several.
        starts: int64 (groups + 1), where each fingerprint begins, and the end.
        counts: (max_operators + 1), all graphs by operators.
    """

    built: Built
    graphs: Array
    starts: Array
    counts: Array
    _made: dict[int, Term] = field(default_factory=dict, repr=False)

    @property
    def space(self) -> Space:
        """What was enumerated."""
        return self.built.table.space

    @property
    def terms(self) -> Terms:
        """The terms that were built."""
        return self.built.terms

    def __repr__(self) -> str:
        return (
            f"<{self.space.name}: {len(self.terms.a)} terms, {self.counts.sum()} graphs,"
            f" {len(self.graphs)} in {len(self.starts) - 1} groups>"
        )

    def term(self, tensor: int) -> Term:
        """Return what a tensor is, as a term."""
        tensor, terms = int(tensor), self.terms
        if tensor < terms.inputs:
            return self.space.inputs[tensor].term
        if tensor not in self._made:
            node = terms.node[tensor]
            output = tensor - int(terms.first[node])
            self._made[tensor] = self._applied(
                self.built.operator[node], terms.a[node], terms.b[node], output
            )
        return self._made[tensor]

    def _applied(self, operator: int, a: int, b: int, output: int) -> Term:
        operands = [self.term(tensor) for tensor in (a, b) if tensor >= 0]
        return term_of(self.space.operators[operator], output, operands)

    def outputs(self, graph: int) -> tuple[int, ...]:
        """Return the tensors that a graph computes and does not use, in order of its nodes."""
        out = np.empty(2 * self.graphs.shape[1], np.int64)
        count = walks.outputs_of(self.graphs[graph], self.terms, out)
        return tuple(out[:count].tolist())

    @cached_property
    def collapses(self) -> list[tuple[Term, Term]]:
        """The terms that are equal to an input or to one of their own subterms, and that one."""
        columns = (column.tolist() for column in self.built.collapses)
        return [
            (self._applied(operator, a, b, output), self.term(tensor))
            for operator, a, b, output, tensor, mask in zip(*columns)
            if is_prefix(mask, self.built.classes)
        ]


def enumerate_space(
    space: Space, evaluator: Evaluator, progress: Progress | None = None
) -> Enumeration:
    """Return all graphs of a space that may be equal to another.

    Raises:
        GraphError: the evaluator cannot evaluate an operator; or there are more than 62 inputs.
    """
    _check(space)
    built = build(space, evaluator, space.max_operators, progress)
    values_apart(built.terms, built.handle, evaluator, progress)
    prints, graphs, counts = _all_graphs(built, progress)
    order, starts = _grouped(prints, graphs, built.terms)
    return Enumeration(built, graphs[order], starts, counts)


def _check(space: Space) -> None:
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


def _all_graphs(built: Built, progress: Progress | None) -> tuple[Array, Array, Array]:
    """Return fingerprints and graphs of those whose outputs have other forms; counts of all."""
    terms, most = built.terms, built.table.space.max_operators
    symmetric = np.array(built.table.symmetric, np.bool_)
    good = walks.with_other_form(terms, walks.signatures(terms, built.operator, symmetric))
    groups = walks.groups_of(terms, built.starts[-1])
    stack = walks.new_stack(most)
    counts = np.zeros(most + 1, np.int64)
    found_prints, found_graphs = [], []
    roots = max(built.starts[1], 1)
    while stack.depth[0] >= 0:
        prints = np.empty(_GRAPHS, np.uint64)
        graphs = np.empty((_GRAPHS, most), np.int32)
        written = walks.walk(
            *(stack, most, terms, groups, good, built.classes, counts, prints, graphs, _STEPS)
        )
        found_prints.append(prints[:written].copy())
        found_graphs.append(graphs[:written].copy())
        if progress is not None:
            done = roots if stack.depth[0] < 0 else min(int(stack.chosen[0]), roots)
            progress("graphs", done, roots)
    return np.concatenate(found_prints), np.concatenate(found_graphs), counts


def _grouped(prints: Array, graphs: Array, terms: Terms) -> tuple[Array, Array]:
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
