"""What the engine asks of an evaluator, and tells whoever waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.space import OperatorUse, Space
from soapstone.search.rules.shapes import Type

Progress: TypeAlias = "Callable[[str, int, int], None]"  # stage, done, total


class Evaluator(Protocol):
    """Whoever computes tensors and names them: equal names if and only if equal tensors.

    Tensors are numbered: the inputs, then those stored, in order. Types are numbers too.
    """

    def begin(self, space: Space, types: tuple[int, ...]) -> Array:
        """Make the inputs, tensors 0 and on, of these types; return their ids (uint64)."""

    def prepare(
        self, use: OperatorUse, operands: tuple[Type, ...], outputs: tuple[int, ...]
    ) -> int:
        """Return the handle of an operator on operands of these types; `outputs` are the types'
        numbers of its results."""

    def values(self, handles: Array, a: Array, b: Array) -> Array:
        """Return the ids of the outputs of nodes: uint64 (nodes, 2); `b` is -1 if there is none."""

    def store(self, handles: Array, a: Array, b: Array) -> None:
        """Keep the outputs of nodes as the next tensors."""

    def agree(
        self, handles: Array, a: Array, b: Array, outputs: Array, tensors: Array | None = None
    ) -> Array:
        """Return for each node whether that output equals the stored tensor, element by element;
        without tensors, whether it equals the output of the node before it."""
