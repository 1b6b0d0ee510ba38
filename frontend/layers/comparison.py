"""Comparisons, choices and changes of type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class ComparisonLayers(LayerBase):
    """Truth values, and what is done with them; operands broadcast as NumPy's do."""

    def where(self, condition: Tensor, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return x where the bool condition holds, else y."""
        return self.apply("where", condition, x, y, name=name)

    def cast(self, x: Tensor, dtype: str, *, name: str | None = None) -> Tensor:
        """Return x as another element type, such as "int32"."""
        return self.apply("cast", x, name=name, to=dtype)

    def logical_not(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the negation of truth values."""
        return self.apply("logical_not", x, name=name)

    def equal(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether x == y."""
        return self.apply("equal", x, y, name=name)

    def less(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether x < y."""
        return self.apply("less", x, y, name=name)

    def less_equal(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether x <= y."""
        return self.apply("less_equal", x, y, name=name)

    def greater(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether x > y."""
        return self.apply("greater", x, y, name=name)

    def greater_equal(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether x >= y."""
        return self.apply("greater_equal", x, y, name=name)

    def logical_and(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether both hold."""
        return self.apply("logical_and", x, y, name=name)

    def logical_or(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether one of them holds."""
        return self.apply("logical_or", x, y, name=name)

    def logical_xor(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return whether exactly one of them holds."""
        return self.apply("logical_xor", x, y, name=name)

    def minimum(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return the smaller of x and y."""
        return self.apply("minimum", x, y, name=name)

    def maximum(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return the larger of x and y."""
        return self.apply("maximum", x, y, name=name)
