"""Attention of halves by cuDNN, which keeps no scores in memory; sums are in single precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from soapstone.dtypes import HALVES
from soapstone.ir.ops.products.attention import scale_of
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.libraries.cudnn import (
    Graph,
    bindings,
    executed,
    result,
    started,
    tensor,
    uids,
)
from soapstone.kernels.cuda.libraries.device import asked
from soapstone.kernels.cuda.libraries.images import Tensor
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

MOST_WIDTH, WIDTHS = 128, 8  # elements of a head, and what they are a multiple of


@dataclass(frozen=True)
class Attention:
    """softmax(q k' scale) v, all (b, heads, positions, elements); keys may not follow queries."""

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    scale: float
    causal: bool

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """As products: one a head; queries, elements of values, and keys, over which it sums."""
        b, heads, queries, width = self.y.dim
        return b * heads, queries, width, self.k.dim[2]

    @property
    def sums(self) -> Tensor:
        """The logarithms of rows' sums, (b, heads, tq, 1)."""
        b, heads, queries, _ = self.y.dim
        return Tensor((b, heads, queries, 1), (heads * queries, queries, 1, 1))


def described(call: Call, inputs: tuple[View, ...], y: View) -> Attention | None:
    """Return what a call computes, or None where cuDNN's attention is not that.

    Masks are not given to it: a row of which a mask hides every key has no answer there.
    """
    if len(inputs) != 3 or inputs[0].dtype not in HALVES:
        return None
    if inputs[0].shape[2] != inputs[1].shape[2]:  # heads that share keys
        return None
    tensors = [_heads(x) for x in (*inputs, y)]
    for x in (*inputs, y):
        if x.strides[-1] != 1 or x.shape[-1] % WIDTHS or x.shape[-1] > MOST_WIDTH or not x.size:
            return None
    causal = bool(call.attributes["causal"])
    if causal and call.attributes.get("ahead", 0):
        return None  # a tile, whose first query and key are apart
    scale = scale_of(call.attributes, inputs[0].shape[-1])
    return Attention(tensors[0], tensors[1], tensors[2], tensors[3], scale, causal)


def _heads(x: View) -> Tensor:
    """Return (b, positions, heads, elements) as cuDNN takes it, heads before positions."""
    whole = max(e * s for e, s in zip(x.shape, x.strides))
    strides = [whole if e == 1 else s for e, s in zip(x.shape, x.strides)]
    order = (0, 2, 1, 3)
    return Tensor(tuple(x.shape[n] for n in order), tuple(strides[n] for n in order))


def attending(of: Attention, kind: str, **where: Any) -> Graph:
    """Return the graph of attention, not planned yet; see `cudnn.started`."""
    graph = started(kind, **where)
    q, k, v = operands = [tensor(graph, each, kind) for each in (of.q, of.k, of.v)]
    y, sums = graph.sdpa(
        q=q,
        k=k,
        v=v,
        attn_scale=of.scale,
        use_causal_mask=of.causal,
        generate_stats=True,
    )
    return Graph(graph, uids(operands), (result(y, of.y, kind), result(sums, of.sums, "float32")))


@variant("attention", "cudnn", processor="cuda")
def attention(call: Call) -> DeviceEntry | None:
    """Return the entry of attention of halves without a mask."""
    if not asked(call, bindings):
        return None
    inputs, (y, lse) = views(call)
    of = described(call, inputs, y)
    if of is None:
        return None
    sums = room(lse.shape, "float32", lse.span)
    found = executed(attending, of, call.precision, inputs, (y, sums))
    if found is None:
        return None
    return sequence((found, pointwise(lambda _, values: values, [sums], [lse])))
