"""Scaled dot-product attention and its gradients, on operands of any strides.

Heads are shared out over the threads; on each of them products run single-threaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from soapstone.dtypes import learn
from soapstone.ir.ops.products.attention import scale_of, shared
from soapstone.kernels.cpu.attention.heads import (
    BLOCK,
    OPERAND,
    PART,
    STRETCH,
    backward,
    forward,
)
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.products.forms import Form, default_form
from soapstone.kernels.cpu.recurrent.layers import Bind, in_rows
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import Native, noop, sequence
from soapstone.native.memory import Block, aligned_array, pack
from soapstone.native.threads.parallel import parallel_for

LIMIT = 1 << 17  # scores of one block of queries, at most
WIDEST = 512  # columns of a product of halves
# The operands of a product: for each its rows, its columns, its buffer (see `PART`), and whether it
# is taken transposed.
Matrix = tuple[int, int, str, bool]
Matrices = tuple[Matrix, Matrix, Matrix]
Part = tuple[Block, list[Entry]]


def _view(matrix: Matrix, buffers: Mapping[str, Array]) -> Array:
    """Return the operand in its buffer, of which it takes the beginning."""
    height, width, name, turned = matrix
    view = buffers[name][: height * width].reshape(height, width)
    return view.T if turned else view


def _part(products: Sequence[Matrices], rows: int, form: Form, halves: bool) -> Part | None:
    """Return a part's record: its buffers and its products on them; None where one fails.

    halves: whether what products read is bfloat16.
    """
    sizes = dict.fromkeys(PART.names, 1)
    sizes["grads"] = rows  # forward: the sums of a block's rows
    for matrices in products:
        for height, width, name, _ in matrices:
            sizes[name] = max(sizes[name], height * width)
    narrow = ("queries", "keys", "values", "weights") if halves else ()
    buffers = {
        name: aligned_array((size,), learn(BFLOAT16) if name in narrow else np.float32)
        for name, size in sizes.items()
    }
    entries = []
    for matrices in products:
        a, b, y = (_view(matrix, buffers) for matrix in matrices)
        entry = _in_pieces(form, a, b, y, _width(y.shape[1], halves and matrices[2][2] == "scores"))
        if entry is None:
            return None
        entries.append(entry)
    return PART.pack(*entries, **buffers), entries


def _width(keys: int, halves: bool) -> int:
    """Return how many keys of a block of queries have scores side by side.

    oneDNN multiplies few long rows by tiles (AMX) only where columns are few, which are dense, and
    best where vectors are whole.
    """
    if not halves or keys <= WIDEST:
        return keys
    return -(-keys // -(-keys // WIDEST) // 32) * 32


def _in_pieces(form: Form, a: Array, b: Array, y: Array, width: int) -> Entry | None:
    """Return the entry of a product that makes so many columns at a time, one piece after another.

    y: its memory, of which each piece is a dense matrix.
    """
    rows, columns = y.shape
    if width == columns:
        return form(b, 1).product(a, y)
    pieces = y.reshape(columns // width, rows, width)
    return sequence(
        [
            form(b[:, first : first + width], 1).product(a, piece)
            for first, piece in zip(range(0, columns, width), pieces)
        ]
    )


def ahead_of(call: Call, keys: int) -> int:
    """Return how many keys after its own position a query sees."""
    if not call.attributes["causal"]:
        return keys + (1 << 40)
    return int(call.attributes.get("ahead", 0))


def empty_of(call: Call) -> float:
    """Return by what a row is multiplied of which every key is hidden."""
    return 0.0 if call.attributes.get("empty", "zeros") == "zeros" else math.nan


def _blocks(call: Call, tq: int, tk: int, rows: int) -> list[tuple[int, int]]:
    """Return for each block of queries how many they are, and how many keys the last one sees."""
    ahead = ahead_of(call, tk)
    ends = [min(tq, first + rows) for first in range(0, tq, rows)]
    return [(hi - i * rows, max(1, min(tk, hi + ahead))) for i, hi in enumerate(ends)]


def mask_fields(call: Call, first: int, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Return what a block says of the mask, input `first`, or None if its rows have gaps."""
    if len(call.inputs) <= first:
        return {"mask": 0, "mask_step": (0, 0, 0, 0)}
    mask = call.inputs[first]
    spread = np.broadcast_to(mask, shape)
    step = 4 if shape[3] == 1 else spread.strides[3]
    if step not in (0, 4):
        return None
    return {"mask": mask, "mask_step": (*spread.strides[:3], step)}


