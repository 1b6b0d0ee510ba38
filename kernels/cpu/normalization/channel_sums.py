"""Sums by channel of arrays (n, c, ...): of x and x^2 around a pivot, or of dy and dy * x.

Channels-last, lanes are channels: a block of 64 is summed in registers over a few rows, then added
to float64 totals. Plain, lanes are positions. The pivot, any value near the mean, keeps what is
summed small, so that nothing is lost where a mean is large beside its deviation.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.kernels.cpu.elementwise.machine import bind_program
from soapstone.kernels.cpu.elementwise.programs import Node, compile_program
from soapstone.kernels.cpu.pooling.windows import first_lanes, load_where
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, native, routine
from soapstone.native.intrinsics import f32p, f64p, i64p, stack
from soapstone.native.memory import aligned_array
from soapstone.native.moves import row_at
from soapstone.native.simd import choose, load, load_doubles, splat, store, sum_lanes, widen
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.native.walks import walk


@routine
def _run(sums: int, u: int, v: int, less: float, pivot: float, n: int) -> None:
    """Add u - less and (u - less) * (v - pivot), n floats, to two times 16 lanes."""
    m, k = splat(pivot), splat(less)
    full = n & -16
    a, b = load_doubles(sums, 0), load_doubles(sums, 16)
    for i in range(0, full, 16):
        x = widen(load(u, i) - k)
        a += x
        b += x * widen(load(v, i) - m)
    if full < n:
        mask = first_lanes(n - full)
        x = widen(choose(mask, load_where(u, full, mask) - k, splat(0.0)))
        a += x
        b += x * widen(load_where(v, full, mask) - m)
    store(sums, 0, a)
    store(sums, 16, b)


@routine
def _rows(totals: int, products: int, u: int, v: int, m: int, places: Any, n: int) -> None:
    """Add n rows of 64 channels to their totals. places: steps of u and v, channels, centred."""
    step_u, step_v, channels, centred = places[0], places[1], places[2], places[3]
    z = splat(0.0)
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = z
    k0, k1 = first_lanes(channels), first_lanes(channels - 16)
    k2, k3 = first_lanes(channels - 32), first_lanes(channels - 48)
    m0, m1 = load_where(m, 0, k0), load_where(m, 16, k1)
    m2, m3 = load_where(m, 32, k2), load_where(m, 48, k3)
    if centred != 0:
        for _ in range(n):
            x = load_where(u, 0, k0) - m0
            a0 += x
            b0 += x * x
            x = load_where(u, 16, k1) - m1
            a1 += x
            b1 += x * x
            x = load_where(u, 32, k2) - m2
            a2 += x
            b2 += x * x
            x = load_where(u, 48, k3) - m3
            a3 += x
            b3 += x * x
            u += step_u
    else:
        for _ in range(n):
            x = load_where(u, 0, k0)
            a0 += x
            b0 += x * (load_where(v, 0, k0) - m0)
            x = load_where(u, 16, k1)
            a1 += x
            b1 += x * (load_where(v, 16, k1) - m1)
            x = load_where(u, 32, k2)
            a2 += x
            b2 += x * (load_where(v, 32, k2) - m2)
            x = load_where(u, 48, k3)
            a3 += x
            b3 += x * (load_where(v, 48, k3) - m3)
            u += step_u
            v += step_v
    store(totals, 0, load_doubles(totals, 0) + widen(a0))
    store(totals, 16, load_doubles(totals, 16) + widen(a1))
    store(totals, 32, load_doubles(totals, 32) + widen(a2))
    store(totals, 48, load_doubles(totals, 48) + widen(a3))
    store(products, 0, load_doubles(products, 0) + widen(b0))
    store(products, 16, load_doubles(products, 16) + widen(b1))
    store(products, 32, load_doubles(products, 32) + widen(b2))
    store(products, 48, load_doubles(products, 48) + widen(b3))


# sums: (images, parts, 2, padded) of channels; rows: of an image, of `run` positions each; step:
# along channels; images: strides of images. Then the walk of an image's rows in u and v.
_SUMS = Fields(
    "u v pivot sums channels padded parts rows run rank step(u v pivot) centred image(u v pivot)"
)
_sums_of, _table_of = _SUMS.at, _SUMS.table


@native("body")
def _sums_by_channel(block: Any, begin: int, end: int) -> int:
    w, table = _sums_of(block), _table_of(block)
    n, rank = w.run, w.rank
    sums = stack(256)
    for item in range(begin, end):
        image, channel = item // w.channels, item % w.channels
        for i in range(32):
            f64p(sums)[i] = 0.0
        pivot: Any = f32p(w.pivot + channel * w.step_pivot + image * w.image_pivot)[0]
        less: Any = pivot if w.centred != 0 else np.float32(0.0)
        at_u = w.u + channel * w.step_u + image * w.image_u
        at_v = w.v + channel * w.step_v + image * w.image_v
        for row in range(w.rows):
            u = at_u + row_at(table, rank, 0, row)
            v = at_v + row_at(table, rank, 1, row)
            _run(sums, u, v, less, pivot, n)
        out = f64p(w.sums + image * w.padded * 16)
        out[channel] = sum_lanes(load_doubles(sums, 0))
        out[w.padded + channel] = sum_lanes(load_doubles(sums, 16))
    return 0


@native("body")
def _sums_by_row(block: Any, begin: int, end: int) -> int:
    w, table = _sums_of(block), _table_of(block)
    rows, rank, padded = w.rows, w.rank, w.padded
    inner = table[rank - 1]
    places = i64p(stack(64))
    places[0], places[1] = table[2 * rank - 1], table[3 * rank - 1]
    places[3] = w.centred
    for item in range(begin, end):
        image, part = item // w.parts, item % w.parts
        sums = w.sums + item * padded * 16
        for i in range(2 * padded):
            f64p(sums)[i] = 0.0
        row, last = part * rows // w.parts, (part + 1) * rows // w.parts
        while row < last:
            n = min(64, last - row, inner - row % inner)
            u = w.u + image * w.image_u + row_at(table, rank, 0, row)
            v = w.v + image * w.image_v + row_at(table, rank, 1, row)
            pivot = w.pivot + image * w.image_pivot
            for c in range(0, w.channels, 64):
                places[2] = w.channels - c
                at = sums + c * 8
                _rows(at, at + padded * 8, u + c * 4, v + c * 4, pivot + c * 4, places, n)
            row += n
    return 0


class ChannelSums:
    """The entry that sums two things by channel, and where it leaves the sums.

    With `centred`: of x - pivot and its square (u and v are x). Without: of u and u * (v - pivot).
    The pivot is (channels,), or (n, channels) to sum each sample by itself. The sums are float64,
    (samples, parts, 2, channels rounded up); `entry` is None where the arrays are not served.
    """

    def __init__(
        self, u: Array, v: Array, pivot: Array, threads: int, *, centred: bool = False
    ) -> None:
        each = pivot.ndim == 2
        self.channels = c = u.shape[1]
        self.padded = (c + 63) // 64 * 64
        self.images = u.shape[0] if each else 1
        self.count = u.size // (c * self.images)
        self.parts = 1
        self.entry: Entry | None = None
        rest = [np.moveaxis(a, 1, 0)[0] for a in (u, v)]
        if each:
            rest = [a[0] for a in rest]
        made = walk(rest[0].shape, rest)
        extents, strides = made.extents, made.strides
        threads = useful_threads(threads, u.nbytes + v.nbytes)
        run = 1
        by_row = c > 1 and u.strides[1] == 4 and v.strides[1] == 4 and pivot.strides[-1] == 4
        if by_row:
            self.parts = max(1, min(-(-threads // self.images), self.count))
        else:
            if any(s[-1] != 4 for s in strides) and extents[-1] > 1:
                return
            run, extents, strides = extents[-1], extents[:-1], tuple(s[:-1] for s in strides)
        self.sums = aligned_array((self.images, self.parts, 2, self.padded), np.float64, zero=True)
        block = _SUMS.pack(
            *(extents, strides),
            u=u,
            v=v,
            pivot=pivot,
            sums=self.sums,
            channels=c,
            padded=self.padded,
            parts=self.parts,
            rows=self.count // run,
            run=run,
            rank=len(extents),
            step=(u.strides[1], v.strides[1], pivot.strides[-1]),
            centred=centred,
            image=(u.strides[0], v.strides[0], pivot.strides[0] if each else 0),
        )
        kernel: Native = _sums_by_row if by_row else _sums_by_channel
        items = self.images * (self.parts if by_row else c)
        self.entry = parallel_for(kernel, block, items, threads)

    def fields(self) -> dict[str, Any]:
        """What a block that uses the sums says of them: count is the elements of a channel."""
        return {
            "sums": self.sums,
            "channels": self.channels,
            "padded": self.padded,
            "parts": self.parts,
            "count": self.count,
        }


# On images, then factors by channel: y = x * scale + shift, and dx = a * dy + b * (x - mean) + d.
SCALE_AND_SHIFT: list[Node] = [("mul", (0, 1), {}), ("add", (3, 2), {})]
SLOPES: list[Node] = [
    ("sub", (1, 2), {}),
    ("mul", (6, 4), {}),
    ("mul", (0, 3), {}),
    ("add", (8, 7), {}),
    ("add", (9, 5), {}),
]


def by_channel(
    nodes: list[Node], images: list[Array], factors: list[Array], y: Array, threads: int
) -> Entry | None:
    """Return the element-wise machine's entry of the nodes.

    factors: arrays of as many elements as channels, or as samples times channels.
    """
    shape = (-1, y.shape[1], *(1,) * (y.ndim - 2))
    operands = [*images, *(factor.reshape(shape) for factor in factors)]
    program = compile_program(len(operands), nodes, (len(operands) + len(nodes) - 1,))
    return None if program is None else bind_program(program, operands, [y], threads)
