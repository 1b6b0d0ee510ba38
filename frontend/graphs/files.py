"""Graphs in files: npz with features and labels, lists of edges, Matrix Market, ROC's layout."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.errors import DataError, hint
from soapstone.files import check_file, check_suffix, naming, read_text, write
from soapstone.frontend.data import npz
from soapstone.frontend.data.sets import VARIABLE, data_folder
from soapstone.frontend.graphs import lux
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import PARTS, GraphData
from soapstone.frontend.graphs.generate import PRESETS, named
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

LISTS = (".txt", ".tsv", ".edges", ".el", ".csv")
SUFFIXES = (".npz", ".mtx", lux.SUFFIX, *LISTS)
_FIELDS = (  # of an npz file
    *("edges", "vertices", "labels", "features", "synthetic", *PARTS),
    *("feature_data", "feature_indices", "feature_indptr", "num_features"),
)
_NEEDED = "one or more needed: a list knows its vertices by their edges"
_LONE, _LONE_PER_EDGE = 10_000_000, 64  # vertices that may have no edge
_FEATURES = ".features.npy"  # beside a file whose own features there are none


def read_graph(name_or_path: str | Path) -> GraphData:
    """Return a graph: of a file, of the folder SOAPSTONE_DATA by name, or a preset's made-up one.

    Args:
        name_or_path: a path that ends in .npz, .mtx, .lux or as a list of edges (.txt, .tsv,
            .edges, .el, .csv); "cora" for `cora.npz` in the folder; or such as "reddit-like:0.01".

    A list has an edge a line, source and target, ids from 0; `#` and `%` begin a comment. In .csv
    files a comma is between them, and a first line of two names is left out, as in .tsv. In a
    Matrix Market file an entry (i, j), counted from 1, is an edge from i to j; a `symmetric` one
    goes both ways. An npz file has `edges`, (e, 2) integers, and may have `vertices`; `labels`;
    `features`, or `feature_data`, `feature_indices`, `feature_indptr` and `num_features`, a sparse
    matrix of them; and the ids `train`, `val` and `test`. Beside a `.lux` file (`lux.py`) there may
    be files of its features, labels and parts. Where a file has no features, those of
    NAME.features.npy beside it are taken, float32, which stay in that file until they are used.
    Equal edges and edges of a vertex to itself are kept.

    Raises:
        DataError: no such graph, a file that cannot be read, or contents that do not fit.
    """
    path = Path(name_or_path)
    if path.suffix.lower() in SUFFIXES:
        return _read(path)
    text = str(name_or_path)
    if text.partition(":")[0] in PRESETS:
        return named(text)
    folder = data_folder()
    if folder is not None and path.name == text and (folder / f"{text}.npz").is_file():
        return _read(folder / f"{text}.npz")
    where = f"file {text}.npz in folder {str(folder)!r}" if folder else f"folder (set {VARIABLE})"
    raise DataError(
        f"graph {text!r} found; a file ({', '.join(SUFFIXES)}), one of {', '.join(PRESETS)}, or a"
        f" {where} needed"
    )


def _read(path: Path) -> GraphData:
    label = f"file {str(path)!r}"
    check_file(path, label, DataError)
    try:
        found, beside = _parsed(path, label), path.with_suffix(_FEATURES)
        if found.features is not None or not beside.is_file():
            return found
        return replace(found, features=_mapped(beside))
    except DataError as error:
        said = str(error)
        raise DataError(said if said.startswith("file ") else f"{label}: {said}") from None


def _parsed(path: Path, label: str) -> GraphData:
    suffix = path.suffix.lower()
    if suffix == ".npz":
        return _of_arrays(path.stem, npz.read(path, label, DataError))
    if suffix == lux.SUFFIX:
        return lux.read_lux(path)
    text = read_text(path, label, DataError)
    if suffix == ".mtx":
        return GraphData(path.stem, _matrix_market(text))
    comma, named = "," if suffix == ".csv" else None, suffix in (".csv", ".tsv")
    sources, targets = ends = _columns(text, _heading(text, comma) if named else 0, comma)
    if not ends.size:
        raise DataError(f"no edge in {len(text)} characters found; {_NEEDED}")
    count = int(ends.max(initial=-1)) + 1
    return GraphData(path.stem, _of_edges(sources, targets, count))


def _of_edges(sources: Array, targets: Array, vertices: int) -> Adjacency:
    """Return the adjacency of edges, of which a file knows nothing else.

    Raises:
        DataError: as of `Adjacency.from_edges`, or far more vertices than edges could touch, as of
            ids that are not counted from 0.
    """
    if vertices > _LONE + _LONE_PER_EDGE * len(sources):
        raise DataError(
            f"{vertices:,} vertices found with {len(sources):,} edges; ids counted from 0 needed"
        )
    return Adjacency.from_edges(sources, targets, vertices)


def _mapped(path: Path) -> Array:
    """Return the matrix of a .npy file, of which what is used is read."""
    label = f"file {str(path)!r}"
    try:
        with naming(path):
            found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{label}: {error}") from None
    if found.dtype != np.float32 or found.ndim != 2:
        raise DataError(
            f"{label}: {found.dtype} of shape {found.shape} found, float32 (vertices, width) needed"
        )
    return np.asarray(found) if found.size == 0 else found


def _heading(text: str, between: str | None) -> int:
    """Return 1 where the first line has the names of two columns, else 0."""
    words = [word.strip() for word in text.partition("\n")[0].split(between)]
    return int(len(words) == 2 and not any(map(_is_integer, words)) and words[0][:1] not in "#%")


def _is_integer(word: str) -> bool:
    return word.strip().removeprefix("-").isdecimal()


def _columns(text: str, skip: int = 0, between: str | None = None) -> Array:
    """Return sources and targets, (2, e) int64, of lines that each have two integers.

    skip: lines before them. between: what is between two numbers; by default, blanks.
    """
    lines = io.StringIO(text)
    for _ in range(skip):
        lines.readline()
    if not any(line.strip() and line.strip()[0] not in "#%" for line in lines):
        return np.zeros((2, 0), np.int64)
    lines.seek(0)
    for _ in range(skip):
        lines.readline()
    try:
        found = np.loadtxt(lines, np.int64, comments=("#", "%"), delimiter=between, ndmin=2)
        if found.shape[1] == 2:
            return found.T
        fault = f"{found.shape[1]} numbers a line"
    except (ValueError, OverflowError) as error:
        fault = str(error)
    for number, line in enumerate(text.split("\n")[skip:], skip + 1):
        words = line.split("#")[0].split("%")[0].strip().split(between)
        if words != [""] and words and (len(words) != 2 or not all(map(_is_integer, words))):
            fault = f"line {number}: {line.strip()[:80]!r}"
            break
    form = "a comma between them" if between else "blanks between them"
    raise DataError(f"{fault} found; a source and a target, {form}, and nothing else needed")


def _matrix_market(text: str) -> Adjacency:
    """Return the edges of a coordinate file of a pattern."""
    lines = text.split("\n")
    words = lines[0].lower().split()
    good = words[:3] == ["%%matrixmarket", "matrix", "coordinate"] and len(words) == 5
    if not good or words[3] != "pattern" or words[4] not in ("general", "symmetric"):
        raise DataError(
            f"header {lines[0]!r} found; '%%MatrixMarket matrix coordinate pattern general' or"
            " 'symmetric' needed (edges have no values)"
        )
    at = next((n for n, s in enumerate(lines) if s.strip() and not s.startswith("%")), None)
    sizes = lines[at].split() if at is not None else []
    if len(sizes) != 3 or not all(size.isascii() and size.isdigit() for size in sizes):
        raise DataError(f"sizes {' '.join(sizes)!r} found; rows, columns and entries needed")
    rows, columns, count = map(int, sizes)
    if rows != columns:
        raise DataError(f"{rows} rows and {columns} columns found; as many of both needed")
    assert at is not None
    entries = _columns(text, at + 1)
    if entries.min(initial=1) < 1:
        raise DataError(f"id {entries.min()} found; ids from 1 needed")
    sources, targets = entries - 1
    if len(sources) != count:
        raise DataError(f"{len(sources)} entries found, {count} needed")
    if words[4] == "symmetric":
        below = sources != targets
        sources, targets = np.append(sources, targets[below]), np.append(targets, sources[below])
    return _of_edges(sources, targets, rows)


def _of_arrays(name: str, arrays: Mapping[str, Array]) -> GraphData:
    """Return the graph of an npz file's arrays."""
    for field in arrays:
        if field not in _FIELDS:
            known = ", ".join(_FIELDS)
            raise DataError(f"field {field!r}: it is not known{hint(field, _FIELDS)}; {known} are")
    edges = _integers(arrays, "edges", 2)
    if edges.shape[1] != 2:
        raise DataError(f"field 'edges': shape {edges.shape} found, (edges, 2) needed")
    labels = _integers(arrays, "labels", 1, 2) if "labels" in arrays else None
    features = _features(arrays)
    rows = next((len(each) for each in (labels, features) if each is not None), None)
    if "vertices" in arrays:
        count = int(_integers(arrays, "vertices", 0))
    elif rows is None and not len(edges):
        raise DataError("field 'edges': no edge found; one or more needed, or field 'vertices'")
    else:
        count = int(edges.max()) + 1 if rows is None else rows
    parts = {part: _integers(arrays, part, 1) for part in PARTS if part in arrays}
    made = _of_edges if rows is None else Adjacency.from_edges
    adjacency = made(edges[:, 0], edges[:, 1], count)
    synthetic = bool(np.any(arrays.get("synthetic", False)))
    return GraphData(name, adjacency, features, labels, parts, synthetic)


