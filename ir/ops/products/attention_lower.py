"""Attention and its gradient as primitives, for splits over keys' positions or elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.ir.attributes import Attributes
from soapstone.ir.builder import Emitter
from soapstone.ir.graph import Node

_LEAST = -3e38
_SWAP = (0, 2, 1, 3)


def _over(*names: str, prefix: str = "d") -> dict[str, str]:
    return {f"{prefix}{axis}": name for axis, name in enumerate(names)}


def shared(queries: int, keys: int) -> int:
    """Return how many heads of queries share one of keys, given how many there are of each; or 1.

    Where they cannot, the extents of their dim differ.
    """
    return queries // keys if keys and queries > keys and queries % keys == 0 else 1


def leaves_zeros(attributes: Attributes, keys: int) -> bool:
    """Return whether a row of which every key is hidden is zeros, rather than NaN.

    keys: how many there are. Of none, a row is a sum of nothing, however its weights are made.
    """
    return not keys or attributes["empty"] == "zeros"


def apart(emit: Emitter, x: str, group: int, element: str = "d") -> str:
    """Emit keys or values (b, t, heads, d) with each head as often as queries share it.

    element: what their last dim follows.
    """
    b, t, heads, d = emit.spec(x).shape
    wide = emit("reshape", x, shape=(b, t, heads, 1, d), rename={})
    along = _over("b", "tk", "heads", "group", element)
    wide = emit("broadcast", wide, shape=(b, t, heads, group, d), rename=along)
    return emit("reshape", wide, shape=(b, t, heads * group, d), rename={})


class _Heads:
    """Emits the parts of attention with heads before positions: (b, heads, t, …).

    heads: what their dim follows; nothing where those of queries share those of keys.
    """

    def __init__(self, emit: Emitter, heads: str = "heads") -> None:
        self.emit, self.heads = emit, heads
        self.scores = emit.renamed(_over("b", heads, "tq", "tk"))

    def moved(self, value: str, t: str, d: str) -> str:
        """Return (b, t, heads, d) as (b, heads, t, d)."""
        rename = _over("b", self.heads, t, d)
        return self.emit("transpose", value, permutation=_SWAP, rename=rename)

    def back(self, value: str, t: str, d: str) -> str:
        """Return (b, heads, t, d) as (b, t, heads, d)."""
        rename = _over("b", t, self.heads, d)
        return self.emit("transpose", value, permutation=_SWAP, rename=rename)

    def product(self, a: str, b: str, dims: str, **transposes: bool) -> str:
        """Return the product of two of them; `dims` names what its m, k and n follow."""
        m, k, n = dims.split()
        rename = {"b0": "b", "b1": self.heads, "m": m, "k": k, "n": n}
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
    group = shared(emit.spec(q).shape[2], emit.spec(k).shape[2])
    if group > 1:
        k, v = apart(emit, k, group), apart(emit, v, group, "dv")
    heads = _Heads(emit, "heads" if group == 1 else "")
    queries, keys = heads.moved(q, "tq", "d"), heads.moved(k, "tk", "d")
    scores = heads.scored(node, queries, keys, mask)
    top = heads.scores("clip", heads.row("reduce_max", scores), low=_LEAST)
    weights = heads.scores("exp", heads.scores("sub", scores, top))
    total = heads.row("reduce_sum", weights)
    mixed = heads.product(weights, heads.moved(v, "tk", "dv"), "tq tk dv")
    # A row has a weight of 1, or it is all hidden and sums to 0.
    zeros = leaves_zeros(node.attributes, emit.spec(k).shape[1])
    divisor = heads.scores("clip", total, low=1e-30) if zeros else total
    mixed = emit("div", mixed, divisor, rename=_over("b", heads.heads, "tq", "dv"))
    lse = heads.scores("add", heads.scores("log", total), top)
    return [heads.back(mixed, "tq", "dv"), heads.row("reduce_max", lse, keepdims=False)]


class _Backward(_Heads):
    """Emits what gradients of attention have in common.

    Attributes:
        queries, keys, dmixed: operands with heads first. weights: of keys. dscores: the gradient of
            the scores, after scaling.
    """

    def __init__(self, emit: Emitter, node: Node) -> None:
        super().__init__(emit)
        dy, q, k, v, y, lse, *mask = node.inputs
        self.queries, self.keys = self.moved(q, "tq", "d"), self.moved(k, "tk", "d")
        values, self.dmixed = self.moved(v, "tk", "dv"), self.moved(dy, "tq", "dv")
        scores = self.scored(node, self.queries, self.keys, mask)
        shape = (*emit.spec(lse).shape, 1)
        named = [name for name, e in zip(("b", "heads", "tq"), shape) if e != 1]
        sums = emit("reshape", lse, shape=shape, rename=_over(*named, prefix="f"))
        sums = self.scores("clip", sums, low=_LEAST)
        self.weights = self.scores("exp", self.scores("sub", scores, sums))
        by_value = _over("b", "heads", "tq", "dv")
        inner = emit("mul", self.dmixed, self.moved(y, "tq", "dv"), rename=by_value)
        rows = emit("reduce_sum", inner, axes=(3,), keepdims=True, rename=by_value)
        products = self.product(self.dmixed, values, "tq dv tk", transpose_b=True)
        self.dscores = self.scores("mul", self.weights, self.scores("sub", products, rows))


def backward(emit: Emitter, node: Node) -> Sequence[str]:
    """Return dq, dk and dv of `attention_grad`."""
    heads = _Backward(emit, node)
    dscores = heads.scores("affine", heads.dscores, scale=heads.scale(node, heads.queries))
    dq = heads.product(dscores, heads.keys, "tq tk d")
    dk = heads.product(dscores, heads.queries, "tk tq d", transpose_a=True)
    dv = heads.product(heads.weights, heads.dmixed, "tk tq dv", transpose_a=True)
    return [heads.back(dq, "tq", "d"), heads.back(dk, "tk", "d"), heads.back(dv, "tk", "dv")]


def mask(emit: Emitter, node: Node) -> Sequence[str]:
    """Return dmask of `attention_mask_grad`."""
    heads = _Backward(emit, node)
    made, shape = heads.dscores, emit.spec(node.inputs[-1]).shape
    lead = tuple(range(4 - len(shape)))
    if lead:
        made = heads.scores("reduce_sum", made, axes=lead)
    names = ("b", "heads", "tq", "tk")[len(lead) :]
    over = [axis for axis, (a, b) in enumerate(zip(emit.spec(made).shape, shape)) if a != b]
    if over:
        made = emit("reduce_sum", made, axes=tuple(over), keepdims=True, rename=_over(*names))
    return [made]
