"""Kernels over the entries of a sparse matrix: the same bits on any threads, and bad matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from soapstone.ir.errors import GraphError
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.graphs import blocks, spmm
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory


def skewed(rows: int, columns: int, seed: int) -> tuple[Array, Array]:
    """Return offsets and indices of a matrix, most of whose entries are in a few rows."""
    random = np.random.default_rng(seed)
    counts = np.minimum(random.zipf(1.4, rows), 4000)
    counts[random.integers(0, rows, rows // 4)] = 0
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return indptr, random.integers(0, columns, indptr[-1]).astype(np.int32)


def entry_of(call: Call) -> Any:
    (only,) = variants(call.operator)
    return only.bind(call)


@pytest.mark.parametrize("width", [7, 200])
def test_bits_do_not_depend_on_threads(width: int) -> None:
    indptr, indices = skewed(300, 211, 0)
    random = np.random.default_rng(1)
    x = random.standard_normal((211, width)).astype(np.float32)
    weights = random.standard_normal(indices.size).astype(np.float32)
    back = np.zeros(212, np.int64), indices
    found = []
    for threads in (1, 2, 5):
        y = np.full((300, width), 7, np.float32)
        operands = (x, indptr, indices, *back, weights, weights)
        entry = entry_of(Call("spmm", {"reduction": "sum"}, operands, (y,), threads))
        assert memory.run(entry) == 0
        found.append(y)
    wanted = operator("spmm").run({"reduction": "sum"}, *operands)[0]
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-3)
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("width", [7, 41, 200])
@pytest.mark.parametrize("ascending", [True, False])
def test_blocks_have_the_same_bits(width: int, ascending: bool) -> None:
    random = np.random.default_rng(1)
    counts = random.integers(0, 300, 60)
    counts[5] = 0
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = random.integers(0, 71, indptr[-1]).astype(np.int32)
    if ascending:
        indices = indices[np.lexsort((indices, np.repeat(np.arange(60), counts)))]
    x = random.standard_normal((71, width + 3)).astype(np.float32)[:, :width]
    weights = random.standard_normal(indices.size).astype(np.float32)
    degrees = np.arange(72) * 2
    back = np.zeros(72, np.int64), indices
    small = 2 * 64 * -(-min(width, 128) // 16) * 30  # bytes: half of it has room for 30 rows
    assert blocks.rows_at_once(60, 71, indices.size, width, small) == 24
    calls = [
        (spmm.spmm, "spmm", {"reduction": "sum"}, (x, indptr, indices, *back, weights, weights)),
        (spmm.spmm, "spmm", {"reduction": "mean"}, (x, indptr, indices, *back)),
        (spmm.spmm_mean_grad, "spmm_mean_grad", {}, (x, degrees, indptr, indices)),
    ]
    for kernel, name, attributes, operands in calls:
        found = []
        for threads, nbytes in ((1, 1 << 30), (1, small), (2, small), (5, small)):
            y = np.full((60, width), 7, np.float32)
            entry = kernel(Call(name, attributes, operands, (y,), threads), nbytes)
            assert entry is not None
            for _ in range(2):  # what the first run left counts for nothing
                assert memory.run(entry) == 0
            found.append(y)
        wanted = operator(name).run(attributes, *operands)[0]
        np.testing.assert_allclose(found[0], wanted, rtol=1e-3, atol=1e-3)
        for other in found[1:]:
            np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("bad", [-1, 71, -(2**31), 2**31 - 1])
def test_blocks_refuse_bad_matrices(bad: int) -> None:
    indices = np.tile(np.arange(71, dtype=np.int32), 60)
    indptr = np.arange(61) * 71
    x, y = np.ones((71, 64), np.float32), np.zeros((60, 64), np.float32)
    for place in (0, 30, indices.size - 1):
        there = indices.copy()
        there[place] = bad
        operands = (x, indptr, there, np.zeros(72, np.int64), there)
        entry = spmm.spmm(Call("spmm", {"reduction": "sum"}, operands, (y,), 2), 8192)
        assert entry is not None
        told = entry.statuses[memory.run(entry)]
        assert callable(told) and f"index {bad} found, 0 to 70 needed" in told()
    for at, offset in ((0, -1), (3, 10**6), (60, 10**6), (30, 0)):
        wrong = indptr.copy()
        wrong[at] = offset
        operands = (x, wrong, indices, np.zeros(72, np.int64), indices)
        entry = spmm.spmm(Call("spmm", {"reduction": "sum"}, operands, (y,), 2), 8192)
        assert entry is not None
        told = entry.statuses[memory.run(entry)]
        assert callable(told) and "indptr" in told()


@pytest.mark.parametrize(("heads", "width"), [(8, 8), (1, 41), (3, 16), (20, 5)])
def test_attention_has_the_same_bits_on_any_threads(heads: int, width: int) -> None:
    forward = skewed(300, 211, 0)
    back = skewed(211, 300, 3)
    random = np.random.default_rng(1)

    def drawn(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32)

    x, dy = drawn(211, heads, width), drawn(300, heads, width)
    source, target, dots = drawn(211, heads), drawn(300, heads), drawn(300, heads)
    scale, step = drawn(300, heads) + 3, np.array(7, np.int64)
    attributes = {"slope": 0.2, "rate": 0.3, "seed": 11}
    calls = {
        "graph_attention": (x, source, target, *forward, *back, step),
        "graph_attention_grad": (dy, x, source, target, scale, dots, *back, step),
    }
    for name, operands in calls.items():
        wanted = operator(name).run(attributes, *operands)
        found = []
        for threads in (1, 2, 5):
            made = tuple(np.full_like(array, 7) for array in wanted)
            assert memory.run(entry_of(Call(name, attributes, operands, made, threads))) == 0
            found.append(made)
        for first, *others, reference in zip(*found, wanted):
            near = 1e-5 * float(np.abs(reference).max())
            np.testing.assert_allclose(first, reference, rtol=1e-3, atol=10 * near, err_msg=name)
            for other in others:
                np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize(
    ("indptr", "indices", "said"),
    [
        ((0, 3, 2, 4), (0, 1, 0, 1), "indptr 3, then 2 found at row 1"),
        ((0, 1, 2, 5), (0, 1, 0, 1), "indptr 5 found at row 3, offsets from 0 to 4"),
        ((-1, 1, 2, 4), (0, 1, 0, 1), "indptr -1 found at row 0"),
        ((0, 1, 2, 4), (0, 1, 0, 2), "index 2 found, 0 to 1 needed"),
        ((0, 1, 2, 4), (0, -1, 0, 1), "index -1 found, 0 to 1 needed"),
    ],
)
def test_bad_matrices_are_refused(
    indptr: tuple[int, ...], indices: tuple[int, ...], said: str
) -> None:
    x = np.ones((2, 3), np.float32)
    matrix = np.array(indptr, np.int64), np.array(indices, np.int32)
    operands = (x, *matrix, np.zeros(3, np.int64), matrix[1])
    with pytest.raises(GraphError, match=f"spmm: {said}"):
        operator("spmm").run({"reduction": "mean"}, *operands)
    y = np.zeros((3, 3), np.float32)
    entry = entry_of(Call("spmm", {"reduction": "mean"}, operands, (y,), threads=2))
    status = memory.run(entry)
    told = entry.statuses[status]
    assert said in told()
