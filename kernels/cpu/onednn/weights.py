"""Products whose right operand serves many entries: packed once, or used as it is.

A recurrence multiplies by the same weights at every step, so that packing them into oneDNN's format
pays within one run; constant weights are packed when the entry is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_BIAS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    WEIGHTS,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    describe,
    equal,
    implementation,
    next_implementation,
)
from soapstone.kernels.cpu.onednn.execute import Program
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.cpu.products.forms import Form
from soapstone.kernels.entry import Array, Entry


@dataclass(frozen=True)
class _Product:
    a: Layout
    b: Layout
    y: Layout
    bias: bool
    threads: int
    gemm: bool


@lru_cache(maxsize=1024)
def _primitive(product: _Product) -> Primitive | None:
    """Return the primitive of y = a b + bias, or None where oneDNN has none of that kind."""
    columns = product.y.shape[-1]
    bias = Layout.dense((1, columns)).descriptor.address if product.bias else None
    with threads(product.threads):
        try:
            found = describe(
                "matmul",
                *(engine(), product.a.descriptor.address, product.b.descriptor.address, bias),
                *(product.y.descriptor.address, attributes().address),
            )
        except UnsupportedError:
            return None
        while product.gemm and "gemm" not in implementation(found):
            if not next_implementation(found):
                return None
        return None if "ref" in implementation(found) else compile_primitive("matmul", found)


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
        self._packed: list[tuple[int, Handle]] = []

    def product(self, a: Array, y: Array, bias: Array | None = None) -> Entry | None:
        """Return the entry of y = a b + bias, or None where the form does not serve it.

        a, y: matrices of contiguous rows.
        """
        ends = Layout.of(a), Layout.of(y)
        packed = self._form == "packed"
        right = Layout.any(self._array.shape) if packed else self._layout
        primitive = _primitive(
            _Product(
                *(ends[0], right, ends[1]),
                *(bias is not None, self._threads, self._form == "gemm"),
            )
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
            arguments[ARG_BIAS] = program.source(row, Layout.of(row), flat.descriptor.address)
        program.step(primitive, arguments)
        return program.entry()

    def _pack(self, wanted: int) -> Handle:
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
