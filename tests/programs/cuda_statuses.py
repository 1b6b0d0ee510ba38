# ruff: noqa: E402
"""CUDA kernels given indices and labels that are outside, in Numba's simulator; prints JSON.

What is printed is, by operator, what its entry says it found. An index into memory that follows
from a wrong one is an error of the simulator's spans.
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
from soapstone.ir.tensor import TensorSpec
from soapstone.kernels.entry import Call
from soapstone.kernels.select import select_device


def reals(*shape: int) -> Any:
    """Return numbers."""
    return np.ones(shape, np.float32)


def wholes(*values: Any) -> Any:
    """Return indices."""
    return np.array(values, np.int64)


def sparse(offsets: Any, *indices: int) -> tuple[Any, Any]:
    """Return a matrix's offsets and indices."""
    return wholes(*offsets), wholes(*indices).astype(np.int32)


BACK = sparse((0, 1, 2, 2), 0, 1)
WRONG = [sparse((0, 1, 2), 0, 3), sparse((0, 1, 2), -1, 0), sparse((0, 2, 1), 0, 1)]
WRONG += [sparse((0, 1, 9), 0, 1), sparse((-3, 1, 2), 0, 1), sparse((7, 8, 9), 0, 1)]
NODES = [wholes(0, 0).astype(np.int32)] * 4 + [wholes(0).astype(np.int32)]
CALLS: dict[str, list[tuple[dict[str, Any], tuple[Any, ...]]]] = {
    "embedding": [({}, (wholes(0, 3), reals(3, 2)))],
    "gather": [({}, (reals(3, 2), wholes(0, -4)))],
    "gather_elements": [({}, (reals(3, 2), wholes([0, 3])))],
    "gather_nd": [({}, (reals(3, 2), wholes([0, 2]))), ({}, (reals(3, 2), wholes([-4, 0])))],
    "gather_grad": [({"extent": 3}, (reals(2, 2), wholes(0, 3)))],
    "gather_nd_grad": [({"shape": (3, 2)}, (reals(1), wholes([3, 0])))],
    "scatter_elements": [({}, (reals(3, 2), wholes([0, 3]), reals(1, 2)))],
    "scatter_elements_grad": [({}, (reals(3, 2), wholes([-4, 0])))],
    "scatter_nd": [({}, (reals(3, 2), wholes([3]), reals(1, 2)))],
    "scatter_nd_grad": [
        ({}, (reals(3, 2), wholes([0], [3]))),
        (
            {"reduction": "max"},
            (reals(3, 2), wholes([0], [-4]), reals(3, 2), reals(2, 2), reals(3, 2)),
        ),
    ],
    "embedding_bag": [({}, (wholes([0, 3]), reals(3, 2)))],
    "embedding_bag_max_grad": [({}, (reals(1, 2), wholes([-1, 0]), reals(3, 2), reals(1, 2)))],
    "write_at": [({}, (reals(2, 3), reals(2, 2), wholes(0, 2)))],
    "tree_leaves": [
        ({}, (reals(1, 2), reals(2), NODES[0] + 2, *NODES[1:3], NODES[3] + 1, NODES[4])),
        ({}, (reals(1, 2), reals(2), NODES[0], NODES[1] + 2, NODES[2] - 1, NODES[3] + 1, NODES[4])),
        ({}, (reals(1, 2), reals(2), *NODES[:4], NODES[4] + 2)),
    ],
    "roi_align": [
        ({"size": (2, 2)}, (reals(1, 1, 4, 4), np.array([region], np.float32), wholes(image)))
        for region, image in (((0, 0, 2, 2), 1), ((0, 0, np.inf, 2), 0), ((0, 0, 2, 1e6), 0))
    ],
    "spmm": [({}, (reals(3, 2), *each, *BACK)) for each in WRONG],
    "sddmm": [({}, (reals(2, 2), reals(3, 2), *each)) for each in WRONG],
    "graph_attention": [
        ({}, (reals(3, 1, 2), reals(3, 1), reals(2, 1), *each, *BACK)) for each in WRONG
    ],
    "ctc": [({}, (reals(1, 3, 4), wholes([1, 4])))],
}


def said(name: str, attributes: dict[str, Any], arrays: tuple[Any, ...]) -> str:
    """Return what an entry says of a call, or "nothing"."""
    spec = operator(name)
    given = spec.normalise(attributes)
    made = spec.bind(tuple(TensorSpec(x.shape, x.dtype.name) for x in arrays), given).output_specs
    outputs = [np.zeros(one.shape, one.dtype) for one in made]
    inputs = tuple(map(FakeCUDAArray, arrays))
    _, entry = select_device(Call(name, given, inputs, tuple(map(FakeCUDAArray, outputs))))
    entry.enqueue()
    code = 0 if entry.status is None else int(entry.status.copy_to_host()[0])
    return entry.explain(code) if code else "nothing"


if __name__ == "__main__":
    print(json.dumps({name: [said(name, *call) for call in CALLS[name]] for name in CALLS}))
