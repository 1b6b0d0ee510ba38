"""Attention and embeddings of com.microsoft, which ONNX Runtime's tool for transformers writes.

`Attention` projects to queries, keys and values itself, `QAttention` by a product of bytes;
`MultiHeadAttention` is given them. The numbers are those of ONNX Runtime on a processor: what a
mask hides is not removed, but has the attribute `mask_filter_value` added.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import floats
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.microsoft.quantized import real_product
from soapstone.frontend.onnx.rules.quantized import dequantized
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule

_UNSUPPORTED = ("do_rotary", "past_present_share_buffer")


@rule("Attention", domain=MICROSOFT)
def attention(n: Call) -> list[Value]:
    n.refuse(*_UNSUPPORTED, inputs=(6,))
    return _projected(n)


@rule("DecoderMaskedSelfAttention", domain=MICROSOFT)
def decoder_masked_self_attention(n: Call) -> list[Value]:
    """The same of one token a sample, with earlier ones in a cache that it makes longer."""
    n.refuse(*_UNSUPPORTED, inputs=(8,))
    _one_beam(n, 7)
    n.maybe(6)  # how many earlier ones there are, which the cache says too
    if n.value(0).shape[1] != 1:
        raise OnnxError(f"{n.value(0).spec} found; one token a sample needed")
    return _projected(n)


def _projected(n: Call) -> list[Value]:
    x, w = n.value(0), n.value(1)
    qkv = n("linear", x, w, *([n.value(2)] if n.has(2) else []), bias=n.has(2))
    sizes = n.attribute("qkv_hidden_sizes") or (w.shape[1] // 3,) * 3
    return _of_one_product(n, qkv, sizes, n.maybe(3), n.maybe(4), n.maybe(5))


@rule("QAttention", domain=MICROSOFT)
def qattention(n: Call) -> list[Value]:
    n.refuse(*_UNSUPPORTED)
    operands = n.value(0), n.value(1), n.maybe(6), n.maybe(7)
    qkv = real_product(n, operands, (n.value(3), n.value(4)), n.value(2))
    return _of_one_product(n, qkv, (qkv.shape[2] // 3,) * 3, n.maybe(5), n.maybe(8), None)


@rule("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(n: Call) -> list[Value]:
    n.refuse(*_UNSUPPORTED, inputs=(8, 9))
    if n.wants(3):
        raise UnsupportedError("output 3 (qk) is not supported")
    heads = head_count(n)
    given = _each(n, heads)
    width = given[0].shape[2]
    if n.has(3):  # keys and values by head come from a cache, with theirs added
        ends = list(itertools.accumulate((width, width), initial=0))
        bias = n.value(3)
        cuts = itertools.pairwise([*ends, bias.shape[0]])
        parts = [n.part(bias, 0, a, b) for a, b in cuts]
        given = [n("add", x, part) if x.rank == 3 else x for x, part in zip(given, parts)]
    apart = [_apart(n, x, heads) if x.rank == 3 else n.transpose(x, (0, 2, 1, 3)) for x in given]
    past = (n.value(6), n.value(7)) if n.has(6) or n.has(7) else None
    y, *held = attended(n, apart, n.maybe(4), past, n.maybe(5))
    return [y, *(n.transpose(each, (0, 2, 1, 3)) for each in held)]


def _each(n: Call, heads: int) -> list[Value]:
    """Return queries, keys and values, of which some may be parts of one input (b, t, heads, 2
    or 3, d), as (b, t, heads * d); keys and values of a cache stay by head.
    """
    given = [n.value(position) for position in range(3) if n.has(position)]
    last = given[-1]
    if last.rank != 5:
        if len(given) != 3:
            raise OnnxError(f"{len(given)} of queries, keys and values found; three needed")
        return given
    samples, count, of, parts, width = last.shape
    if (of, parts) != (heads, 4 - len(given)):
        raise OnnxError(f"input {len(given) - 1} is {last.spec}; {4 - len(given)} of {heads} heads")
    apart = [n.row(last, 3, part) for part in range(parts)]
    return given[:-1] + [n.reshape(x, (samples, count, heads * width)) for x in apart]


@rule("DecoderMaskedMultiHeadAttention", domain=MICROSOFT)
def decoder_masked_multi_head_attention(n: Call) -> list[Any]:
    """Attention of one token a sample, with earlier ones in a cache, or over those of an encoder.

    A cache is as long as it ever gets where the node says so, and how far it is filled an input.
    """
    _one_beam(n, 8)
    if n.attribute("output_qk", 0):
        raise UnsupportedError("attribute 'output_qk' is not supported")
    q, heads, bias, mask, scores = n.value(0), head_count(n), n.maybe(10), n.maybe(3), n.maybe(4)
    if q.rank != 3 or q.shape[1] != 1 or n.has(1) != n.has(2):
        raise OnnxError(f"queries {q.spec} found; one token a sample, keys and values needed")
    if n.has(1):
        given = [q, n.value(1), n.value(2)]
    else:
        given = [n.part(q, 2, a, b) for a, b in _thirds(q.shape[2])]
    if bias is not None:
        parts = [n.part(bias, 0, a, b) for a, b in _thirds(bias.shape[0])]
        given = [n("add", x, part) if x.rank == 3 else x for x, part in zip(given, parts)]
    apart = [_apart(n, x, heads) if x.rank == 3 else n.transpose(x, (0, 2, 1, 3)) for x in given]
    past = (n.value(5), n.value(6)) if n.has(5) or n.has(6) else None
    room, filled = n.attribute("past_present_share_buffer", 0), n.maybe(7)
    if past is None:
        return [attended(n, apart, mask, None, scores)[0]]
    before = past[0].shape[2]
    length = before if room else before + 1
    if room and filled is not None:
        before = int(n.array(filled).reshape(()))
    if not 0 <= before < length:
        raise OnnxError(f"{before} tokens found in a cache of {length}")
    old, rest = (
        [n.part(each, 2, begin, end) for each in past]
        for begin, end in ((0, before), (min(before + 1, past[0].shape[2]), past[0].shape[2]))
    )
    y, *held = attended(n, apart, mask, (old[0], old[1]), scores)
    made = [n.transpose(each, (0, 2, 1, 3)) for each in held]
    if rest[0].shape[2]:
        made = [n("concat", each, tail, axis=2) for each, tail in zip(made, rest)]
    return [y, *made]


def _one_beam(n: Call, position: int) -> None:
    if n.has(position) and int(n.array(position).reshape(())) != 1:
        raise UnsupportedError(f"input {position} (beam_width) other than 1 is not supported")


def _thirds(extent: int) -> Iterable[tuple[int, int]]:
    """Return where each of three equal parts begins and ends."""
    return itertools.pairwise(extent * part // 3 for part in range(4))


def head_count(n: Call) -> int:
    heads = n.attribute("num_heads", 0)
    if heads < 1:
        raise OnnxError(f"attribute 'num_heads' is {heads}; 1 or more needed")
    return int(heads)


def _apart(n: Call, x: Value, heads: int) -> Value:
    """Return x (b, t, heads * d) as (b, t, heads, d)."""
    if x.shape[2] % heads:
        raise OnnxError(f"{x.spec} found; elements that divide into {heads} heads needed")
    return n.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))


def _of_one_product(
    n: Call,
    qkv: Value,
    sizes: Sequence[int],
    mask: Value | None,
    past: Value | None,
    bias: Value | None,
) -> list[Value]:
    """Return attention of queries, keys and values that are parts of one product, and a cache.

    past: keys and values (2, b, heads, t, d) of earlier tokens.
    """
    if len(sizes) != 3 or sum(sizes) != qkv.shape[2]:
        raise OnnxError(f"parts of {tuple(sizes)} found in {qkv.spec}; three needed")
    cuts = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    parts = [_apart(n, n.part(qkv, 2, a, b), head_count(n)) for a, b in cuts]
    old = None if past is None else (n.row(past, 0, 0), n.row(past, 0, 1))
    y, *held = attended(n, parts, mask, old, bias)
    if not n.wants(1):
        return [y]
    each = [n.transpose(part, (0, 2, 1, 3)) for part in held]
    both = [n.reshape(part, (1, *part.shape)) for part in each]
    return [y, n("concat", *both, axis=0)]


def attended(
    n: Call,
    parts: Sequence[Value],
    mask: Value | None,
    past: tuple[Value, Value] | None,
    bias: Value | None,
) -> tuple[Value, Value, Value]:
    """Return attention (b, t, heads * d), and all keys and values (b, rows, heads, d).

    parts: queries, keys and values (b, t, heads, d); mask: which keys count, or how many;
    past: keys and values (b, heads, rows, d) of earlier tokens; bias: what scores have added.
    """
    q, k, v = parts
    before = 0
    if past is not None:
        before = past[0].shape[2]
        k, v = (
            n("concat", n.transpose(old, (0, 2, 1, 3)), new, axis=1)
            for old, new in zip(past, (k, v))
        )
    count, rows = q.shape[1], k.shape[1]
    added = [] if bias is None else [bias]
    least = n.attribute("mask_filter_value", -1e4)
    if mask is not None:
        added.append(n.once(_hidden, mask, q.shape[0], rows, least))
    if n.attribute("unidirectional", 0):
        n.room(rows * count)
        late = np.arange(rows) > np.arange(count)[:, None] + before
        added.append(n.known(np.where(late, -np.inf, 0)[None, None].astype(np.float32)))
    total = added[:1]
    for each in added[1:]:
        total = [n("add", *(n.cast(part, "float32") for part in (total[0], each)))]
    if total and total[0].dtype != q.dtype:  # a half's least number hides as much
        total = [n.cast(n("maximum", total[0], n.like(floats(q.dtype).min, total[0])), q.dtype)]
    y = n("attention", q, k, v, *total, scale=n.attribute("scale", 0.0) or None)
    return n.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3])), k, v


def _hidden(n: Call, mask: Value, samples: int, rows: int, least: float) -> Value:
    """Return what scores (b, heads, t, rows) have added: 0, or `least` where a key is hidden.

    mask: 1 by key (b, rows) or by query and key (b, t, rows); else each sample's number of keys
    (b), or where keys end and then where they start (2 * b).
    """
    if mask.rank == 1 and mask.shape[0] in (samples, 2 * samples):
        places = n.known(np.arange(n.room(rows)).reshape(1, rows).astype(mask.dtype))
        ends = n.reshape(n.part(mask, 0, 0, samples), (samples, 1))
        shown = n("less", places, ends)
        if mask.shape[0] != samples:
            starts = n.reshape(n.part(mask, 0, samples, 2 * samples), (samples, 1))
            shown = n("logical_and", shown, n("greater_equal", places, starts))
    elif mask.rank in (2, 3) and (mask.shape[0], mask.shape[-1]) == (samples, rows):
        shown = n("greater", mask, n.like(0, mask))
    else:
        raise UnsupportedError(f"a mask {mask.spec} of {samples} samples and {rows} keys")
    zero = n.known(np.zeros((), np.float32))
    made = n("where", shown, zero, n.like(least, zero))
    return n.reshape(made, (samples, 1, made.shape[1] if made.rank == 3 else 1, rows))


@rule("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(n: Call) -> list[Any]:
    n.attribute("mask_index_type")  # by which ONNX Runtime infers shapes
    return _embedded(n, Call.value, n.maybe(8))


@rule("QEmbedLayerNormalization", domain=MICROSOFT)
def qembed_layer_normalization(n: Call) -> list[Any]:
    """The same of tables, a scale and a shift in bytes; `_embedded` takes rows of the tables."""
    scales = {2: 8, 3: 9, 4: 10, 5: 11, 6: 12}  # zero points are five inputs further

    def real(n: Call, position: int) -> Value:
        at = scales[position]
        return dequantized(n, n.value(position), n.value(at), n.value(at + 5))

    return _embedded(n, real, None)[:2]


def _embedded(n: Call, table_of: Callable[[Call, int], Value], places: Value | None) -> list[Any]:
    """Return the norm of sums of rows of tables, each sample's number of words, and the sums.

    table_of: makes an input from 2 to 6 of the node: tables of words, places and segments, a scale
    and a shift. places: of the words (b, t), by default from 0 on.
    """
    ids, segments, mask = n.value(0), n.maybe(1), n.maybe(7)
    samples, count = ids.shape
    total = n("gather", table_of(n, 2), ids, axis=0)
    table = table_of(n, 3)
    rows = n.part(table, 0, 0, count) if places is None else n("gather", table, places, axis=0)
    total = n("add", total, rows)
    if segments is not None:
        total = n("add", total, n("gather", table_of(n, 4), segments, axis=0))
    epsilon = n.attribute("epsilon", 1e-12)
    y = n("layer_norm", total, table_of(n, 5), table_of(n, 6), axis=-1, epsilon=epsilon)
    if mask is None:
        lengths = n.known(np.zeros(n.room(samples), np.int32))
    else:
        lengths = n.cast(n("reduce_sum", n.cast(mask, "int64"), axes=(1,), keepdims=False), "int32")
    return [y, lengths, total]
