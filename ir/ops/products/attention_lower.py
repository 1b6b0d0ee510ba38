"""Attention and its gradient as primitives, for splits over keys' positions or elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.ir.builder import Emitter
from soapstone.ir.graph import Node

_LEAST = -3e38
_SWAP = (0, 2, 1, 3)


def _over(*names: str, prefix: str = "d") -> dict[str, str]:
    return {f"{prefix}{axis}": name for axis, name in enumerate(names)}


class _Heads:
    """Emits the parts of attention with heads before positions: (b, heads, t, …)."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit
        self.scores = emit.renamed(_over("b", "heads", "tq", "tk"))

    def moved(self, value: str, t: str, d: str) -> str:
        """Return (b, t, heads, d) as (b, heads, t, d)."""
        rename = _over("b", "heads", t, d)
        return self.emit("transpose", value, permutation=_SWAP, rename=rename)

    def back(self, value: str, t: str, d: str) -> str:
        """Return (b, heads, t, d) as (b, t, heads, d)."""
        rename = _over("b", t, "heads", d)
        return self.emit("transpose", value, permutation=_SWAP, rename=rename)

    def product(self, a: str, b: str, dims: str, **transposes: bool) -> str:
        """Return the product of two of them; `dims` names what its m, k and n follow."""
        m, k, n = dims.split()
        rename = {"b0": "b", "b1": "heads", "m": m, "k": k, "n": n}
        return self.emit("matmul", a, b, rename=rename, **transposes)

    def scored(self, node: Node, q: str, k: str, mask: Sequence[str]) -> str:
        """Return the scores of queries and keys (b, heads, t, d), hidden ones minus infinity."""
        made = self.product(q, k, "tq d tk", transpose_b=True)
        made = self.scores("affine", made, scale=self.scale(node, q))
        for values in mask:
            made = self.scores("add", made, values)
        if node.attributes["causal"]:
            made = self.emit("hide_later", made, rename={})
        return made

    def scale(self, node: Node, q: str) -> float:
        given = node.attributes["scale"]
        if given is None:
            return 1 / math.sqrt(max(self.emit.spec(q).shape[-1], 1))
        return float(given)

    def row(self, operator: str, value: str, keepdims: bool = True) -> str:
        """Return a reduction of each row of scores."""
        return self.scores(operator, value, axes=(3,), keepdims=keepdims)


def forward(emit: Emitter, node: Node) -> Sequence[str]:
    """Return y and lse of `attention`."""
    q, k, v, *mask = node.inputs
    heads = _Heads(emit)
    queries, keys = heads.moved(q, "tq", "d"), heads.moved(k, "tk", "d")
    scores = heads.scored(node, queries, keys, mask)
    top = heads.scores("clip", heads.row("reduce_max", scores), low=_LEAST)
    weights = heads.scores("exp", heads.scores("sub", scores, top))
    total = heads.row("reduce_sum", weights)
    mixed = heads.product(weights, heads.moved(v, "tk", "dv"), "tq tk dv")
    # A row has a weight of 1, or it is all hidden and sums to 0.
    safe = heads.scores("clip", total, low=1e-30)
    mixed = emit("div", mixed, safe, rename=_over("b", "heads", "tq", "dv"))
    lse = heads.scores("add", heads.scores("log", total), top)
    return [heads.back(mixed, "tq", "dv"), heads.row("reduce_max", lse, keepdims=False)]


def backward(emit: Emitter, node: Node) -> Sequence[str]:
    """Return dq, dk and dv of `attention_grad`."""
    dy, q, k, v, y, lse, *mask = node.inputs
    heads = _Heads(emit)
    queries, keys = heads.moved(q, "tq", "d"), heads.moved(k, "tk", "d")
    values, dmixed = heads.moved(v, "tk", "dv"), heads.moved(dy, "tq", "dv")
    scores = heads.scored(node, queries, keys, mask)
    shape = (*emit.spec(lse).shape, 1)
    named = [name for name, e in zip(("b", "heads", "tq"), shape) if e != 1]
    sums = emit("reshape", lse, shape=shape, rename=_over(*named, prefix="f"))
    sums = heads.scores("clip", sums, low=_LEAST)
    weights = heads.scores("exp", heads.scores("sub", scores, sums))
    by_value = _over("b", "heads", "tq", "dv")
    inner = emit("mul", dmixed, heads.moved(y, "tq", "dv"), rename=by_value)
    rows = emit("reduce_sum", inner, axes=(3,), keepdims=True, rename=by_value)
    dscores = heads.product(dmixed, values, "tq dv tk", transpose_b=True)
    dscores = heads.scores("mul", weights, heads.scores("sub", dscores, rows))
    dscores = heads.scores("affine", dscores, scale=heads.scale(node, queries))
    dq = heads.product(dscores, keys, "tq tk d")
    dk = heads.product(dscores, queries, "tk tq d", transpose_a=True)
    dv = heads.product(weights, dmixed, "tk tq dv", transpose_a=True)
    return [heads.back(dq, "tq", "d"), heads.back(dk, "tk", "d"), heads.back(dv, "tk", "dv")]
