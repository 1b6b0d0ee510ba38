"""Operators of com.microsoft.nchwc, by which ONNX Runtime's optimiser lays images out in blocks.

Between `ReorderInput` and `ReorderOutput` an image has its channels in blocks: (n, c / block, h, w,
block), whole ones, under the shape (n, c, h, w). Here it stays in order, and kernels choose their
layouts themselves, so these two do no more than pad channels and cut them off again; weights are
put in order as they are read. What comes in between and is of ONNX's own (sums, activations,
concatenations of whole blocks) means the same in either order.

A file does not say how long its blocks are: as ONNX Runtime does, it is read with this processor's.
"""

from __future__ import annotations

from functools import cache

from soapstone.cache.environment import environment
from soapstone.cache.objects import arm
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.rules.microsoft.fused import (
    channels_first,
    channels_last,
    fused_convolution,
)
from soapstone.frontend.onnx.rules.windows import averaged, global_pool, max_pooled
from soapstone.frontend.onnx.values import PLAIN, STRIDED, Even, Value, rule

DOMAIN = "com.microsoft.nchwc"


@cache
def block_size() -> int:
    """Return how many channels ONNX Runtime has in a block on this processor."""
    return 16 if arm() or "avx512f" in environment()["features"].split() else 8


@rule("ReorderInput", domain=DOMAIN, even=PLAIN)
def reorder_input(n: Call) -> Value:
    x = n.value()
    x = channels_first(n, x) if n.attribute("channels_last", 0) else x
    missing = -x.shape[1] % block_size()
    if not missing:
        return x
    none = (0,) * x.rank
    return n("pad", x, low=none, high=(0, missing, *none[2:]), interior=none)


@rule("ReorderOutput", domain=DOMAIN, even=Even(places=True))
def reorder_output(n: Call) -> Value:
    x, channels = n.value(), n.attribute("channels", 0)
    _check_blocks("channels", x.shape[1])
    if not 0 < channels <= x.shape[1]:
        raise OnnxError(f"attribute 'channels' is {channels}; 1 to {x.shape[1]} needed")
    x = x if channels == x.shape[1] else n.part(x, 1, 0, channels)
    return channels_last(n, x) if n.attribute("channels_last", 0) else x


def _check_blocks(what: str, count: int) -> None:
    if count % block_size():
        raise OnnxError(
            f"{count} {what} found; blocks of {block_size()} needed, ONNX Runtime's on this"
            " processor (its layouts are for the processor that wrote the file)"
        )


@rule("Conv", domain=DOMAIN, even=STRIDED)
def conv(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    if w.rank != 4:
        raise OnnxError(f"weights {w.spec} found; rank 4 needed")
    return fused_convolution(
        n, x, n.once(_in_order, w, n.attribute("group", 1)), n.maybe(2), n.maybe(3)
    )


def _in_order(n: Call, w: Value, groups: int) -> Value:
    """Return weights (o, i, h, w) that lie in blocks of o, or of i and o, as ONNX has them.

    Blocks are of both where a group has a block of channels or more, and not depthwise.
    """
    block = block_size()
    outputs, inputs, *kernel = w.shape
    _check_blocks("filters", outputs)
    if inputs < block or (inputs == 1 and outputs == groups):
        blocks = n.reshape(w, (outputs // block, inputs, *kernel, block))
        return n.reshape(n.transpose(blocks, (0, 4, 1, 2, 3)), w.shape)
    _check_blocks("channels", inputs)
    blocks = n.reshape(w, (outputs // block, inputs // block, *kernel, block, block))
    return n.reshape(n.transpose(blocks, (0, 5, 1, 4, 2, 3)), w.shape)


@rule("MaxPool", domain=DOMAIN, even=STRIDED)
def max_pool(n: Call) -> Value:
    n.attribute("storage_order")  # of places, which are no output
    return max_pooled(n, n.value())[0]


@rule("AveragePool", domain=DOMAIN, even=STRIDED)
def average_pool(n: Call) -> Value:
    return averaged(n, n.value())


rule("GlobalAveragePool", "GlobalMaxPool", domain=DOMAIN, even=PLAIN)(global_pool)


@rule("Upsample", domain=DOMAIN, even=Even(scaled=True, places=True))
def upsample(n: Call) -> Value:
    x = n.value()
    scales = n.attribute("scales") or (1,) * x.rank
    if len(scales) != x.rank or min(scales) < 1:
        raise OnnxError(f"attribute 'scales' is {scales}; {x.rank} positive numbers needed")
    return n(
        "resize",
        x,
        sizes=tuple(extent * scale for extent, scale in zip(x.shape, scales)),
        scales=tuple(map(float, scales)),
        mode=n.text("mode", "nearest", ("nearest", "linear")),
        coordinate_transformation_mode=n.attribute("coordinate_transformation_mode", "asymmetric"),
        nearest_mode="floor",
    )
