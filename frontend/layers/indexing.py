"""Layers that take elements by index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.base import LayerBase

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class IndexingLayers(LayerBase):
    """Gathering, scattering and ranking; indices are int32 or int64, negative ones from the end."""

    def gather(self, x: Tensor, ids: Tensor, axis: int = 0, *, name: str | None = None) -> Tensor:
        """Return slices of x along an axis: ids' shape in the place of that axis."""
        return self.apply("gather", x, ids, name=name, axis=self._axis("gather", x, axis))

    def gather_elements(
        self, x: Tensor, ids: Tensor, axis: int = -1, *, name: str | None = None
    ) -> Tensor:
        """Return elements of x, each at its own place but for its index along an axis."""
        where = self._axis("gather_elements", x, axis)
        return self.apply("gather_elements", x, ids, name=name, axis=where)

    def scatter_elements(
        self,
        x: Tensor,
        ids: Tensor,
        updates: Tensor,
        axis: int = -1,
        reduction: str = "none",
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return x with updates at indices along an axis; "add", "mul", "max" or "min" combine."""
        where = self._axis("scatter_elements", x, axis)
        return self.apply(
            "scatter_elements", x, ids, updates, name=name, axis=where, reduction=reduction
        )

    def top_k(
        self,
        x: Tensor,
        k: int,
        axis: int = -1,
        *,
        largest: bool = True,
        name: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the k largest (or smallest) values along an axis, in order, and their indices."""
        where = self._axis("top_k", x, axis)
        values, indices = self.apply_all("top_k", x, name=name, k=k, axis=where, largest=largest)
        return values, indices
