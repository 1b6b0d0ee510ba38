"""Decision trees: samples are shared out over the threads, and walk down one tree after another."""

from __future__ import annotations

import numpy as np

from soapstone.ir.ops.indexing.trees import check_nodes
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop
from soapstone.native.intrinsics import f32p, i32p
from soapstone.native.threads.parallel import parallel_for, useful_threads

# x_n, x_f and y_n, y_t: strides in bytes; the tables are contiguous.
TREES = Fields("x y threshold feature yes no comparison roots trees nodes features x_n x_f y_n y_t")
trees_of = TREES.at


@native("body")
def _leaves(block: int, begin: int, end: int) -> int:
    w = trees_of(block)
    for tree in range(w.trees):
        root = i32p(w.roots)[tree]
        if root < 0 or root >= w.nodes:
            return 1
        for row in range(begin, end):
            at, x = root, w.x + row * w.x_n
            for _ in range(w.nodes):
                kind = i32p(w.comparison)[at]
                test = kind % 10
                if test == 0:
                    break
                feature = i32p(w.feature)[at]
                if feature < 0 or feature >= w.features:
                    return 1
                value, bound = f32p(x + feature * w.x_f)[0], f32p(w.threshold)[at]
                if value != value and kind >= 10:
                    holds = True
                elif test == 1:
                    holds = value <= bound
                elif test == 2:
                    holds = value < bound
                elif test == 3:
                    holds = value >= bound
                elif test == 4:
                    holds = value > bound
                elif test == 5:
                    holds = value == bound
                else:
                    holds = value != bound
                at = i32p(w.yes)[at] if holds else i32p(w.no)[at]
                if at < 0 or at >= w.nodes:
                    return 1
            i32p(w.y + row * w.y_n + tree * w.y_t)[0] = at
    return 0


@variant("tree_leaves", "numba")
def tree_leaves(call: Call) -> Entry | None:
    """The trees of float32 samples whose tables are contiguous."""
    (x, *tables), (y,) = call.inputs, call.outputs
    threshold, *numbers = tables
    if not is_float32(x, threshold) or not all(each.flags.c_contiguous for each in tables):
        return None
    if any(each.dtype != np.int32 or not each.flags.aligned for each in numbers):
        return None
    if y.size == 0:
        return noop()
    names = ("feature", "yes", "no", "comparison", "roots")
    block = TREES.pack(
        **dict(zip(names, numbers)),
        x=x,
        y=y,
        threshold=threshold,
        trees=len(numbers[-1]),
        nodes=len(threshold),
        features=x.shape[1],
        x_n=x.strides[0],
        x_f=x.strides[1],
        y_n=y.strides[0],
        y_t=y.strides[1],
    )
    threads = useful_threads(call.threads, 64 * y.nbytes)
    feature, yes, no, _, roots = numbers
    status = outside(call.operator, check_nodes, x.shape[1], feature, yes, no, roots)
    return parallel_for(_leaves, block, x.shape[0], threads, status)
