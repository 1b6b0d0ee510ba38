"""Problems of cost frontiers with the shapes of models, on 16 devices that are described.

Devices are a mesh of 2 x 2 x 2 x 2: one link between two machines of eight, faster ones inside. A
configuration gives each dim of the mesh to samples, to what an operator makes, to what it sums
over, or to copies: 256 of them; a tensor has 81 layouts. Costs are times in ns and bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from soapstone.search.parallel.frontier.tables import Edge, Operator, Problem

SAMPLES, MADE, SUMMED, COPIES = range(4)
LINKS = (12.0, 60.0, 60.0, 60.0)  # bytes a ns, by dim of the mesh
LATENCY = 20_000
FLOPS = 10_000.0  # a ns
CONFIGURATIONS = np.array(list(itertools.product(range(4), repeat=4)))
LAYOUTS = np.array(list(itertools.product(range(3), repeat=4)))  # samples, channels, copies
_CODES = 27, 9, 3, 1
READ = np.array([0, 2, 1, 2])[CONFIGURATIONS] @ _CODES  # the layout that each configuration needs
WRITTEN = np.array([0, 1, 2, 2])[CONFIGURATIONS] @ _CODES  # and that which it makes


@dataclass
class Builder:
    """A problem that is made operator by operator."""

    operators: list[Operator] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)

    def operator(
        self, flops: float, made: float, weights: float, *inputs: tuple[int, float]
    ) -> int:
        """Add an operator and return its number.

        Args:
            flops: of a step. made: bytes of its result. weights: bytes. inputs: operators that it
                reads, and bytes.
        """
        self.operators.append(Operator(f"op{len(self.operators)}", _own(flops, made, weights)))
        number = len(self.operators) - 1
        for of, nbytes in inputs:
            self.edges.append(Edge(of, number, WRITTEN, READ, _between(nbytes)))
        return number

    def problem(self) -> Problem:
        return Problem(self.operators, self.edges)


@cache
def _own(flops: float, made: float, weights: float) -> Any:
    costs = np.zeros((len(CONFIGURATIONS), 1, 2), np.int64)
    for row, dims in enumerate(CONFIGURATIONS):
        split = {kind: 2.0 ** int((dims == kind).sum()) for kind in range(4)}
        parts = split[SAMPLES] * split[MADE] * split[SUMMED]
        time = flops / parts / FLOPS + LATENCY / 4
        of_weights = weights / split[MADE] / split[SUMMED]
        of_made = made / split[SAMPLES] / split[MADE]
        for kind, link in zip(dims, LINKS):
            if kind == SUMMED:
                time += of_made / link + LATENCY
            if kind == SAMPLES and weights:
                time += of_weights / link + LATENCY
        costs[row, 0] = int(time), int(4 * of_weights + of_made)
    return costs


@cache
def _between(nbytes: float) -> Any:
    """Return costs of (layouts, layouts, copies kept, 2); the first choice keeps both copies."""
    costs = np.zeros((len(LAYOUTS), len(LAYOUTS), 2, 2), np.int64)
    parts = 2.0 ** (LAYOUTS < 2).sum(1)
    for i, one in enumerate(LAYOUTS):
        for j, other in enumerate(LAYOUTS):
            moved, kept = 0.0, nbytes / parts[j]
            for before, after, link in zip(one, other, LINKS):
                if before != after and before != 2:
                    share = nbytes / min(parts[i], parts[j])
                    moved += share / link * (0.5 if after != 2 else 1.0) + LATENCY
            if i == j:
                costs[i, j] = 0
            else:
                costs[i, j, 0] = int(2 * moved) + 2_000, int(kept)
                costs[i, j, 1] = int(3 * moved) + 3_000, 0
    return costs


def resnet(blocks: int = 16, width: float = 1.0) -> Problem:
    """Return residual blocks of three convolutions and a sum, in four stages; wide ones."""
    b = Builder()
    made = 256e6
    last = b.operator(2e12, made, 4e4)
    before = made
    for block in range(blocks):
        stage = 4 * block // blocks
        made, weights = 512e6 * width / 2**stage, 8e6 * width**2 * 4**stage
        inner = made / 4
        one = b.operator(1e12, inner, weights / 4, (last, before))
        two = b.operator(3e12, inner, weights, (one, inner))
        three = b.operator(1e12, made, weights / 4, (two, inner))
        last = b.operator(1e9, made, 0, (three, made), (last, before))
        before = made
    b.operator(1e10, 1e6, 2e6 * width, (last, before))
    return b.problem()


def transformer(layers: int = 6, decoder: bool = True, masks: bool = True) -> Problem:
    """Return layers of attention and of a feed-forward part; masks are read by all layers."""
    b, wide = Builder(), 200e6
    words = b.operator(1e9, wide, 400e6)
    mask = b.operator(1e6, 4e6, 0) if masks else -1

    def attention(x: int, source: int, weights: float) -> int:
        q = b.operator(2e12, wide, weights, (x, wide))
        k = b.operator(2e12, wide, weights, (source, wide))
        v = b.operator(2e12, wide, weights, (source, wide))
        read = [(mask, 4e6)] if masks else []
        scores = b.operator(1e12, wide, 0, (q, wide), (k, wide), *read)
        mixed = b.operator(1e12, wide, 0, (scores, wide), (v, wide))
        out = b.operator(2e12, wide, weights, (mixed, wide))
        return b.operator(1e9, wide, 0, (out, wide), (x, wide))

    def forward(x: int) -> int:
        up = b.operator(8e12, 4 * wide, 64e6, (x, wide))
        down = b.operator(8e12, wide, 64e6, (up, 4 * wide))
        return b.operator(1e9, wide, 0, (down, wide), (x, wide))

    x = words
    for _ in range(layers):
        x = forward(attention(x, x, 16e6))
    if decoder:
        encoded, x = x, b.operator(1e9, wide, 400e6)
        for _ in range(layers):
            x = attention(x, x, 16e6)
            x = forward(attention(x, encoded, 16e6))
    b.operator(4e12, wide, 400e6, (x, wide))
    return b.problem()


def rnn(layers: int = 2, steps: int = 10) -> Problem:
    """Return a grid of cells: each reads the step before, and the layer below."""
    b, wide = Builder(), 40e6
    below = [b.operator(1e9, wide, 100e6) for _ in range(steps)]
    for _ in range(layers):
        cells: list[int] = []
        for step in range(steps):
            before = [(cells[-1], wide)] if cells else []
            cells.append(b.operator(4e12, wide, 64e6, (below[step], wide), *before))
        below = cells
    return b.problem()


MODELS = {"wide-resnet": resnet, "transformer": transformer, "rnn": rnn}
