"""Layers of matrix products and tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soapstone.frontend.einsum import einsum
from soapstone.frontend.layers.base import LayerBase, Parameters, initials
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import Initial

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor


class DenseLayers(LayerBase):
    """Dense layers, matrix products and embeddings."""

    def dense(
        self,
        x: Tensor,
        width: int,
        activation: str | None = None,
        *,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        """Return activation(x w + b), along the last axis of x.

        x: (n, …, k); result: (n, …, width).

        Args:
            activation: None, "relu", "leaky_relu", "gelu", "sigmoid" or "tanh".
            bias: whether b, a trained vector, is added.
            initial: how w and b begin, "uniform" or "he" (`initials` in layers/base.py).
            name: of the node; its parameters are `name.weight`, (k, width), and `name.bias`,
                (width,).

        Raises:
            ShapeError: x is a scalar, or the width is below 1.
            GraphError: another argument does not fit; it is named.
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
        """Return the rows of a trained table that ids name.

        ids: (n, …) integers from 0 to rows - 1; result: (n, …, width) float32. The table is
        `name.table`, (rows, width), and begins as normal numbers of deviation 1.

        Raises:
            ShapeError: ids are neither int32 nor int64, or rows or width is below 1.
            TaskError: when run, an id outside the table.
        """
        node = self._name("embedding", name)
        initial = Initial("normal", 1.0)
        if rows < 1 or width < 1:
            raise ShapeError(f"embedding {node!r}: table ({rows}, {width}) found; 1 or more needed")
        return self._layer("embedding", ids, {"table": ((rows, width), initial)}, node)

    def einsum(self, equation: str, *tensors: Tensor, name: str | None = None) -> Tensor:
        """Return the sum of products that an equation such as "bij,bjk->bik" describes.

        tensors: one for each comma-separated term of the equation, one axis a letter; the result
        has the axes after the arrow, or without one those that occur once, by letter.

        Raises:
            GraphError, ShapeError: an equation that is malformed, or does not fit the tensors.

        Source: `numpy.einsum`, and ONNX's Einsum.
        """
        node = self._name("einsum", name)

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return (einsum(builder, equation, values, name=node),)

        return self.record(emit, tensors)[0]

    def matmul(self, x: Tensor, y: Tensor, *, name: str | None = None) -> Tensor:
        """Return the matrix product of x and y over their last two axes.

        x: (…, m, k), y: (…, k, n); result: (…, m, n), where the leading axes broadcast as NumPy's
        do.

        Raises:
            ShapeError: k differs, or leading axes do not broadcast.
        """
        return self.apply("matmul", x, y, name=name)
