"""What the engine asks of an evaluator."""

from __future__ import annotations

from typing import Protocol

from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.space import OperatorUse, Space
from soapstone.search.rules.shapes import Type


class Evaluator(Protocol):
    """Evaluates the outputs of nodes and gives each an id: equal ids if and only if equal tensors.

    A node is an operator on operands of given types (a handle), applied to tensors `a` and `b`.
    Tensors are numbered: the inputs first, then the outputs of stored nodes, in order. Types are
    numbers of the type table.
    """

    def begin(self, space: Space, types: tuple[int, ...]) -> Array:
        """Create the inputs, which are tensors 0, 1, ..., and return their ids (uint64)."""

    def prepare(
        self, use: OperatorUse, operands: tuple[Type, ...], outputs: tuple[int, ...]
    ) -> int:
        """Return the handle of an operator on operands of these types; `outputs` are the types'
        numbers of its results."""

    def values(self, handles: Array, a: Array, b: Array) -> Array:
        """Return the ids of the outputs of nodes: uint64 (nodes, 2); `b` is -1 if there is none."""

    def store(self, handles: Array, a: Array, b: Array) -> None:
        """Store the outputs of nodes as the next tensors, so that they can be operands."""

    def agree(
        self, handles: Array, a: Array, b: Array, outputs: Array, tensors: Array | None = None
    ) -> Array:
        """Return for each node whether that output equals the stored tensor, element by element;
        without tensors, whether it equals the output of the node before it."""
