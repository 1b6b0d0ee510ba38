"""`matmul_nbits`: a product with weights of few bits, of which each block has a scale of its own.

What a decoder waits for is its weights, which all come from memory for each token; in four bits
they are an eighth as many bytes. `pack_nbits` makes them of numbers. Dims: b0, b1, …, n; k stays
whole, since its numbers are packed.

Source: MatMulNBits of ONNX Runtime (com.microsoft).
"""

from __future__ import annotations

import numpy as np

from soapstone.dtypes import BYTES, learn
from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Kind, Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_count, need_float
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

BITS = (2, 4, 8, 16)
WHOLE = "integer"  # the numbers that codes of few bits are, unless they are those of a type
KINDS = {  # of numbers, by the bits that they have; integers have any but sixteen
    WHOLE: 0,
    "float4_e2m1fn": 4,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "bfloat16": 16,
    "float16": 16,
}


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 3 + attributes["zeros"])
    x, w, *rest = inputs
    need_float(inputs, 0, *range(2, len(inputs)))
    _need_kind(attributes)
    if attributes["zeros"] and attributes["numbers"] != WHOLE:
        raise ShapeError(f"attribute zeros found with {attributes['numbers']}; integers needed")
    if w.dtype != "uint8" or w.rank != 3 or not x.rank:
        raise ShapeError(
            f"input 0 has shape {x.shape}, input 1 is {w}; (…, k) and uint8 (n, blocks, bytes)"
            " needed"
        )
    block = block_of(w.shape[2], attributes)
    depth = x.shape[-1]
    if -(-depth // max(block, 1)) != w.shape[1]:
        raise ShapeError(
            f"dim k is {depth} in input 0; input 1 has {w.shape[1]} blocks of {block} numbers"
        )
    table = DimTable()
    rows: list[Axis] = [
        along(table, f"b{axis}", extent, "input 0") for axis, extent in enumerate(x.shape[:-1])
    ]
    column = along(table, "n", w.shape[0], "input 1")
    operands = [Operand((*rows, Whole(depth))), Operand((column, *map(Whole, w.shape[1:])))]
    for position, spec in enumerate(rest, 2):
        if spec.shape != w.shape[:2]:
            raise ShapeError(f"input {position} has shape {spec.shape}; {w.shape[:2]} needed")
        operands.append(Operand((column, Whole(spec.shape[1]))))
    return finish(table, operands, [Operand((*rows, column))], [x.dtype], {"n": Kind.FREE})


def _need_kind(attributes: Attributes) -> None:
    """Refuse numbers of a type that has not so many bits."""
    kind, bits = attributes["numbers"], attributes["bits"]
    if bits != KINDS[kind] and (kind != WHOLE or bits == 16):
        raise ShapeError(f"attribute bits is {bits}; {kind} has {KINDS[kind] or '2, 4 or 8'}")


def block_of(nbytes: int, attributes: Attributes) -> int:
    """Return how many numbers of these bits are in so many bytes."""
    return nbytes * 8 // int(attributes["bits"])


def dequantized(attributes: Attributes, w: Array, scales: Array, *zeros: Array) -> Array:
    """Return the weights (n, blocks * block) as numbers of the scales' type.

    Of a byte's numbers the first is in its lowest bits. Without zero points, it is the middle.
    """
    bits, kind = int(attributes["bits"]), attributes["numbers"]
    if bits < 8:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        apart = w[..., None] >> shifts & ((1 << bits) - 1)
        w = apart.reshape(*w.shape[:2], w.shape[2] * len(shifts))
    if kind == WHOLE:
        middle = zeros[0][..., None] if zeros else scales.dtype.type(1 << (bits - 1))
        made = (w.astype(scales.dtype) - middle) * scales[..., None]
    else:
        made = np.ascontiguousarray(w).view(learn(kind)).astype(scales.dtype) * scales[..., None]
    return np.asarray(made.reshape(w.shape[0], made.shape[1] * made.shape[2]))


def _matmul_nbits(attributes: Attributes, x: Array, w: Array, *parts: Array) -> Array:
    depth = x.shape[-1]
    return np.asarray(x @ dequantized(attributes, w, *parts)[:, :depth].T)


_BYTES = "uint8 {} >=0 <256"
_ZEROS = {"zeros": True}
_FLOAT8 = {"bits": 8, "numbers": "float8_e4m3fn"}
_OTHER = {"numbers": "float8_e5m2"}
_HALF, _SHORT = {"bits": 16, "numbers": "float16"}, {"numbers": "bfloat16"}
define(
    name="matmul_nbits",
    inputs=("x", "w", "scales", "zeros?"),
    signature=_signature,
    reference=_matmul_nbits,
    attributes={
        "bits": Attribute("int", 4, choices=BITS),
        "zeros": Attribute("bool", False),
        "numbers": Attribute("str", WHOLE, choices=tuple(KINDS)),
        "coarse": Attribute("bool", False),
    },
    flops_per_point=2,
    layer=None,
    cases=(
        Case(("3 32", _BYTES.format("5 2 8"), "5 2"), {}, ()),
        Case(("2 2 48", _BYTES.format("33 2 16"), "33 2", "33 2"), _ZEROS, ()),
        Case(("7 16", _BYTES.format("18 1 16"), "18 1", "18 1"), {"bits": 8, "zeros": True}, ()),
        Case(("24", _BYTES.format("3 2 16"), "3 2"), {"bits": 8}, ()),
        Case(("1 16", _BYTES.format("4 1 4"), "4 1"), {"bits": 2}, ()),
        Case(("1 30", _BYTES.format("4 1 16"), "4 1"), {}, ()),
        Case(("0 16", _BYTES.format("4 1 8"), "4 1"), {}, ()),
        Case(("2 48", _BYTES.format("18 2 16"), "18 2"), {"numbers": "float4_e2m1fn"}, ()),
        Case(("3 48", "uint8 17 2 32 >=0 <127", "17 2"), _FLOAT8, ()),
        Case(("1 16", "uint8 4 1 16 >=128 <252", "4 1"), _FLOAT8 | _OTHER, ()),
        Case(("2 32", "uint8 17 1 64 >=0 <120", "17 1"), _HALF, ()),
        Case(("1 16", "uint8 3 1 32 >=0 <120", "3 1"), _HALF | _SHORT, ()),
    ),
    doc="x w', whose blocks of numbers of few bits have a scale each and maybe a zero point\n"
    "x: (…, k); w: (n, blocks, bytes) uint8, the first of a byte's numbers in its lowest\n"
    "bits, and integers or codes of `numbers`; scales, zeros: (n, blocks); coarse: kernels\n"
    "may round numbers of x to eight bits of the largest of their block",
)


def _pack_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    _need_kind(attributes)
    (w,), bits, block = inputs, attributes["bits"], attributes["block"]
    whole = attributes["numbers"] == WHOLE
    fits = w.dtype in BYTES if whole else w.is_float
    if w.rank != 2 or not fits or block * bits % 8:
        raise ShapeError(
            f"input 0 has type {w.dtype} and shape {w.shape}, blocks {block} numbers;"
            f" {'int8 or uint8' if whole else 'floats'} (n, k) and blocks of whole bytes needed"
        )
    table = DimTable()
    column, blocks = along(table, "n", w.shape[0], "input 0"), -(-w.shape[1] // block)
    packed = Operand((column, Whole(blocks), Whole(block * bits // 8)))
    operands = [Operand((column, Whole(w.shape[1])))]
    return finish(table, operands, [packed], ["uint8"], {"n": Kind.FREE})


def _pack_nbits(attributes: Attributes, w: Array) -> Array:
    bits, block, kind = (attributes[name] for name in ("bits", "block", "numbers"))
    if kind == WHOLE:  # bytes wrap around
        codes = w.view(np.uint8) + np.uint8(attributes["shift"])
    else:
        codes = np.ascontiguousarray(w.astype(learn(kind)))
        codes = codes.view(np.uint16 if bits == 16 else np.uint8)
    blocks, each = -(-w.shape[1] // block), max(1, 8 // bits)
    codes = np.pad(codes, ((0, 0), (0, blocks * block - w.shape[1])))
    if bits >= 8:
        return codes.view(np.uint8).reshape(w.shape[0], blocks, block * bits // 8)
    apart = codes.reshape(w.shape[0], blocks, block // each, each)
    packed = np.zeros(apart.shape[:-1], np.uint8)
    for place in range(each):
        packed |= apart[..., place] << np.uint8(bits * place)
    return packed


define(
    name="pack_nbits",
    inputs=("w",),
    signature=_pack_signature,
    reference=_pack_nbits,
    attributes={
        "bits": Attribute("int", 4, choices=BITS),
        "block": Attribute("int", 128, minimum=1),
        "numbers": Attribute("str", WHOLE, choices=tuple(KINDS)),
        "shift": Attribute("int", 0, minimum=0),
    },
    flops_per_point=1,
    layer=None,
    cases=(
        Case(("int8 5 40 >=-8 <8",), {"block": 32, "shift": 8}),
        Case(("uint8 3 20 >=0 <256",), {"bits": 8, "block": 16}),
        Case(("uint8 1 6 >=0 <4",), {"bits": 2, "block": 4}),
        Case(("4 16",), {"block": 16, "numbers": "float4_e2m1fn"}),
        Case(("2 20",), {"bits": 8, "block": 16, "numbers": "float8_e5m2"}),
        Case(("int8 0 16",), {"block": 16, "shift": 8}),
        Case(("3 20",), {"bits": 16, "block": 16, "numbers": "bfloat16"}),
    ),
    doc="the numbers of weights (n, k) packed as `matmul_nbits` reads them: integers, with\n"
    "`shift` added, or the nearest ones of a type `numbers`",
)
