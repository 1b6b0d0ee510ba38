"""Initial contents of parameters: counter-based random numbers keyed by name and element index.

There is no generator state, so neither the order of creation nor partition nor placement matters.
"""

from __future__ import annotations

import hashlib

import numpy as np

from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array, TensorSpec

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _bits(key: int, count: int, stream: int) -> Array:
    """Return `count` 64-bit words of splitmix64 over the counter."""
    with np.errstate(over="ignore"):
        z = (np.arange(count, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        z += np.uint64((key + stream * 0xD1B54A32D192ED03) % 2**64)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def _uniform(key: int, count: int, stream: int) -> Array:
    """Return numbers in [0, 1) with 53 bits."""
    return (_bits(key, count, stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def materialise(initial: Initial | None, spec: TensorSpec, seed: int, name: str) -> Array:
    """Return the initial contents of a parameter or state; zeros if nothing is declared."""
    if initial is None:
        return np.zeros(spec.shape, spec.dtype)
    if initial.kind == "constant":
        return np.full(spec.shape, initial.scale, spec.dtype)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little")
    if initial.kind == "uniform":
        values = (2 * _uniform(key, spec.size, 0) - 1) * initial.scale
    else:
        radius = np.sqrt(-2 * np.log1p(-_uniform(key, spec.size, 0)))
        values = radius * np.cos(2 * np.pi * _uniform(key, spec.size, 1)) * initial.scale
    return values.astype(spec.dtype).reshape(spec.shape)
