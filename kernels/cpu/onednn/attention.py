"""Scaled dot-product attention and its gradients, bound to strided operands without copies.

Heads are shared out over the threads; on each of them oneDNN's products run single-threaded.
"""

from __future__ import annotations

import ctypes as C
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.kernels.cpu.native import Block, Native, pack, parallel_for
from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DST,
    ARG_SCRATCHPAD,
    ARG_SRC,
    ARG_WEIGHTS,
    SCRATCHPAD,
    Layout,
    Primitive,
    buffer,
    memory,
)
from soapstone.kernels.cpu.onednn.execute import empty
from soapstone.kernels.cpu.onednn.library import STATUSES, library, stream
from soapstone.kernels.cpu.onednn.recurrent import in_rows
from soapstone.kernels.cpu.onednn.weights import matrix_product, private
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

SCORES = 1 << 17  # of one block of queries, at most
_MESSAGES = {code: f"oneDNN: {text}" for code, text in STATUSES.items()}
Matrices = tuple[Layout, Layout, Layout]


def _matrix(array: Array, count: int) -> Layout:
    """Return the layout of `count` positions of one head of an array (b, t, heads, d)."""
    width = array.shape[3]
    step = array.strides[1] // 4 if array.shape[1] > 1 else width
    return Layout((count, width), (step, 1))


def _turned(layout: Layout) -> Layout:
    strides = layout.strides or (0, 0)
    return Layout(layout.shape[::-1], strides[::-1])


def _address(function: Any) -> int:
    return int(C.cast(function, C.c_void_p).value or 0)


def _record(primitive: Primitive, layouts: Matrices) -> tuple[list[int], object]:
    """Return a product's words (see heads.py), and what they point to."""
    operands = [memory(layout.descriptor.address, 0) for layout in layouts]
    given = list(zip((ARG_SRC, ARG_WEIGHTS, ARG_DST), operands))
    if primitive.scratch_bytes:
        store = buffer(primitive.scratch_bytes)
        scratch = memory(primitive.descriptor(SCRATCHPAD), store.ctypes.data, store)
        given.append((ARG_SCRATCHPAD, scratch))
    # A C struct of an int and a pointer, the int in the low half of a word.
    arguments = np.array([[index, handle.address] for index, handle in given], np.int64)
    head = [primitive.primitive.address, len(given), int(arguments.ctypes.data)]
    return [*head, *(handle.address for handle in operands)], (primitive, layouts, given, arguments)


def _part(products: Sequence[tuple[Primitive, Matrices]], sizes: Sequence[int]) -> Block:
    """Return a part's record: its stream, buffers of these numbers of floats, and products."""
    lane = stream()
    records = [_record(primitive, layouts) for primitive, layouts in products]
    buffers = [private(size) for size in sizes]
    buffers += [private(1)] * (4 - len(buffers))
    made = pack(lane.address, buffers, [record for record, _ in records])
    return Block(made.array, (made.keep, lane, [kept for _, kept in records]))


def _compiled(products: Sequence[Matrices]) -> list[tuple[Primitive, Matrices]] | None:
    """Return the products with their primitives, or None if one of them has none."""
    found = []
    for layouts in products:
        primitive = matrix_product(*layouts, 1)
        if primitive is None:
            return None
        found.append((primitive, layouts))
    return found


def _ahead(call: Call, keys: int) -> int:
    """Return how many keys after its own position a query sees."""
    if not call.attributes["causal"]:
        return keys + (1 << 40)
    return int(call.attributes.get("ahead", 0))


def _blocks(call: Call, tq: int, tk: int, rows: int) -> list[tuple[int, int]]:
    """Return for each block of queries how many they are, and how many keys the last one sees."""
    ahead = _ahead(call, tk)
    ends = [min(tq, first + rows) for first in range(0, tq, rows)]
    return [(hi - i * rows, max(1, min(tk, hi + ahead))) for i, hi in enumerate(ends)]


def _mask_words(call: Call, first: int, shape: tuple[int, ...]) -> tuple[Any, ...] | None:
    """Return the words of the mask, input `first`, or None if its rows have gaps."""
    if len(call.inputs) <= first:
        return (0, 0, 0, 0, 0)
    mask = call.inputs[first]
    spread = np.broadcast_to(mask, shape)
    step = 4 if shape[3] == 1 else spread.strides[3]
    if step not in (0, 4):
        return None
    return (mask, *spread.strides[:3], step)


