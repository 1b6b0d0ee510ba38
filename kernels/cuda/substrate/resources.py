"""Registers and shared memory of kernels: the most that ptxas gave one of each name.

`benchmarks/kernels/cuda_ptx.py` prints them; they say how many blocks a multiprocessor holds.
"""

from __future__ import annotations

from collections.abc import Mapping

# Registers of a thread, and bytes of shared memory of a block, for sm_80 and sm_90.
_MOST: Mapping[str, tuple[int, int]] = {
    "each": (47, 1024),
    "fold": (56, 2048),
    "pointwise": (40, 0),
    "product": (128, 8320),
    "rows": (56, 128),
}
_OTHERS = (64, 8320)


def resources(kernel: str) -> tuple[int, int]:
    """Return registers of a thread, and bytes of static shared memory of a block, at most.

    kernel: its name.
    """
    return _MOST.get(kernel, _OTHERS)


__all__ = ["resources"]
