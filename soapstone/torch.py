"""Reuse in PyTorch: `soapstone.torch.reuse` (docs/dynamic.md)."""

from soapstone.frontend.torch.session import Reused, TorchReport, reuse

__all__ = ["Reused", "TorchReport", "reuse"]
