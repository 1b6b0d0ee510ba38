"""Attention of decoders of com.microsoft: rotations by place, queries that share keys, and caches.

The numbers are those of ONNX Runtime on a processor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.microsoft.contrib import codes_in
from soapstone.frontend.onnx.rules.quantized import quantized
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule
from soapstone.records import dataclass


@rule("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(n: Call) -> Value:
    return _embedded(n, _of_tokens)


def _embedded(n: Call, of_places: Callable[[Call, Value, Value], Value]) -> Value:
    """Return the node's first input, turned by rows of tables that `of_places` takes."""
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
    if places.spec.size == 1 and places.rank < 3:  # of the first token
        samples, count = split.shape[:2]
        places = n.once(_places, n.reshape(n.cast(places, "int64"), (1,)), count)
        places = n.broadcast(places, (samples, count))
    cosine, sine = (of_places(n, table, places) for table in (cosines, sines))
    y = _turned(n, split, cosine, sine, bool(n.attribute("interleaved", 0)))
    return n.reshape(y, x.shape) if x.rank == 3 else n.transpose(y, (0, 2, 1, 3))


@rule("MRotaryEmbedding", domain=MICROSOFT)
def multimodal_rotary_embedding(n: Call) -> Value:
    """The same of places (3, b, t) in time, height and width; each turns pairs of its own.

    Source: Wang et al., Qwen2-VL, 2024.
    """
    sections = n.attribute("mrope_section") or ()
    pairs = sum(sections)
    if len(sections) != 3 or min(sections) < 0 or pairs != n.value(2).shape[1]:
        raise OnnxError(f"attribute 'mrope_section' is {sections}, of tables {n.value(2).spec}")
    layout = n.attribute("mrope_layout", 0)
    if layout not in (0, 1):
        raise UnsupportedError(f"attribute 'mrope_layout' is {layout}; 0 and 1 are supported")
    which = np.repeat(np.arange(3), sections)
    if layout:
        which = np.zeros(pairs, np.int64)
        for stream in (1, 2):
            which[stream : 3 * sections[stream] : 3] = stream

    def of_streams(n: Call, table: Value, places: Value) -> Value:
        rows = n("gather", table, places, axis=0)  # (3, b, t, pairs)
        made = n.row(rows, 0, 0)
        for stream in (1, 2):
            own = n.known((which == stream).reshape(1, 1, pairs))
            made = n("where", own, n.row(rows, 0, stream), made)
        return n.reshape(made, (*made.shape[:2], 1, pairs))

    return _embedded(n, of_streams)


@rule("GemmaRotaryEmbedding", domain=MICROSOFT)
def gemma_rotary_embedding(n: Call) -> list[Value]:
    angles, q, q_turned, k, k_turned = n.values()
    column = (angles.shape[0], 1, *angles.shape[1:])
    sine, cosine = (n.reshape(n.cast(n(f, angles), q.dtype), column) for f in ("sin", "cos"))
    return [
        n("add", n("mul", x, cosine), n("mul", turned, sine))
        for x, turned in ((q, q_turned), (k, k_turned))
    ]


def _turned(n: Call, x: Value, cosine: Value, sine: Value, interleaved: bool) -> Value:
    """Return x (b, t, heads, d) with pairs of its first elements turned.

    cosine, sine: (b, t, 1, pairs). Pairs are neighbours where interleaved, else apart by half.
    """
    pairs = cosine.shape[3]
    if 2 * pairs > x.shape[3]:
        raise OnnxError(f"{pairs} pairs of elements found in heads of {x.shape[3]}")
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


def _of_tokens(n: Call, table: Value, places: Value) -> Value:
    return n.once(_of_places, table, places)


def _of_places(n: Call, table: Value, places: Value) -> Value:
    """Return rows of a table (places, pairs) by place (b, t), as (b, t, 1, pairs)."""
    return n.reshape(n("gather", table, places, axis=0), (*places.shape, 1, table.shape[1]))


