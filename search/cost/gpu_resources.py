"""What kernels need of a multiprocessor: what ptxas gives four of five of each name at most.

`benchmarks/kernels/cuda_ptx.py` prints registers and shared memory, which say how many blocks a
multiprocessor holds, and with --loops how many instructions a product's loops have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LANES = 32  # threads of a warp, each of which multiplies and adds in one instruction
FUSED = 2.0 * LANES  # operations of an instruction of a warp that multiplies and adds


@dataclass(frozen=True)
class Resources:
    """What a kernel needs.

    Attributes:
        registers: of a thread. shared: bytes of static shared memory of a block.
        issued: operations to an instruction that a warp issues in a product's loops, all others
            counted; None where that is not what bounds a kernel. `FUSED` is as many as without
            tensor cores there can be.
        tensor: whether tensor cores multiply.
        loaded: bytes that a thread has under way: 16 (`elementwise.pointwise`), four loads of 16
            (`substrate.source.loop`), what it keeps of a row (`normalization.rowwise`), or the
            tiles that are copied ahead (`products.staged`).
    """

    registers: int
    shared: int
    issued: float | None = None
    tensor: bool = False
    loaded: int = 16


# For sm_80 and sm_90.
_MOST: Mapping[str, Resources] = {
    "attention": Resources(168, 26112, 22),
    "attention_halves": Resources(168, 24576, 250, tensor=True, loaded=64),
    "attention_halves_keys": Resources(176, 24576, 250, tensor=True, loaded=64),
    "attention_halves_queries": Resources(176, 24576, 250, tensor=True, loaded=64),
    "attention_keys": Resources(248, 26112, 22),
    "attention_queries": Resources(200, 26112, 22),
    "each": Resources(40, 1024),
    "fold": Resources(64, 8192, loaded=64),
    "fragments": Resources(128, 10240, 108, tensor=True),
    "kept": Resources(64, 128, loaded=64),
    "line": Resources(32, 32768),
    "merging": Resources(32, 0),
    "pointwise": Resources(32, 0),
    "product": Resources(112, 8704, 31),
    "product_few": Resources(66, 17920, 31),
    "product_large": Resources(254, 20992, 37),
    "puts": Resources(88, 0, loaded=128),
    "rows": Resources(56, 128, loaded=64),
    "sorting": Resources(24, 8192),
    "staged": Resources(128, 49152, 650, tensor=True, loaded=128),
    "staged_small": Resources(104, 24576, 300, tensor=True, loaded=64),
    "sums": Resources(80, 0),
    "transposition": Resources(32, 16640, loaded=64),
}
_OTHERS = Resources(64, 8320)


def resources(kernel: str) -> Resources:
    """Return what a kernel needs, by its name."""
    return _MOST.get(kernel, _OTHERS)
