"""Products of bytes: sums of whole numbers, exact to 32 bits, times the scale of each channel.

The zero point is taken off before, into 16 bits, so that a window's padding is of zeros. The tiles
are those of other products; they use no tensor cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.ir.ops.windows.convolution import CONVOLUTIONS
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.products.matmul import BINDS, Product, bound, channel_of, tiled
from soapstone.kernels.cuda.substrate.arrays import View, room
from soapstone.kernels.registry import variant


def _less(x: View, by: str, zero: Sequence[View], beside: Any) -> tuple[DeviceEntry, View]:
    """Return the entry that takes a zero point off bytes, and where it puts them."""
    made = room(x.shape, "int16", beside)

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        names = [text.cast(value, "int32").name for value in values]
        return [text.set(f"int32({names[0]} - {names[1] if zero else by})", "int32")]

    return pointwise(write, [x, *zero], [made]), made


def quantized(of: Product) -> DeviceEntry:
    """Return the entry of a product of bytes, then its steps."""
    x, w, zero, *vectors = of.inputs
    y, more = of.y, of.more
    if y.size == 0:
        return DeviceEntry(())
    first, x = _less(x, "", [zero], y.span)
    before = [first]
    if of.attributes.get("w_zero"):
        second, w = _less(w, f"int32({of.attributes['w_zero']})", [], y.span)
        before.append(second)
    plain = of.name.removeprefix("quantized_")
    rank = len(y.shape)
    channels = [channel_of(v, rank, rank - 1 if plain == "linear" else 1) for v in vectors]

    def write(text: Text, values: Sequence[Value]) -> Sequence[Value]:
        total, rest = values[0], list(values[1:])
        if vectors:  # else it stays as it is, int32
            kind = wide(vectors[0].dtype)
            scaled = f"{text.cast(total, kind).name} * {rest[0].name}"
            bias = f" + {rest[1].name}" if len(vectors) > 1 else ""
            total = text.set(scaled + bias, kind)
        return more(text, [total, *rest[len(vectors) :]]) if more is not None else [total]

    given = {**of.attributes, "bias": False, "activation": None}
    made = Product(plain, given, (x, w), y, write, [*channels, *of.extras])
    return sequence((*before, bound(made, "int32")))


for _name in (*CONVOLUTIONS, "linear"):
    BINDS[f"quantized_{_name}"] = quantized
    variant(f"quantized_{_name}", "tiled", processor="cuda")(tiled)
