"""What `pairs` and `quads` do to sums of bytes before they write them."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.kernels.cpu.products.pairs_lanes import KINDS, NUMBERS
from soapstone.kernels.cpu.substrate.layout import overlaps
from soapstone.kernels.entry import Array, Call
from soapstone.native.arrays import strided
from soapstone.records import dataclass

PRODUCTS = ("quantized_conv1d", "quantized_conv2d", "quantized_conv3d", "quantized_linear")


@dataclass(frozen=True)
class Part:
    """v * rise + start, kept within low and high, and where it says so rounded."""

    rise: float = 1.0
    start: float = 0.0
    low: float = -math.inf
    high: float = math.inf
    rounds: bool = False

    @property
    def bounded(self) -> bool:
        """Whether a number may change within these bounds."""
        return (self.low, self.high) != (-math.inf, math.inf)

    def affine(self, rise: float, start: float) -> Part | None:
        """Return the part with a multiplication and an addition after it, or None."""
        if rise <= 0 or self.rounds:
            return None
        low, high = self.low * rise + start, self.high * rise + start
        return Part(self.rise * rise, self.start * rise + start, low, high)

    def within(self, low: float, high: float) -> Part:
        """Return the part that keeps within these bounds too, whole numbers where it rounds."""
        low, high = (min(max(bound, low), high) for bound in (self.low, self.high))
        return replace(self, low=low, high=high)


@dataclass(frozen=True)
class ByteEpilogue:
    """What is done to a real result; see `pairs_lanes.NUMBERS`.

    second: before what is added, and `third` after it; None where the first part is all. last:
    after a third part that rounds, whose result is real. zero: what is added to a rounded result
    that is bytes, whose bounds the last part has.
    """

    first: Part = Part()
    second: Part | None = None
    added: Array | None = None
    third: Part = Part()
    last: Part | None = None
    zero: float = 0.0

    @property
    def numbers(self) -> Array:
        """NUMBERS, float32."""
        first, second, third = self.first, self.second or Part(), self.third
        given = (
            *(first.rise, first.start, first.low, first.high, float(first.rounds)),
            *(second.rise, second.start, third.rise, third.start, third.low, third.high),
            self.zero,
        )
        assert len(given) == len(NUMBERS)
        return np.array(given, np.float32)

    @property
    def kind(self) -> int:
        """Whether there is a second part, and what is added; see `pairs_lanes.finish`."""
        if self.second is None:
            return 0
        return 1 + KINDS["none" if self.added is None else self.added.dtype.name]

    def affine(self, rise: float, start: float) -> ByteEpilogue | None:
        """Return the epilogue with a multiplication and an addition after it, or None."""
        if self.second is None:
            made = self.first.affine(rise, start)
            if made is not None:
                return replace(self, first=made)
            return replace(self, second=Part(rise, start)) if rise > 0 else None
        if self.added is None and self.third == Part():
            second = self.second.affine(rise, start)
            return None if second is None else replace(self, second=second)
        if self.third.rounds:
            last = (self.last or Part()).affine(rise, start)
            return None if last is None else replace(self, last=last)
        third = self.third.affine(rise, start)
        return None if third is None else replace(self, third=third)

    def rounded(self, scale: float, zero: float, to: str) -> ByteEpilogue | None:
        """Return the epilogue that makes bytes of scale and zero, and numbers less it of them."""
        whole = self.second is None
        part = (self.first if whole else self.third).affine(1 / scale, 0.0)
        if part is None:
            return None
        part = part.within(np.iinfo(to).min - zero, np.iinfo(to).max - zero)
        part = replace(part, rounds=True)
        return replace(self, first=part) if whole else replace(self, third=part)

    def within(self, low: float, high: float) -> ByteEpilogue:
        """Return the epilogue that keeps within these bounds too."""
        if self.second is None:
            return replace(self, first=self.first.within(low, high))
        if self.third.rounds:
            return replace(self, last=(self.last or Part()).within(low, high))
        return replace(self, third=self.third.within(low, high))

    def add(self, array: Array, scale: float, zero: float) -> ByteEpilogue | None:
        """Return the epilogue that adds (array - zero) * scale, or None: it adds one array at most.

        v + (q - zero) scale = (v / scale + q) scale - zero scale
        """
        if self.added is not None or scale <= 0 or self.third != Part():
            return None
        second = (self.second or Part()).affine(1 / scale, 0.0)
        third = Part(scale, -zero * scale)
        return replace(self, second=second, added=array, third=third)


def _spread(array: Array, shape: tuple[int, ...]) -> Array | None:
    """Return a view of an operand as it is broadcast to a result's shape, None: it is larger."""
    if array.ndim > len(shape):
        return None
    array = array[(None,) * (len(shape) - array.ndim)]
    if any(own not in (1, extent) for own, extent in zip(array.shape, shape)):
        return None
    steps = (0 if own == 1 else step for own, step in zip(array.shape, array.strides))
    return strided(array, shape, tuple(steps))


