"""The errors of the graph: each names the operator or field, what was found and what was needed."""

from __future__ import annotations


class GraphError(ValueError):
    """A graph, operator, strategy, plan or native file that is not legal."""


class ShapeError(GraphError):
    """Operands whose shapes, ranks or element types do not fit an operator."""


class StrategyError(GraphError):
    """A strategy that is not legal for a graph or a machine."""
