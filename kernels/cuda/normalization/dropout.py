"""Dropout with the random numbers of every other processor: counter-based, by element index."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.ir.ops.normalization.dropout import INDEX, MASK, MIX_1, MIX_2, SEED, STEP
from soapstone.kernels.cuda.elementwise.pointwise import numbers, pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


@variant("dropout", "numba", processor="cuda")
def dropout(call: Call) -> DeviceEntry:
    """Return the entry of x scaled by 1 / (1 - rate) or 0; a row may have a step of its own."""
    (x, step), (y,) = views(call)
    at, rank = call.attributes, len(x.shape)
    inner = len(step.shape)  # the axes that rows have steps of
    origin = at.get("origin", (0,) * rank)
    whole = at.get("full_shape", x.shape)
    index = numbers(x.shape[inner:], origin[inner:], whole[inner:])
    index = View(None, x.shape, (*(0,) * inner, *index.strides), "int64", index.offset)
    steps = View(
        step.span,
        (*step.shape, *(1,) * (rank - inner)),
        (*step.strides, *(0,) * (rank - inner)),
        step.dtype,
        step.offset,
    )
    seed, least = at["seed"] * SEED & MASK, math.ceil(at["rate"] * 2**32)

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        value, count, number = values
        kind, u = value.type, "uint64"

        def shifted(z: Value, by: int, factor: int) -> Value:
            mixed = text.set(f"{z.name} ^ ({z.name} >> uint64({by}))", u)
            return text.set(f"{mixed.name} * uint64({factor})", u)

        shift = text.set(f"uint64({count.name}) * uint64({STEP}) + uint64({seed})", u)
        z = text.set(f"uint64({number.name}) * uint64({INDEX}) + {shift.name}", u)
        z = shifted(shifted(z, 30, MIX_1), 27, MIX_2)
        bits = text.set(f"({z.name} ^ ({z.name} >> uint64(31))) >> uint64(32)", u)
        scale = literal(1 / (1 - at["rate"]), kind)
        kept = f"{bits.name} >= uint64({least})"
        return [text.set(f"({value.name} * {scale} if {kept} else {literal(0, kind)})", kind)]

    return pointwise(write, (x, steps), (y,), index)