def _epilogue(call: Call) -> ByteEpilogue | None:
    """Return what the steps of an epilogue do to a result, or None where none holds it."""
    arity, program = call.attributes["arity"], call.attributes["program"]
    y, operands = call.outputs[0], call.inputs[arity:]
    made, result = ByteEpilogue(), 0
    real: dict[int, tuple[Array, float, float]] = {
        number: (array, 1.0, 0.0)
        for number, array in enumerate(operands, 1)
        if array.dtype == np.float32
    }

    def known(number: int) -> float | None:
        position = arity + number - 1
        if position not in call.constants or call.inputs[position].size != 1:
            return None
        return float(call.inputs[position].reshape(()))

    for index, (name, numbers, items) in enumerate(program):
        at, own = dict(items), len(operands) + index + 1
        after: ByteEpilogue | None = None
        if name in ("quantize", "dequantize"):
            scale, zero = map(known, numbers[1:])
            if scale is None or zero is None or not 0 < scale < math.inf:
                return None
            if name == "dequantize" and numbers[0] != result:
                if 1 <= numbers[0] <= len(operands):
                    real[own] = operands[numbers[0] - 1], scale, zero
                continue
            if name == "dequantize":
                after = made.affine(scale, -zero * scale)
            elif index == len(program) - 1:
                limits, after = np.iinfo(at["to"]), made.affine(1 / scale, 0.0)
                if after is not None:
                    after = after.within(limits.min - zero, limits.max - zero)
                    after = replace(after, zero=zero)
            else:  # rounded in between
                rounded = made.rounded(scale, zero, at["to"])
                after = None if rounded is None else rounded.affine(1.0, zero)
        elif numbers == (result,) and name == "relu":
            after = made.within(0.0, math.inf)
        elif numbers == (result,) and name == "clip":
            low, high = at.get("low"), at.get("high")
            after = made.within(
                -math.inf if low is None else low, math.inf if high is None else high
            )
        elif numbers == (result,) and name == "affine":
            after = made.affine(at["scale"], at["shift"])
        elif name == "add" and numbers.count(result) == 1 and len(numbers) == 2:
            array, *scaling = real.get(sum(numbers) - result, (None, 1.0, 0.0))
            spread = None if array is None else _spread(array, y.shape)
            if spread is not None:
                after = made.add(spread, *scaling)
        if after is None:
            return None
        made, result = after, own
    whole = y.dtype.kind in "iu"  # which only a last rounding makes
    return made if whole == (bool(program) and program[-1][0] == "quantize") else None


def product_epilogue(call: Call, results: Container[str]) -> ByteEpilogue | None:
    """Return what follows a product of bytes with constant weights, or None for any other call.

    results: the types of elements that may be written.
    """
    first = call.inner
    end = ByteEpilogue() if first is call else _epilogue(call)
    if end is None or first.operator not in PRODUCTS or 1 not in first.constants:
        return None
    (x, w, zero, *vectors), (y,) = first.inputs, first.outputs
    served = (
        x.dtype.name in BYTES and w.dtype == np.int8 and zero.dtype in (np.int32, x.dtype),
        y.dtype.name in results and not overlaps(y),
        all(vector.dtype == np.float32 for vector in vectors),
    )
    return end if all(served) else None
