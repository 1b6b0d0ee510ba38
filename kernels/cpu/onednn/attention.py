"""Scaled dot-product attention and its gradients, on operands of any strides.

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

LIMIT = 1 << 17  # scores of one block of queries, at most
_MESSAGES = {code: f"oneDNN: {text}" for code, text in STATUSES.items()}
# The operands of a product: for each its rows, its columns, its buffer (see heads.py), and whether
# it is taken transposed.
Matrix = tuple[int, int, int, bool]
Matrices = tuple[Matrix, Matrix, Matrix]
_SCORES, _GRADS, _KEY_SHARE, _VALUE_SHARE, _QUERIES, _KEYS, _VALUES, _RESULTS, _QUERY_GRADS = range(
    1, 10
)


def _layout(matrix: Matrix) -> Layout:
    rows, columns, _, turned = matrix
    return Layout((columns, rows), (1, columns)) if turned else Layout.dense((rows, columns))


def _address(function: Any) -> int:
    return int(C.cast(function, C.c_void_p).value or 0)


def _part(products: Sequence[tuple[Primitive, Matrices]], rows: int) -> Block:
    """Return a part's record: its stream, its buffers, and its products on them."""
    lane = stream()
    sizes = [1] * _QUERY_GRADS
    for _, matrices in products:
        for height, width, index, _ in matrices:
            sizes[index - 1] = max(sizes[index - 1], height * width)
    sizes[_GRADS - 1] = max(sizes[_GRADS - 1], rows)  # forward: the sums of a block's rows
    buffers = [private(size) for size in sizes]
    scratch = buffer(max(primitive.scratch_bytes for primitive, _ in products))
    records: list[int] = []
    keep: list[object] = [lane, scratch]
    for primitive, matrices in products:
        given = [
            (argument, memory(_layout(m).descriptor.address, buffers[m[2] - 1].ctypes.data))
            for argument, m in zip((ARG_SRC, ARG_WEIGHTS, ARG_DST), matrices)
        ]
        if primitive.scratch_bytes:
            descriptor = primitive.descriptor(SCRATCHPAD)
            given.append((ARG_SCRATCHPAD, memory(descriptor, scratch.ctypes.data)))
        # A C struct of an int and a pointer, the int in the low half of a word.
        arguments = np.array([[index, handle.address] for index, handle in given], np.int64)
        records += [primitive.primitive.address, len(given), int(arguments.ctypes.data)]
        keep.append((primitive, given, arguments))
    made = pack(lane.address, buffers, records)
    return Block(made.array, (made.keep, keep))


def _compiled(products: Sequence[Matrices]) -> list[tuple[Primitive, Matrices]] | None:
    """Return the products with their primitives, or None if one of them has none."""
    found = []
    for matrices in products:
        a, b, y = (_layout(matrix) for matrix in matrices)
        primitive = matrix_product(a, b, y, 1)
        if primitive is None:
            return None
        found.append((primitive, matrices))
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
    block = pack(
        _address(library().dnnl_primitive_execute),
        (parts, items, q.shape[2], rows, len(blocks), q.shape[1], k.shape[1]),
        (q.shape[3], v.shape[3], scale, _ahead(call, k.shape[1])),
        [(array, array.strides[:3]) for array in operands],
        mask,
        (lse, lse.strides),
        table,
        [_part(found, rows) for _ in range(parts)],
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
    rows = _rows(call, tq, tk, LIMIT)
    if samples * heads * -(-tq // rows) < call.threads:
        rows = max(1, -(-tq // call.threads))
    blocks = _blocks(call, tq, tk, rows)
    d, dv = q.shape[3], v.shape[3]
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        scores = (count, seen, _SCORES, False)
        products.append(((count, d, _QUERIES, False), (seen, d, _KEYS, True), scores))
        products.append((scores, (seen, dv, _VALUES, False), (count, dv, _RESULTS, False)))
    items = samples * heads * len(blocks)
    return _bind(call, forward, (q, k, v, y), lse, mask, rows, blocks, products, items)


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
    rows = _rows(call, tq, tk, LIMIT // 2)
    blocks = _blocks(call, tq, tk, rows)
    dv_width = v.shape[3]
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        scores, grads = (count, seen, _SCORES, False), (count, seen, _GRADS, False)
        queries, results = (count, d, _QUERIES, False), (count, dv_width, _RESULTS, False)
        products.append((queries, (seen, d, _KEYS, True), scores))
        products.append((results, (seen, dv_width, _VALUES, True), grads))
        products.append((grads, (seen, d, _KEYS, False), (count, d, _QUERY_GRADS, False)))
        products.append(((*grads[:3], True), queries, (seen, d, _KEY_SHARE, False)))
        products.append(((*scores[:3], True), results, (seen, dv_width, _VALUE_SHARE, False)))
    operands = (q, k, v, y, dy, dq, dk, dv)
    items = samples * heads
    return _bind(call, backward, operands, lse, mask, rows, blocks, products, items)


def _rows(call: Call, tq: int, tk: int, scores: int) -> int:
    """Return how many queries a block has; fewer where a block need not see all keys."""
    rows = max(64, scores // tk)
    if call.attributes["causal"]:
        rows = min(rows, max(64, -(-tq // 4)))
    return min(tq, rows)
