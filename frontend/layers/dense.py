"""Layers of matrix products and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.einsum import einsum
from soapstone.frontend.layers.base import LayerBase, Parameters, initials
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import GraphBuilder, Initial

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor


class DenseLayers(LayerBase):
    """Dense layers, matrix products and embeddings."""

    def dense(
        self,
        x: Tensor,
        width: int,
        *,
        activation: str | None = None,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        """Return activation(x w + b). x: (n, …, k); result: (n, …, width).

        The weight begins as `initial` says, "uniform" or "he".
        """
        node = self._name("dense", name)
        if not x.shape or width < 1:
            raise ShapeError(
                f"dense {node!r}: width {width} and x {x.spec} found; 1 or more needed"
            )
        k = x.shape[-1]
        first, shift = initials(f"dense {node!r}", initial, k)
        parameters: Parameters = {"weight": ((k, width), first)}
        if bias:
            parameters["bias"] = ((width,), shift)
        return self._layer("linear", x, parameters, node, bias=bias, activation=activation)

    def embedding(self, ids: Tensor, rows: int, width: int, *, name: str | None = None) -> Tensor:
        """Return rows of a table. ids: (n, …) integers below `rows`; result: (n, …, width)."""
        node = self._name("embedding", name)
        initial = Initial("normal", 1.0)
        if rows < 1 or width < 1:
            raise ShapeError(f"embedding {node!r}: table ({rows}, {width}) found; 1 or more needed")
        return self._layer("embedding", ids, {"table": ((rows, width), initial)}, node)

    def einsum(self, equation: str, *tensors: Tensor, name: str | None = None) -> Tensor:
        """Return the sum of products that an equation such as "bij,bjk->bik" describes.

        Raises:
            GraphError, ShapeError: an equation that is malformed, or does not fit the tensors.
        """
        node = self._name("einsum", name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return (einsum(builder, equation, values, name=node),)

        return self.record(emit, tensors)[0]

    def matmul(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return the matrix product over the last two axes. x: (…, m, k), y: (…, k, n)."""
        return self.apply("matmul", x, y, name=name)
