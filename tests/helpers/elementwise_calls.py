"""Calls of the element-wise machine, and numbers that are special."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.machine import elementwise, fused_elementwise
from soapstone.kernels.entry import Call
from soapstone.native import memory

Array = np.ndarray[Any, Any]

SPECIAL = np.array(
    [0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 1e-40, 3e38, -3e38, 88.7, -87, -103, 200, -200],
    np.float32,
)


def run(
    operator: str, inputs: list[Array], outputs: list[Array], threads: int = 1, **attributes: Any
) -> None:
    """Run one operator, or `fused_elementwise`, into the outputs."""
    bind = fused_elementwise if operator == "fused_elementwise" else elementwise
    entry = bind(Call(operator, attributes, tuple(inputs), tuple(outputs), threads))
    assert entry is not None
    assert memory.run(entry) == 0


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
