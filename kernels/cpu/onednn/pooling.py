"""Maximum and average pooling and their gradients.

oneDNN pools dense activations only, so tiles of larger arrays are staged. Its workspace of maxima
holds, as our indices do, the position in the window row by row in a byte, laid out as they are.
Its maxima skip NaN, which would hide a diverged step, so inputs are checked and the rare pooling of
values that are not finite is done again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_SRC,
    ARG_WORKSPACE,
    DIFF_SOURCE,
    DIFF_TARGET,
    PLAIN_4D,
    SOURCE,
    TARGET,
    WORKSPACE,
    Kept,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    describe,
    dims,
    equal,
    usable,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32, served
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.records import dataclass

_TRAINING, _INFERENCE = 64, 96
_MAX, _AVERAGE_ALL, _AVERAGE_INSIDE = 0x1FF, 0x2FF, 0x3FF


@dataclass(frozen=True)
class _Pool:
    """A pooling problem; `x` and `y` are dense in `order`."""

    algorithm: int
    direction: int
    x: tuple[int, ...]
    y: tuple[int, ...]
    order: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    low: tuple[int, ...]
    high: tuple[int, ...]
    threads: int
    dtype: str

    def legal(self) -> bool:
        """Return whether sizes agree and every window holds an element."""
        fields = (self.x[2:], self.y[2:], self.kernel, self.stride, self.dilation)
        spans = [
            (size, count, (extent - 1) * dilation + 1, stride, low, high)
            for size, count, extent, stride, dilation, low, high in zip(
                *fields, self.low, self.high
            )
        ]
        dilated = max(self.dilation) > 1  # then a window may step over the elements inside
        return (
            min(*self.low, *self.high) >= 0
            and not (dilated and any((*self.low, *self.high)))
            and self.x[:2] == self.y[:2]
            and all(
                (size + low + high - span) // stride + 1 == count
                and low < span
                and (count - 1) * stride - low < size
                for size, count, span, stride, low, high in spans
            )
        )


def _order(*arrays: Array) -> tuple[int, ...]:
    """Return the axis order in which images are pooled; those of bytes have one way to be fast."""
    plain = tuple(range(arrays[0].ndim))
    if arrays[0].dtype != np.float32:
        return (0, *plain[2:], 1)
    rows = (a.shape[1] == 1 or a.strides[1] >= a.strides[-1] for a in arrays)
    return plain if all(rows) else (0, *plain[2:], 1)


def _pool(call: Call, algorithm: int, direction: int, x: Array, y: Array) -> _Pool | None:
    """Return the call's problem, or None when its windows are not oneDNN's."""
    at, rank = call.attributes, x.ndim - 2
    kernel, stride = tuple(at["kernel"]), tuple(at["stride"])
    dilation = tuple(at.get("dilation", (1,) * rank))
    low, high = tuple(at["padding"][:rank]), tuple(at["padding"][rank:])
    # The last window may end past the padding, which oneDNN is then told to be wider.
    beyond = tuple(
        (count - 1) * step - before + (extent - 1) * dilated + 1 - size
        for count, step, before, extent, dilated, size in zip(
            y.shape[2:], stride, low, kernel, dilation, x.shape[2:]
        )
    )
    wide = tuple(max(past, after) for past, after in zip(beyond, high))
    if algorithm == _AVERAGE_ALL and (wide != high or any(at.get("excess", ()))):
        return None
    ends = (x.shape, y.shape, _order(x, y))
    window = kernel, stride, dilation, low, wide
    pool = _Pool(algorithm, direction, *ends, *window, call.threads, x.dtype.name)
    return pool if x.size and pool.legal() else None


@Kept
def _primitive(pool: _Pool, backward: bool) -> Primitive | None:
    """Return the primitive on dense activations, or None where oneDNN has only plain loops."""
    window: tuple[Any, ...] = (
        *(dims(pool.stride), dims(pool.kernel), dims([step - 1 for step in pool.dilation])),
        *(dims(pool.low), dims(pool.high)),
    )
    x = Layout.dense(pool.x, pool.order, pool.dtype).descriptor
    y = Layout.dense(pool.y, pool.order, pool.dtype).descriptor
    attribute = attributes()
    with threads(pool.threads):
        try:
            found = describe(
                "pooling_forward",
                *(engine(), pool.direction, pool.algorithm, x, y, *window, attribute),
            )
            if backward:
                found = describe(
                    "pooling_backward",
                    *(engine(), pool.algorithm, x, y, *window, found, attribute),
                )
        except UnsupportedError:
            return None
        primitive = compile_primitive("pooling", found)
    return None if "ref" in primitive.implementation else primitive


def _indices(program: Program, primitive: Primitive, index: Array, order: Any) -> Handle | None:
    """Return memory of the index array as the primitive's workspace, or None: another format."""
    workspace = primitive.descriptor(WORKSPACE)
    layout = Layout.of(index, order)
    if index.dtype != np.uint8 or not usable(index) or layout.overlaps:
        return None
    if not workspace or not equal(workspace, layout.descriptor):
        return None
    return program.source(index, layout)


