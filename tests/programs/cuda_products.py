# ruff: noqa: E402
"""Products by each shape of a block's tile, in parts, and by tiles that are copied ahead.

    python tests/programs/cuda_products.py             # in Numba's simulator
    python tests/programs/cuda_products.py --device    # on a GPU

Prints a line of JSON for each layout of operands: type, extents, the kernel and the shape of its
tile, into how many parts sums are cut, and how far the result is off, which is an error where it
is too far.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

DEVICE = "--device" in sys.argv
if not DEVICE:
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.setswitchinterval(1e-4)  # the simulator polls its threads
warnings.simplefilter("ignore")

import numpy as np
from helpers.cuda_arrays import There

from soapstone.dtypes import HALVES, learn
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

# Rows, columns, terms; whether a and b are transposes of what lies in rows. Rows of halves end
# within a piece of eight.
FORMS = ((40, 20, 37, False, False), (33, 17, 64, True, False), (9, 33, 70, False, True))
FORMS += ((31, 16, 35, True, True), (5, 3, 2, False, True))
# Of single precision: few rows, few columns, large tiles, wide and tall ones, and in parts.
LARGER = ((3, 50, 70, False, False), (50, 3, 70, True, False), (20, 36, 9, False, True))
LARGER += ((7, 70, 5, True, True), (70, 14, 6, False, False), (16, 32, 90, False, False))
if DEVICE:
    FORMS += ((1800, 1300, 70, False, False),)
    LARGER = (
        (9, 20000, 50, False, True),
        (20000, 9, 50, False, False),
        (2000, 1000, 33, True, True),
    )
    LARGER += (
        (50, 40000, 17, False, False),
        (40000, 50, 17, True, False),
        (90, 70, 2600, True, True),
    )


MOST = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6}  # that a result is off


def matrix(rows: int, columns: int, dtype: str, transposed: bool) -> Array:
    """Return numbers in rows that begin at multiples of eight elements; between them are NaNs."""
    if transposed:
        return matrix(columns, rows, dtype, False).T
    kind = np.dtype(learn(dtype))
    store = np.full((rows, -(-columns // 8) * 8 + 8), np.nan, kind)
    rng = np.random.default_rng([rows, columns])
    store[:, :columns] = rng.standard_normal((rows, columns)).astype(kind)
    return store[:, :columns]


def main() -> None:
    """Multiply in all forms and types."""
    (tiled,) = [each for each in variants("matmul", "cuda") if each.name == "tiled"]
    for dtype in (*HALVES, "float32"):
        for m, n, k, *transposed in (*FORMS, *(LARGER if dtype == "float32" else ())):
            a, b = matrix(m, k, dtype, transposed[0]), matrix(k, n, dtype, transposed[1])
            y = np.zeros((m, n), a.dtype)
            inputs, made = (There(a), There(b)), There(y)
            given = tuple(each.array for each in inputs)
            entry = tiled.bind(
                Call("matmul", operator("matmul").normalise({}), given, (made.array,))
            )
            entry.enqueue()
            made.back()
            wanted = a.astype(np.float32) @ b.astype(np.float32)
            off = float(np.abs(y.astype(np.float32) - wanted).max() / np.abs(wanted).max())
            first, *more = entry.launches
            parts = more[0].arguments[1] if more else 1
            assert off < MOST[dtype], (dtype, m, n, k, off)
            print(json.dumps([dtype, (m, n, k), first.kernel.name, parts, off]), flush=True)


if __name__ == "__main__":
    main()
