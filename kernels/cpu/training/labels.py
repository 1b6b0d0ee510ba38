"""What labels choose: `pick`, the element of a row, and `one_hot`, the row of zeros with a one."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import dense, is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native
from soapstone.native.intrinsics import f32p
from soapstone.native.threads.parallel import parallel_for, useful_threads

_STATUSES = {1: "label out of range"}

# Labels are less than `total`; a row has those from `base` on, `classes` of them. wide: whether
# they are int64; step: bytes between rows; column: between elements of x.
_BLOCK = Fields("classes base total wide x labels y step(x labels y) column")
_block_of = _BLOCK.at


@helper
def _label(w: Any, row: int) -> Any:
    """The label of a row, less the row's first; below -1 where it is out of range."""
    label = integer_at(w.labels + row * w.step_labels, w.wide)
    if label < 0 or label >= w.total:
        return np.int64(-2)
    column = label - w.base
    return column if column >= 0 and column < w.classes else np.int64(-1)


@native("body")
def _pick(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    for row in range(begin, end):
        label = _label(w, row)
        if label < -1:
            return 1
        to = f32p(w.y + row * w.step_y)
        to[0] = f32p(w.x + row * w.step_x + label * w.column)[0] if label >= 0 else np.float32(0)
    return 0


@native("body")
def _one_hot(block: Any, begin: int, end: int) -> int:
    w = _block_of(block)
    for row in range(begin, end):
        label = _label(w, row)
        if label < -1:
            return 1
        to = f32p(w.y + row * w.step_y)
        for k in range(w.classes):
            to[k] = np.float32(0)
        if label >= 0:
            to[label] = np.float32(1)
    return 0


@variant(("pick", "one_hot"), "numba")
def chosen(call: Call) -> Entry | None:
    """The element of each row of x that its label says, or rows with a one there."""
    *given, labels = call.inputs
    (y,), at = call.outputs, call.attributes
    if given:
        if not is_float32(given[0], y) or not is_integer(labels):
            return None
        body, (x,), classes, step = _pick, given, given[0].shape[1], y.strides[0]
    else:
        if not dense(y) or not is_integer(labels) or not labels.flags.c_contiguous:
            return None
        body, x, classes, step = _one_hot, y, y.shape[-1], 4 * y.shape[-1]
    total = at["base"] + classes if at["total"] is None else at["total"]
    block = _BLOCK.pack(
        classes=classes,
        base=at["base"],
        total=total,
        wide=labels.dtype == np.int64,
        x=x,
        labels=labels,
        y=y,
        step=[x.strides[0] if given else 0, labels.strides[0] if given else labels.itemsize, step],
        column=x.strides[1] if given else 0,
    )
    threads = useful_threads(call.threads, y.nbytes)
    return parallel_for(body, block, labels.size, threads, _STATUSES)
