"""The choices of a strategy beyond degrees and devices, carried out by rewriting the graph.

A recomputed value is a clone of its node before its first reader in the backward pass. A resharding
path is a chain of copies with configurations of their own; keeping one of its two ends means
copying again in the backward pass (TensorOpt, section 4.2, tensor reuse). An offloaded value passes
through two copies, the first of which is in the backing memory. Afterwards the strategy consists of
configurations alone, so everything that simulates, lowers, launches or runs the graph sees ordinary
nodes.
"""

from __future__ import annotations

from soapstone.engine.carry.rewriting import CARRY, carry_out

__all__ = ["CARRY", "carry_out"]
