"""What products of bytes are scaled by, and what their operands call 0, as oneDNN takes them."""

from __future__ import annotations

import numpy as np

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_SCALES,
    ARG_SRC,
    ARG_WEIGHTS,
    ARG_ZEROS,
    Integers,
    Layout,
)
from soapstone.kernels.cpu.onednn.execute import Program
from soapstone.kernels.cpu.onednn.library import Handle
from soapstone.kernels.entry import Array
from soapstone.native.memory import aligned_array
from soapstone.records import dataclass


@dataclass(frozen=True, eq=False)
class Scaling:
    """Scales and zeros of a product of bytes.

    Attributes:
        zero: what x calls 0, int32 or a byte as x is. centred: whether that is known to be 0.
        scale: of each channel of the result, float32; None: the result is the sums.
        w_zero: what the weights call 0, which convolutions have no other number for.
    """

    zero: Array
    centred: bool
    scale: Array | None
    w_zero: int = 0

    def integers(self, x: Array, y: Array, mask: int) -> Integers:
        """Return the primitive's part; mask: of the axes of the weights that are channels."""
        ends = x.dtype.name, y.dtype.name
        zeros = not self.centred, self.w_zero != 0
        return Integers(*ends, None if self.scale is None else mask, *zeros)

    def arguments(self, program: Program) -> dict[int, Handle]:
        """Return the memories that the primitive is run with."""
        given = {}
        if self.scale is not None:
            given[ARG_SCALES | ARG_WEIGHTS] = self.scale
        if not self.centred:
            given[ARG_ZEROS | ARG_SRC] = self._whole_zero(program)
        if self.w_zero:
            given[ARG_ZEROS | ARG_WEIGHTS] = np.array([self.w_zero], np.int32)
        return {
            argument: program.source(
                array,
                Layout.of(array),
                Layout.dense(array.shape, dtype=array.dtype.name).descriptor,
            )
            for argument, array in given.items()
        }

    def _whole_zero(self, program: Program) -> Array:
        """Return x's zero as int32, which a byte is made on each run."""
        if self.zero.dtype == np.int32:
            return self.zero.reshape(1)
        whole = aligned_array((1,), np.int32)
        program.native("widened", byte=self.zero, signed=self.zero.dtype == np.int8, target=whole)
        return whole
