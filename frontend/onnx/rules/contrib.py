"""Operators of com.microsoft that tools of ONNX Runtime write into decoders and transformers.

Those that only join what ONNX spells out are what they join; where ONNX Runtime's own and ONNX's
differ, it is ONNX Runtime's that counts. Weights of few bits stay packed.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.products import product, scaled
from soapstone.frontend.onnx.values import Value, rule

MICROSOFT = "com.microsoft"


# ------------------------------------------------------------------------------- element by element
@rule("Gelu", "BiasGelu", domain=MICROSOFT)
def gelu(n: Call) -> Value:
    x = n.value(0)
    return n("gelu", n("add", x, n.value(1)) if n.has(1) else x)


@rule("FastGelu", domain=MICROSOFT)
def fast_gelu(n: Call) -> Value:
    x = n.value(0)
    return n("gelu", n("add", x, n.value(1)) if n.has(1) else x, approximate="tanh")


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(n: Call) -> Value:
    x = n.value(0)
    return n("mul", x, n("sigmoid", n("affine", x, scale=n.attribute("alpha", 1.702))))


# -------------------------------------------------------------------------------------------- norms
@rule("SimplifiedLayerNormalization")
@rule("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(n: Call) -> Any:
    x, scale = n.value(0), n.value(1)
    axis = n.axis(x.rank, -1)
    if n.attribute("stash_type", 1) != 1:
        raise UnsupportedError("attribute 'stash_type' other than 1 is not supported")
    return _rms(n, x, scale, axis, 1e-5)


def _rms(n: Call, x: Value, scale: Value, axis: int, least: float) -> tuple[Value, ...]:
    """Return x over its root mean square times the scale, and one over that.

    least: added to the mean square, unless the node says how much.
    """
    epsilon = n.attribute("epsilon", least)
    if scale.shape != x.shape[axis:]:
        raise OnnxError(f"scale {scale.spec} found; shape {x.shape[axis:]} needed")
    wide = n.cast(x, "float32") if x.spec.is_half else x
    made = n.all("rms_norm", wide, n.cast(scale, wide.dtype), axis=axis - x.rank, epsilon=epsilon)
    column = (*x.shape[:axis], *(1,) * (x.rank - axis))
    rest = [n.reshape(n.cast(value, "float32"), column) for value in made[1:]]
    return (n.cast(made[0], x.dtype), *rest)


@rule("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(n: Call) -> Any:
    x, total = _skipped(n, 3)
    made = _rms(n, total, n.value(2), x.rank - 1, 1e-12)
    return [made[0], None, made[1] if len(made) > 1 else None, total]


@rule("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(n: Call) -> Any:
    _, total = _skipped(n, 4)
    scale, shift = n.value(2), n.maybe(3)
    if shift is None:
        shift = n.known(np.zeros(scale.shape), scale.dtype)
    made = n.all("layer_norm", total, scale, shift, axis=-1, epsilon=n.attribute("epsilon", 1e-12))
    column = (*total.shape[:-1], 1)
    return [made[0], *(n.reshape(value, column) for value in made[1:]), total]


def _skipped(n: Call, bias: int) -> tuple[Value, Value]:
    """Return x, and its sum with what skipped a layer and maybe a bias."""
    x, skip = n.value(0), n.value(1)
    total = n("add", x, skip)
    if total.shape != x.shape:
        raise OnnxError(f"skip {skip.spec} found; what broadcasts to {x.spec} needed")
    return x, n("add", total, n.value(bias)) if n.has(bias) else total


# ----------------------------------------------------------------------------------------- products
@rule("FusedMatMul", domain=MICROSOFT)
def fused_matmul(n: Call) -> Value:
    a, b = n.value(0), n.value(1)
    if n.attribute("transBatchA", 0) or n.attribute("transBatchB", 0):
        raise UnsupportedError("attributes transBatchA and transBatchB are not supported")
    a, b = (
        _swapped(n, x) if n.attribute(name, 0) and x.rank > 1 else x
        for name, x in (("transA", a), ("transB", b))
    )
    return scaled(n, product(n, a, b), n.attribute("alpha", 1.0))


def _swapped(n: Call, x: Value) -> Value:
    return n.transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


_IN_BYTES = 4  # the level of accuracy that numbers of eight bits have


@rule("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    depth, columns = n.attribute("K"), n.attribute("N")
    bits, size = n.attribute("bits", 4), n.attribute("block_size")
    if n.attribute("weight_prepacked", 0):
        raise UnsupportedError("attribute 'weight_prepacked' other than 0 is not supported")
    if n.has(4):
        raise UnsupportedError("input 4 (g_idx), an order of its own of weights, is not supported")
    if bits not in (2, 4, 8) or w.dtype != "uint8":
        raise UnsupportedError(f"{bits} bits in {w.dtype} found; 2, 4 or 8 in uint8 are supported")
    if not size or size * bits % 8 or not depth or not columns or x.shape[-1:] != (depth,):
        raise OnnxError(f"K {depth}, N {columns} and block_size {size} do not fit input {x.spec}")
    blocks = -(-depth // size)
    wide = n.cast(x, "float32")
    parts = [n.reshape(w, (columns, blocks, size * bits // 8))]
    parts.append(n.cast(n.reshape(n.value(2), (columns, blocks)), "float32"))
    zeros = n.maybe(3)
    if zeros is not None:
        if zeros.dtype == "uint8":
            zeros = _unpacked(n, zeros, bits, columns, blocks)
        parts.append(n.cast(n.reshape(zeros, (columns, blocks)), "float32"))
    coarse = n.attribute("accuracy_level", 0) == _IN_BYTES
    y = n("matmul_nbits", wide, *parts, bits=bits, zeros=zeros is not None, coarse=coarse)
    if n.has(5):
        y = n("add", y, n.cast(n.value(5), "float32"))
    return n.cast(y, x.dtype)


def _unpacked(n: Call, packed: Value, bits: int, rows: int, count: int) -> Value:
    """Return zero points, so many in each row of whole bytes, as numbers."""
    known = n.array(packed).reshape(rows, -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    each = (known[..., None] >> shifts & ((1 << bits) - 1)).reshape(rows, -1)
    return n.known(each[:, :count].astype(np.float32))


@rule("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(n: Call) -> Value:
    w, ids, scales, zeros = n.value(0), n.value(1), n.value(2), n.maybe(3)
    bits, size = n.attribute("bits", 4), n.attribute("block_size", 128)
    axis = n.axis_of(n.attribute("quantize_axis", 1), w.rank)
    if w.dtype != "uint8" or bits not in (4, 8) or w.rank != 2 or axis != 1:
        raise UnsupportedError(
            f"{bits} bits in {w.spec} along axis {axis} found; 4 or 8 in uint8 (rows, bytes) along"
            " axis 1 are supported"
        )
    if n.attribute("gather_axis", 0):
        raise UnsupportedError("attribute gather_axis other than 0 is not supported")
    depth = w.shape[1] * 8 // bits
    parts = [n("gather", each, ids, axis=0) for each in (w, scales)]
    numbers = n.cast(_apart(n, parts[0], bits, depth), "float32")
    if zeros is None:
        numbers = n("affine", numbers, shift=-float(1 << (bits - 1)))
    else:
        own = _apart(n, n("gather", zeros, ids, axis=0), bits, scales.shape[1])
        numbers = n("sub", numbers, _over_blocks(n, n.cast(own, "float32"), size, depth))
    spread = _over_blocks(n, n.cast(parts[1], "float32"), size, depth)
    return n.cast(n("mul", numbers, spread), scales.dtype)


def _apart(n: Call, packed: Value, bits: int, count: int) -> Value:
    """Return so many numbers (…, count) of bytes (…, bytes), the first in the lowest bits."""
    if bits == 8:
        return packed
    low = n("bitwise_and", packed, n.known(np.array(15), "uint8"))
    high = n("bit_shift", packed, n.known(np.array(4), "uint8"), direction="right")
    column = (*packed.shape, 1)
    both = n("concat", n.reshape(low, column), n.reshape(high, column), axis=packed.rank)
    whole = n.reshape(both, (*packed.shape[:-1], 2 * packed.shape[-1]))
    return n.part(whole, packed.rank - 1, 0, count)


def _over_blocks(n: Call, x: Value, size: int, depth: int) -> Value:
    """Return x (…, blocks) with each number as often as its block has numbers: (…, depth)."""
    wide = n.broadcast(n.reshape(x, (*x.shape, 1)), (*x.shape, size))
    whole = n.reshape(wide, (*x.shape[:-1], x.shape[-1] * size))
    return n.part(whole, x.rank - 1, 0, depth)


# ---------------------------------------------------------------------------------------- attention
@rule("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(n: Call) -> Value:
    x, places, cosines, sines = n.values()
    if n.attribute("is_packed_batching", 0) or n.attribute("scale", 1.0) != 1.0:
        raise UnsupportedError("attributes is_packed_batching and scale are not supported")
    turned = n.attribute("rotary_embedding_dim", 0) or 2 * cosines.shape[1]
    heads = n.attribute("num_heads", 0)
    if x.rank == 3:
        heads = heads or x.shape[2] // turned
        split = n.reshape(x, (*x.shape[:2], heads, x.shape[2] // max(heads, 1)))
    else:
        split = n.transpose(x, (0, 2, 1, 3))
    samples, count = split.shape[:2]
    if places.spec.size == 1:  # of the first token
        steps = n.known(np.arange(n.room(count)).reshape(1, count).astype(np.int64))
        places = n.broadcast(n("add", n.reshape(places, (1, 1)), steps), (samples, count))
    y = _turned(n, split, places, cosines, sines, bool(n.attribute("interleaved", 0)))
    return n.reshape(y, x.shape) if x.rank == 3 else n.transpose(y, (0, 2, 1, 3))


def _turned(
    n: Call, x: Value, places: Value, cosines: Value, sines: Value, interleaved: bool
) -> Value:
    """Return x (b, t, heads, d) with pairs of its first elements turned by their place (b, t).

    cosines, sines: (places, pairs). Pairs are neighbours where interleaved, else apart by half.
    """
    pairs = cosines.shape[1]
    if 2 * pairs > x.shape[3]:
        raise OnnxError(f"{pairs} pairs of elements found in heads of {x.shape[3]}")
    cosine, sine = (n.once(_of_places, table, places) for table in (cosines, sines))
    turned = n.part(x, 3, 0, 2 * pairs)
    if interleaved:
        apart = n.reshape(turned, (*x.shape[:3], pairs, 2))
        first, second = (n.row(apart, 4, half) for half in (0, 1))
    else:
        first, second = (n.part(turned, 3, half * pairs, (half + 1) * pairs) for half in (0, 1))
    made = [
        n("sub", n("mul", first, cosine), n("mul", second, sine)),
        n("add", n("mul", second, cosine), n("mul", first, sine)),
    ]
    if interleaved:
        column = (*x.shape[:3], pairs, 1)
        whole = n("concat", *(n.reshape(each, column) for each in made), axis=4)
        y = n.reshape(whole, (*x.shape[:3], 2 * pairs))
    else:
        y = n("concat", *made, axis=3)
    if 2 * pairs == x.shape[3]:
        return y
    return n("concat", y, n.part(x, 3, 2 * pairs, x.shape[3]), axis=3)


def _of_places(n: Call, table: Value, places: Value) -> Value:
    """Return rows of a table (places, pairs) by place (b, t), as (b, t, 1, pairs)."""
    return n.reshape(n("gather", table, places, axis=0), (*places.shape, 1, table.shape[1]))


_GQA_OPTIONS = ("softcap", "smooth_softmax", "qk_output", "k_quant_type", "v_quant_type")


@rule("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(n: Call) -> Any:
    for name in _GQA_OPTIONS:
        if n.attribute(name, 0) not in (0, "NONE"):
            raise UnsupportedError(f"attribute {name!r} is not supported")
    if any(n.has(position) for position in (10, 11)):
        raise UnsupportedError("inputs attention_bias and head_sink are not supported")
    heads, kv_heads = n.attribute("num_heads"), n.attribute("kv_num_heads")
    if not heads or not kv_heads or heads % kv_heads:
        raise OnnxError(f"num_heads {heads} and kv_num_heads {kv_heads} found")
    q, k, v = _split_qkv(n, heads, kv_heads)
    samples, count, _, width = q.shape
    total = int(n.array(6).reshape(()))
    past = [n.maybe(3), n.maybe(4)]
    empty = n.known(np.zeros((samples, kv_heads, 0, width)), q.dtype)
    keys, values = (empty if each is None else each for each in past)
    rows = max(total, keys.shape[2])
    # The first tokens begin with the first row; of some samples, the last may be none.
    starts = n.once(_starts, n.value(5), samples, count, count == total)
    places = n.once(_places, starts, count)
    if n.attribute("do_rotary", 0):
        where = n.value(9) if n.has(9) else places
        interleaved = bool(n.attribute("rotary_interleaved", 0))
        q, k = (_turned(n, x, where, n.value(7), n.value(8), interleaved) for x in (q, k))
    held = [
        n("write_at", _longer(n, old, rows), n.transpose(new, (0, 2, 1, 3)), starts, axis=2)
        for old, new in ((keys, k), (values, v))
    ]
    y = _grouped(n, q, held, places, n.attribute("local_window_size", -1))
    return [n.reshape(y, (samples, count, heads * width)), *held]


def _starts(n: Call, last: Value, samples: int, count: int, first: bool) -> Value:
    """Return each sample's row of the first of `count` new tokens, given that of the last."""
    if first:
        return n.known(np.zeros(samples, np.int64))
    last = n.reshape(n.cast(last, "int64"), (samples,))
    return n("add", last, n.known(np.array(1 - count, np.int64)))