@rule("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(n: Call) -> Any:
    if n.attribute("qk_output", 0):
        raise UnsupportedError("attribute 'qk_output' other than 0 is not supported")
    heads, kv_heads = _head_counts(n)
    q, k, v = _split_qkv(n, heads, kv_heads)
    q, k = _normed_heads(n, q, "q", 14), _normed_heads(n, k, "k", 15)
    samples, count, _, width = q.shape
    total = int(n.array(6).reshape(()))
    past = [n.maybe(3), n.maybe(4)]
    codes = _codes(n)
    empty = n.known(np.zeros((samples, kv_heads, 0, codes.elements(width))), codes.dtype or q.dtype)
    keys, values = (empty if each is None or not each.shape[2] else each for each in past)
    # The first tokens begin with the first row; of some samples, the last may be none.
    first = count == total
    starts = n.once(_starts, n.value(5), samples, count, first)
    places = n.once(_places, starts, count)
    where = places
    if n.has(9):  # of the first tokens, the first place tells all others
        given = n.value(9)
        where = n.once(_places, n.row(n.part(given, 0, 0, 1), 1, 0), count) if first else given
        where = n.broadcast(where, (samples, count))
    q, k = _rotated(n, q, k, where, 7)
    window, capacity = n.attribute("local_window_size", -1), keys.shape[2]
    # A cache that is shorter than the window has all tokens so far, and grows as others do.
    evicts = _drops(n, window) and capacity >= window
    rows = capacity + count if evicts else max(total, capacity)
    if evicts:
        gone = n.once(_evicted, starts, capacity, window)
        starts = n("sub", starts, gone)
        places = n.once(_places, starts, count)
    held = [
        n("write_at", _longer(n, old, rows), codes.of(n, new, scale), starts, axis=2)
        for old, new, scale in zip((keys, values), (k, v), codes.scales)
    ]
    if n.attribute("causal", 1):
        mask = n.once(_mask, places, rows, window, q.dtype)
    else:
        last = n.reshape(n.cast(n.value(5), "int64"), (samples, 1))
        mask = n.once(_mask, n.broadcast(last, (samples, count)), rows, -1, q.dtype)
    if n.has(10):
        mask = n("add", mask, _wider(n, n.value(10), rows))
    sinks = n.maybe(11)
    if sinks is None and n.attribute("smooth_softmax", -1) > 0:
        sinks = n.known(np.zeros(heads), q.dtype)
    numbers = [codes.numbers(n, each, scale) for each, scale in zip(held, codes.scales)]
    y = _grouped(n, q, numbers, mask, sinks)
    if evicts:
        tokens = n("affine", n.cast(n.reshape(n.value(5), (samples,)), "int64"), shift=1)
        oldest = n("sub", n.once(_evicted, tokens, capacity, window), gone)
        held = [n.once(_rows_from, each, oldest, capacity) for each in held]
    return [n.reshape(y, (samples, count, heads * width)), *held]


@dataclass(frozen=True)
class _Codes:
    """How a cache keeps numbers: as they are (0 bits), as int8, or as two of four bits a byte.

    scales: of keys and of values, what a code of 1 stands for: a number, or one a channel.
    """

    bits: int
    scales: tuple[Value | None, Value | None]

    @property
    def dtype(self) -> str | None:
        return {0: None, 4: "uint8", 8: "int8"}[self.bits]

    def elements(self, width: int) -> int:
        """Return how many elements so many numbers take."""
        return width // 2 if self.bits == 4 else width

    def of(self, n: Call, x: Value, scale: Value | None) -> Value:
        """Return x (b, t, heads, d) as the cache keeps it: (b, heads, t, elements)."""
        x = n.transpose(x, (0, 2, 1, 3))
        if scale is None:
            return x
        if self.bits == 8:
            return quantized(n, n.cast(x, "float32"), scale, None, "int8")
        whole = n("round", n("div", n.cast(x, "float32"), scale))
        codes = n.cast(n("affine", n("clip", whole, low=-8.0, high=7.0), shift=8.0), "uint8")
        pairs = n.reshape(codes, (*x.shape[:3], x.shape[3] // 2, 2))
        low, high = (n.row(pairs, 4, place) for place in (0, 1))
        high = n("bit_shift", high, n.known(np.array(4), "uint8"), direction="left")
        return n("bitwise_or", low, high)

    def numbers(self, n: Call, held: Value, scale: Value | None) -> Value:
        """Return the numbers (b, heads, t, d) of what a cache keeps."""
        if scale is None:
            return held
        if self.bits == 4:
            held = codes_in(n, held, 4, 2 * held.shape[3])
        whole = n.cast(held, "float32")
        whole = n("affine", whole, shift=-8.0) if self.bits == 4 else whole
        return n.cast(n("mul", whole, scale), n.value(0).dtype)


def _codes(n: Call) -> _Codes:
    """Return how the node's caches keep numbers.

    Raises:
        OnnxError: its attributes say it in no way that is known, or a scale is missing.
    """
    kinds = [n.attribute(f"{which}_quant_type", "NONE") for which in "kv"]
    bits = n.attribute("kv_cache_bit_width", 0)
    if (*kinds, bits) == ("NONE", "NONE", 0):
        return _Codes(0, (None, None))
    if not {*kinds} <= {"PER_TENSOR", "PER_CHANNEL"} or bits not in (4, 8):
        raise UnsupportedError(
            f"k_quant_type {kinds[0]!r} and v_quant_type {kinds[1]!r} with kv_cache_bit_width"
            f" {bits} is not supported; PER_TENSOR or PER_CHANNEL, and 4 or 8, are"
        )
    scales = (n.cast(n.value(position), "float32") for position in (12, 13))
    k, v = (n.reshape(each, ()) if each.spec.size == 1 else each for each in scales)
    return _Codes(bits, (k, v))


def _drops(n: Call, window: int) -> bool:
    """Return whether a cache keeps no more tokens than its rows, the last of them.

    A step whose past lies in buffers has rows for all; what has left the window is hidden there.
    """
    if not n.attribute("sliding_window_cache", 0):
        return False
    causal = n.attribute("causal", 1)
    if window <= 0 or not causal:
        found = f"local_window_size {window} and causal {causal}"
        raise OnnxError(f"sliding_window_cache beside {found} found; a window of at least 1 needed")
    if n.has(10):
        raise UnsupportedError("attention_bias beside sliding_window_cache is not supported")
    return n.importer.purpose != "decoding"


def _evicted(n: Call, tokens: Value, capacity: int, window: int) -> Value:
    """Return how many of so many tokens (b,) a cache of a window has dropped: int64 (b,).

    Once it is full it drops as many as leave the window, so that the next have room.
    """
    step = n.known(np.array(capacity - window + 1.0))
    over = n("affine", n.cast(tokens, "float64"), shift=-capacity)
    times = n("maximum", n("ceil", n("div", over, step)), n.known(np.array(0.0)))
    return n.cast(n("mul", times, step), "int64")


def _rows_from(n: Call, x: Value, first: Value, count: int) -> Value:
    """Return so many rows of x (b, heads, rows, d) from each sample's `first` on.

    What would lie beyond the last is the last again.
    """
    samples, heads, rows, width = x.shape
    which = n("minimum", n.once(_places, first, count), n.known(np.array(rows - 1)))
    begins = n.known(np.arange(n.room(samples * heads)).reshape(samples, heads, 1) * rows)
    which = n("add", n.reshape(which, (samples, 1, count)), begins)
    return n("gather", n.reshape(x, (samples * heads * rows, width)), which, axis=0)


@rule("SparseAttention", domain=MICROSOFT)
def sparse_attention(n: Call) -> Any:
    """The same over the blocks of keys that a query's block sees, in caches of one length."""
    heads, kv_heads = _head_counts(n)
    q, k, v = _split_qkv(n, heads, kv_heads)
    samples, count, _, width = q.shape
    total, rows = int(n.array(7).reshape(())), n.value(3).shape[2]
    if not count <= total <= rows:
        raise OnnxError(f"{total} keys found of {count} queries and a cache of {rows}")
    last = n("affine", n.cast(n.value(8), "float64"), shift=-1.0)
    starts = n.once(_starts, n.cast(last, "int64"), samples, count, count == total)
    places = n.once(_places, starts, count)
    q, k = _rotated(n, q, k, places, 9)
    held = [
        n("write_at", n.value(past), n.transpose(new, (0, 2, 1, 3)), starts, axis=2)
        for past, new in ((3, k), (4, v))
    ]
    shown = _block_mask(n, places, heads, rows, q.dtype)
    mask = n("add", n.once(_mask, places, rows, -1, q.dtype), shown)
    return [n.reshape(_grouped(n, q, held, mask), (samples, count, heads * width)), *held]


def _block_mask(n: Call, places: Value, heads: int, rows: int, dtype: str) -> Value:
    """Return what hides blocks of keys from queries at places (b, t): (b, heads, t, rows).

    Which blocks each block of queries sees is given by layout: ends of its entries, and entries.
    Heads have the layouts in turn.
    """
    size = n.attribute("sparse_block_size")
    ends, entries = n.array(5), n.array(6)
    if ends.ndim != 2 or entries.ndim != 2 or len(ends) != len(entries) or not size:
        raise OnnxError(f"rows {ends.shape} and columns {entries.shape} of blocks of {size} found")
    layouts, blocks = ends.shape[0], ends.shape[1] - 1
    if layouts < 1 or heads % layouts or blocks * size < rows:
        found = f"{layouts} layouts of {blocks} blocks of {size}"
        raise OnnxError(f"{found} found; what fits {heads} heads and {rows} keys needed")
    n.room(layouts * blocks * blocks)
    hidden = np.full((layouts, blocks, blocks), -np.inf)
    for layout in range(layouts):
        for block, (begin, end) in enumerate(itertools.pairwise(ends[layout])):
            hidden[layout, block, entries[layout, begin:end]] = 0
    at = n("floor", n("affine", n.cast(places, "float64"), scale=1 / size))
    seen = n("gather", n.known(hidden, dtype), n.cast(at, "int64"), axis=1)
    seen = n.transpose(seen, (1, 0, 2, 3))  # (b, layouts, t, blocks)
    column = n.reshape(seen, (*seen.shape, 1))
    each = n.reshape(n.broadcast(column, (*seen.shape, size)), (*seen.shape[:3], blocks * size))
    each = n.part(each, 3, 0, rows)
    samples, _, count, _ = each.shape
    turns = n.reshape(each, (samples, 1, layouts, count, rows))
    turns = n.broadcast(turns, (samples, heads // layouts, layouts, count, rows))
    return n.reshape(turns, (samples, heads, count, rows))


def _head_counts(n: Call) -> tuple[int, int]:
    """Return how many heads queries have, and how many keys and values."""
    heads, kv_heads = n.attribute("num_heads"), n.attribute("kv_num_heads")
    if not heads or not kv_heads or heads % kv_heads:
        raise OnnxError(f"num_heads {heads} and kv_num_heads {kv_heads} found")
    return heads, kv_heads


def _normed_heads(n: Call, x: Value, which: str, position: int) -> Value:
    """Return x (b, t, heads, d) with each head over its root mean square, if an input scales it."""
    least = n.attribute("qk_norm_epsilon", 1e-6)
    least = n.attribute(f"{which}_norm_epsilon", least)
    scale = n.maybe(position)
    return x if scale is None else n("rms_norm", x, scale, axis=-1, epsilon=least)


def _rotated(n: Call, q: Value, k: Value, places: Value, tables: int) -> tuple[Value, Value]:
    """Return queries and keys turned by their places, if the node says so.

    tables: which input has the cosines; the sines come next.
    """
    interleaved = bool(n.attribute("rotary_interleaved", 0))
    both = n.maybe(tables), n.maybe(tables + 1)
    if not n.attribute("do_rotary", 0):
        return q, k
    if both[0] is None or both[1] is None:
        raise OnnxError(f"inputs {tables} and {tables + 1} needed where 'do_rotary' is 1")
    cosine, sine = (_of_tokens(n, table, places) for table in (both[0], both[1]))
    q, k = (_turned(n, x, cosine, sine, interleaved) for x in (q, k))
    return q, k


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


def _wider(n: Call, bias: Value, rows: int) -> Value:
    """Return what scores (b, heads, t, keys) have added, with zeros up to so many keys."""
    if bias.rank != 4 or bias.shape[3] > rows:
        raise OnnxError(f"attention_bias {bias.spec} found of {rows} keys; rank 4 needed")
    missing = rows - bias.shape[3]
    if not missing:
        return bias
    none = (0, 0, 0)
    return n("pad", bias, low=(0, *none), high=(*none, missing), interior=(0, *none))


def _grouped(
    n: Call, q: Value, held: list[Value], mask: Value, sinks: Value | None = None
) -> Value:
    """Return attention of queries (b, t, heads, d) over keys and values (b, kv_heads, rows, d).

    mask: what scores have added. sinks: by head, the score of a key whose value is zero.
    """
    scale, cap = n.attribute("scale", 0.0) or None, n.attribute("softcap", 0.0)
    if cap:
        return _capped(n, q, held, mask, sinks, cap)
    keys, values = (n.transpose(each, (0, 2, 1, 3)) for each in held)
    y, sums = n.all("attention", q, keys, values, mask, scale=scale)
    if sinks is None:
        return y
    # A key more divides by exp(sums) + exp(sink), where `sums` are logarithms.
    share = n("sigmoid", n("sub", sums, n.reshape(sinks, (q.shape[2], 1))))
    column = n.reshape(n.transpose(share, (0, 2, 1)), (*y.shape[:3], 1))
    return n("mul", y, column)


def _capped(
    n: Call, q: Value, held: list[Value], mask: Value, sinks: Value | None, cap: float
) -> Value:
    """Return attention by scores that a hyperbolic tangent keeps within `cap`, before the mask."""
    samples, count, heads, width = q.shape
    keys, values = held
    few, rows = keys.shape[1], keys.shape[2]
    grouped = (samples, few, heads // few * count)
    queries = n.reshape(n.transpose(q, (0, 2, 1, 3)), (*grouped, width))
    scale = n.attribute("scale", 0.0) or 1 / math.sqrt(width)
    scores = n("matmul", queries, keys, transpose_b=True)
    bent = n("affine", n("tanh", n("affine", scores, scale=scale / cap)), scale=cap)
    scores = n("add", n.reshape(bent, (samples, heads, count, rows)), mask)
    if sinks is not None:
        column = n.broadcast(n.reshape(sinks, (heads, 1, 1)), (*scores.shape[:3], 1))
        scores = n("concat", scores, column, axis=3)
    weights = n.part(n("softmax", scores, axis=3), 3, 0, rows)
    y = n("matmul", n.reshape(weights, (*grouped, rows)), values)
    return n.transpose(n.reshape(y, (samples, heads, count, y.shape[3])), (0, 2, 1, 3))