def _bind(
    call: Call,
    body: Native,
    operands: Sequence[Array],
    lse: Array,
    mask: dict[str, Any],
    rows: int,
    blocks: Sequence[tuple[int, int]],
    products: Sequence[Matrices],
    items: int,
    form: Form,
    halves: bool = False,
) -> Entry | None:
    q, k, v = operands[:3]
    kinds = list(dict.fromkeys(blocks))
    each = len(products) // len(kinds)
    stretches = [
        STRETCH.row(
            product=each * kinds.index(block), keys=block[1], width=_width(block[1], halves)
        )
        for block in blocks
    ]
    scale = scale_of(call.attributes, q.shape[3])
    threads = call.threads if items * rows * k.shape[1] * q.shape[3] > 1 << 16 else 1
    parts = max(1, min(threads, items))
    made = [_part(products, rows, form, halves) for _ in range(parts)]
    records = [part for part in made if part is not None]
    if len(records) < parts:
        return None
    table = []
    for array in operands:
        sample, position, head, _ = array.strides
        table.append(OPERAND.row(place=array, sample=sample, position=position, head=head))
    block = BLOCK.pack(
        *table,
        parts=parts,
        items=items,
        heads=q.shape[2],
        group=shared(q.shape[2], k.shape[2]),
        rows=rows,
        blocks=len(blocks),
        tq=q.shape[1],
        tk=k.shape[1],
        d=q.shape[3],
        dv=v.shape[3],
        ahead=ahead_of(call, k.shape[1]),
        halves=halves,
        **mask,
        lse=lse,
        lse_step=lse.strides,
        stretches=pack(stretches),
        records=pack([record for record, _ in records]),
        scale=scale,
        empty=empty_of(call),
    )
    statuses = {code: text for entry in records[0][1] for code, text in entry.statuses.items()}
    return parallel_for(body, block, items, parts, statuses)


def _products(operator: str) -> Callable[[Bind], Bind]:
    """Return a decorator that registers `bind(call, form)` where a library has products."""

    def register(bind: Bind) -> Bind:
        found = default_form()
        if found is not None:
            bound = partial(in_rows(bind), form=found[1])
            variant(operator, found[0], promises=True)(bound)
        return bind

    return register


@_products("attention")
def attention(call: Call, form: Form, halves: bool = False) -> Entry | None:
    """Return the entry of attention of all heads; halves: whether its products read bfloat16."""
    q, k, v = call.inputs[:3]
    y, lse = call.outputs
    samples, tq, heads, _ = q.shape
    tk = k.shape[1]
    if y.size == 0 and lse.size == 0:
        return noop()
    mask = mask_fields(call, 3, (samples, heads, tq, tk))
    if mask is None or not all(array.size for array in (*call.inputs, *call.outputs)):
        return None
    rows = _rows(call, tq, tk, LIMIT)
    if samples * heads * -(-tq // rows) < call.threads:
        rows = max(1, -(-tq // call.threads))
    blocks = _blocks(call, tq, tk, rows)
    d, dv = q.shape[3], v.shape[3]
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        width = _width(seen, halves)
        most = -(-seen // width) * width  # what is past the keys is in no row
        scores = (count, most, "scores", False)
        products.append(((count, d, "queries", False), (most, d, "keys", True), scores))
        shares = (count, seen, "weights", False) if halves else scores
        products.append((shares, (seen, dv, "values", False), (count, dv, "results", False)))
    items, operands = samples * heads * len(blocks), (q, k, v, y)
    return _bind(*(call, forward, operands, lse, mask, rows, blocks, products, items, form, halves))


def _of_halves(call: Call) -> Entry | None:
    form = default_form()
    if call.precision != BFLOAT16 or form is None:
        return None
    return in_rows(partial(attention, form=form[1], halves=True))(call)


def _expected(_: Call) -> float:
    return 0.5 if onednn.gains_by_bfloat16() else 2.0


if onednn.available():
    _runs = onednn.multiplies_bfloat16()
    variant("attention", "onednn_bfloat16", expected=_expected, promises=True, runs=_runs)(
        _of_halves
    )


@_products("attention_grad")
def attention_grad(call: Call, form: Form) -> Entry | None:
    """Return the entry of the gradients of queries, keys and values."""
    dy, q, k, v, y, lse = call.inputs[:6]
    dq, dk, dv = call.outputs
    samples, tq, heads, d = q.shape
    tk = k.shape[1]
    mask = mask_fields(call, 6, (samples, heads, tq, tk))
    if mask is None or not all(array.size for array in (*call.inputs, *call.outputs)):
        return None
    rows = _rows(call, tq, tk, LIMIT // 2)
    blocks = _blocks(call, tq, tk, rows)
    dv_width = v.shape[3]
    products: list[Matrices] = []
    for count, seen in dict.fromkeys(blocks):
        scores, grads = (count, seen, "scores", False), (count, seen, "grads", False)
        queries, results = (count, d, "queries", False), (count, dv_width, "results", False)
        products.append((queries, (seen, d, "keys", True), scores))
        products.append((results, (seen, dv_width, "values", True), grads))
        products.append((grads, (seen, d, "keys", False), (count, d, "query_grads", False)))
        products.append(((*grads[:3], True), queries, (seen, d, "key_share", False)))
        products.append(((*scores[:3], True), results, (seen, dv_width, "value_share", False)))
    operands = (q, k, v, y, dy, dq, dk, dv)
    items = samples * heads
    return _bind(call, backward, operands, lse, mask, rows, blocks, products, items, form)


def _rows(call: Call, tq: int, tk: int, scores: int) -> int:
    """Return how many queries a block has; fewer where a block need not see all keys."""
    rows = max(64, -(-scores // tk // 32) * 32)
    if call.attributes["causal"]:
        rows = min(rows, max(64, -(-tq // 4)))
    return min(tq, rows)
