"""Symbolic elements of tensors, with which an operator's NumPy reference computes as with numbers.

An `Element` is a node that is shared, so that elements that are merely moved stay the same
object; what it is equal to is decided by its `Field`.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from soapstone.rules.laws.field import Field

Number: TypeAlias = "int | Fraction"


class Undecided(Exception):
    """An element is asked for what depends on its inputs: a comparison, or too large a form."""


def number(value: Any) -> Number:
    """Return a finite number exactly, an integer where it is one."""
    exact = Fraction(float(value) if isinstance(value, np.floating) else value)
    return exact.numerator if exact.denominator == 1 else exact


class Element:
    """A real function of input elements; NumPy computes with arrays of these."""

    __slots__ = ("arguments", "field", "index", "operation")

    def __init__(
        self, field: Field, index: int, operation: str, arguments: tuple[Any, ...]
    ) -> None:
        self.field, self.index = field, index
        self.operation, self.arguments = operation, arguments

    def __add__(self, other: Any) -> Element:
        return self.field.binary("add", self, other)

    def __radd__(self, other: Any) -> Element:
        return self.field.binary("add", other, self)

    def __sub__(self, other: Any) -> Element:
        return self.field.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Element:
        return self.field.binary("sub", other, self)

    def __mul__(self, other: Any) -> Element:
        return self.field.binary("mul", self, other)

    def __rmul__(self, other: Any) -> Element:
        return self.field.binary("mul", other, self)

    def __truediv__(self, other: Any) -> Element:
        return self.field.binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Element:
        return self.field.binary("div", other, self)

    def __neg__(self) -> Element:
        return self.field.binary("sub", 0, self)

    def __pow__(self, exponent: Any) -> Element:
        exact = number(exponent)
        if isinstance(exact, int) and exact >= 0:
            result = self.field.number(1)
            for _ in range(exact):
                result = result * self
            return result
        if exact == Fraction(1, 2):
            return self.sqrt()
        if exact == Fraction(-1, 2):
            return 1 / self.sqrt()
        raise Undecided(f"power {exact}: a natural number, 1/2 or -1/2 needed")

    def exp(self) -> Element:
        """Return e to the power of the element."""
        return self.field.node("exp", self)

    def sqrt(self) -> Element:
        """Return the square root."""
        return self.field.node("sqrt", self)

    def tanh(self) -> Element:
        """Return the hyperbolic tangent, which is not interpreted."""
        return self.field.function("tanh", self)

    def _undecided(self, *_: object) -> bool:
        raise Undecided("the sign of an element is not known")

    __lt__ = __le__ = __gt__ = __ge__ = _undecided
    __bool__ = __float__ = __abs__ = _undecided

    def __repr__(self) -> str:
        return self.field.text(self)


class Elements(np.ndarray[Any, Any]):
    """An array of symbolic elements whose maximum is one element that is not interpreted.

    A reference may subtract it before `exp`, against overflow; it cancels in the quotient.
    """

    def max(  # type: ignore[override]
        self, axis: Any = None, *_: Any, keepdims: bool = False, **__: Any
    ) -> Any:
        """Return the maxima over an axis, each an element that is not interpreted."""
        axes = tuple(range(self.ndim)) if axis is None else np.atleast_1d(axis) % self.ndim
        kept = [size for dim, size in enumerate(self.shape) if dim not in axes]
        rows = np.moveaxis(np.asarray(self), tuple(axes), range(-len(axes), 0)).reshape(*kept, -1)
        result = np.empty(kept, object)
        for position in np.ndindex(*kept):
            row = rows[position]
            result[position] = row[0].field.node("max", *sorted(row, key=lambda item: item.index))
        return np.expand_dims(result, tuple(axes)) if keepdims else result


def elements(field: Field, name: str, shape: Iterable[int]) -> Elements:
    """Return an input tensor: an array of the field's inputs `name[i,j]`."""
    array = np.empty(tuple(shape), object)
    for position in np.ndindex(*array.shape):
        array[position] = field.input(f"{name}[{','.join(map(str, position))}]")
    return array.view(Elements)
