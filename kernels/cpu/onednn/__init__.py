"""Variants of operators served by oneDNN, registered where the library is found."""

from __future__ import annotations

from soapstone.kernels.cpu.onednn.library import OneDnnError, available, version

__all__ = ["OneDnnError", "available", "version"]
