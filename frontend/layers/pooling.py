"""Pooling over windows and over all positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.frontend.layers.base import Padding, pads, spread
from soapstone.frontend.layers.declared import DeclaredLayers
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor

Extent = int | Sequence[int]


class PoolingLayers(DeclaredLayers):
    """Maxima and means of windows.

    The stride defaults to the kernel; `ceil_mode` adds a last window that crosses the border.
    """

    def max_pool(
        self,
        x: Tensor,
        kernel: Extent,
        stride: Extent | None = None,
        padding: Padding = 0,
        *,
        dilation: Extent = 1,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> Tensor:
        """Return the maximum over windows along one to three axes.

        x: (n, c, …), with one to three more axes; result: (n, c, …), whose extents are
        (extent + padding - dilation (kernel - 1) - 1) // stride + 1, padding being that of both
        sides.

        Args:
            kernel, stride, dilation: one number, or one for each axis; the stride is the kernel's
                extent unless given.
            padding: "same", "valid" or numbers, as of `conv2d`; no element of it is a maximum.
            ceil_mode: round the extents up instead of down, where the last window still begins
                inside.

        Raises:
            ShapeError: x has another rank, or is smaller than the window.
            GraphError: another argument does not fit; it is named.
        """
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
        stride: Extent | None = None,
        padding: Padding = 0,
        *,
        dilation: Extent = 1,
        ceil_mode: bool = False,
        include_pad: bool = True,
        name: str | None = None,
    ) -> Tensor:
        """Return the mean over windows along one to three axes.

        x: (n, c, …); kernel, stride, padding, dilation, ceil_mode and the result are as of
        `max_pool`. With `include_pad` the padding counts as zeros, else it is left out of the mean.

        Raises:
            ShapeError, GraphError: as of `max_pool`.
        """
        rank, attributes = self._windows("avg_pool", x, kernel, stride, padding, dilation)
        attributes |= {"ceil_mode": ceil_mode, "include_pad": include_pad}
        return self.apply(f"avg_pool{rank}d", x, name=name, **attributes)

    def lp_pool(
        self,
        x: Tensor,
        kernel: Extent,
        p: int = 2,
        stride: Extent | None = None,
        padding: Padding = 0,
        *,
        name: str | None = None,
    ) -> Tensor:
        """Return the p-norm of windows, (the sum of |x|^p)^(1/p), along one to three axes.

        x: (n, c, …); p is 1 or more; kernel, stride, padding and the result are as of `max_pool`.

        Raises:
            ShapeError, GraphError: as of `max_pool`.

        Source: ONNX's LpPool.
        """
        _, attributes = self._windows("lp_pool", x, kernel, stride, padding)
        del attributes["dilation"]
        return self.apply("lp_pool", x, name=name, p=p, **attributes)

    max_pool1d = max_pool2d = max_pool3d = max_pool  # of x (n, c, l), images and volumes
    avg_pool1d = avg_pool2d = avg_pool3d = avg_pool

    def adaptive_avg_pool(self, x: Tensor, size: Extent, *, name: str | None = None) -> Tensor:
        """Return means of equal windows that do not overlap. x: (n, c, …); result: (n, c, *size).

        size: one extent, or one for each axis.

        Raises:
            ShapeError: x has another rank, or an extent that is no multiple of the size's.
            GraphError: another argument does not fit.
        """
        return self.avg_pool(x, self._cut("adaptive_avg_pool", x, size), name=name)

    def adaptive_max_pool(self, x: Tensor, size: Extent, *, name: str | None = None) -> Tensor:
        """Return maxima of windows that do not overlap. x: (n, c, …); result: (n, c, *size).

        size: one extent, or one for each axis.

        Raises:
            ShapeError, GraphError: as of `adaptive_avg_pool`.
        """
        return self.max_pool(x, self._cut("adaptive_max_pool", x, size), name=name)

    def _cut(self, layer: str, x: Tensor, size: Extent) -> tuple[int, ...]:
        """Return the extents of equal windows of which there are `size` along each axis."""
        extents = x.shape[2:]
        sizes = spread(f"{layer}: size", size, len(extents))
        if any(one < 1 or extent % one for extent, one in zip(extents, sizes)):
            raise ShapeError(f"{layer}: size {sizes} found, divisors of {extents} needed")
        return tuple(extent // one for extent, one in zip(extents, sizes))

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
