"""Activations that are a few operators: what is one operator is a layer by its declaration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.ir.errors import ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


class ActivationLayers(DeclaredLayers):
    """Functions of single elements, and the gated linear unit."""

    def relu6(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x kept within 0 and 6. x: any shape, which is also the result's."""
        return self.clip(x, 0.0, 6.0, name=name)

    def hard_tanh(
        self, x: Tensor, low: float = -1.0, high: float = 1.0, *, name: str | None = None
    ) -> Tensor:
        """Return x kept within low and high. x: any shape, which is also the result's."""
        return self.clip(x, low, high, name=name)

    def log_sigmoid(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return log(1 / (1 + exp(-x))). x: any shape, which is also the result's."""
        return self.neg(self.softplus(self.neg(x)), name=name)

    def tanh_shrink(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return x - tanh(x). x: any shape, which is also the result's."""
        return self.sub(x, self.tanh(x), name=name)

    def soft_shrink(self, x: Tensor, lambd: float = 0.5, *, name: str | None = None) -> Tensor:
        """Return x moved by lambd toward 0, and 0 where it is within lambd of it.

        x: any shape, which is also the result's.

        Raises:
            GraphError: lambd below 0.
        """
        return self.shrink(x, lambd, lambd, name=name)

    def softmin(self, x: Tensor, axis: int = -1, *, name: str | None = None) -> Tensor:
        """Return the softmax of -x along an axis. x: any shape, which is also the result's.

        Raises:
            ShapeError: there is no such axis.
        """
        return self.softmax(self.neg(x), axis, name=name)

    def glu(self, x: Tensor, axis: int = -1, *, name: str | None = None) -> Tensor:
        """Return one half of x times the sigmoid of the other: a gated linear unit.

        x: any shape, halved along an axis in the result.

        Raises:
            ShapeError: there is no such axis, or its extent is odd.

        Source: Dauphin et al., Language modeling with gated convolutional networks, ICML 2017.
        """
        where = self._axis("glu", x, axis)
        half, odd = divmod(x.shape[where], 2)
        if odd or not where:
            raise ShapeError(f"glu: axis {axis} of {x.spec} found, an even extent needed")
        kept, gate = self.apply_all("split", x, axis=where, sizes=(half, half))
        return self.mul(kept, self.sigmoid(gate), name=name)