def _integers(arrays: Mapping[str, Array], field: str, *ranks: int) -> Array:
    """Return a field of integers, int64, which has one of some numbers of axes.

    Raises:
        DataError: no such field, other elements or axes, or integers beyond int64.
    """
    array = arrays.get(field)
    fits = array is not None and array.ndim in ranks
    if array is None or not fits or (array.size and array.dtype.kind not in "iu"):
        found = "nothing" if array is None else f"{array.dtype} of shape {array.shape}"
        axes = " or ".join(map(str, ranks))
        raise DataError(f"field {field!r}: {found} found, integers with {axes} axes needed")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise DataError(f"field {field!r}: {array.max()} found, int64 needed")
    return array.astype(np.int64, copy=False)


def _features(arrays: Mapping[str, Array]) -> Array | None:
    """Return the features of vertices as a dense matrix, from a dense or a sparse one."""
    for field in ("features", "feature_data"):
        if field not in arrays:
            continue
        data, rank = arrays[field], 2 if field == "features" else 1
        if data.ndim != rank or (data.size and data.dtype.kind not in "iufb"):
            raise DataError(
                f"field {field!r}: {data.dtype} of shape {data.shape} found, numbers with {rank}"
                " axes needed"
            )
    if "features" in arrays:
        return arrays["features"].astype(np.float32, copy=False)
    if "feature_data" not in arrays:
        return None
    data = arrays["feature_data"]
    indices, indptr = (_integers(arrays, f"feature_{n}", 1) for n in ("indices", "indptr"))
    width, rows = int(_integers(arrays, "num_features", 0)), len(indptr) - 1
    counts = np.diff(indptr)
    fits = rows >= 0 and counts.min(initial=0) >= 0 and indptr[0] == 0
    if not fits or indptr[-1] != len(data) or data.shape != indices.shape:
        raise DataError(
            f"field 'feature_indptr': offsets that do not fall, from 0 to the {len(data)} of"
            " 'feature_data', needed"
        )
    if width < 0 or (indices.size and not 0 <= indices.min() <= indices.max() < width):
        raise DataError(f"field 'feature_indices': columns from 0 to {width - 1} needed")
    check_bytes(4 * rows * width, "features", DataError)
    dense = np.zeros((rows, width), np.float32)
    dense[np.repeat(np.arange(rows), counts), indices] = data
    return dense


