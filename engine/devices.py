"""Operators on GPUs: the kernel that serves a call, or a warning that the host runs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from soapstone.dtypes import BITS, name_of
from soapstone.ir.tensor import Array
from soapstone.kernels.entry import Call, Declined
from soapstone.kernels.fallback import report
from soapstone.kernels.registry import variants
from soapstone.kernels.select import REFERENCE, select_device
from soapstone.native.promises import held

Seen = Callable[[Array, bool], Any]  # a tile, and whether it is of a constant, as kernels take it


def device_entry(
    operator: str, call: Callable[[Seen], Call], variant: str | None
) -> tuple[str, Any]:
    """Return the name and entry of the CUDA kernel of an operator, on the current GPU.

    The entry is None if there is none. Then the host runs the operator on copies of its operands,
    which a warning reports once.

    Args:
        call: makes the call, of arrays as kernels take them.
        variant: the one to use; by default the fastest that serves the call (`kernels.select`).

    Raises:
        ValueError: the named variant does not serve the call.
    """
    if variant is not None or variants(operator, "cuda"):
        try:
            return select_device(call(_on_device), variant)
        except (ValueError, Declined):
            if variant is not None:
                raise
    report(
        f"{operator}: no CUDA kernel serves it",
        "the host runs it, on copies of its operands (`soapstone doctor` lists such operators)",
    )
    return REFERENCE, None


def _on_device(tile: Array, constant: bool) -> Any:
    """Return a tile as kernels take it; a constant, whose contents are on the host, is copied.

    Raises:
        Declined: an element type that no kernel of a GPU has.
    """
    if name_of(tile.dtype) in BITS and name_of(tile.dtype) != "bfloat16":
        raise Declined
    from soapstone.native.cuda.arrays import launchable, uploaded

    return launchable(uploaded(held(tile)) if constant else tile)
