"""`matmul_nbits`: a product with weights of few bits, of which each block has a scale of its own.

What a decoder waits for is its weights, which all come from memory for each token; in four bits
they are an eighth as many bytes. Dims: b0, b1, …, n; k stays whole, since its numbers are packed.

Source: MatMulNBits of ONNX Runtime (com.microsoft).
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.dims import Axis, DimTable, Kind, Operand, Signature, Whole, along, finish
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_count, need_float
from soapstone.ir.spec import Attribute, Attributes, Case, OpSpec, register
from soapstone.ir.tensor import Array, TensorSpec

BITS = (2, 4, 8)


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_count(inputs, 3 + attributes["zeros"])
    x, w, *rest = inputs
    need_float(inputs, 0, *range(2, len(inputs)))
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


def block_of(nbytes: int, attributes: Attributes) -> int:
    """Return how many numbers of these bits are in so many bytes."""
    return nbytes * 8 // int(attributes["bits"])


def dequantized(attributes: Attributes, w: Array, scales: Array, *zeros: Array) -> Array:
    """Return the weights (n, blocks * block) as numbers of the scales' type.

    Of a byte's numbers the first is in its lowest bits. Without zero points, it is the middle.
    """
    bits = int(attributes["bits"])
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    whole = w[..., None] >> shifts & ((1 << bits) - 1)
    whole = whole.reshape(*w.shape[:2], w.shape[2] * len(shifts))
    middle = zeros[0][..., None] if zeros else scales.dtype.type(1 << (bits - 1))
    made = (whole.astype(scales.dtype) - middle) * scales[..., None]
    return np.asarray(made.reshape(w.shape[0], made.shape[1] * made.shape[2]))


def _matmul_nbits(attributes: Attributes, x: Array, w: Array, *parts: Array) -> Array:
    depth = x.shape[-1]
    return np.asarray(x @ dequantized(attributes, w, *parts)[:, :depth].T)


_BYTES = "uint8 {} >=0 <256"
_ZEROS = {"zeros": True}
register(
    OpSpec(
        name="matmul_nbits",
        inputs=("x", "w", "scales", "zeros?"),
        signature=_signature,
        reference=_matmul_nbits,
        attributes={
            "bits": Attribute("int", 4, choices=BITS),
            "zeros": Attribute("bool", False),
        },
        flops_per_point=2,
        layer=None,
        cases=(
            Case(("3 32", _BYTES.format("5 2 8"), "5 2"), {}, ()),
            Case(("2 2 48", _BYTES.format("33 2 16"), "33 2", "33 2"), _ZEROS, ()),
            Case(
                ("7 16", _BYTES.format("18 1 16"), "18 1", "18 1"), {"bits": 8, "zeros": True}, ()
            ),
            Case(("24", _BYTES.format("3 2 16"), "3 2"), {"bits": 8}, ()),
            Case(("1 16", _BYTES.format("4 1 4"), "4 1"), {"bits": 2}, ()),
            Case(("1 30", _BYTES.format("4 1 16"), "4 1"), {}, ()),
            Case(("0 16", _BYTES.format("4 1 8"), "4 1"), {}, ()),
        ),
        doc="x w', whose blocks of numbers of few bits have a scale each and maybe a zero point\n"
        "x: (…, k); w: (n, blocks, bytes) uint8, the first of a byte's numbers in its lowest\n"
        "bits; scales, zeros: (n, blocks)",
    )
)
