"""Matrix products as parts of larger entries, by whichever library there is: oneDNN, or a BLAS.

Recurrent layers and attention are products with Numba kernels between them. A product's right
operand serves many entries; how it is taken is a *form*, and each form makes a variant of those
operators. Without any library there is no form, and the reference serves them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.kernels.cpu.openblas import library as openblas
from soapstone.kernels.entry import Array, Entry

PANELS = "panels"  # the form of constant weights for few rows
MOST_ROWS = 4  # of such a product
IN_PLACE = frozenset({"onednn_plain", "onednn_gemm"})  # forms that read weights where they lie


class Weights(Protocol):
    """The right operand of products; the entries of `prepare` run before them, on every run."""

    prepare: list[Entry]

    def product(self, a: Array, y: Array, bias: Array | None = None) -> Entry | None:
        """Return the entry of y = a b + bias, or None where the form does not serve it.

        a, y: matrices of contiguous rows, or transposed ones.
        """
        ...


class Form(Protocol):
    """Returns the right operand, for products of so many threads; constant: it never changes."""

    def __call__(self, array: Array, threads: int, constant: bool = False) -> Weights: ...


def forms() -> Mapping[str, Form]:
    """Return the forms by variant, none where there is no library.

    The first one's products of few rows read constant weights in panels, and the others are the
    library's: it serves no weights that change.
    """
    of_library = _of_library()
    if not of_library:
        return {}
    from soapstone.kernels.cpu.products import panels

    rest = next(iter(of_library.values()))
    return {PANELS: partial(panels.Weights, rest=rest), **of_library}


def default_form() -> tuple[str, Form] | None:
    """Return the library's variant and form that take operands as they are, if there is one.

    It is best for few products of dense operands.
    """
    if onednn.available():
        return "onednn", _of_library()["onednn_plain"]
    return next(iter(_of_library().items()), None)


def _of_library() -> Mapping[str, Form]:
    """Return the forms of whichever library there is, by variant."""
    if onednn.available():
        from soapstone.kernels.cpu.onednn.weights import FORMS

        return FORMS
    if openblas.available():
        from soapstone.kernels.cpu.openblas.products import Weights

        return {"openblas": Weights}
    return {}
