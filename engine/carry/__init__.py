"""What a strategy says beyond degrees and devices, carried out by rewriting the graph.

A value that is recomputed is a clone of its node, before its first reader of the backward pass. A
resharding path is a chain of copies with configurations of their own; to keep one of the two ends
is to copy anew for the backward pass (TensorOpt, section 4.2, tensor reuse). An offloaded value
goes through two copies, of which the first lies in the backing memory. Afterwards a strategy has
configurations alone, so whatever simulates, lowers, launches or runs the graph sees nodes like any
others.
"""

from __future__ import annotations

from soapstone.engine.carry.rewriting import CARRY, carry_out

__all__ = ["CARRY", "carry_out"]
