# ruff: noqa: E402
"""CUDA kernels over rows with infinities and what is no number, in Numba's simulator.

Prints a line of JSON a call: operator, items of a row, element type, and the numbers of rows that
are not as the reference has them. Rows are short enough to be kept, or are read again.
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
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device

ALONG: dict[str, dict[str, Any]] = {
    **{name: {"axis": 1} for name in ("softmax", "log_softmax", "argmax", "argmin", "hardmax")},
    "cross_entropy": {},
    "reduce_log_sum_exp": {"axes": (1,)},
}


def rows(items: int, dtype: str) -> Any:
    """Return rows whose extremes are in their first, middle or last items, or everywhere."""
    x = np.random.default_rng(items).standard_normal((11, items)).astype(dtype) * 30
    x[0] = -np.inf
    x[1, : items // 2] = -np.inf
    x[2, items - 1] = np.nan
    x[3, 7] = np.inf
    x[4] = -np.inf
    x[4, items - 1] = 3
    x[5], x[6] = -200, -1e30
    x[7, 0], x[7, items - 2] = np.inf, np.nan
    x[8, -200:] = -np.inf
    x[9] = np.nan
    return x


def wrong(name: str, items: int, dtype: str) -> list[int]:
    """Return the numbers of rows that are not as the reference has them."""
    spec, x = operator(name), rows(items, dtype)
    labels = np.arange(len(x), dtype=np.int64) * (items // len(x))
    arrays = (x, labels) if name == "cross_entropy" else (x,)
    attributes = spec.normalise(ALONG[name])
    wanted = spec.run(attributes, *arrays)
    outputs = [np.zeros_like(each) for each in wanted]
    there = tuple(map(FakeCUDAArray, arrays)), tuple(map(FakeCUDAArray, outputs))
    select_device(Call(name, attributes, *there))[1].enqueue()
    found, right = outputs[-1], wanted[-1]  # of cross-entropy, what each row has
    same = np.isclose(found, right, rtol=2e-5, atol=1e-5, equal_nan=True)
    return [int(row) for row in np.flatnonzero(~same.reshape(len(x), -1).all(1))]


if __name__ == "__main__":
    for name in ALONG:
        for items in (300, 701, 1400):
            for dtype in ("float32", "float64"):
                print(json.dumps([name, items, dtype, wrong(name, items, dtype)]))
