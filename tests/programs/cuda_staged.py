# ruff: noqa: E402
"""Products of halves whose tiles are copied ahead, on rows that end within a piece of eight.

    python tests/programs/cuda_staged.py     # in Numba's simulator

Prints a line of JSON for each layout of operands: the kernel, and how far its result is off.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

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

# Rows, columns, terms; whether a and b are transposes of what lies in rows.
FORMS = ((40, 20, 37, False, False), (33, 17, 64, True, False), (9, 33, 70, False, True))
FORMS += ((31, 16, 35, True, True), (5, 3, 2, False, True))


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
    for dtype in HALVES:
        for m, n, k, *transposed in FORMS:
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
            print(json.dumps([dtype, m, n, k, entry.launches[0].kernel.name, off]), flush=True)


if __name__ == "__main__":
    main()
