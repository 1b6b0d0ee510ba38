"""The files of ROC and Lux: NAME.lux with the edges, and what is known of vertices beside it.

`.lux`: the number of vertices, uint32, and of edges, uint64; for each vertex the number of edges
that lead to it and those before it, uint64; the source of each edge, uint32; all little-endian. Of
vertices: `.feats.bin`, float32 row by row, or `.feats.csv`; `.label`, a class number a line;
`.mask`, `Train`, `Val`, `Test` or `None` a line. NAME is without `.add_self_edge`, which ROC has
before `.lux`.

Source: Jia et al., Improving the accuracy, scalability, and performance of graph neural networks
with ROC, MLSys 2020, and its published code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from soapstone.errors import DataError
from soapstone.files import naming, read_text, write
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import PARTS, UNLABELLED, GraphData
from soapstone.ir.tensor import Array

SUFFIX = ".lux"
_HEADER = np.dtype([("vertices", "<u4"), ("edges", "<u8")])
_WORDS = ("Train", "Val", "Test")  # of PARTS
_NO_PART = "None"
_SUFFIXES = (".feats.bin", ".feats.csv", ".label", ".mask")  # of what is known of vertices


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name[: -len(SUFFIX)].removesuffix(".add_self_edge") + suffix)


def read_lux(path: Path) -> GraphData:
    """Return the graph of a file, with what files beside it say of its vertices.

    path: of NAME.lux. Features are not read from `.feats.bin` until they are used.

    Raises:
        DataError: a file of another length, or contents that do not fit; names the field.
    """
    edges = _edges(path)
    count = edges.vertices
    labels = parts = None
    known = _beside(path, ".label")
    if known.is_file():
        labels = _numbers(known, np.int32, ndmin=1)
    mask = _beside(path, ".mask")
    if mask.is_file():
        words = np.array(read_text(mask, f"file {str(mask)!r}", DataError).split())
        bad = words[~np.isin(words, (*_WORDS, _NO_PART))]
        if bad.size or len(words) != count:
            found = f"{str(bad[0])!r}" if bad.size else f"{len(words)} lines"
            needed = f"{count} lines of {', '.join(_WORDS)} or {_NO_PART}"
            raise DataError(f"file {str(mask)!r}: {found} found, {needed} needed")
        parts = {part: np.flatnonzero(words == word) for part, word in zip(PARTS, _WORDS)}
    return GraphData(path.stem, edges, _features(path, count), labels, parts or {})


def _edges(path: Path) -> Adjacency:
    with naming(path):
        head = np.fromfile(path, _HEADER, 1)
        size = path.stat().st_size
    if not len(head):
        raise DataError(f"{size} bytes found, {_HEADER.itemsize} or more needed")
    vertices, edges = int(head["vertices"][0]), int(head["edges"][0])
    needed = _HEADER.itemsize + 8 * vertices + 4 * edges
    if size != needed:
        raise DataError(
            f"{size} bytes found, {needed} needed for {vertices} vertices and {edges} edges"
        )
    with naming(path):
        ends = np.fromfile(path, "<u8", vertices, offset=_HEADER.itemsize)
        sources = np.fromfile(path, "<u4", edges, offset=_HEADER.itemsize + 8 * vertices)
    indptr = np.append(0, ends.astype(np.int64))
    fall = np.flatnonzero(np.diff(indptr) < 0)
    if fall.size or indptr[-1] != edges:
        at = int(fall[0]) if fall.size else vertices
        raise DataError(
            f"vertex {max(at, 1) - 1}: {int(indptr[at])} edges up to it found; numbers that do not"
            f" fall, and end with {edges}, needed"
        )
    return Adjacency.from_edges(sources, np.repeat(np.arange(vertices), np.diff(indptr)), vertices)


def _features(path: Path, count: int) -> Array | None:
    packed, text = _beside(path, ".feats.bin"), _beside(path, ".feats.csv")
    if packed.is_file():
        width, rest = divmod(packed.stat().st_size, 4 * max(count, 1))
        if rest:
            raise DataError(
                f"file {str(packed)!r}: {packed.stat().st_size} bytes found, float32 for each of"
                f" {count} vertices needed"
            )
        if not width:
            return np.zeros((count, 0), np.float32)
        with naming(packed):
            return np.memmap(packed, "<f4", "r", shape=(count, width))
    if text.is_file():
        return _numbers(text, np.float32, delimiter=",", ndmin=2)
    return None


def _numbers(path: Path, dtype: type[np.generic], **how: Any) -> Array:
    try:
        with naming(path):
            return np.loadtxt(path, dtype, **how)
    except (ValueError, OverflowError) as error:
        raise DataError(f"file {str(path)!r}: {error}") from None


def write_lux(path: Path, graph: GraphData) -> None:
    """Write a graph, and beside it the files that say what is known of its vertices.

    Those that an earlier graph of the name has beside it, and this one has not, are removed.

    path: of NAME.lux. A vertex without a label gets 0, and is in no part.

    Raises:
        DataError: several labels of a vertex, for which the layout has no place.
    """
    if graph.several:
        raise DataError(f"file {str(path)!r}: {SUFFIX} has one label of a vertex")
    edges = graph.adjacency
    head = np.array([(edges.vertices, edges.edges)], _HEADER)
    parts = head, edges.indptr[1:].astype("<u8"), edges.indices.astype("<u4")
    write(path, lambda stream: [stream.write(part.tobytes()) for part in parts])
    known: dict[str, Callable[[IO[bytes]], object]] = {}
    if graph.features is not None:
        rows = np.ascontiguousarray(graph.features, "<f4")
        known[".feats.bin"] = lambda stream: stream.write(rows.data)
    if graph.labels is not None:
        labels = np.where(graph.labels == UNLABELLED, 0, graph.labels)
        known[".label"] = lambda stream: np.savetxt(stream, labels, "%d")
    if graph.parts:
        words = np.full(edges.vertices, _NO_PART, "U5")
        for part, word in zip(PARTS, _WORDS):
            words[graph.parts.get(part, [])] = word
        text = "".join(f"{word}\n" for word in words)
        known[".mask"] = lambda stream: stream.write(text.encode())
    for suffix in _SUFFIXES:
        beside = _beside(path, suffix)
        if suffix in known:
            write(beside, known[suffix])
        else:  # an earlier graph's, which would be read with this one
            with naming(beside):
                beside.unlink(missing_ok=True)
