"""Products with constant weights of few bits, which stay packed (`matmul_nbits`).

A file expresses weights of narrow types by casts, scales and zero points. Computed in advance, they
would be four or eight times the bytes that each run reads; packed, the kernel unpacks them. If a
session asks for it (`precision="int4"`), weights of wider types are rounded to few bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from soapstone.dtypes import BITS, WIDE
from soapstone.engine.lower.fold import Fold, Site
from soapstone.ir.by_extents import by_extents
from soapstone.ir.graph import Node
from soapstone.ir.ops.products.nbits import KINDS, WHOLE
from soapstone.kernels.entry import BFLOAT16
from soapstone.records import dataclass

_STEP = 16  # what kernels need depth and blocks to be multiples of
_BLOCK = 128  # numbers of a block where the file has one scale for a column, or for all
_FEW = 4  # rows, as of products that read float32 weights at memory's speed
_FINE = 32  # of a block where they are rounded here
# What is added to integers so that they are codes, which begin with 0.
_SHIFTS = {f"int{bits}": 1 << (bits - 1) for bits in (2, 4, 8)}
_SHIFTS |= {f"u{name}": 0 for name in _SHIFTS}


@dataclass(frozen=True)
class _Weights:
    """Constant weights of few bits, with their scales and zero points.

    Attributes:
        numbers: of the narrow type. axis: of them, along k.
        scale, zero: values that broadcast over them, and their axis along k; None if there is none.
    """

    numbers: str
    axis: int
    scale: tuple[str, int] | None = None
    zero: tuple[str, int] | None = None


def _weights(site: Site, value: str, axis: int) -> _Weights | None:
    """Return the parts of a matrix of weights; None if it is not of few bits.

    axis: of the matrix, along k.
    """
    maker = site.builder.maker(value)
    if maker is None:
        return None
    if maker.operator == "transpose" and maker.attributes["permutation"] == (1, 0):
        return _weights(site, maker.inputs[0], 1 - axis)
    if maker.operator == "dequantize" and _is_narrow(site, maker.inputs[0]):
        numbers, scale, zero = maker.inputs
        return _Weights(numbers, axis, (scale, axis), (zero, axis))
    if maker.operator == "cast" and _is_narrow(site, maker.inputs[0]):
        return _Weights(maker.inputs[0], axis)
    if maker.operator == "sub":
        inner = _weights(site, maker.inputs[0], axis)
        if inner is None or inner.scale is not None or inner.zero is not None:
            return None
        return replace(inner, zero=(_narrow(site, maker.inputs[1]), axis))
    if maker.operator == "mul":
        for real, scale in (maker.inputs, maker.inputs[::-1]):
            inner = _weights(site, real, axis)
            if inner is not None and inner.scale is None:
                return replace(inner, scale=(scale, axis))
    return None


def _is_narrow(site: Site, value: str) -> bool:
    dtype = site.builder.spec(value).dtype
    return dtype in _SHIFTS or dtype in KINDS


def _narrow(site: Site, value: str) -> str:
    """Return the value of a narrow type that a value is cast from, or the value itself."""
    maker = site.builder.maker(value)
    if maker is None or maker.operator != "cast" or not _is_narrow(site, maker.inputs[0]):
        return value
    return maker.inputs[0]


def _block(site: Site, value: str, axis: int) -> tuple[str, int] | None:
    """Return the value whose elements are repeated along an axis to make this one, and how often.

    Its axis is followed by an axis of extent 1. None if it is not made so.
    """
    maker = site.builder.maker(value)
    if maker is not None and maker.operator == "slice":
        if any(maker.attributes["starts"]) or any(s != 1 for s in maker.attributes["steps"]):
            return None
        maker = site.builder.maker(maker.inputs[0])
    wide = maker and maker.operator == "reshape" and site.builder.maker(maker.inputs[0])
    if not wide or wide.operator != "broadcast":
        return None
    before, after = (site.builder.spec(name).shape for name in (wide.inputs[0], wide.outputs[0]))
    if len(before) != 3 or before != (*after[: axis + 1], 1, *after[axis + 2 :]):
        return None
    return wide.inputs[0], after[axis + 1]


def _by_blocks(site: Site, value: str, axis: int, shape: tuple[int, int], block: int) -> str | None:
    """Return a scale or zero point as float32 (n, blocks), or None if it has no such form.

    axis: of the weights, along k. block: the number of elements along k that share one number.
    """
    found = _block(site, value, axis)
    if found:
        if found[1] != block:
            return None
        extents = site.builder.spec(found[0]).shape
        flat = tuple(extent for place, extent in enumerate(extents) if place != axis + 1)
        rows = site.emit("reshape", found[0], shape=flat)
        if axis == 0:
            rows = site.emit("transpose", rows, permutation=(1, 0))
    else:
        extents = site.builder.spec(value).shape
        extents = (1,) * (2 - len(extents)) + extents
        if len(extents) != 2 or extents[axis] != 1:
            return None
        column = site.emit("reshape", value, shape=(extents[1 - axis], 1))
        rows = site.emit("broadcast", column, shape=shape)
    if site.builder.spec(rows).dtype == "float32":
        return rows
    return site.emit("cast", rows, to="float32")


def _is_zero(site: Site, value: str) -> bool:
    """Return whether a constant is known to be 0 everywhere."""
    maker = site.builder.maker(value)
    while maker is not None and maker.operator in ("cast", "reshape", "broadcast", "slice"):
        value = maker.inputs[0]
        maker = site.builder.maker(value)
    array = site.constants.get(value)
    return array is not None and bool((np.asarray(array) == 0).all())


def _packed(site: Site, node: Node, halves: bool) -> str | None:
    """Replace a product with weights of few bits by one with packed weights.

    halves: whether a few rows read sixteen bits, which takes half the time; more rows read float32.
    """
    x, w = node.inputs[:2]
    found = _weights(site, w, 0) if w in site.fixed and x not in site.fixed else None
    if found is None or site.builder.spec(x).dtype != "float32":
        return None
    depth, columns = site.builder.spec(w).shape
    numbers = site.builder.spec(found.numbers)
    kind = numbers.dtype if numbers.dtype in KINDS else WHOLE
    bits = KINDS[kind] or BITS.get(numbers.dtype, 8)
    if (bits == 16) != halves:
        return None
    if halves and not by_extents(_few, site.builder.spec(x).size, depth):
        return None
    repeated = found.scale and _block(site, *found.scale)
    block = repeated[1] if repeated else min(depth if halves else _BLOCK, depth)
    along = (columns, depth) if found.axis else (depth, columns)
    if not depth or depth % _STEP or block % _STEP or numbers.shape != along:
        return None
    shape = columns, -(-depth // block)
    one = site.emit("full", shape=(), value=1.0, dtype="float32")
    parts = [_by_blocks(site, *(found.scale or (one, 0)), shape, block)]
    shift = _SHIFTS.get(numbers.dtype, 0)
    if found.zero is not None and not _is_zero(site, found.zero[0]):
        parts.append(_by_blocks(site, *found.zero, shape, block))
    elif kind == WHOLE and shift != 1 << (bits - 1):
        parts.append(site.emit("full", shape=shape, value=0.0, dtype="float32"))
    known = [part for part in parts if part and site.builder.spec(part).shape == shape]
    if len(known) < len(parts) or (kind != WHOLE and len(parts) > 1):
        return None
    known[1:] = [site.emit("affine", each, shift=float(shift)) for each in known[1:]]
    values, wide = found.numbers, WIDE.get(numbers.dtype, numbers.dtype)
    if wide != numbers.dtype:
        values = site.emit("cast", values, to=wide)
    if found.axis == 0:
        values = site.emit("transpose", values, permutation=(1, 0))
    at = {"bits": bits, "numbers": kind}
    codes = site.emit("pack_nbits", values, block=block, shift=shift, **at)
    return _product(site, node, codes, known, at)


def _product(
    site: Site, node: Node, codes: str, parts: Sequence[str], attributes: Mapping[str, Any]
) -> str:
    """Emit a product with packed weights, not `linear`. parts: scales, perhaps zero points."""
    x, _, *bias = node.inputs
    attributes = {**attributes, "zeros": len(parts) > 1}
    y = site.emit("matmul_nbits", x, codes, *parts, name=node.name, **attributes)
    if bias:
        y = site.emit("add", y, bias[0], name=f"{node.name}.biased")
    if node.attributes["activation"] is not None:
        y = site.emit(node.attributes["activation"], y)
    return y


def _rounded(site: Site, node: Node, bits: int) -> str | None:
    """Replace the weights of a product by the nearest of few bits, with a scale for each block.

    The number of a block that is farthest from zero becomes the lowest integer, whose negative does
    not exist.
    """
    x, w = node.inputs[:2]
    if w not in site.fixed or x in site.fixed or site.builder.spec(w).dtype != "float32":
        return None
    depth, columns = site.builder.spec(w).shape
    block = _FINE if depth % _FINE == 0 else _STEP
    if depth % block or not depth * columns:
        return None
    emit, shape, lowest = site.emit, (depth // block, columns), -(1 << (bits - 1))
    blocks = emit("reshape", w, shape=(shape[0], block, columns))
    high, low = (
        emit(each, blocks, axes=(1,), keepdims=True) for each in ("reduce_max", "reduce_min")
    )
    above = emit("greater", high, emit("neg", low))
    scales = emit("affine", emit("where", above, high, low), scale=1 / lowest)
    none, one = (emit("full", shape=(), value=each, dtype="float32") for each in (0.0, 1.0))
    scales = emit("where", emit("equal", scales, none), one, scales)
    whole = emit("round", emit("div", blocks, scales))
    whole = emit("cast", emit("clip", whole, low=float(lowest), high=-lowest - 1.0), to="int8")
    whole = emit("transpose", emit("reshape", whole, shape=(depth, columns)), permutation=(1, 0))
    codes = emit("pack_nbits", whole, bits=bits, block=block, shift=-lowest)
    parts = emit("transpose", emit("reshape", scales, shape=shape), permutation=(1, 0))
    return _product(site, node, codes, [parts], {"bits": bits})


def _few(size: int, depth: int) -> bool:
    """Return whether an operand has few rows, given its number of elements and their depth."""
    return 0 < size <= _FEW * depth


def _halved(site: Site, node: Node) -> str | None:
    """Replace a product of a few rows by one of bfloat16 operands, with weights stored so."""
    x, w, *bias = node.inputs
    given, kept = site.builder.spec(x), site.builder.spec(w)
    if w not in site.fixed or x in site.fixed or {given.dtype, kept.dtype} != {"float32"}:
        return None
    depth, columns = kept.shape
    if depth % _STEP or not columns or not by_extents(_few, given.size, depth):
        return None
    half = {"bits": KINDS[BFLOAT16], "numbers": BFLOAT16}
    values = site.emit("transpose", w, permutation=(1, 0))
    codes = site.emit("pack_nbits", values, block=depth, **half)  # which rounds them
    for to in (BFLOAT16, "float32"):
        x = site.emit("cast", x, to=to)
    one = site.emit("full", shape=(columns, 1), value=1.0, dtype="float32")
    return _product(site, replace(node, inputs=(x, w, *bias)), codes, [one], half)


IN_FEW_BITS = Fold("pack_weights", ("linear",), partial(_packed, halves=False))
IN_HALVES = Fold("pack_halves", ("linear",), partial(_packed, halves=True))
ROUNDED_ROWS = Fold("round_rows", ("linear",), _halved)
# By the precision of sessions whose weights alone are rounded.
ROUNDING = {
    f"int{bits}": Fold("round_weights", ("linear",), partial(_rounded, bits=bits))
    for bits in (4, 8)
}
