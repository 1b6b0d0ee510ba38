"""Attention of halves by cuDNN, and its gradients: no scores in memory, sums in single precision.

A mask is given as a bias in which what hides a key is a number that is far below any score, as
cuDNN has no answer for a row of which every key is hidden: the logarithm of such a row's sum tells
it from others, and a pass over the result makes of it what it has to be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from soapstone.dtypes import HALVES
from soapstone.ir.ops.products.attention import leaves_zeros, scale_of
from soapstone.kernels.cuda.elementwise.pointwise import Writer, pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal
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
from soapstone.kernels.registry import arrange, variant

MOST_WIDTH, WIDTHS = 128, 8  # elements of a head, and what they are a multiple of
HIDDEN, LEAST = -60000.0, -30000.0  # instead of minus infinity, and of what is less than this
EMPTY = (HIDDEN + LEAST) / 2  # logarithms of sums below it are of rows without a key


Biases = list[tuple[DeviceEntry, View]]  # of one call, one at most


@dataclass(frozen=True)
class Attention:
    """softmax(q k' scale + bias) v, all (b, heads, positions, elements).

    causal: keys may not follow queries. bias: (b or 1, heads or 1, queries, keys), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    y: Tensor
    scale: float
    causal: bool
    bias: Tensor | None = None

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


@dataclass(frozen=True)
class Descent:
    """Gradients of attention: from that of its result, those of queries, keys and values."""

    of: Attention
    dy: Tensor
    made: tuple[Tensor, ...]

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """As products: those of keys, of which each takes gradients of all queries."""
        count, queries, width, keys = self.of.extents
        return count, keys, width, queries


def described(call: Call, inputs: Sequence[View], y: View) -> Attention | None:
    """Return what a call computes but for its mask, or None where cuDNN's attention is not that.

    inputs: queries, keys and values.
    """
    if inputs[0].dtype not in HALVES:
        return None
    if inputs[0].shape[2] != inputs[1].shape[2]:  # heads that share keys
        return None
    tensors = [_heads(x) for x in (*inputs, y)]
    if not all(map(_in_rows, (*inputs, y))):
        return None
    causal = bool(call.attributes["causal"])
    if causal and call.attributes.get("ahead", 0):
        return None  # a tile, whose first query and key are apart
    scale = scale_of(call.attributes, inputs[0].shape[-1])
    return Attention(tensors[0], tensors[1], tensors[2], tensors[3], scale, causal)


def biased(of: Attention, masks: Sequence[View], y: View) -> tuple[Attention, Biases]:
    """Return what is computed with a mask, where there is one, as the bias that is made of it.

    What hides a key is finite in it. Of each bias there is the entry that makes it, and it.
    """
    if not masks:
        return of, []
    (mask,) = masks
    shape = (*(1,) * (4 - len(mask.shape)), *mask.shape)
    bias = room((*shape[:2], y.shape[1], of.k.dim[2]), y.dtype, y.span)

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        (x,) = values
        least, hidden = (literal(number, x.type) for number in (LEAST, HIDDEN))
        more = f"({least} if {x.name} < {least} else {x.name})"
        none = f"{x.name} == {literal(-math.inf, x.type)}"
        return [text.set(f"({hidden} if {none} else {more})", x.type)]

    about = replace(of, bias=Tensor(bias.shape, _strides(bias)))
    return about, [(pointwise(write, [mask], [bias]), bias)]


def _in_rows(x: View) -> bool:
    """Return whether heads' elements lie side by side, as many as cuDNN takes."""
    width = x.shape[-1]
    return x.strides[-1] == 1 and width % WIDTHS == 0 and width <= MOST_WIDTH and x.size > 0


def _heads(x: View) -> Tensor:
    """Return (b, positions, heads, elements) as cuDNN takes it, heads before positions."""
    order, strides = (0, 2, 1, 3), _strides(x)
    return Tensor(tuple(x.shape[n] for n in order), tuple(strides[n] for n in order))


def _strides(x: View) -> tuple[int, ...]:
    """Return the strides of a view, none of which is 0: an axis of one element has that of all."""
    whole = max(e * s for e, s in zip(x.shape, x.strides))
    return tuple(whole if e == 1 else s for e, s in zip(x.shape, x.strides))


def attending(of: Attention, kind: str, **where: Any) -> Graph:
    """Return the graph of attention, not planned yet; see `cudnn.started`."""
    graph = started(kind, **where)
    q, k, v, *bias = operands = _operands(graph, of, kind, (of.q, of.k, of.v))
    y, sums = graph.sdpa(
        q=q,
        k=k,
        v=v,
        bias=bias[0] if bias else None,
        attn_scale=of.scale,
        use_causal_mask=of.causal,
        generate_stats=True,
    )
    return Graph(graph, uids(operands), (result(y, of.y, kind), result(sums, of.sums, "float32")))


def descending(of: Descent, kind: str, **where: Any) -> Graph:
    """Return the graph of attention's gradients, not planned yet; see `cudnn.started`."""
    graph, at = started(kind, **where), of.of
    q, k, v, y, dy, *bias = operands = _operands(graph, at, kind, (at.q, at.k, at.v, at.y, of.dy))
    sums = tensor(graph, at.sums, "float32")
    made = graph.sdpa_backward(
        q=q,
        k=k,
        v=v,
        o=y,
        dO=dy,
        stats=sums,
        bias=bias[0] if bias else None,
        attn_scale=at.scale,
        use_causal_mask=at.causal,
        use_deterministic_algorithm=True,
    )
    results = [result(each, place, kind) for each, place in zip(made, of.made, strict=True)]
    return Graph(graph, uids([*operands, sums]), tuple(results))


def _operands(graph: Any, of: Attention, kind: str, tensors: Sequence[Tensor]) -> list[Any]:
    """Return the operands of a graph, the bias last, where there is one."""
    return [tensor(graph, each, kind) for each in (*tensors, of.bias) if each is not None]


@variant("attention", "cudnn", processor="cuda")
def attention(call: Call) -> DeviceEntry | None:
    """Return the entry of attention of halves."""
    if not asked(call, bindings):
        return None
    (q, k, v, *masks), (y, lse) = views(call)
    plain = described(call, (q, k, v), y)
    if plain is None:
        return None
    of, biases = biased(plain, masks, y)
    sums = room(lse.shape, "float32", lse.span)
    operands = [q, k, v, *(bias for _, bias in biases)]
    found = executed(attending, of, call.precision, operands, (y, sums))
    if found is None:
        return None
    if not biases:
        return sequence((found, pointwise(lambda _, values: values, [sums], [lse])))
    value = 0.0 if leaves_zeros(call.attributes, k.shape[1]) else math.nan
    by_query = sums.through(lambda x: x.transpose(0, 2, 1)[..., None])
    none = pointwise(_where_empty(value), [y, by_query], [y])
    logarithms = pointwise(_where_empty(-math.inf), [sums, sums], [lse])
    return sequence((*(made for made, _ in biases), found, none, logarithms))


@variant("attention_grad", "cudnn", processor="cuda")
def attention_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of the gradients of queries, keys and values, of halves."""
    if not asked(call, bindings):
        return None
    (dy, q, k, v, y, lse, *masks), made = views(call)
    plain = described(call, (q, k, v), y)
    if plain is None or not all(map(_in_rows, (dy, *made))):
        return None
    about, biases = biased(plain, masks, y)
    of = Descent(about, _heads(dy), tuple(map(_heads, made)))
    sums = room(lse.shape, "float32", lse.span)
    operands = [q, k, v, y, dy, *(bias for _, bias in biases)]
    found = executed(descending, of, call.precision, operands, made, (sums,))
    if found is None:
        return None
    given = pointwise(_sums_of, [lse], [sums])
    return sequence((*(entry for entry, _ in biases), given, found))


def _sums_of(text: Text, values: Sequence[Value]) -> list[Value]:
    """Write the logarithm of a row's sum as it fits the bias: a row without a key weighs none."""
    x = text.cast(values[0], "float32")
    least, none = literal(LEAST, x.type), literal(-math.inf, x.type)
    more = f"({least} if {x.name} < {least} else {x.name})"
    return [text.set(f"({literal(-HIDDEN, x.type)} if {x.name} == {none} else {more})", x.type)]


def _where_empty(value: float) -> Writer:
    """Return the writer of a value where a row's sum says that it has no key, else of another."""

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        x, row = values
        none = f"{row.name} < {literal(EMPTY, row.type)}"
        return [text.set(f"({literal(value, x.type)} if {none} else {x.name})", x.type)]

    return write


arrange("attention_grad", "cuda", ("cudnn", "lowered"))