def _bind(
    call: Call,
    body: Native,
    operands: Sequence[Array],
    lse: Array,
    mask: tuple[Any, ...],
    rows: int,
    blocks: Sequence[tuple[int, int]],
    products: Sequence[Matrices],
    sizes: Sequence[int],
    items: int,
) -> Entry | None:
    q, k, v = operands[:3]
    kinds = list(dict.fromkeys(blocks))
    found = _compiled(products)
    if found is None:
        return None
    each = len(products) // len(kinds)
    table = [(each * kinds.index(block), block[1]) for block in blocks]
    given = call.attributes["scale"]
    scale = 1 / math.sqrt(q.shape[3]) if given is None else float(given)
    threads = call.threads if items * rows * k.shape[1] * q.shape[3] > 1 << 16 else 1
    parts = max(1, min(threads, items))
    dnnl = library()
    block = pack(
        (_address(dnnl.dnnl_primitive_execute), _address(dnnl.dnnl_memory_set_data_handle)),
        (parts, items, q.shape[2], rows, len(blocks), q.shape[1], k.shape[1]),
        (q.shape[3], v.shape[3], scale, _ahead(call, k.shape[1])),
        [(array, array.strides[:3]) for array in operands],
        mask,
        (lse, lse.strides),
        table,
        [_part(found, sizes) for _ in range(parts)],
    )
    return parallel_for(body, block, items, parts, _MESSAGES)


@variant("attention", "onednn")
@in_rows
def attention(call: Call) -> Entry | None:
    """Return the entry of attention of all heads."""
    from soapstone.kernels.cpu.onednn.heads import forward

    q, k, v = call.inputs[:3]
    y, lse = call.outputs
    samples, tq, heads, _ = q.shape
    tk = k.shape[1]
    if y.size == 0 and lse.size == 0:
        return empty()
    mask = _mask_words(call, 3, (samples, heads, tq, tk))
    if mask is None or not all(array.size for array in (*call.inputs, *call.outputs)):
        return None
    rows = _rows(call, tq, tk, SCORES)
    if samples * heads * -(-tq // rows) < call.threads:
        rows = max(1, -(-tq // call.threads))
    blocks = _blocks(call, tq, tk, rows)
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        scores = Layout.dense((count, seen))
        products.append((_matrix(q, count), _turned(_matrix(k, seen)), scores))
        products.append((scores, _matrix(v, seen), _matrix(y, count)))
    items = samples * heads * len(blocks)
    operands = (q, k, v, y)
    return _bind(
        call, forward, operands, lse, mask, rows, blocks, products, [rows * tk, 1, rows], items
    )


@variant("attention_grad", "onednn")
@in_rows
def attention_grad(call: Call) -> Entry | None:
    """Return the entry of the gradients of queries, keys and values."""
    from soapstone.kernels.cpu.onednn.heads import backward

    dy, q, k, v, y, lse = call.inputs[:6]
    dq, dk, dv = call.outputs
    samples, tq, heads, d = q.shape
    tk = k.shape[1]
    mask = _mask_words(call, 6, (samples, heads, tq, tk))
    if mask is None or not all(array.size for array in (*call.inputs, *call.outputs)):
        return None
    rows = _rows(call, tq, tk, SCORES // 2)
    blocks = _blocks(call, tq, tk, rows)
    direct = blocks == [(tq, tk)]
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        scores, keys = Layout.dense((count, seen)), _matrix(k, seen)
        ends = [
            _matrix(array, seen) if direct else Layout.dense((seen, array.shape[3]))
            for array in (dk, dv)
        ]
        products.append((_matrix(q, count), _turned(keys), scores))
        products.append((_matrix(dy, count), _turned(_matrix(v, seen)), scores))
        products.append((scores, keys, _matrix(dq, count)))
        products.append((_turned(scores), _matrix(q, count), ends[0]))
        products.append((_turned(scores), _matrix(dy, count), ends[1]))
    shares = [1, 1] if direct else [tk * d, tk * v.shape[3]]
    sizes = [rows * tk, rows * tk, *shares]
    operands = (q, k, v, y, dy, dq, dk, dv)
    items = samples * heads
    return _bind(call, backward, operands, lse, mask, rows, blocks, products, sizes, items)


def _rows(call: Call, tq: int, tk: int, scores: int) -> int:
    """Return how many queries a block has; fewer where a block need not see all keys."""
    rows = max(64, scores // tk)
    if call.attributes["causal"]:
        rows = min(rows, max(64, -(-tq // 4)))
    return min(tq, rows)
