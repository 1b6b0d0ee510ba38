"""Products as cuBLASLt takes them: three column-major matrices, some transposed, and batches.

Source: NVIDIA, cuBLAS library documentation, section "Using the cuBLASLt API": an element (i, j)
of a matrix lies at i + j * ld, that of batch number p further on by p times the batch's stride.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soapstone.kernels.cuda.products.matmul import Problem
from soapstone.kernels.cuda.products.operands import Axes, Operand, step

MOST_CALLS = 64  # of one product, whose batches are not all in one stride
MOST_EXTENT = 2**31 - 1


@dataclass(frozen=True)
class Matrix:
    """A matrix as it lies in memory; the product takes its transpose where `transposed`."""

    rows: int
    columns: int
    ld: int
    batch_stride: int
    transposed: bool = False


@dataclass(frozen=True)
class MatrixProduct:
    """d = a b, in columns; `places`: of each call, the elements at which a, b and d begin.

    `swapped`: a is the problem's second operand, and d the transpose of its result. Then a value a
    column of the result, such as a bias, is one a row of d.
    """

    a: Matrix
    b: Matrix
    d: Matrix
    batch: int
    places: tuple[tuple[int, int, int], ...]
    swapped: bool


def column_major(problem: Problem, by_columns: bool = False) -> MatrixProduct | None:
    """Return a product of a problem, or None: it has windows or strides that cuBLASLt has not.

    by_columns: only one in which the result's columns are rows of d.
    """
    a, b, c, axes, _ = problem
    if any(operand.windows for operand in (a, b, c)):
        return None
    count = {key: math.prod(extent for _, extent in axes[key]) for key in "bmnk"}
    if not 0 < min(count.values()) <= max(count.values()) <= MOST_EXTENT:
        return None
    used = {(key, n): step(operand, axes[key]) for key, n, operand in _uses(a, b, c)}
    along = {use: stride for use, stride in used.items() if stride is not None}
    batch = _batches((a, b, c), axes["b"])
    if batch is None or len(along) < len(used):
        return None
    number, strides, places = batch
    am, ak, bk, bn = along["m", 0], along["k", 0], along["k", 1], along["n", 1]
    cm, cn = along["m", 2], along["n", 2]
    m, n, k = count["m"], count["n"], count["k"]
    ways = (
        (True, (n, k, bn, bk, 1), (k, m, ak, am, 0), (n, m, cn, cm, 2)),
        (False, (m, k, am, ak, 0), (k, n, bk, bn, 1), (m, n, cm, cn, 2)),
    )
    for swapped, *operands in ways[: 1 if by_columns else 2]:
        first, second, result = (
            _matrix(rows, columns, down, across, strides[of])
            for rows, columns, down, across, of in operands
        )
        if first is None or second is None or result is None or result.transposed:
            continue
        order = (1, 0, 2) if swapped else (0, 1, 2)
        moved = tuple((at[order[0]], at[order[1]], at[order[2]]) for at in places)
        return MatrixProduct(first, second, result, number, moved, swapped)
    return None


def _uses(a: Operand, b: Operand, c: Operand) -> list[tuple[str, int, Operand]]:
    """Return which group of axes is a row or column of which operand, and its number."""
    return [
        (key, n, x) for n, x, keys in ((0, a, "mk"), (1, b, "kn"), (2, c, "mn")) for key in keys
    ]


def _batches(
    operands: Sequence[Operand], axes: Axes
) -> tuple[int, list[int], list[tuple[int, ...]]] | None:
    """Return how many batches one call has, their strides, and where calls begin.

    The last axes that every operand has as one are the batches of a call; there is a call for each
    index of the others.
    """
    for cut in range(len(axes) + 1):
        strides = [step(operand, axes[cut:]) for operand in operands]
        known = [stride for stride in strides if stride is not None]
        if len(known) == len(operands):
            break
    outer = axes[:cut]
    if math.prod(extent for _, extent in outer) > MOST_CALLS:
        return None
    places = [
        tuple(_away(operand.strides, outer, index) for operand in operands)
        for index in itertools.product(*(range(extent) for _, extent in outer))
    ]
    return math.prod(extent for _, extent in axes[cut:]), known, places


def _away(strides: Mapping[str, int], axes: Axes, index: Sequence[int]) -> int:
    return sum(strides.get(name, 0) * at for (name, _), at in zip(axes, index))


def _matrix(rows: int, columns: int, down: int, across: int, batch_stride: int) -> Matrix | None:
    """Return a matrix of which an element lies at i * down + j * across, as it lies in memory."""
    if (down == 1 or rows == 1) and (across >= rows or columns == 1):
        return Matrix(rows, columns, max(across, rows) if columns > 1 else rows, batch_stride)
    if (across == 1 or columns == 1) and (down >= columns or rows == 1):
        ld = max(down, columns) if rows > 1 else columns
        return Matrix(columns, rows, ld, batch_stride, transposed=True)
    return None
