"""PyTorch's models here: `compile` for inference (docs/inference.md), `reuse` (docs/dynamic.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from soapstone.frontend.torch.session import Reused, TorchReport, reuse

if TYPE_CHECKING:
    from soapstone.frontend.torch.compiled import (
        CompileReport,
        GraphReport,
        backend,
        compile,
        report,
    )

_COMPILED = ("CompileReport", "GraphReport", "backend", "compile", "report")


def __getattr__(name: str) -> Any:
    if name in _COMPILED:  # imported when first used: PyTorch's own compiler takes seconds
        return getattr(importlib.import_module("soapstone.frontend.torch.compiled"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CompileReport",
    "GraphReport",
    "Reused",
    "TorchReport",
    "backend",
    "compile",
    "report",
    "reuse",
]
