"""Calls of the element-wise machine, and what tests of it compare with."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.machine import elementwise, fused_elementwise
from soapstone.kernels.entry import Call
from soapstone.native import memory

Array = np.ndarray[Any, Any]
erf = np.vectorize(math.erf, otypes=[np.float64])

SPECIAL = np.array(
    [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 88.7, -87, -103, 200, -200],
    np.float32,
)


def gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def run(
    operator: str, inputs: list[Array], outputs: list[Array], threads: int = 1, **attributes: Any
) -> None:
    """Run one operator, or `fused_elementwise`, into the outputs."""
    bind = fused_elementwise if operator == "fused_elementwise" else elementwise
    entry = bind(Call(operator, attributes, tuple(inputs), tuple(outputs), threads))
    assert entry is not None
    assert memory.run(entry) == 0


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def fused(
    inputs: list[Array],
    outputs: list[Array],
    program: list[Any],
    results: tuple[int, ...],
    threads: int = 1,
) -> None:
    run(
        "fused_elementwise",
        inputs,
        outputs,
        threads,
        program=tuple((o, tuple(i), tuple(a.items())) for o, i, a in program),
        results=results,
    )
