# ruff: noqa: E402
"""CUDA kernels over graphs whose rows are of very different lengths, in Numba's simulator.

Prints a line of JSON a call: operator, form, and how far the result is from the reference, beside
the largest number of it. Rows have no entry, one, as many as a piece, and many pieces; those of a
tile begin in the midst of the entries.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
warnings.simplefilter("ignore")

import numpy as np
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

from soapstone.ir.spec import operator
from soapstone.kernels.cuda.graphs.entries import piece_of
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device

COLUMNS = 5
LENGTHS = {
    "one long row": (0, 0, 1, 61, 0, 3),
    "ends of pieces": (8, 4, 4, 12, 1, 3, 0, 8),
    "only the first": (40, 0, 0),
    "only the last": (0, 0, 33),
    "all of one": (1,) * 9,
    "none": (0, 0),
}


def transposed(offsets: Any, indices: Any) -> tuple[Any, Any]:
    """Return offsets and indices of a matrix's columns."""
    rows = np.repeat(np.arange(offsets.size - 1), np.diff(offsets)).astype(np.int32)
    order = np.argsort(indices, kind="stable")
    counts = np.bincount(indices, minlength=COLUMNS)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), rows[order]


def calls(lengths: tuple[int, ...]) -> list[tuple[str, dict[str, Any], tuple[Any, ...]]]:
    """Return calls over a matrix with rows of some lengths."""
    rng = np.random.default_rng(len(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    indices = rng.integers(0, COLUMNS, offsets[-1]).astype(np.int32)
    back, rows = transposed(offsets, indices)
    matrix = (offsets, indices, back, rows)

    def real(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    count = len(lengths)
    weights = real(indices.size), real(indices.size)
    ends = real(COLUMNS, 2), real(count, 2)
    scale, dots = (real(COLUMNS, 2) for _ in range(2))
    chosen = rng.integers(0, count, (COLUMNS, 3)).astype(np.int32)
    masked = real(indices.size, 3)
    masked[: indices.size // 2, 1] = -np.inf  # a row's first pieces, or all of it
    behind = (real(COLUMNS, 2, 3), real(count, 2, 3), real(count, 2), real(COLUMNS, 2))
    return [
        ("spmm", {}, (real(COLUMNS, 3), *matrix)),
        ("spmm", {"reduction": "mean"}, (real(COLUMNS, 3), *matrix)),
        ("spmm", {}, (real(COLUMNS, 3), *matrix, *weights)),
        ("spmm_mean_grad", {}, (real(COLUMNS, 3), back, offsets, indices)),
        ("spmm_max", {}, (real(COLUMNS, 3), *matrix)),
        ("spmm_max_grad", {"base": 0}, (real(COLUMNS, 3), chosen, offsets, indices)),
        ("segment_softmax", {}, (masked, offsets)),
        ("segment_softmax_grad", {}, (real(indices.size, 3), real(indices.size, 3), offsets)),
        ("sddmm", {}, (real(count, 3), real(COLUMNS, 3), offsets, indices)),
        ("sddmm", {}, (real(count, 70), real(COLUMNS, 70), offsets, indices)),
        ("sddmm", {}, (real(count, 1), real(COLUMNS, 1), offsets, indices)),
        ("graph_attention", {}, (real(COLUMNS, 2, 3), *ends, *matrix)),
        ("graph_attention_grad", {}, (*behind, scale, dots, offsets, indices)),
    ]


def bound(name: str, given: dict[str, Any], arrays: tuple[Any, ...], outputs: Any) -> Any:
    """Return the entry of a call."""
    there = tuple(map(FakeCUDAArray, arrays)), tuple(map(FakeCUDAArray, outputs))
    return select_device(Call(name, given, *there))[1]


def off(name: str, attributes: dict[str, Any], arrays: tuple[Any, ...]) -> tuple[float, float]:
    """Return by how much a call's results are wrong, at most, and the largest right number."""
    spec = operator(name)
    given = spec.normalise(attributes)
    wanted = spec.run(given, *arrays)
    outputs = [np.full(x.shape, np.nan, x.dtype) for x in wanted]
    entry = bound(name, given, arrays, outputs)
    entry.enqueue()
    assert entry.status is None or int(entry.status.copy_to_host()[0]) == 0
    pairs = list(zip(outputs, wanted))
    there = [~np.isnan(right) for _, right in pairs]  # where all of a row is minus infinity, it is
    assert all((~np.isnan(found) == here).all() for (found, _), here in zip(pairs, there))
    pairs = [(found[here], right[here]) for (found, right), here in zip(pairs, there)]
    most = max(float(np.abs(right).max(initial=0)) for _, right in pairs)
    return max(float(np.abs(found - right).max(initial=0)) for found, right in pairs), most


def tile(lengths: tuple[int, ...], first: int) -> tuple[float, float]:
    """Return `off` of a product of the rows from `first` on, as a tile of more has them."""
    name, attributes, (x, offsets, *rest) = calls(lengths)[0]
    spec = operator(name)
    given = spec.normalise(attributes)
    wanted = spec.run(given, x, offsets, *rest)[0][first:]
    found = np.full(wanted.shape, np.nan, np.float32)
    bound(name, given, (x, offsets[first:], *rest), [found]).enqueue()
    return float(np.abs(found - wanted).max(initial=0)), float(np.abs(wanted).max(initial=0))


if __name__ == "__main__":
    assert piece_of(100) < 61 / 3  # so that a row has several pieces
    for form, lengths in LENGTHS.items():
        for call in calls(lengths):
            print(json.dumps([call[0], form, *off(*call)]))
        print(json.dumps(["spmm", f"{form}, a tile", *tile(lengths, 1)]))
