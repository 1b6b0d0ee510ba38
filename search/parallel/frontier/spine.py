"""The marked spine of a graph: the operators through which all data passes, in order.

Between two of them is a block (a residual block, a layer of a transformer). TensorOpt marks the
first operator, and then the only reader of the last marked one, while it eliminates. Here the spine
is found beforehand: an operator is on it if no edge leads past it. Edges from the few operators
that are read in many blocks (an attention mask, an encoder's output) do not count, and these
operators are eliminated last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAR = 6  # operators that may be read in many blocks
BLOCKS = 3  # many blocks: so many at least


@dataclass(frozen=True)
class Spine:
    """The spine's operators in order, those read in many blocks, and the block of each operator.

    A block ends with an operator of the spine.
    """

    marked: tuple[int, ...]
    far: tuple[int, ...]
    blocks: tuple[int, ...]


def marked_spine(count: int, edges: Sequence[tuple[int, int]]) -> Spine:
    """Return the spine of operators 0 to count - 1, in topological order.

    Args:
        edges: writer and reader.
    """
    readers: list[set[int]] = [set() for _ in range(count)]
    written = set()
    for i, j in edges:
        readers[i].add(j)
        written.add(j)
    # An operator that reads nothing stands where it is first read: a bias is inside its block.
    order = sorted(range(count), key=lambda i: _place(i, readers[i], i in written))
    at = {op: place for place, op in enumerate(order)}
    reach = [max((at[j] for j in readers[i]), default=at[i]) for i in range(count)]
    longest = sorted(range(count), key=lambda i: (at[i] - reach[i], i))
    spine, far = _cut(order, reach, set()), set[int]()
    least = len(spine) + 0.5  # far operators make all tables larger
    for many in range(1, min(FAR, count) + 1):
        tried = set(longest[:many])
        for _ in range(2):
            cuts = _cut(order, reach, tried)
            block = _blocks(order, cuts)
            tried = {i for i in tried if len({block[j] for j in readers[i]}) >= BLOCKS}
        cuts = _cut(order, reach, tried)
        score = len(cuts) - BLOCKS * len(tried)
        if score > least:
            spine, far, least = cuts, tried, score
    return Spine(tuple(spine), tuple(sorted(far)), tuple(_blocks(order, spine)))


def _place(op: int, readers: set[int], written: bool) -> tuple[int, int, int]:
    if written or not readers or op == 0:
        return op, 1, op
    return min(readers), 0, op


def _cut(order: list[int], reach: list[int], far: set[int]) -> list[int]:
    """Return the operators past which no edge leads, in order; edges from `far` do not count."""
    found, passing = [], -1
    for place, op in enumerate(order):
        if passing <= place:
            found.append(op)
        if op not in far:
            passing = max(passing, reach[op])
    return found


def _blocks(order: list[int], cuts: list[int]) -> list[int]:
    blocks, ends, block = [0] * len(order), set(cuts), 0
    for op in order:
        blocks[op] = block
        block += op in ends
    return blocks