def _places(n: Call, starts: Value, count: int) -> Value:
    """Return the rows (b, t) of so many tokens from `starts` on."""
    steps = n.known(np.arange(n.room(count)).reshape(1, count).astype(np.int64))
    return n("add", n.reshape(starts, (*starts.shape, 1)), steps)


def _mask(n: Call, places: Value, rows: int, window: int, dtype: str) -> Value:
    """Return what hides keys from queries at places (b, t): (b, 1, t, rows)."""
    samples, count = places.shape
    own = n.known(np.arange(n.room(rows)).reshape(1, 1, rows).astype(dtype))
    at = n.reshape(n.cast(places, dtype), (samples, count, 1))
    hidden = n("less", at, own)
    if window > 0:
        early = n("less_equal", own, n("affine", at, shift=-window))
        hidden = n("logical_or", hidden, early)
    mask = n("where", hidden, n.like(-np.inf, at), n.like(0, at))
    return n.reshape(mask, (samples, 1, count, rows))


def _split_qkv(n: Call, heads: int, kv_heads: int) -> tuple[Value, Value, Value]:
    """Return queries, keys and values (b, t, heads, d), which may be parts of one input."""
    q, k, v = n.value(0), n.maybe(1), n.maybe(2)
    samples, count, size = q.shape
    if k is None or v is None:
        width = size // (heads + 2 * kv_heads)
        cuts = (0, heads * width, (heads + kv_heads) * width, (heads + 2 * kv_heads) * width)
        q, k, v = (n.part(q, 2, a, b) for a, b in itertools.pairwise(cuts))
    width = q.shape[2] // heads
    q = n.reshape(q, (samples, count, heads, width))
    k, v = (n.reshape(each, (samples, count, kv_heads, width)) for each in (k, v))
    return q, k, v


def _longer(n: Call, x: Value, rows: int) -> Value:
    """Return x (b, heads, t, d) with zeros up to so many rows."""
    missing = rows - x.shape[2]
    if not missing:
        return x
    zeros = n.known(np.zeros((*x.shape[:2], missing, x.shape[3])), x.dtype)
    return n("concat", x, zeros, axis=2) if x.shape[2] else zeros


def _grouped(n: Call, q: Value, held: list[Value], places: Value, window: int) -> Value:
    """Return attention of queries (b, t, heads, d) at places (b, t) over keys up to theirs."""
    mask = n.once(_mask, places, held[0].shape[2], window, q.dtype)
    keys, values = (n.transpose(each, (0, 2, 1, 3)) for each in held)
    scale = n.attribute("scale", 0.0) or None
    return n("attention", q, keys, values, mask, scale=scale)
