"""Room on the stack of compiled code."""

from __future__ import annotations

from typing import Any


def room(builder: Any, kind: Any, align: int = 0) -> Any:
    """Return the pointer to room of an LLVM type on the stack of the function being built.

    It is taken in the function's first block: where it is used may be inside a loop, which would
    take more stack in every round.
    """
    with builder.goto_entry_block():
        place = builder.alloca(kind)
        if align:
            place.align = align
    return place
