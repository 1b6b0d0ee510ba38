"""Products with constant weights of few bits, which stay packed and are unpacked in registers.

Weights lie in panels of 16 columns, a word of each column side by side, so that one shift takes the
next number of all sixteen; each block is followed by its scales. Lines of a few panels may
alternate (`Layout`). A thread reads one contiguous piece of memory, once for all rows where they
are few. Where the processor adds products of bytes (`dots`), x becomes bytes first, and weights
need no unpacking to floating point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.ops.products.nbits import KINDS, WHOLE, block_of
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats
from soapstone.kernels.cpu.products import nbits_dots, nbits_lanes
from soapstone.kernels.cpu.products.nbits_dots import LAYOUT, Layout
from soapstone.kernels.cpu.products.nbits_lanes import factor_of
from soapstone.kernels.cpu.products.panels import reading_of
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.copies import copy
from soapstone.native.entries import Native, native, noop, sequence
from soapstone.native.intrinsics import stack
from soapstone.native.lanes import converts_halves
from soapstone.native.memory import aligned_array
from soapstone.native.promises import held
from soapstone.native.shared import packed
from soapstone.native.threads.parallel import parallel_for, useful_threads

_LANES = 16
_SINGLE = Layout(1, 1)
_LONGEST = 1 << 15  # numbers of a block whose sums of bytes stay within 32 bits
# steps: bytes from one row to the next; panel: bytes of the weights of 16 columns.
_NBITS = Fields("rows depth columns block weights panel x x_step y y_step reading")
_nbits_of = _NBITS.at


def _body(products: list[Any], many: int, layout: Layout) -> Native:
    """Return the loop over panels, by groups that lie together.

    products: the blocks of one row, of two, of many by a pair of panels, and of one by several.
    """
    one, two, most, wide = products
    several, pair, together = layout

    @native("body")
    def nbits(block: Any, begin: int, end: int) -> int:
        w = _nbits_of(block)
        room = stack(1024)
        panel, end = begin * together, min(end * together, (w.columns + _LANES - 1) // _LANES)
        while w.rows == 1 and panel + several <= end:
            wide(w.x, w.x_step, w.depth, w.block, w.weights + panel * w.panel, room, w.reading)
            count = min(several * _LANES, w.columns - panel * _LANES)
            copy_floats(w.y + panel * 64, room, count)
            panel += several
        while panel < end:
            width, done = 1, 0
            if panel + pair <= end and w.rows >= many:
                width = pair
                weights = w.weights + panel * w.panel
                count = min(pair * _LANES, w.columns - panel * _LANES)
                while done + many <= w.rows:
                    x = w.x + done * w.x_step
                    most(x, w.x_step, w.depth, w.block, weights, room, w.reading)
                    for r in range(many):
                        to = w.y + (done + r) * w.y_step + panel * 64
                        copy_floats(to, room + r * pair * 64, count)
                    done += many
            last = panel + width
            while panel < last:
                apart = panel % together
                weights = w.weights + (panel - apart) * w.panel + apart * _LANES * 4
                count = min(_LANES, w.columns - panel * _LANES)
                row = done
                while row < w.rows:
                    x, to = w.x + row * w.x_step, w.y + row * w.y_step + panel * 64
                    if row + 2 <= w.rows:
                        two(x, w.x_step, w.depth, w.block, weights, room, w.reading)
                        copy_floats(to + w.y_step, room + 64, count)
                        row += 1
                    else:
                        one(x, w.x_step, w.depth, w.block, weights, room, w.reading)
                    copy_floats(to, room, count)
                    row += 1
                panel += 1
        return 0

    return nbits


_Kind = tuple[int, bool, str]  # bits, whether there are zero points, and what numbers they are
_KINDS: list[_Kind] = [(bits, zeros, WHOLE) for bits in (2, 4, 8) for zeros in (False, True)]
_NARROW: list[_Kind] = [
    (bits, False, kind)
    for kind, bits in KINDS.items()
    if kind == "bfloat16" or (kind != WHOLE and converts_halves())
]


def _by_floats(kind: _Kind) -> Native:
    products = nbits_lanes.products(*kind)
    return _body([*products, products[0]], nbits_lanes.MANY, _SINGLE)


def _by_dots(bits: int, zeros: bool, planes: int, layout: Layout) -> Native:
    products = nbits_dots.products(bits, zeros, planes, layout)
    return _body(products, nbits_dots.MANY[planes], layout)


_FLOATS = {kind: _by_floats(kind) for kind in (*_KINDS, *_NARROW)}
_DOTS = {  # by the bytes of a number of x
    planes: {
        kind: _by_dots(*kind[:2], planes, LAYOUT) for kind in _KINDS if nbits_dots.has_dots(kind[0])
    }
    for planes in nbits_dots.MANY
}

# planes: from a row's heads to its bytes.
_DIGITS = Fields("x depth block plane heads rows_step planes")
_digits_of = _DIGITS.at


def _digits(bits: int, planes: int) -> Native:
    """Return the loop over rows of x that makes bytes of them."""
    digits = nbits_dots.digits(bits, planes)

    @native("body")
    def rows(block: Any, begin: int, end: int) -> int:
        w = _digits_of(block)
        for row in range(begin, end):
            heads = w.heads + row * w.rows_step
            digits(w.x + row * w.depth * 4, w.depth, w.block, w.plane, heads + w.planes, heads)
        return 0

    return rows


_BYTES = {
    (bits, planes): _digits(bits, planes)
    for planes, bodies in _DOTS.items()
    for bits in sorted({kind[0] for kind in bodies})
}


def _packed(kind: _Kind, together: int, w: Array, scales: Array, zeros: Sequence[Array]) -> Array:
    """Return weights (n, blocks, bytes) in panels: (groups, blocks, lines, together, 16) words."""
    bits, _, numbers = kind
    w, scales = held(w), held(scales)
    columns, blocks, nbytes = w.shape
    words = nbytes // 4
    groups = -(-columns // (together * _LANES))
    made = aligned_array((groups, blocks, words + 1 + len(zeros), together, _LANES), np.uint32)

    def place(line: int | slice, part: Array) -> None:
        full = np.zeros((groups * together * _LANES, *part.shape[1:]), np.uint32)
        full[:columns] = part
        apart = full.reshape(groups, together, _LANES, *part.shape[1:])
        made[:, :, line] = np.moveaxis(apart, (1, 2), (-2, -1))

    if numbers != WHOLE:
        scales = scales * factor_of(numbers)
    if numbers == "float8_e4m3fn":  # whose one code that is not a number halves have as a number
        scales[(w & 127 == 127).any(-1)] = np.nan
    place(slice(words), np.ascontiguousarray(w).view("<u4"))
    place(words, np.ascontiguousarray(scales).view(np.uint32))
    for each in zeros:
        shift = ((1 << (bits - 1)) - held(each)) * scales
        place(words + 1, np.ascontiguousarray(shift).view(np.uint32))
    return made


@variant("matmul_nbits", "dots", promises=True)
def dots(call: Call) -> Entry | None:
    """Return the entry of a product by sums of products of bytes, where processors have them."""
    planes = 1 if call.attributes["coarse"] else nbits_dots.PLANES
    return _product(call, _DOTS[planes], planes, LAYOUT)


@variant("matmul_nbits", "panels", promises=True)
def matmul_nbits(call: Call) -> Entry | None:
    """Return the entry of a product with constant weights of few bits."""
    return _product(call, _FLOATS)


def _product(
    call: Call, bodies: dict[_Kind, Native], planes: int = 0, layout: Layout = _SINGLE
) -> Entry | None:
    """Return the entry of a product. planes: the bytes that numbers of x become, 0: they do not."""
    (x, w, scales, *zeros), (y,) = call.inputs, call.outputs
    bits, numbers, depth = call.attributes["bits"], call.attributes["numbers"], x.shape[-1]
    kind = bits, bool(zeros), numbers
    body = bodies.get(kind)
    known = set(range(1, len(call.inputs))) <= call.constants
    if body is None or not known or not is_float32(x, scales, *zeros, y):
        return None
    if y.size == 0:
        return noop()
    step = _LANES if zeros else 32 // bits
    size = block_of(w.shape[2], call.attributes)
    if w.shape[2] % 4 or size % step or depth % step or not y.flags.c_contiguous:
        return None
    if planes and size > _LONGEST:
        return None
    entries: list[Entry | None] = []
    if not x.flags.c_contiguous:
        dense = aligned_array(x.shape, np.float32)
        entries.append(copy(dense, x, call.threads))
        x = dense
    others = scales, *zeros
    key = "nbits", kind, layout.together
    weights = packed(w, key, lambda w: _packed(kind, layout.together, w, scales, zeros), others)
    rows, columns, x_step = y.size // y.shape[-1], y.shape[-1], 4 * depth
    if planes:
        heads = -(-depth // size) * nbits_dots.HEAD
        plane = nbits_dots.plane_of(depth)
        made = aligned_array((rows, heads + planes * plane), np.uint8)
        x_step = made.strides[0]
        given = _DIGITS.pack(
            x=x, depth=depth, block=size, plane=plane, heads=made, rows_step=x_step, planes=heads
        )
        few = useful_threads(call.threads, 4 * x.nbytes)
        entries.append(parallel_for(_BYTES[bits, planes], given, rows, few))
        x = made
    threads = useful_threads(call.threads, weights.nbytes * max(1, rows // 8))
    block = _NBITS.pack(
        rows=rows,
        depth=depth,
        columns=columns,
        block=size,
        weights=weights,
        panel=weights[0].nbytes // layout.together,
        x=x,
        x_step=x_step,
        y=y,
        y_step=4 * columns,
        reading=reading_of(threads),
    )
    entries.append(parallel_for(body, block, len(weights), threads))
    return sequence(entries)
