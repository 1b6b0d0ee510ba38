"""Operators of com.microsoft that tools of ONNX Runtime write into decoders and transformers.

Those that only join what ONNX spells out are what they join; where ONNX Runtime's own and ONNX's
differ, it is ONNX Runtime's that counts. Weights of few bits stay packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.elementwise import softmax_from
from soapstone.frontend.onnx.rules.products import product, scaled
from soapstone.frontend.onnx.rules.quantized import spread
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule
from soapstone.ir.tensor import Array


# ------------------------------------------------------------------------------- element by element
@rule("Gelu", "BiasGelu", domain=MICROSOFT)
def gelu(n: Call) -> Value:
    x = n.value(0)
    return n("gelu", n("add", x, n.value(1)) if n.has(1) else x)


@rule("FastGelu", domain=MICROSOFT)
def fast_gelu(n: Call) -> Value:
    x = n.value(0)
    return n("gelu", n("add", x, n.value(1)) if n.has(1) else x, approximate="tanh")


@rule("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(n: Call) -> Value:
    """The softmax over all axes from one on, of x plus a bias that broadcasts as in a sum."""
    x, bias = n.value(0), n.value(1)
    n.attribute("is_inner_broadcast")  # by which axes it is repeated, which its shape says
    total = n("add", x, bias)
    if total.shape != x.shape:
        raise OnnxError(f"bias {bias.spec} found; what broadcasts to {x.spec} needed")
    return softmax_from(n, total, n.axis(x.rank, 1), whole=True)


@rule("QuickGelu", domain=MICROSOFT)
def quick_gelu(n: Call) -> Value:
    x = n.value(0)
    return n("mul", x, n("sigmoid", n("affine", x, scale=n.attribute("alpha", 1.702))))


@rule("GatedAdd", domain=MICROSOFT)
def gated_add(n: Call) -> Value:
    return n("add", n.value(0), n("mul", n.value(1), n.value(2)))


# -------------------------------------------------------------------------------------------- norms
@rule("SimplifiedLayerNormalization")
@rule("SimplifiedLayerNormalization", domain=MICROSOFT)
def simplified_layer_normalization(n: Call) -> Any:
    x, scale = n.value(0), n.value(1)
    axis = n.axis(x.rank, -1)
    if n.attribute("stash_type", 1) != 1:
        raise UnsupportedError("attribute 'stash_type' other than 1 is not supported")
    return _rms(n, x, scale, axis, 1e-5)


def _rms(n: Call, x: Value, scale: Value, axis: int, least: float) -> tuple[Value, ...]:
    """Return x over its root mean square times the scale, and one over that.

    least: added to the mean square, unless the node says how much.
    """
    epsilon = n.attribute("epsilon", least)
    if scale.shape != x.shape[axis:]:
        raise OnnxError(f"scale {scale.spec} found; shape {x.shape[axis:]} needed")
    wide = n.cast(x, "float32") if x.spec.is_half else x
    made = n.all("rms_norm", wide, n.cast(scale, wide.dtype), axis=axis - x.rank, epsilon=epsilon)
    column = (*x.shape[:axis], *(1,) * (x.rank - axis))
    rest = [n.reshape(n.cast(value, "float32"), column) for value in made[1:]]
    return (n.cast(made[0], x.dtype), *rest)


@rule("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(n: Call) -> Value:
    """x over the root mean square of each group of elements, times a scale and a bent gate."""
    x, scale, gate = n.value(0), n.value(1), n.value(2)
    kind = n.text("activation", "silu", ("silu", "swish", "sigmoid"))
    if gate.shape != x.shape:
        raise OnnxError(f"gate {gate.spec} found; shape {x.shape} needed")
    y = _in_groups(n, x, scale.spec.size, scale, n.attribute("epsilon", 1e-5))
    bent = n("sigmoid" if kind == "sigmoid" else "silu", n.cast(gate, y.dtype))
    return n.cast(n("mul", y, bent), x.dtype)


@rule("BranchwiseRMSNorm", domain=MICROSOFT)
def branchwise_rms_norm(n: Call) -> Value:
    x, scale, branches = n.value(0), n.maybe(1), n.attribute("num_branches", 0)
    width = x.shape[-1] // branches if branches > 0 else x.shape[-1]
    whole = scale is not None and scale.spec.size != width
    y = _in_groups(n, x, width, None if whole else scale, n.attribute("epsilon", 1e-5))
    if whole and scale is not None:
        last = x.shape[-1:] if branches > 0 else x.shape[-2:]
        y = n("mul", y, n.cast(n.reshape(scale, last), y.dtype))
    return n.cast(y, x.dtype)


def _in_groups(n: Call, x: Value, width: int, scale: Value | None, epsilon: float) -> Value:
    """Return groups of so many elements of x over their root mean square, in float32."""
    if width < 1 or x.shape[-1] % width:
        raise OnnxError(f"groups of {width} elements found in {x.spec}")
    wide = n.reshape(n.cast(x, "float32"), (x.spec.size // width, width))
    if scale is None:
        scale = n.known(np.ones(width, np.float32))
    scale = n.cast(n.reshape(scale, (width,)), "float32")
    return n.reshape(n("rms_norm", wide, scale, axis=-1, epsilon=epsilon), x.shape)


@rule("ScaledSiLU", domain=MICROSOFT)
def scaled_silu(n: Call) -> Value:
    x, scale, alpha = n.value(0), n.maybe(1), n.attribute("alpha", 1.0)
    if scale is None:
        return n("silu", n("affine", x, scale=alpha))
    return n("silu", n("mul", x, n.cast(n.reshape(scale, ()), x.dtype)))


@rule("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(n: Call) -> Any:
    x, total = _skipped(n, 3)
    made = _rms(n, total, n.value(2), x.rank - 1, 1e-12)
    return [made[0], None, made[1] if len(made) > 1 else None, total]


@rule("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(n: Call) -> Any:
    _, total = _skipped(n, 4)
    scale, shift = n.value(2), n.maybe(3)
    if shift is None:
        shift = n.known(np.zeros(scale.shape), scale.dtype)
    made = n.all("layer_norm", total, scale, shift, axis=-1, epsilon=n.attribute("epsilon", 1e-12))
    column = (*total.shape[:-1], 1)
    return [made[0], *(n.reshape(value, column) for value in made[1:]), total]


def _skipped(n: Call, bias: int) -> tuple[Value, Value]:
    """Return x, and its sum with what skipped a layer and maybe a bias."""
    x, skip = n.value(0), n.value(1)
    total = n("add", x, skip)
    if total.shape != x.shape:
        raise OnnxError(f"skip {skip.spec} found; what broadcasts to {x.spec} needed")
    return x, n("add", total, n.value(bias)) if n.has(bias) else total


# ----------------------------------------------------------------------------------------- products
@rule("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_matmul(n: Call) -> Value:
    a, b = (
        _batched(n, x) if n.attribute(name, 0) and x.rank > 2 else x
        for name, x in (("transBatchA", n.value(0)), ("transBatchB", n.value(1)))
    )
    a, b = (
        _swapped(n, x) if n.attribute(name, 0) and x.rank > 1 else x
        for name, x in (("transA", a), ("transB", b))
    )
    return scaled(n, product(n, a, b), n.attribute("alpha", 1.0))


def _batched(n: Call, x: Value) -> Value:
    """Return x (rows, batch, …, columns) with its rows before its columns."""
    return n.transpose(x, (*range(1, x.rank - 1), 0, x.rank - 1))


def _swapped(n: Call, x: Value) -> Value:
    return n.transpose(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


_IN_BYTES = 4  # the level of accuracy that numbers of eight bits have


@rule("MatMulNBits", domain=MICROSOFT)
def matmul_nbits(n: Call) -> Value:
    x, w = n.value(0), n.value(1)
    depth, columns = n.attribute("K"), n.attribute("N")
    bits, size = n.attribute("bits", 4), n.attribute("block_size")
    if n.attribute("weight_prepacked", 0):
        raise UnsupportedError("attribute 'weight_prepacked' other than 0 is not supported")
    if bits not in (2, 4, 8) or w.dtype != "uint8":
        raise UnsupportedError(f"{bits} bits in {w.dtype} found; 2, 4 or 8 in uint8 are supported")
    if not size or size * bits % 8 or not depth or not columns or x.shape[-1:] != (depth,):
        raise OnnxError(f"K {depth}, N {columns} and block_size {size} do not fit input {x.spec}")
    blocks = -(-depth // size)
    wide = n.cast(x, "float32")
    if n.has(4):
        order = _order(n, n.array(4), depth, size)
        wide = n("gather", wide, n.known(order), axis=x.rank - 1)
        w = n.once(_reordered, w, n.known(order), bits, columns)
    parts = [n.reshape(w, (columns, blocks, size * bits // 8))]
    parts.append(n.cast(n.reshape(n.value(2), (columns, blocks)), "float32"))
    zeros = n.maybe(3)
    if zeros is not None:
        if zeros.dtype == "uint8":
            zeros = unpacked(n, zeros, bits, columns, blocks)
        parts.append(n.cast(n.reshape(zeros, (columns, blocks)), "float32"))
    coarse = n.attribute("accuracy_level", 0) == _IN_BYTES
    y = n("matmul_nbits", wide, *parts, bits=bits, zeros=zeros is not None, coarse=coarse)
    if n.has(5):
        y = n("add", y, n.cast(n.value(5), "float32"))
    return n.cast(y, x.dtype)


def _order(n: Call, blocks: Array, depth: int, size: int) -> Array:
    """Return the numbers of a column in the order of the blocks that they are of."""
    order = np.argsort(blocks, kind="stable")
    if blocks.shape != (depth,) or (blocks[order] != np.arange(depth) // size).any():
        raise UnsupportedError(f"input 4 (g_idx) {blocks.shape} names others than blocks of {size}")
    return order.astype(np.int64)


def _reordered(n: Call, w: Value, order: Value, bits: int, columns: int) -> Value:
    """Return packed columns of weights with their numbers in another order."""
    known, places = n.array(w).reshape(columns, -1), n.array(order)
    each = 8 // bits
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    codes = (known[..., None] >> shifts & ((1 << bits) - 1)).reshape(columns, -1)
    codes[:, : places.size] = codes[:, places]
    moved = codes.reshape(columns, -1, each) << shifts
    return n.known(np.bitwise_or.reduce(moved, axis=-1).astype(np.uint8))


# The numbers that codes of four bits stand for: FP4 and NF4 of the library bitsandbytes (Dettmers
# et al., QLoRA, 2023, appendix E).
_FP4 = (0, 0.0052083334, 0.6666667, 1, 0.33333334, 0.5, 0.16666667, 0.25)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_OF_FOUR_BITS = ((*_FP4, *(-each for each in _FP4)), _NF4)


@rule("MatMulBnb4", domain=MICROSOFT)
def matmul_bnb4(n: Call) -> Value:
    """A product with weights (n, k) that codes of four bits stand for, a scale a block of them."""
    x, packed, scales = n.value(0), n.value(1), n.value(2)
    depth, columns, size = n.attribute("K"), n.attribute("N"), n.attribute("block_size")
    kind = n.attribute("quant_type")
    n.attribute("training_mode")  # which a gradient goes by
    if kind not in (0, 1) or packed.dtype != "uint8" or not depth or not columns or not size:
        raise UnsupportedError(f"quant_type {kind}, K {depth}, N {columns} and block_size {size}")
    count = depth * columns
    if packed.spec.size != -(-count // 2) or scales.spec.size != -(-count // size):
        raise OnnxError(f"{packed.spec} and scales {scales.spec} found of {count} numbers")
    w = n.once(_of_codes, packed, scales, kind, (columns, depth), size)
    if n.attribute("transB", 1):
        w = n.transpose(w, (1, 0))
    return n.cast(product(n, n.cast(x, "float32"), w), x.dtype)


def _of_codes(
    n: Call, packed: Value, scales: Value, kind: int, shape: tuple[int, int], size: int
) -> Value:
    """Return the numbers (n, k) of codes of four bits, the first of a byte in its upper ones."""
    column = (packed.spec.size, 1)
    high = n("bit_shift", packed, n.known(np.array(4), "uint8"), direction="right")
    low = n("bitwise_and", packed, n.known(np.array(15), "uint8"))
    codes = n("concat", n.reshape(high, column), n.reshape(low, column), axis=1)
    table = n.known(np.array(_OF_FOUR_BITS[kind], np.float32))
    numbers = n("gather", table, n.cast(codes, "int32"), axis=0)
    count = shape[0] * shape[1]
    spread = n.reshape(n.cast(scales, "float32"), (1, scales.spec.size))
    spread = n.reshape(_over_blocks(n, spread, size, count), (count,))
    flat = n.part(n.reshape(numbers, (2 * packed.spec.size,)), 0, 0, count)
    return n.reshape(n("mul", flat, spread), shape)


def unpacked(n: Call, packed: Value, bits: int, rows: int, count: int) -> Value:
    """Return zero points, so many in each row of whole bytes, as numbers."""
    known = n.array(packed).reshape(rows, -1)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    each = (known[..., None] >> shifts & ((1 << bits) - 1)).reshape(rows, -1)
    return n.known(each[:, :count].astype(np.float32))


@rule("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(n: Call) -> Value:
    w, ids, scales, zeros = n.value(0), n.value(1), n.value(2), n.maybe(3)
    bits, size = n.attribute("bits", 4), n.attribute("block_size", 128)
    axis = n.axis_of(n.attribute("quantize_axis", 1), w.rank)
    along = n.axis_of(n.attribute("gather_axis", 0), w.rank)
    bits = bits if w.dtype == "uint8" else 8  # of all other types each number is an element
    last = w.rank - 1
    if bits not in (2, 4, 8) or (w.dtype == "uint8" and (axis, along) != (last, 0)):
        raise UnsupportedError(
            f"{bits} bits in {w.spec}, quantized along axis {axis}, gathered along axis {along},"
            f" found; bytes of 2, 4 or 8 bits are supported along axis {last}, gathered along 0"
        )
    count, blocks = w.shape[axis] * 8 // bits, scales.shape[axis]
    parts = [(w, count), (scales, blocks)] + ([] if zeros is None else [(zeros, blocks)])
    numbers, scale, *offset = (
        each if along == axis else n("gather", each, ids, axis=along) for each, _ in parts
    )
    place = axis + ids.rank - 1 if along < axis else axis
    numbers = n.cast(codes_in(n, numbers, bits, count), "float32")
    if offset:
        own = n.cast(codes_in(n, offset[0], bits, blocks), "float32")
        numbers = n("sub", numbers, spread(n, own, numbers, place, size))
    elif w.dtype == "uint8":
        numbers = n("affine", numbers, shift=-float(1 << (bits - 1)))
    scale = n.cast(scale, "float32")
    scale = scale if blocks == 1 else spread(n, scale, numbers, place, size)
    y = n.cast(n("mul", numbers, scale), scales.dtype)
    return n("gather", y, ids, axis=along) if along == axis else y


def codes_in(n: Call, packed: Value, bits: int, count: int) -> Value:
    """Return so many numbers (…, count) of bytes (…, bytes), the first in the lowest bits."""
    if bits == 8:
        return packed
    column, each = (*packed.shape, 1), 8 // bits
    shifted = (
        n("bit_shift", packed, n.known(np.array(place * bits), "uint8"), direction="right")
        for place in range(each)
    )
    mask = n.known(np.array((1 << bits) - 1), "uint8")
    parts = [n.reshape(n("bitwise_and", part, mask), column) for part in shifted]
    whole = n("concat", *parts, axis=packed.rank)
    whole = n.reshape(whole, (*packed.shape[:-1], each * packed.shape[-1]))
    return n.part(whole, packed.rank - 1, 0, count)


def _over_blocks(n: Call, x: Value, size: int, depth: int) -> Value:
    """Return x (…, blocks) with each number as often as its block has numbers: (…, depth)."""
    wide = n.broadcast(n.reshape(x, (*x.shape, 1)), (*x.shape, size))
    whole = n.reshape(wide, (*x.shape[:-1], x.shape[-1] * size))
    return n.part(whole, x.rank - 1, 0, depth)
