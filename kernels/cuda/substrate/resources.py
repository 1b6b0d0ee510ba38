"""Registers and shared memory of kernels: what ptxas gives four of five of each name at most.

`benchmarks/kernels/cuda_ptx.py` prints them; they say how many blocks a multiprocessor holds.
"""

from __future__ import annotations

from collections.abc import Mapping

# Registers of a thread, and bytes of shared memory of a block, for sm_80 and sm_90.
_MOST: Mapping[str, tuple[int, int]] = {
    "each": (40, 1024),
    "fold": (40, 2048),
    "fragments": (168, 10240),
    "pointwise": (32, 0),
    "product": (128, 8320),
    "rows": (48, 128),
    "transposition": (40, 4224),
}
_OTHERS = (64, 8320)


def resources(kernel: str) -> tuple[int, int]:
    """Return registers of a thread, and bytes of static shared memory of a block.

    kernel: its name.
    """
    return _MOST.get(kernel, _OTHERS)
