"""Products with weights of few bits: unpacked as they are read for a few rows, before for many.

Of a few rows, such as a decoder's, the weights' bytes are what there is to read: a warp or a block
folds a column's bytes. Of many rows it is the sums, which tiles in shared memory share: then the
weights are unpacked into memory first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.ir.ops.products.nbits import WHOLE
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.movement.copies import copy, fill
from soapstone.kernels.cuda.products.matmul import Product, bound
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

FEW = 8  # rows whose sums cost less than unpacked weights


def _unpacked(text: Text, part: int, bits: int, values: Sequence[Value], kind: str) -> Value:
    """Return one of a byte's numbers, of values byte, scale and maybe zero point."""
    byte, scale, *zero = (value.name for value in values)
    number = text.set(f"{kind}(({byte} >> {part * bits}) & {(1 << bits) - 1})", kind).name
    middle = zero[0] if zero else literal(1 << (bits - 1), kind)
    return text.set(f"({number} - {middle}) * {scale}", kind)


def _nth(view: View, n: int) -> View:
    """Return the elements of one index of the last axis."""
    return view.through(lambda a: a[..., n])


@variant("matmul_nbits", "numba", processor="cuda")
def matmul_nbits(call: Call) -> DeviceEntry | None:
    """Return the entry of x times the transpose of packed weights."""
    (x, w, *parts), (y,) = views(call)
    bits, kind = call.attributes["bits"], wide(y.dtype)
    if call.attributes["numbers"] != WHOLE:
        return None
    if y.size == 0:
        return DeviceEntry(())
    columns, blocks, nbytes = w.shape
    each = 8 // bits  # numbers of a byte
    depth, padded = x.shape[-1], blocks * nbytes * each
    rows = math.prod(x.shape[:-1])
    packed = [w, *(p.reshaped((columns, blocks, 1)) for p in parts)]
    if rows > FEW:
        weights = room((columns, padded), kind, call.outputs[0])
        grid = weights.reshaped((columns, blocks, nbytes, each))

        def unpack(text: Text, values: Sequence[Value]) -> list[Value]:
            return [_unpacked(text, n, bits, values, kind) for n in range(each)]

        numbers = [_nth(grid, n) for n in range(each)]
        first = pointwise(unpack, packed, numbers)
        given, flat = weights.cut(1, 0, depth), (x, y)
        if len(x.shape) > 2:
            flat = (x.reshaped((rows, depth)), y.reshaped((rows, columns)))
        at = {"transpose_a": False, "transpose_b": True}
        return sequence((first, bound(Product("matmul", at, (flat[0], given), flat[1]))))
    before = []
    if depth != padded:  # the last block's numbers without an element meet zeros
        whole = room((*x.shape[:-1], padded), x.dtype, call.outputs[0])
        before = [fill(whole, 0), copy(x, whole.cut(len(x.shape) - 1, 0, depth))]
        x = whole
    lead = x.shape[:-1]
    split = x.reshaped((*lead, 1, blocks, nbytes, each))
    elements = [_nth(split, n) for n in range(each)]

    def products(text: Text, values: Sequence[Value]) -> list[Value]:
        of_x, rest = values[:each], values[each:]
        total = None
        for n, one in enumerate(of_x):
            made = f"{one.name} * {_unpacked(text, n, bits, rest, kind).name}"
            total = text.set(made if total is None else f"{total.name} + {made}", kind)
        assert total is not None
        return [total]

    axes = (len(lead) + 1, len(lead) + 2)
    made = fold([*elements, *packed], axes, [("sum", kind)], [y], products)
    return sequence((*before, made))