@variant("max_pool2d", "onednn")
def max_pool2d(call: Call) -> Entry | None:
    """Return the entry of the maximum of each window, with the attribute `indices` also where."""
    (x,), (y, *index) = call.inputs, call.outputs
    whole = x.dtype.name in BYTES and not index
    kind = x.dtype.name if whole else "float32"
    if not served(Call(call.operator, {}, (x,), (y,)), kind) or x.ndim != 4:
        return None
    if y.size == 0:
        return empty()
    pool = _pool(call, _MAX, _TRAINING if index else _INFERENCE, x, y)
    if pool is not None and max(pool.dilation) > 1 and not whole:
        return None  # values that are not finite could not be repaired
    primitive = _primitive(pool, False) if pool else None
    if pool is None or primitive is None or len(index) != bool(call.attributes.get("indices")):
        return None
    program = Program(call.threads)
    source = program.source(x, Layout.of(x, pool.order), primitive.descriptor(SOURCE))
    target = program.target(y, Layout.of(y, pool.order), primitive.descriptor(TARGET))
    arguments = {ARG_SRC: source, ARG_DST: target}
    if index:
        where = _indices(program, primitive, index[0], pool.order)
        if where is None:
            return None
        arguments[ARG_WORKSPACE] = where
    program.step(primitive, arguments)
    if whole:
        return program.entry()
    images, channels, height, width = pool.x
    program.native(
        "repair_maxima",
        images=images,
        channels=channels,
        height=height,
        width=width,
        rows=pool.y[2],
        columns=pool.y[3],
        kernel_height=pool.kernel[0],
        kernel_width=pool.kernel[1],
        stride_height=pool.stride[0],
        stride_width=pool.stride[1],
        top=pool.low[0],
        left=pool.low[1],
        x=_memory_of(source, x),
        y=_memory_of(target, y),
        index=index[0] if index else 0,
        x_step=1 if pool.order == PLAIN_4D else channels,
        y_step=1 if pool.order == PLAIN_4D else channels,
    )
    return program.entry()


def _memory_of(handle: Handle, array: Array) -> Array:
    """Return what a primitive works on: the array, or the private copy it is staged in."""
    return handle.keep if isinstance(handle.keep, np.ndarray) else array


def _gradient(call: Call, algorithm: int | None, index: Array | None) -> Entry | None:
    """Return the entry of dx from dy, and of maxima their positions."""
    dy, dx = call.inputs[0], call.outputs[0]
    pool = _pool(call, algorithm, _TRAINING, dx, dy) if dy.size and algorithm else None
    primitive = _primitive(pool, True) if pool else None
    if pool is None or primitive is None:
        return None
    program, order, arguments = Program(call.threads), pool.order, {}
    if index is not None:
        where = _indices(program, primitive, index, order) if index.shape == dy.shape else None
        if where is None:
            return None
        arguments[ARG_WORKSPACE] = where
    arguments |= {
        ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), primitive.descriptor(DIFF_TARGET)),
        ARG_DIFF_SRC: program.target(dx, Layout.of(dx, order), primitive.descriptor(DIFF_SOURCE)),
    }
    program.step(primitive, arguments)
    return program.entry()


@variant("max_pool2d_grad", "onednn")
def max_pool2d_grad(call: Call) -> Entry | None:
    """Return the entry of dx from dy and the positions of the maxima."""
    (dy, index), (dx,) = call.inputs, call.outputs
    if not float32(Call(call.operator, {}, (dy,), (dx,))) or not dy.ndim == dx.ndim == 4:
        return None
    return empty() if dx.size == 0 else _gradient(call, _MAX, index)


def _average(call: Call, x: Array) -> int | None:
    """Return the averaging algorithm, or None where a tile hides what the divisors depend on.

    Without padding in the divisor, a tile's own padding tells each window's count, unless the
    call says that the tile lies elsewhere in a larger input.
    """
    if call.attributes["include_pad"]:
        return _AVERAGE_ALL
    origin = call.attributes.get("origin")
    whole = call.attributes.get("full_size")
    at_origin = origin is None or not any(origin)
    complete = whole is None or tuple(whole) == x.shape[2:]
    if (at_origin and complete) or not any(call.attributes["padding"]):
        return _AVERAGE_INSIDE
    return None


@variant(("avg_pool2d", "avg_pool3d"), "onednn")
def avg_pool2d(call: Call) -> Entry | None:
    """Return the entry of the average of each window."""
    (x,), (y,) = call.inputs, call.outputs
    if not float32(call) or not 4 <= x.ndim <= 5:
        return None
    if y.size == 0:
        return empty()
    algorithm = _average(call, x)
    pool = _pool(call, algorithm, _INFERENCE, x, y) if algorithm else None
    primitive = _primitive(pool, False) if pool else None
    if pool is None or primitive is None:
        return None
    program = Program(call.threads)
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, pool.order), primitive.descriptor(SOURCE)),
        ARG_DST: program.target(y, Layout.of(y, pool.order), primitive.descriptor(TARGET)),
    }
    program.step(primitive, arguments)
    return program.entry()


@variant(("avg_pool2d_grad", "avg_pool3d_grad"), "onednn")
def avg_pool2d_grad(call: Call) -> Entry | None:
    """Return the entry of dy shared among the elements of each window."""
    (dx,) = call.outputs
    if not float32(call) or not 4 <= dx.ndim <= 5:
        return None
    if dx.size == 0:
        return empty()
    return _gradient(call, _average(call, dx), None)
