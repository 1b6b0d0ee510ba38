"""Pooling over windows and over all positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.frontend.layers.base import Padding, pads, spread
from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.ir.errors import ShapeError
from soapstone.ir.graph import GraphBuilder

if TYPE_CHECKING:
    from soapstone.frontend.model import Tensor

Extent = int | Sequence[int]


class PoolingLayers(DeclaredLayers):
    """Maxima and means of windows.

    The stride defaults to the kernel; `ceil_mode` adds a last window that crosses the border.
    """

    def max_pool(
        self,
        x: Tensor,
        kernel: Extent,
        *,
        stride: Extent | None = None,
        padding: Padding = 0,
        dilation: Extent = 1,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the maximum over windows along one to three axes. x: (n, c, …)."""
        rank, attributes = self._windows("max_pool", x, kernel, stride, padding, dilation)
        operator = f"max_pool{rank}d"
        node = self._name(operator, name)
        attributes["ceil_mode"] = ceil_mode

        def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
            return builder.apply(operator, *values, name=node, indices=training, **attributes)[:1]

        return self.record(emit, (x,))[0]

    def avg_pool(
        self,
        x: Tensor,
        kernel: Extent,
        *,
        stride: Extent | None = None,
        padding: Padding = 0,
        dilation: Extent = 1,
        ceil_mode: bool = False,
        include_pad: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return the mean over windows along one to three axes. x: (n, c, …).

        With `include_pad` the padding counts as zeros, else it is left out of the mean.
        """
        rank, attributes = self._windows("avg_pool", x, kernel, stride, padding, dilation)
        attributes |= {"ceil_mode": ceil_mode, "include_pad": include_pad}
        return self.apply(f"avg_pool{rank}d", x, name=name, **attributes)

    def lp_pool(
        self,
        x: Tensor,
        kernel: Extent,
        p: int = 2,
        *,
        stride: Extent | None = None,
        padding: Padding = 0,
        name: str | None = None,
    ) -> Tensor:
        """Return the p-norm of windows along one to three axes. x: (n, c, …)."""
        _, attributes = self._windows("lp_pool", x, kernel, stride, padding)
        del attributes["dilation"]
        return self.apply("lp_pool", x, name=name, p=p, **attributes)

    max_pool2d, avg_pool2d = max_pool, avg_pool  # of images x: (n, c, h, w)

    def global_avg_pool(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the mean over positions. x: (n, c, …); result: (n, c)."""
        return self.reduce_mean(x, tuple(range(2, len(x.shape))), name=name)

    def global_max_pool(self, x: Tensor, *, name: str | None = None) -> Tensor:
        """Return the maximum over positions. x: (n, c, …); result: (n, c)."""
        return self.reduce_max(x, tuple(range(2, len(x.shape))), name=name)

    def _windows(
        self,
        layer: str,
        x: Tensor,
        kernel: Extent,
        stride: Extent | None,
        padding: Padding,
        dilation: Extent = 1,
    ) -> tuple[int, dict[str, Any]]:
        """Return along how many axes the windows of a layer are, and their attributes."""
        rank = len(x.shape) - 2
        if not 1 <= rank <= 3:
            raise ShapeError(f"{layer}: x has shape {x.shape}; n c and 1 to 3 more needed")
        window, steps = spread("kernel", kernel, rank), spread("dilation", dilation, rank)
        return rank, {
            "kernel": window,
            "stride": window if stride is None else spread("stride", stride, rank),
            "padding": pads(padding, window, steps),
            "dilation": steps,
        }
