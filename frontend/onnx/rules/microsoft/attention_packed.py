"""Attention of com.microsoft over sequences without the padding between them.

Tokens that are not padding follow each other as rows, and `token_offset` (samples, length) says
where each was: first of those, then of the padding. Attention itself is computed with padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.rules.microsoft.attention import attended, head_count
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule


@rule("RemovePadding", domain=MICROSOFT)
def remove_padding(n: Call) -> list[Any]:
    x, counts = n.value(0), n.array(1).reshape(-1).astype(np.int64)
    if (
        x.rank != 3
        or counts.shape != x.shape[:1]
        or not ((counts >= 0) & (counts <= x.shape[1])).all()
    ):
        raise OnnxError(f"counts {counts.tolist()} found of {x.spec}; one for each sample needed")
    there = np.arange(n.room(x.shape[1])) < counts[:, None]
    order = np.concatenate([np.flatnonzero(there), np.flatnonzero(~there)])
    rows = n.reshape(x, (x.shape[0] * x.shape[1], x.shape[2]))
    ends = np.concatenate([[0], np.cumsum(counts)])
    told = order.reshape(x.shape[:2]), ends, counts.max(initial=0, keepdims=True)
    kept = n("gather", rows, n.known(order[: counts.sum()]), axis=0)
    return [kept, *(n.known(each.astype(np.int32)) for each in told)]


@rule("RestorePadding", domain=MICROSOFT)
def restore_padding(n: Call) -> Value:
    x, offsets = n.value(0), n.value(1)
    padded, shown = _padded(n, [x], offsets)
    column = n.reshape(shown, (*shown.shape, 1))
    return n("where", column, padded[0], n.like(0, x))


@rule("PackedAttention", domain=MICROSOFT)
def packed_attention(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    qkv = n("linear", x, w, *([n.value(2)] if n.has(2) else []), bias=n.has(2))
    sizes = n.attribute("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    if len(sizes) != 3 or sum(sizes) != w.shape[1]:
        raise OnnxError(f"parts of {tuple(sizes)} found in {w.spec}; three needed")
    cuts = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    parts = [_by_head(n, n.part(qkv, 1, a, b)) for a, b in cuts]
    n.value(4)  # how long each is, which the offsets say too
    return _over_tokens(n, parts, n.value(3), n.maybe(5))


@rule("PackedMultiHeadAttention", domain=MICROSOFT)
def packed_multi_head_attention(n: Call) -> Value:
    q = n.value(0)
    if q.rank == 4:  # (tokens, heads, 3, d)
        if q.shape[1:3] != (head_count(n), 3):
            raise OnnxError(f"{q.spec} found; three of {head_count(n)} heads needed")
        parts = [n.row(q, 2, place) for place in range(3)]
    else:
        parts = [_by_head(n, n.value(position)) for position in range(3)]
    if n.has(3):
        bias, start = n.value(3), 0
        for place, part in enumerate(parts):
            size = part.shape[1] * part.shape[2]
            own = n.reshape(n.part(bias, 0, start, start + size), part.shape[1:])
            parts[place], start = n("add", part, own), start + size
    n.value(5)  # how long each is, which the offsets say too
    return _over_tokens(n, parts, n.value(4), n.maybe(6))


def _by_head(n: Call, x: Value) -> Value:
    """Return x (tokens, heads * d) as (tokens, heads, d)."""
    heads = head_count(n)
    if x.rank != 2 or x.shape[1] % heads:
        raise OnnxError(f"{x.spec} found; rows that divide into {heads} heads needed")
    return n.reshape(x, (x.shape[0], heads, x.shape[1] // heads))


def _over_tokens(n: Call, parts: Sequence[Value], offsets: Value, bias: Value | None) -> Value:
    """Return attention (tokens, heads * d) of queries, keys and values (tokens, heads, d)."""
    tokens = parts[0].shape[0]
    padded, shown = _padded(n, parts, offsets)
    y, *_ = attended(n, padded, n.cast(shown, "int32"), None, bias)
    rows = n.reshape(y, (y.shape[0] * y.shape[1], y.shape[2]))
    flat = n.reshape(offsets, (offsets.spec.size,))
    return n("gather", rows, n.part(flat, 0, 0, tokens), axis=0)


def _padded(n: Call, parts: Sequence[Value], offsets: Value) -> tuple[list[Value], Value]:
    """Return rows (tokens, …) as (samples, length, …), and which of these are no padding."""
    tokens, count = parts[0].shape[0], offsets.spec.size
    if offsets.rank != 2 or any(x.shape[0] != tokens for x in parts) or not tokens <= count:
        raise OnnxError(f"{tokens} tokens found of offsets {offsets.spec}")
    flat = n.reshape(n.cast(offsets, "int64"), (count,))
    own, none = n.known(np.arange(n.room(count))), n.known(np.zeros(count, np.int64))
    place = n("scatter_elements", none, flat, own, axis=0, reduction="none")
    shown = n.reshape(n("less", place, n.like(tokens, place)), offsets.shape)
    at = n("minimum", place, n.like(max(tokens - 1, 0), place))
    made = [n("gather", x, at, axis=0) for x in parts]
    return [n.reshape(x, (*offsets.shape, *x.shape[1:])) for x in made], shown