def write_graph(path: str | Path, graph: GraphData) -> None:
    """Write a graph to a file, whole or not at all.

    Args:
        path: ends in .npz, which has all there is; .lux, with the rest in files beside it; .mtx or
            as a list of edges, which have edges.
        graph: what is written.

    Raises:
        DataError: another suffix, or a list for a graph without edges.
    """
    path, edges = Path(path), graph.adjacency
    check_suffix(path, *SUFFIXES)
    pairs = np.stack([edges.indices, edges.targets], axis=1)
    if path.suffix.lower() == ".npz":
        arrays: dict[str, Any] = {"edges": pairs, "vertices": np.int64(edges.vertices)}
        arrays["synthetic"] = np.bool_(graph.synthetic)
        known = {"features": graph.features, "labels": graph.labels, **graph.parts}
        arrays |= {name: array for name, array in known.items() if array is not None}
        write(path, lambda stream: np.savez(stream, **arrays))
    elif path.suffix.lower() == ".mtx":
        head = "%%MatrixMarket matrix coordinate pattern general\n"
        head += f"{edges.vertices} {edges.vertices} {edges.edges}"
        write(path, lambda stream: np.savetxt(stream, pairs + 1, "%d", header=head, comments=""))
    elif path.suffix.lower() == lux.SUFFIX:
        lux.write_lux(path, graph)
    else:
        if not edges.edges:
            raise DataError(f"file {str(path)!r}: no edge found; {_NEEDED}")
        between = "," if path.suffix.lower() == ".csv" else " "
        write(path, lambda stream: np.savetxt(stream, pairs, "%d", delimiter=between))
