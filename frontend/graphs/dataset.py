"""A graph with what is known of its vertices: features, labels, and which are for what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone.errors import DataError, warn
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.ir.tensor import Array

PARTS = ("train", "val", "test")
_ROWS = 1 << 16  # that are looked at together
UNLABELLED = -1  # the label of a vertex that takes no part in a loss


@dataclass(frozen=True, eq=False)
class GraphData:
    """A graph whose vertices are to be classified.

    Attributes:
        name: of the data set. adjacency: its edges.
        features: (vertices, width) float32, None where the set has none.
        labels: (vertices) int32 class numbers, -1 where a vertex has none; or (vertices, classes)
            of 0 and 1, where a vertex may have several; None without labels.
        parts: the vertices to train on, to validate on and to test on: ids by "train", "val" and
            "test".
        synthetic: whether it was made up.

    Raises:
        DataError: rows that are not the graph's vertices, features that are not finite, labels
            that are no class numbers nor 0 and 1, or ids outside.
    """

    name: str
    adjacency: Adjacency
    features: Array | None = None
    labels: Array | None = None
    parts: Mapping[str, Array] = field(default_factory=dict)
    synthetic: bool = False

    def __post_init__(self) -> None:
        label, count = f"graph {self.name!r}", self.adjacency.vertices
        for what, ranks in (("features", (2,)), ("labels", (1, 2))):
            array = getattr(self, what)
            if array is None:
                continue
            if array.ndim not in ranks or len(array) != count:
                raise DataError(
                    f"{label}: {what} of shape {array.shape} found, a row for each of {count}"
                    " vertices needed"
                )
            for start in range(0, count if array.dtype.kind == "f" else 0, _ROWS):
                finite = np.isfinite(array[start : start + _ROWS])  # of a file, a part at a time
                if not finite.all():
                    row = start + int(np.argwhere(~finite)[0][0])
                    raise DataError(f"{label}: {what} of vertex {row} are not finite")
        if self.several:
            assert self.labels is not None
            if not ((self.labels == 0) | (self.labels == 1)).all():
                raise DataError(f"{label}: labels (vertices, classes) found that are not 0 or 1")
        elif self.labels is not None:
            labels, most = self.labels, np.iinfo(np.int32).max
            wrong = (labels < UNLABELLED) | (labels > most)
            if labels.dtype.kind not in "iu" or wrong.any():
                vertex = int(np.argmax(wrong))
                raise DataError(
                    f"{label}: label {labels[vertex]} of vertex {vertex} found, class numbers up to"
                    f" {most} or {UNLABELLED} for none needed"
                )
            object.__setattr__(self, "labels", labels.astype(np.int32, copy=False))
        for part, ids in self.parts.items():
            whole = ids.ndim == 1 and (ids.size == 0 or ids.dtype.kind in "iu")
            if not whole or (ids.size and not 0 <= ids.min() <= ids.max() < count):
                raise DataError(f"{label}: {part}: ids from 0 to {count - 1} needed")

    @property
    def several(self) -> bool:
        """Whether a vertex may have several labels."""
        return self.labels is not None and self.labels.ndim == 2

    @property
    def classes(self) -> int:
        """How many classes there are: one more than the largest label, or the labels' columns."""
        if self.labels is not None and self.labels.ndim == 2:
            return int(self.labels.shape[1])
        return 0 if self.labels is None else int(self.labels.max(initial=-1)) + 1

    @property
    def width(self) -> int:
        """How many features each vertex has."""
        return 0 if self.features is None else self.features.shape[1]

    def labels_of(self, part: str) -> Array:
        """Return the labels of a part's vertices, and -1 of all others.

        Result: (vertices) int32, or (vertices, classes) float32 of several labels a vertex.

        Raises:
            DataError: the data set has no labels, or not that part.
        """
        if self.labels is None or part not in self.parts:
            have = ", ".join(self.parts) or "none"
            what = "no labels" if self.labels is None else f"parts {have}"
            raise DataError(f"graph {self.name!r}: {what} found, labels and part {part!r} needed")
        kind = np.float32 if self.several else np.int32
        chosen = np.full(self.labels.shape, UNLABELLED, kind)
        chosen[self.parts[part]] = self.labels[self.parts[part]]
        return chosen

    def splits(self) -> Splits:
        """Return the data set of a step over the whole graph: features, and labels of each part.

        Raises:
            DataError: it lacks vertices, features, labels, the part to train or to test on, or
                labels there.
        """
        if not self.adjacency.vertices:
            raise DataError(f"graph {self.name!r}: 0 vertices found, 1 or more needed to train on")
        if self.features is None:
            raise DataError(f"graph {self.name!r}: no features found; needed to train on")
        train, test = self.labels_of("train"), self.labels_of("test")
        if not (train != UNLABELLED).any():
            raise DataError(
                f"graph {self.name!r}: part 'train' of {len(self.parts['train'])} vertices, none of"
                " which has a label, found; needed to train on"
            )
        if not self.several and self.classes > self.adjacency.vertices and self.labels is not None:
            vertex = int(self.labels.argmax())
            warn(
                f"graph {self.name!r}: label {self.labels[vertex]} of vertex {vertex} found: a"
                f" model has {self.classes:,} classes for {self.adjacency.vertices:,} vertices"
            )
        return Splits(self.features, train, self.features, test, self.name, self.synthetic)

    def row_normalised(self) -> GraphData:
        """Return the data set with the features of each vertex over their sum, where that is > 0.

        Raises:
            DataError: it has no features.
        """
        if self.features is None:
            raise DataError(f"graph {self.name!r}: no features found")
        total = self.features.sum(axis=1, keepdims=True)
        scaled = self.features / np.where(total > 0, total, 1)
        return GraphData(self.name, self.adjacency, scaled, self.labels, self.parts, self.synthetic)

    def renumbered(self, order: Array) -> GraphData:
        """Return the data set whose vertex i was vertex order[i]. order: each vertex once."""
        place, edges = np.argsort(order), self.adjacency
        moved = Adjacency.from_edges(place[edges.indices], place[edges.targets], len(order))
        features, labels = (a if a is None else a[order] for a in (self.features, self.labels))
        parts = {part: np.sort(place[ids]) for part, ids in self.parts.items()}
        return GraphData(self.name, moved, features, labels, parts, self.synthetic)

    def as_dict(self) -> dict[str, Any]:
        """Return what `soapstone graph info` tells, as JSON can say it."""
        degrees = self.adjacency.in_degrees
        edges = self.adjacency
        own = edges.indices == edges.targets
        return {
            "name": self.name,
            "synthetic": self.synthetic,
            "vertices": edges.vertices,
            "edges": edges.edges,
            "symmetric": edges.symmetric,
            "self_edges": int(own.sum()),
            "equal_edges": edges.edges - int(own.sum()) - edges.simple().edges,
            "isolated": int(((degrees == 0) & (np.diff(edges.indptr_t) == 0)).sum()),
            "in_degree_mean": float(degrees.mean()) if degrees.size else 0.0,
            "in_degree_most": int(degrees.max(initial=0)),
            "features": self.width,
            "classes": self.classes,
            "parts": {part: len(ids) for part, ids in self.parts.items()},
        }

    def __str__(self) -> str:
        found = self.as_dict()
        parts = ", ".join(f"{count:,} {part}" for part, count in found["parts"].items())
        lines = [
            f"graph {self.name!r}{' (synthetic)' if self.synthetic else ''}: {self.adjacency}",
            f"  edges:      {'both ways' if found['symmetric'] else 'one way'},"
            f" {found['self_edges']:,} of a vertex to itself, {found['equal_edges']:,} repeated",
            f"  in-degree:  {found['in_degree_mean']:.1f} mean, {found['in_degree_most']:,} most,"
            f" {found['isolated']:,} vertices without edges",
            f"  features:   {found['features'] or 'none'}",
            f"  classes:    {found['classes'] or 'none'}",
            f"  vertices:   {parts or 'no parts'}",
        ]
        return "\n".join(lines)
