"""Made-up graphs that follow from a seed: R-MAT, and a block model whose labels can be learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.synthetic import generator, need
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

_AT_ONCE = 1 << 22  # edges that are drawn together
_LARGEST = 1000  # scale of a preset
_GROUPS = 16  # of vertices that have labels in common, where they have several


@dataclass(frozen=True)
class Shape:
    """How large a graph is: vertices, edges (each way), features of a vertex, and classes.

    graphs: how many of its like lie beside each other, without edges between them. Where there are
    several, a vertex may have several labels.
    """

    vertices: int
    edges: int
    features: int
    classes: int
    graphs: int = 1

    def scaled(self, scale: float) -> Shape:
        """Return the shape with that share of vertices and edges."""
        vertices = max(round(self.vertices * scale), self.classes)
        return replace(self, vertices=vertices, edges=round(self.edges * scale))


# Sizes as published: Planetoid's citation graphs, and table 4.4 of Jia 2020 for the others.
PRESETS: Mapping[str, Shape] = {
    "cora-like": Shape(2_708, 10_556, 1_433, 7),
    "pubmed-like": Shape(19_717, 108_365, 500, 3),
    "ppi-like": Shape(56_944, 1_612_348, 50, 121, graphs=24),
    "reddit-like": Shape(232_965, 114_848_857, 602, 41),
    "amazon-like": Shape(9_430_088, 231_594_310, 300, 24),
}


def rmat(
    vertices: int,
    edges: int,
    *,
    shares: tuple[float, float, float, float] = (0.57, 0.19, 0.19, 0.05),
    seed: int = 0,
) -> Adjacency:
    """Return a graph of skewed degrees: each edge chooses a quarter of the matrix, over and over.

    Args:
        vertices: how many; ids of low numbers have the most edges.
        edges: how many are drawn; some are equal, and some lead from a vertex to itself.
        shares: how likely each quarter is: sources and targets both low, targets high, sources
            high, both high.
        seed: what the draws follow from.

    Raises:
        DataError: vertices below 1, edges below 0, or shares that are no probabilities.

    Source: Chakrabarti, Zhan and Faloutsos, R-MAT: a recursive model for graph mining, SDM 2004.
    """
    need("rmat", vertices=vertices)
    if edges < 0:
        raise DataError(f"rmat: edges: {edges} found, 0 or more needed")
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-9:
        raise DataError(f"rmat: shares {shares} found, 4 numbers of sum 1 needed")
    check_bytes(2 * 4 * edges, f"rmat: {edges:,} edges", DataError)
    random, levels = generator(seed), (vertices - 1).bit_length()
    both, right, low, _ = shares
    empty = np.zeros(0, np.int32)
    drawn: list[tuple[Array, Array]] = [(empty, empty)]
    for start in range(0, edges, _AT_ONCE):
        count = min(_AT_ONCE, edges - start)
        source, target = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for _ in range(levels):
            draw = random.random(count, np.float32)
            source = source * 2 + (draw >= both + right)
            target = target * 2 + (
                ((draw >= both) & (draw < both + right)) | (draw >= both + right + low)
            )
        scaled = [(ids * vertices >> levels).astype(np.int32) for ids in (source, target)]
        drawn.append((scaled[0], scaled[1]))
    sources, targets = (np.concatenate(side) for side in zip(*drawn))
    return Adjacency.from_edges(sources, targets, vertices)


def block_model(
    shape: Shape,
    *,
    name: str = "block model",
    homophily: float = 0.8,
    skew: float = 2.5,
    signal: float = 0.3,
    seed: int = 0,
) -> GraphData:
    """Return a graph whose edges and features tell the classes of its vertices.

    Vertices have a class each, by turns, and a propensity that follows a power law. An edge begins
    at a vertex drawn by propensity and ends at one of its class, or at any, drawn the same way; it
    goes both ways, equal ones and those of a vertex to itself are left out, so there are fewer than
    the shape says, by far where it is dense. Features are the class's mean plus normal noise.
    Twenty vertices of a class are to train on, then up to 500 to validate on and 1,000 to test on.

    Args:
        shape: how large it is. name: what it is called.
        homophily: the share of edges that are kept within a class.
        skew: the exponent of the degrees' power law, above 1: the smaller, the more skewed.
        signal: the deviation of class means; that of the noise is 1.
        seed: what the draws follow from.

    Raises:
        DataError: a size below 1, more classes than vertices, or a share outside of 0 to 1.

    Source: Karrer and Newman, Stochastic blockmodels and community structure in networks, 2011.
    """
    sizes = {"features": shape.features, "classes": shape.classes}
    need("block_model", vertices=shape.vertices, **sizes)
    if shape.classes > shape.vertices:
        raise DataError(
            f"block_model: classes: {shape.classes:,} found, as many as there are vertices at most"
            f" needed, {shape.vertices:,}"
        )
    if not (0 <= homophily <= 1 and skew > 1 and shape.edges >= 0):
        raise DataError(
            f"block_model: homophily {homophily}, skew {skew} and {shape.edges} edges found; 0 to"
            " 1, above 1, and 0 or more needed"
        )
    needed = 4 * (shape.vertices * shape.features + 2 * shape.edges)
    check_bytes(needed, f"block_model: {shape}", DataError)
    random, count, classes = generator(seed), shape.vertices, shape.classes
    labels = (np.arange(count) % classes).astype(np.int32)
    edges = Adjacency.from_edges(
        *_linked(random, count, shape.edges, classes, homophily, skew), count
    ).undirected()
    means = random.standard_normal((classes, shape.features), np.float32) * np.float32(signal)
    features = random.standard_normal((count, shape.features), np.float32)
    for start in range(0, count, classes):  # classes are 0, 1, 2, ... again and again
        features[start : start + classes] += means[: count - start]
    order = random.permutation(count)
    first = np.concatenate([order[labels[order] == number][:20] for number in range(classes)])
    rest = order[~np.isin(order, first)]
    held = min(500, len(rest) // 3)
    parts = {"train": np.sort(first), "val": rest[:held], "test": rest[held : held + 1000]}
    return GraphData(name, edges, features, labels, parts, synthetic=True)


def _linked(
    random: np.random.Generator,
    count: int,
    edges: int,
    classes: int,
    homophily: float,
    skew: float,
) -> tuple[Array, Array]:
    """Return the ends of edges of a block model, each once; vertex i is of class i % classes."""
    # Ids are in no order: a class's vertices are `classes` apart, and propensities are drawn.
    weight = np.minimum((1 - random.random(count)) ** (-1 / (skew - 1)), np.sqrt(count))
    whole = np.cumsum(weight)
    own = [np.cumsum(weight[number::classes]) for number in range(classes)]
    empty = np.zeros(0, np.int32)
    ends: list[tuple[Array, Array]] = [(empty, empty)]
    for start in range(0, edges // 2, _AT_ONCE):
        drawn = min(_AT_ONCE, edges // 2 - start)
        source = _drawn(whole, random.random(drawn))
        target = _drawn(whole, random.random(drawn))
        near, place = random.random(drawn) < homophily, random.random(drawn)
        for number, sums in enumerate(own):
            chosen = np.flatnonzero(near & (source % classes == number))
            target[chosen] = _drawn(sums, place[chosen]) * classes + number
        ends.append((source.astype(np.int32), target.astype(np.int32)))
    sources, targets = (np.concatenate(side) for side in zip(*ends))
    return sources, targets


def many_graphs(
    shape: Shape, *, name: str = "graphs", signal: float = 0.5, noise: float = 0.05, seed: int = 0
) -> GraphData:
    """Return several block models as one graph, where a vertex may have several labels.

    Each graph is drawn by itself, of about as many vertices, in `_GROUPS` groups that all have in
    common. Features are the group's mean plus normal noise; labels are three in ten for each group,
    some of them turned over. A twelfth of the graphs, the last, is to test on, as many before them
    to validate on, the rest to train on: no edge leads from one part to another.

    Args:
        shape: how large they are together. name: what they are called.
        signal: the deviation of group means; that of the noise is 1.
        noise: the share of labels that are turned over.
        seed: what the draws follow from.

    Raises:
        DataError: fewer than 3 graphs, or too few vertices.
    """
    if shape.graphs < 3 or shape.vertices < shape.graphs * _GROUPS:
        raise DataError(
            f"many_graphs: {shape.graphs} graphs of {shape.vertices} vertices found; 3 or more"
            f" graphs, of {_GROUPS} vertices each, needed"
        )
    cuts = np.arange(shape.graphs + 1) * shape.vertices // shape.graphs
    random, drawn = generator(seed), []
    for number, (first, past) in enumerate(pairwise(cuts)):
        own = np.random.Generator(np.random.Philox(key=[seed % 2**64, number + 1]))
        each = shape.edges // shape.graphs
        ends = _linked(own, int(past - first), each, _GROUPS, homophily=0.8, skew=2.5)
        drawn.append(np.stack(ends).astype(np.int64) + first)
    sources, targets = np.concatenate(drawn, axis=1)
    edges = Adjacency.from_edges(sources, targets, shape.vertices).undirected()
    place = np.arange(shape.vertices)
    graph = np.searchsorted(cuts, place, side="right") - 1
    group = (place - cuts[graph]) % _GROUPS
    means = random.standard_normal((_GROUPS, shape.features), np.float32) * np.float32(signal)
    features = random.standard_normal((shape.vertices, shape.features), np.float32)
    features += means[group]
    labels = (random.random((_GROUPS, shape.classes)) < 0.3)[group]
    labels ^= random.random(labels.shape, np.float32) < noise
    held = max(shape.graphs // 12, 1)
    bounds = {"train": (0, -2 * held), "val": (-2 * held, -held), "test": (-held, None)}
    parts = {
        part: np.flatnonzero(np.isin(graph, np.arange(shape.graphs)[slice(*ends)]))
        for part, ends in bounds.items()
    }
    return GraphData(name, edges, features, labels.astype(np.uint8), parts, synthetic=True)


def _drawn(sums: Array, uniform: Array) -> Array:
    """Return numbers drawn by weights whose running sums these are."""
    if not len(uniform):
        return np.zeros(0, np.int64)
    found = np.searchsorted(sums, uniform * sums[-1], side="right")
    return np.asarray(np.minimum(found, len(sums) - 1))


def named(text: str, seed: int = 0) -> GraphData:
    """Return the block model of a preset's shape, or several.

    Args:
        text: a name of `PRESETS`, with `:SCALE` for that share of vertices and edges.
        seed: what the draws follow from.

    Raises:
        DataError: no preset's name, or a scale that is no number above 0 to 1000.
    """
    name, colon, scale = text.partition(":")
    if name not in PRESETS:
        raise DataError(
            f"graph {text!r} found; rmat, blocks, or one of {', '.join(PRESETS)} needed, with"
            " :SCALE for a share of one"
        )
    try:
        factor = float(scale) if colon else 1.0
    except ValueError:
        factor = 0.0
    if not 0 < factor <= _LARGEST:
        raise DataError(f"graph {text!r}: scale {scale!r} found, above 0 to {_LARGEST} needed")
    shape = PRESETS[name].scaled(factor)
    make = block_model if shape.graphs == 1 else many_graphs
    return make(shape, name=text, seed=seed)
