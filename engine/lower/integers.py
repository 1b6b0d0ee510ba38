"""Products of bytes: quantised weights and operands are multiplied as they are stored.

A file says that values are bytes by `dequantize` where they are read and `quantize` where they are
made. If kernels multiply bytes, a product of two dequantised operands becomes one of bytes; the
steps after it are fused later (`fuse_epilogues`). Operators that only move elements move bytes.
Otherwise products of bytes, which some files have, become products of real numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.dtypes import BYTES, exact_sums
from soapstone.engine.lower.constant_vectors import vector_over
from soapstone.engine.lower.fold import CHANNELS, Fold, Site
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import having, operator
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.registry import variants

_PRODUCTS = {name: f"quantized_{name}" for name in CHANNELS}
_OF_BYTES = frozenset(("quantize", "dequantize", "byte_scale", *_PRODUCTS.values()))
_MOVES = ("reshape", "transpose", "slice", *having("chooses"))


def has_bytes(graph: Graph) -> bool:
    """Return whether a graph says of any values that they are bytes."""
    return any(node.operator in _OF_BYTES for node in graph.nodes)


def multiplies_bytes(processor: str) -> bool:
    """Return whether a kind of processor has kernels for products of bytes."""
    return bool(variants("quantized_linear", processor))


def _stays_real(node: Node) -> bool:
    """Return whether a product stays one of real numbers where others multiply bytes.

    These are grouped convolutions, unless one instruction sums four products.
    """
    several = node.attributes.get("groups", 1) > 1
    return several and not (onednn.available() and onednn.multiplies_bytes())


def _bytes_of(site: Site, value: str) -> tuple[str, str, str] | None:
    """Return the bytes, scale and zero point of a dequantised value, or None."""
    maker = site.builder.maker(value)
    if maker is None or maker.operator != "dequantize":
        return None
    source, scale, zero = maker.inputs
    known = site.builder.spec(source).dtype in BYTES and site.builder.spec(scale).dtype
    return (source, scale, zero) if known == "float32" else None


def _is_number(site: Site, value: str) -> bool:
    return site.builder.spec(value).size == 1


def _number(site: Site, value: str) -> str:
    return value if site.builder.spec(value).rank == 0 else site.emit("reshape", value, shape=())


def _weights(site: Site, value: str, axis: int, centred: bool) -> tuple[str, str, int] | None:
    """Return constant weights as signed bytes, their scales as a vector along an axis, their zero.

    centred: whether the zero point must be 0.
    """
    if value not in site.fixed:
        return None
    maker = site.builder.maker(value)
    rank = site.builder.spec(value).rank
    axis %= rank
    if maker is not None and maker.operator == "transpose":
        order = maker.attributes["permutation"]
        inner = _weights(site, maker.inputs[0], order[axis], centred)
        return inner and (site.emit("transpose", inner[0], permutation=order), *inner[1:])
    found = _bytes_of(site, value)
    if found is None:
        return None
    source, scale, zero = found
    contents, off = site.constants.get(source), site.constants.get(zero)
    if contents is None or off is None:
        return None
    extents = (1,) * (rank - off.ndim) + site.builder.spec(scale).shape
    extents = (1,) * (rank - len(extents)) + extents
    channels = contents.shape[axis]
    if any(extent != 1 for i, extent in enumerate(extents) if i != axis):
        return None
    if extents[axis] == 1:
        vector = site.emit("broadcast", _number(site, scale), shape=(channels,))
    else:
        vector = site.emit("reshape", scale, shape=(channels,))
    left = 0
    if contents.dtype != np.int8 or off.any():
        shifted = contents.astype(np.int16) - off
        fits = not shifted.size or -128 <= shifted.min() <= shifted.max() < 128
        if not fits and (centred or off.size != 1):
            return None
        if fits or contents.dtype != np.int8:
            by = site.emit("cast", zero, to="int16")
            if not fits:
                left = int(off.reshape(())) - 128
                by = site.emit("full", shape=(), value=128, dtype="int16")
            wide = site.emit("cast", source, to="int16")
            source = site.emit("cast", site.emit("sub", wide, by), to="int8")
        else:
            left = int(off.reshape(()))
    return source, vector, left


def _product(site: Site, node: Node) -> str | None:
    """Replace a product of dequantised operands, one constant, by a product of bytes."""
    x, w, *bias = node.inputs
    left = _bytes_of(site, x)
    if left is None or x in site.fixed or node.attributes["activation"] is not None:
        return None
    if _stays_real(node):
        return None
    source, scale, zero = left
    product = operator(_PRODUCTS[node.operator])
    shifts = "w_zero" in product.attributes  # whether what the weights call 0 may be another number
    right = _weights(site, w, CHANNELS[node.operator][0], not shifts)
    if right is None or not (_is_number(site, scale) and _is_number(site, zero)):
        return None
    scales = site.emit("mul", right[1], _number(site, scale))
    inputs = (source, right[0], _number(site, zero), scales, *bias)
    at = {**node.attributes, "bias": bool(bias)} | ({"w_zero": right[2]} if shifts else {})
    del at["activation"]
    return site.emit(product.name, *inputs, name=node.name, **at)


def _unsigned(site: Site, node: Node) -> str | None:
    """Signed bytes that are rounded to be read as numbers are unsigned ones of a zero 128 higher.

    Instructions multiply unsigned bytes by signed ones, which are the weights: a product would have
    to shift others each time that it reads them.
    """
    source, scale, _ = node.inputs
    maker = site.builder.maker(source)
    if maker is None or maker.operator != "quantize" or maker.attributes["to"] != "int8":
        return None
    zeros = [_contents(site, each.inputs[2]) for each in (maker, node)]
    if source in site.fixed or not site.readers.get(source) or None in zeros:
        return None
    first, second = (
        site.emit("full", shape=(), value=zero[1] + 128, dtype="uint8") for zero in zeros if zero
    )
    unsigned = f"{source}.unsigned"
    if not site.builder.has(unsigned):
        inputs = (*maker.inputs[:2], first)
        site.builder.apply("quantize", *inputs, name=unsigned, sources=maker.work_of, to="uint8")
    return site.emit("dequantize", unsigned, scale, second, name=node.name)


def _moved(site: Site, node: Node) -> str | None:
    """Move the elements of a dequantised value before it is dequantised."""
    found = _bytes_of(site, node.inputs[0])
    if found is None or node.inputs[0] in site.fixed or node.attributes.get("indices"):
        return None
    source, scale, zero = found
    if not (_is_number(site, scale) and _is_number(site, zero)):
        return None
    moved = site.changed(node, [source])
    return _meaning(site, node, moved, scale, zero)


def _meaning(site: Site, node: Node, value: str, scale: str, zero: str) -> str:
    numbers = _number(site, scale), _number(site, zero)
    return site.emit("dequantize", value, *numbers, name=f"{node.name}.real")


def _same(site: Site, first: Sequence[str], second: Sequence[str]) -> bool:
    """Return whether scales and zero points are equal numbers."""

    def equal(a: str, b: str) -> bool:
        if a == b:
            return True
        left, right = _contents(site, a), _contents(site, b)
        return left is not None and right is not None and left == right

    return all(equal(a, b) for a, b in zip(first, second))


def _contents(site: Site, value: str) -> tuple[str, float] | None:
    """Return the type and value of a constant of one number, or None."""
    maker = site.builder.maker(value)
    if maker is not None and maker.operator == "reshape":
        return _contents(site, maker.inputs[0])
    if maker is not None and maker.operator == "full" and site.builder.spec(value).size == 1:
        return site.builder.spec(value).dtype, float(maker.attributes["value"])
    array = site.constants.get(value)
    if array is None or array.size != 1:
        return None
    return array.dtype.name, float(array.reshape(()))


def _concat(site: Site, node: Node) -> str | None:
    """Join parts that are dequantised by one scale as bytes."""
    parts = [_bytes_of(site, name) for name in node.inputs]
    first = parts[0]
    if first is None or not (_is_number(site, first[1]) and _is_number(site, first[2])):
        return None
    sources = []
    for part in parts:
        if part is None or not _same(site, part[1:], first[1:]):
            return None
        sources.append(part[0])
    return _meaning(site, node, site.changed(node, sources), *first[1:])


def _rounded(site: Site, node: Node) -> str | None:
    """Remove a quantisation by the scale that bytes were read with; round parts, then join."""
    x, *numbers = node.inputs
    found = _bytes_of(site, x)
    if found is not None:
        return found[0] if _same(site, found[1:], numbers) else None
    joined = site.builder.maker(x)
    if joined is None or joined.spec.view != "concat" or site.readers.get(x) != 1:
        return None
    if not all(_is_number(site, each) for each in numbers):
        return None
    parts = []
    for part in joined.inputs:
        before = _bytes_of(site, part)
        if before is not None and _same(site, before[1:], numbers):
            parts.append(before[0])
        else:
            parts.append(site.changed(node, [part, *numbers]))
    return site.changed(joined, parts)


def _summed(site: Site, node: Node) -> str | None:
    """Let a product make its sums real, if they become real at once."""
    host = site.only(node.inputs[0], *_QUANTIZED)
    if host is None or (host.attributes["to"], node.attributes["to"]) != ("int32", "float32"):
        return None
    channels = site.builder.spec(host.inputs[1]).shape[CHANNELS[_QUANTIZED[host.operator]][0]]
    ones = site.emit("full", shape=(channels,), value=1.0, dtype="float32")
    return site.changed(host, [*host.inputs, ones], to="float")


def _scaled(site: Site, node: Node) -> str | None:
    """Move a factor after a product of bytes, a number or one a channel, into the product."""
    for value, other in (node.inputs, node.inputs[::-1]):
        host = site.only(value, *_QUANTIZED)
        if host is None or host.attributes["to"] == "int32" or host.attributes["bias"]:
            continue
        spec, factor = site.builder.spec(value), site.builder.spec(other)
        axis = CHANNELS[_QUANTIZED[host.operator]][1] % spec.rank
        extents = (1,) * (spec.rank - factor.rank) + factor.shape
        if len(extents) > spec.rank or any(e != 1 for i, e in enumerate(extents) if i != axis):
            continue
        vector = site.emit("reshape", other, shape=(factor.size,))
        scales = site.emit("mul", host.inputs[3], vector)
        return site.changed(host, [*host.inputs[:3], scales])
    return None


def _biased(site: Site, node: Node) -> str | None:
    """Move a constant that is added to the channels of a product of bytes into the product."""
    for value, other in (node.inputs, node.inputs[::-1]):
        host = site.only(value, *_QUANTIZED)
        if host is None or host.attributes["to"] == "int32" or host.attributes["bias"]:
            continue
        spec = site.builder.spec(value)
        if other not in site.fixed or site.builder.spec(other).rank > spec.rank:
            continue
        axis = CHANNELS[_QUANTIZED[host.operator]][1] % spec.rank
        vector = vector_over(site, other, spec.shape, axis)
        if vector is not None:
            return site.changed(host, [*host.inputs, vector], bias=True)
    return None


def _real(site: Site, node: Node) -> str | None:
    """Replace a product of bytes by a floating-point product of the same integers."""
    name = _QUANTIZED[node.operator]
    x, w, zero, *vectors = node.inputs
    weights, (of_weights, of_result) = site.builder.spec(w), CHANNELS[name]
    terms = weights.size // max(1, weights.shape[of_weights])
    whole = node.attributes["to"] == "int32"
    real = site.builder.spec(vectors[0]).dtype if vectors else "float32"
    if whole and exact_sums(terms) == "float64":
        real = "float64"
    left, right, off = (site.emit("cast", each, to=real) for each in (x, w, zero))
    at = {n: v for n, v in node.attributes.items() if n not in ("to", "bias", "w_zero")}
    if node.attributes.get("w_zero"):
        right = site.emit("affine", right, shift=-float(node.attributes["w_zero"]))
    bias = vectors[1:]
    if vectors and vectors[0] in site.fixed:
        right = site.emit("mul", right, site.along(vectors[0], of_weights, weights.rank))
        vectors = []
    centred = site.emit("sub", left, off)
    made = site.emit(
        name, centred, right, *(() if vectors else bias), bias=bool(bias) and not vectors, **at
    )
    if whole:
        return site.emit("cast", made, name=node.name, to="int32")
    for step, vector in zip(("mul", "add"), vectors):
        made = site.emit(step, made, site.along(vector, of_result, site.builder.spec(made).rank))
    return made


def _apart(site: Site, node: Node) -> str | None:
    """Replace a product of bytes that no kernel serves by a floating-point product."""
    return _real(site, node) if _stays_real(node) else None


def _scale(site: Site, node: Node) -> tuple[str, str]:
    """Compute the scale and zero point of a range from its least and greatest values."""
    x, emit = node.inputs[0], site.emit
    spec = site.builder.spec(x)
    axes, none = tuple(range(spec.rank)), emit("full", shape=(), value=0.0, dtype=spec.dtype)
    low = emit("minimum", emit("reduce_min", x, axes=axes, keepdims=False), none)
    high = emit("maximum", emit("reduce_max", x, axes=axes, keepdims=False), none)
    span = emit("sub", high, low)
    one = emit("full", shape=(), value=1.0, dtype=spec.dtype)
    # A division by a number is a product with its inverse, which is exact enough in double.
    wide = emit("affine", emit("cast", span, to="float64"), scale=1 / 255)
    step = emit("cast", wide, to=spec.dtype)
    scale = emit("where", emit("greater", span, none), step, one)
    place = emit("round", emit("clip", emit("div", emit("neg", low), scale), low=0.0, high=255.0))
    return scale, emit("cast", place, to="uint8")


_QUANTIZED = {quantized: name for name, quantized in _PRODUCTS.items()}

IN_BYTES = (
    Fold("read_unsigned", ("dequantize",), _unsigned),
    Fold("multiply_groups", tuple(_QUANTIZED), _apart),
    Fold("move_bytes", _MOVES, _moved),
    Fold("join_bytes", ("concat",), _concat),
    Fold("multiply_bytes", tuple(_PRODUCTS), _product),
    Fold("scale_sums", ("cast",), _summed),
    Fold("scale_products", ("mul",), _scaled),
    Fold("bias_products", ("add",), _biased),
    Fold("round_parts", ("quantize",), _rounded),
)
IN_REAL = (
    Fold("multiply_reals", tuple(_QUANTIZED), _real),
    Fold("open_scales", ("byte_scale",), _scale),
)
