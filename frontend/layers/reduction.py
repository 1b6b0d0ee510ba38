"""Reductions over axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class ReductionLayers(LayerBase):
    """Sums, means and the like over axes."""

    def _reduce(
        self, operator: str, x: Tensor, axes: int | Sequence[int], keepdims: bool, name: str | None
    ) -> Tensor:
        given = (axes,) if isinstance(axes, int) else tuple(axes)
        where = tuple(self._axis(operator, x, axis) for axis in given)
        return self.apply(operator, x, name=name, axes=where, keepdims=keepdims)

    def reduce_sum(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the sum over axes."""
        return self._reduce("reduce_sum", x, axes, keepdims, name)

    def reduce_mean(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the mean over axes."""
        return self._reduce("reduce_mean", x, axes, keepdims, name)

    def reduce_max(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the maximum over axes."""
        return self._reduce("reduce_max", x, axes, keepdims, name)

    def reduce_min(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the minimum over axes."""
        return self._reduce("reduce_min", x, axes, keepdims, name)

    def reduce_prod(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the product over axes."""
        return self._reduce("reduce_prod", x, axes, keepdims, name)

    def reduce_l1(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the sum of magnitudes over axes."""
        return self._reduce("reduce_l1", x, axes, keepdims, name)

    def reduce_l2(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the root of the sum of squares over axes."""
        return self._reduce("reduce_l2", x, axes, keepdims, name)

    def reduce_sum_square(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the sum of squares over axes."""
        return self._reduce("reduce_sum_square", x, axes, keepdims, name)

    def reduce_log_sum(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the logarithm of the sum over axes."""
        return self._reduce("reduce_log_sum", x, axes, keepdims, name)

    def reduce_log_sum_exp(
        self,
        x: Tensor,
        axes: int | Sequence[int],
        *,
        keepdims: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the logarithm of the sum of exponentials over axes."""
        return self._reduce("reduce_log_sum_exp", x, axes, keepdims, name)

    def argmax(
        self, x: Tensor, axis: int = -1, *, keepdims: bool = False, name: str | None = None
    ) -> Tensor:
        """Return the int64 index of the largest element along an axis, the first of equals."""
        where = self._axis("argmax", x, axis)
        return self.apply("argmax", x, name=name, axis=where, keepdims=keepdims)

    def argmin(
        self, x: Tensor, axis: int = -1, *, keepdims: bool = False, name: str | None = None
    ) -> Tensor:
        """Return the int64 index of the smallest element along an axis, the first of equals."""
        where = self._axis("argmin", x, axis)
        return self.apply("argmin", x, name=name, axis=where, keepdims=keepdims)

    def cumsum(
        self,
        x: Tensor,
        axis: int = -1,
        *,
        exclusive: bool = False,
        reverse: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return running sums along an axis; `exclusive` leaves the element itself out."""
        where = self._axis("cumsum", x, axis)
        return self.apply("cumsum", x, name=name, axis=where, exclusive=exclusive, reverse=reverse)
