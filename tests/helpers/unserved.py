"""An operator that no CUDA kernel serves, whichever has one."""

from __future__ import annotations

from soapstone.kernels import registry


def without_cuda(operator: str) -> None:
    """Let no CUDA kernel serve an operator in this process."""
    registry.variants(operator, "cuda")  # which loads all
    registry._VARIANTS[operator, "cuda"] = []
