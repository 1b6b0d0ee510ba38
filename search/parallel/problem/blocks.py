"""Repeated blocks: a model with two of each, whose strategy is extended to all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.ir.strategy.configuration import Configuration
from soapstone.search.parallel.problem.prepare import Model, prepare

LONGEST = 64  # operators of a block


def repeated(classes: Sequence[int]) -> list[int]:
    """Return, for each item of a sequence, the kept item that it is like.

    Of a part that is repeated three times or more, the first two are kept, and later ones are like
    the second. A kept item is like itself.
    """
    like: list[int] = []
    at = 0
    while at < len(classes):
        best, saved = (0, 0), 0
        for length in range(1, min(LONGEST, (len(classes) - at) // 3) + 1):
            end = at + length
            while end < len(classes) and classes[end] == classes[end - length]:
                end += 1
            count = (end - at) // length
            if count >= 3 and (count - 2) * length > saved:
                best, saved = (length, count), (count - 2) * length
        length, count = best
        if not saved:
            like.append(at)
            at += 1
            continue
        for i in range(length * count):
            like.append(at + i if i < 2 * length else at + length + i % length)
        at += length * count
    return like


class Blocks:
    """A model reduced to two of each repeated block.

    Attributes:
        model: the small model; None if nothing is repeated.
    """

    def __init__(self, full: Model) -> None:
        free = full.problem.free
        names = [full.operators[op].name for op in free]
        like = repeated(full.problem.operators["class_"][free].tolist())
        self.like = {name: names[i] for name, i in zip(names, like)}
        kept = set(self.like.values())
        self.model = None
        if len(kept) < len(names):
            self.model = prepare(full.graph, full.machine, kept, full.routes)

    def spread(self, configurations: Mapping[str, Configuration]) -> dict[str, Configuration]:
        """Return the strategy of the whole model in which blocks are split like the kept ones."""
        return {
            name: configurations[kept] for name, kept in self.like.items() if kept in configurations
        }
