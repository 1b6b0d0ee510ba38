# ruff: noqa: E402
"""Attention of halves by tensor cores, and its gradients, on rows in pieces of eight elements.

    python tests/programs/cuda_attention.py     # in Numba's simulator

Prints a line of JSON for each form and type: the kernels, and how far each result is off.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.setswitchinterval(1e-4)  # the simulator polls its threads
warnings.simplefilter("ignore")

import numpy as np
from helpers.cuda_arrays import There

from soapstone.dtypes import HALVES, learn
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.cuda.attention.fused import FUSED
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

# Samples, queries, keys, heads of both, elements of keys and of values; a mask's shape; attributes.
FORMS: tuple[tuple[tuple[int, ...], tuple[int, ...] | None, dict[str, Any]], ...] = (
    ((1, 21, 35, 2, 1, 16, 24), None, {"causal": True, "ahead": 9}),
    ((2, 7, 18, 1, 1, 9, 8), (2, 1, 7, 18), {}),
    ((1, 33, 17, 2, 2, 40, 16), (1, 17), {"causal": True, "empty": "nan"}),
    ((1, 18, 20, 1, 1, 8, 33), (18, 20), {"scale": 0.3}),
)


def rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Return numbers (b, t, heads, d) in rows that begin at multiples of eight elements; between
    them are NaNs."""
    kind = np.dtype(learn(dtype))
    store = np.full((*shape[:-1], -(-shape[-1] // 8) * 8 + 8), np.nan, kind)
    store[..., : shape[-1]] = rng.standard_normal(shape).astype(kind)
    return store[..., : shape[-1]]


def off(found: Array, wanted: Array) -> float:
    """Return the greatest difference, of the greatest number; where there is none, none is."""
    found, wanted = (x.astype(np.float64) for x in (found, wanted))
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    finite = np.isfinite(wanted)
    most = np.abs(wanted[finite]).max(initial=1)
    return float(np.abs(found - wanted)[finite].max(initial=0) / most)


def run(name: str, attributes: dict[str, Any], inputs: list[Array]) -> list[Array]:
    """Print how far a call is off, and return the reference's results."""
    spec = operator(name)
    known = {key: value for key, value in attributes.items() if key in spec.attributes}
    at = {**attributes, **spec.normalise(known)}
    wanted = [np.asarray(x, inputs[0].dtype) for x in spec.run(at, *inputs)]
    outputs = [rows(np.random.default_rng(1), x.shape, inputs[0].dtype.name) for x in wanted]
    there = [There(x) for x in inputs], [There(x) for x in outputs]
    (fused,) = [each for each in variants(name, "cuda") if each.name == FUSED]
    entry = fused.bind(Call(name, at, *(tuple(x.array for x in side) for side in there)))
    entry.enqueue()
    kernels = [each.kernel.name for each in entry.launches]
    away = [off(*pair) for pair in zip(outputs, wanted, strict=True)]
    print(json.dumps([inputs[0].dtype.name, kernels, away]), flush=True)
    return wanted


def main() -> None:
    """Run all forms in both types, with gradients where heads are not shared."""
    for dtype in HALVES:
        for (b, tq, tk, heads, few, d, dv), mask, attributes in FORMS:
            rng = np.random.default_rng([tq, tk, d])
            shapes = ((b, tq, heads, d), (b, tk, few, d), (b, tk, few, dv))
            q, k, v = (rows(rng, shape, dtype) for shape in shapes)
            masks = []
            if mask is not None:
                bias = rng.standard_normal(mask).astype(q.dtype)
                bias[..., rng.permutation(mask[-1])[:5]] = -np.inf
                bias[(0,) * (len(mask) - 1)] = -np.inf  # a row of which every key is hidden
                masks = [bias]
            y, lse = run("attention", attributes, [q, k, v, *masks])
            if heads == few:
                dy = rows(rng, y.shape, dtype)
                operands = [dy, q, k, v, np.nan_to_num(y), lse, *masks]
                run("attention_grad", attributes, operands)


if __name__ == "__main__":
    main()
