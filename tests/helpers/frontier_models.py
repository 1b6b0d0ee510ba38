"""Problems of cost frontiers with the shapes of models, on 16 devices that are described.

Devices are a mesh of 2 x 2 x 2 x 2: one link between two machines of eight, faster ones inside. A
configuration gives each dim of the mesh to samples, to what an operator makes, to what it sums
over, or to copies: 256 of them; a tensor has 81 layouts. A mesh of fewer or more dims has a quarter
or four times the configurations. Costs are times in ns and bytes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from soapstone.search.parallel.frontier.tables import Edge, Operator, Problem

SAMPLES, MADE, SUMMED, COPIES = range(4)
SLOW, FAST = 12.0, 60.0  # bytes a ns, between machines and inside one
LATENCY = 20_000
FLOPS = 10_000.0  # a ns


class Mesh:
    """Devices in dims of two, the first of them over the slow link, and what operators cost."""

    def __init__(self, dims: int) -> None:
        self.links = (SLOW, *[FAST] * (dims - 1))
        self.configurations = np.array(list(itertools.product(range(4), repeat=dims)))
        # Of samples, of channels, copies.
        self.layouts = np.array(list(itertools.product(range(3), repeat=dims)))
        codes = 3 ** np.arange(dims)[::-1]
        # The layout that each configuration needs, and that which it makes.
        self.read = np.array([0, 2, 1, 2])[self.configurations] @ codes
        self.written = np.array([0, 1, 2, 2])[self.configurations] @ codes

    @cache  # noqa: B019 - there are few meshes
    def own(self, flops: float, made: float, weights: float) -> Any:
        costs = np.zeros((len(self.configurations), 1, 2), np.int64)
        for row, dims in enumerate(self.configurations):
            split = {kind: 2.0 ** int((dims == kind).sum()) for kind in range(4)}
            parts = split[SAMPLES] * split[MADE] * split[SUMMED]
            time = flops / parts / FLOPS + LATENCY / 4
            of_weights = weights / split[MADE] / split[SUMMED]
            of_made = made / split[SAMPLES] / split[MADE]
            for kind, link in zip(dims, self.links):
                if kind == SUMMED:
                    time += of_made / link + LATENCY
                if kind == SAMPLES and weights:
                    time += of_weights / link + LATENCY
            costs[row, 0] = int(time), int(4 * of_weights + of_made)
        return costs

    @cache  # noqa: B019
    def between(self, nbytes: float) -> Any:
        """Return costs of (layouts, layouts, copies kept, 2); the first choice keeps both."""
        layouts = self.layouts
        costs = np.zeros((len(layouts), len(layouts), 2, 2), np.int64)
        parts = 2.0 ** (layouts < 2).sum(1)
        for i, one in enumerate(layouts):
            for j, other in enumerate(layouts):
                moved, kept = 0.0, nbytes / parts[j]
                for before, after, link in zip(one, other, self.links):
                    if before != after and before != 2:
                        share = nbytes / min(parts[i], parts[j])
                        moved += share / link * (0.5 if after != 2 else 1.0) + LATENCY
                if i == j:
                    costs[i, j] = 0
                else:
                    costs[i, j, 0] = int(2 * moved) + 2_000, int(kept)
                    costs[i, j, 1] = int(3 * moved) + 3_000, 0
        return costs


@cache
def mesh(dims: int) -> Mesh:
    return Mesh(dims)


@dataclass
class Builder:
    """A problem that is made operator by operator, on a mesh of so many dims of two devices."""

    dims: int = 4
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
        devices = mesh(self.dims)
        own = devices.own(flops, made, weights)
        self.operators.append(Operator(f"op{len(self.operators)}", own))
        number = len(self.operators) - 1
        for of, nbytes in inputs:
            between = devices.between(nbytes)
            self.edges.append(Edge(of, number, devices.written, devices.read, between))
        return number

    def problem(self) -> Problem:
        return Problem(self.operators, self.edges)


def resnet(blocks: int = 16, width: float = 1.0, dims: int = 4) -> Problem:
    """Return residual blocks of three convolutions and a sum, in four stages; wide ones."""
    b = Builder(dims)
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
