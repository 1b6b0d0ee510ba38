"""Products whose right operand serves many entries: packed once, or used as it is.

A recurrence multiplies by the same weights at every step, so that packing them into oneDNN's format
pays within one run; constant weights are packed when the entry is made.
"""

from __future__ import annotations

from functools import partial

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    WEIGHTS,
    Layout,
    equal,
)
from soapstone.kernels.cpu.onednn.execute import Program
from soapstone.kernels.cpu.onednn.library import Descriptor, Handle
from soapstone.kernels.cpu.onednn.matmul import Product, matmul_primitive
from soapstone.kernels.cpu.products.forms import Form
from soapstone.kernels.entry import Array, Entry


class Weights:
    """The right operand of products; `prepare` packs it on every run.

    form: "packed" in oneDNN's format, "plain" as it is by its first implementation, "gemm" as it is
    by its classic product, best on a single row.
    """

    def __init__(
        self, array: Array, threads: int, constant: bool = False, *, form: str = "packed"
    ) -> None:
        self.prepare: list[Entry] = []
        self._array, self._layout = array, Layout.of(array)
        self._threads, self._form, self._constant = threads, form, constant
        self._packed: list[tuple[Descriptor, Handle]] = []

    def product(self, a: Array, y: Array, bias: Array | None = None) -> Entry | None:
        """Return the entry of y = a b + bias, or None where the form does not serve it.

        a, y: matrices of contiguous rows.
        """
        ends = Layout.of(a), Layout.of(y)
        packed = self._form == "packed"
        right = Layout.any(self._array.shape) if packed else self._layout
        form = "gemm" if self._form == "gemm" else "first"
        primitive = matmul_primitive(
            Product(ends[0], right, ends[1], bias is not None, (), self._threads, form, True)
        )
        if primitive is None:
            return None
        program = Program(self._threads)
        weights = (
            self._pack(primitive.descriptor(WEIGHTS))
            if packed
            else program.source(self._array, self._layout)
        )
        arguments = {
            ARG_SRC: program.source(a, ends[0]),
            ARG_WEIGHTS: weights,
            ARG_DST: program.target(y, ends[1]),
        }
        if bias is not None:
            row = bias.reshape(1, bias.size)
            flat = Layout.dense(row.shape)
            arguments[ARG_BIAS] = program.source(row, Layout.of(row), flat.descriptor)
        program.step(primitive, arguments)
        return program.entry()

    def _pack(self, wanted: Descriptor) -> Handle:
        for descriptor, handle in self._packed:
            if equal(descriptor, wanted):
                return handle
        program = Program(self._threads)
        handle = program.source(self._array, self._layout, wanted, constant=self._constant)
        if not self._constant:
            self.prepare.append(program.entry())
        self._packed.append((wanted, handle))
        return handle


FORMS: dict[str, Form] = {
    "onednn": partial(Weights, form="packed"),
    "onednn_plain": partial(Weights, form="plain"),
    "onednn_gemm": partial(Weights, form="gemm"),
}
