"""Convolutions along one, two or three axes, and their transposes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from soapstone.frontend.layers.base import (
    LayerBase,
    Padding,
    Pair,
    Parameters,
    initials,
    pads,
    spread,
)
from soapstone.ir.errors import ShapeError

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor

Extent = int | Sequence[int]
_COUNTED = {1: "one axis", 2: "two axes", 3: "three axes"}
_AXES = {1: "n c l", 2: "n c h w", 3: "n c d h w"}
_CONVOLUTION = """Return the cross-correlation of x along {axes}, plus a bias, activated.

{shapes}, where an extent becomes
(extent + padding - dilation (kernel - 1) - 1) // stride + 1, padding being that of both sides.

Args:
    x: the tensor to convolve.
    channels: the number of channels of the result.
    kernel, stride, dilation: one number, or one for each axis.
    padding: "same" (which keeps extents at stride 1), "valid" (none), one number, one for each
        axis, or two: before each axis, then after each.
    groups: the number of parts into which channels are divided; parts do not mix.
    activation: None, "relu", "leaky_relu", "gelu", "sigmoid" or "tanh".
    bias: whether a trained number is added to each channel.
    initial: how parameters begin, "uniform" or "he" (`initials` in layers/base.py).
    name: of the node. Its parameters are `name.weight`, (channels, c / groups, *kernel), and
        `name.bias`, (channels,).

Raises:
    ShapeError: x has another rank or is smaller than the window, or groups do not divide its
        channels or the result's.
    GraphError: another argument does not fit; it is named.
"""


P = ParamSpec("P")
S = TypeVar("S")


def _of_rank(
    rank: int, method: Callable[Concatenate[S, int, P], Tensor], shapes: str
) -> Callable[Concatenate[S, P], Tensor]:
    """Return the method for images of `rank` axes, which it takes as its first argument."""

    def layer(self: S, /, *args: P.args, **kwargs: P.kwargs) -> Tensor:
        return method(self, rank, *args, **kwargs)

    taken = inspect.signature(method)
    layer.__name__ = f"conv{rank}d"
    layer.__doc__ = _CONVOLUTION.format(axes=_COUNTED[rank], shapes=shapes)
    parameters = [value for name, value in taken.parameters.items() if name != "rank"]
    layer.__signature__ = taken.replace(parameters=parameters)  # type: ignore[attr-defined]
    return layer


def _parameters(
    label: str, weight: tuple[int, ...], channels: int, bias: bool, initial: str
) -> Parameters:
    """Return the parameters of a convolution; weight: the shape of its weight."""
    first, shift = initials(label, initial, math.prod(weight[1:]))
    parameters: Parameters = {"weight": (weight, first)}
    return {**parameters, "bias": ((channels,), shift)} if bias else parameters


class ConvolutionLayers(LayerBase):
    """Convolutions with their parameters.

    A weight begins as `initial` says, "uniform" or "he"; `padding` is "same", "valid" or numbers.
    """

    def _conv(
        self,
        rank: int,
        x: Tensor,
        channels: int,
        kernel: Extent,
        stride: Extent = 1,
        padding: Padding = 0,
        *,
        dilation: Extent = 1,
        groups: int = 1,
        activation: str | None = None,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        operator = f"conv{rank}d"
        node = self._name(operator, name)
        label = f"{operator} {node!r}"
        self._channels(operator, x, rank, node)
        per_group = self._grouped(label, x, channels, groups) // groups
        window, steps = spread("kernel", kernel, rank), spread("dilation", dilation, rank)
        weight = channels, per_group, *window
        return self._layer(
            *(operator, x, _parameters(label, weight, channels, bias, initial), node),
            stride=spread("stride", stride, rank),
            padding=pads(padding, window, steps),
            dilation=steps,
            groups=groups,
            bias=bias,
            activation=activation,
        )

    conv1d = _of_rank(1, _conv, "x: (n, c, l); result: (n, channels, l')")
    conv2d = _of_rank(2, _conv, "x: (n, c, h, w); result: (n, channels, h', w')")
    conv3d = _of_rank(3, _conv, "x: (n, c, d, h, w); result: (n, channels, d', h', w')")

    def depthwise_conv2d(
        self,
        x: Tensor,
        kernel: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        *,
        multiplier: int = 1,
        dilation: Pair = 1,
        activation: str | None = None,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        """Return each channel's own convolutions: `multiplier` filters for each channel of x.

        x: (n, c, h, w); result: (n, c multiplier, h', w'). The other arguments are those of
        `conv2d`: kernel, stride, padding, dilation, activation, bias, initial.

        Raises:
            ShapeError, GraphError: as of `conv2d`.
        """
        groups = self._channels("depthwise_conv2d", x, 2, name)
        return self.conv2d(
            x,
            groups * multiplier,
            kernel=kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            activation=activation,
            bias=bias,
            initial=initial,
            name=name,
        )

    def separable_conv2d(
        self,
        x: Tensor,
        channels: int,
        kernel: Pair,
        stride: Pair = 1,
        padding: Padding = 0,
        *,
        dilation: Pair = 1,
        activation: str | None = None,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        """Return a depthwise, then a 1x1 convolution; bias and activation are of the second.

        x: (n, c, h, w); result: (n, channels, h', w'). kernel, stride, padding and dilation are of
        the first; initial is of both. The nodes are `name.depth` and `name.point`.

        Raises:
            ShapeError, GraphError: as of `conv2d`.

        Source: Chollet, Xception, CVPR 2017.
        """
        label = self._name("separable_conv2d", name)
        with self.all_or_nothing():
            y = self.depthwise_conv2d(
                x,
                kernel=kernel,
                stride=stride,
                padding=padding,
                dilation=dilation,
                bias=False,
                initial=initial,
                name=f"{label}.depth",
            )
            return self.conv2d(
                y,
                channels,
                kernel=1,
                activation=activation,
                bias=bias,
                initial=initial,
                name=f"{label}.point",
            )

    def conv_transpose(
        self,
        x: Tensor,
        channels: int,
        kernel: Extent,
        stride: Extent = 1,
        padding: Padding = 0,
        *,
        dilation: Extent = 1,
        output_padding: Extent = 0,
        groups: int = 1,
        bias: bool = True,
        initial: str = "uniform",
        name: str | None = None,
    ) -> Tensor:
        """Return the transposed convolution along one to three axes: the gradient of a convolution.

        x: (n, c, …), with one to three more axes; result: (n, channels, …), whose extents are
        (extent - 1) stride - padding + (kernel - 1) dilation + 1 + output_padding, padding being
        that of both sides. groups, bias and initial are as of `conv2d`; the weight is
        (c, channels / groups, *kernel).

        Raises:
            ShapeError: x has another rank, or groups do not divide its channels or the result's.
            GraphError: another argument does not fit; it is named.
        """
        rank = len(x.shape) - 2
        operator = f"conv_transpose{rank}d"
        if rank not in _AXES:
            raise ShapeError(f"conv_transpose: x has shape {x.shape}; n c and 1 to 3 more needed")
        node = self._name(operator, name)
        label = f"{operator} {node!r}"
        given = self._grouped(label, x, channels, groups)
        window, steps = spread("kernel", kernel, rank), spread("dilation", dilation, rank)
        weight = given, channels // groups, *window
        return self._layer(
            *(operator, x, _parameters(label, weight, channels, bias, initial), node),
            stride=spread("stride", stride, rank),
            padding=pads(padding, window, steps),
            dilation=steps,
            output_padding=spread("output_padding", output_padding, rank),
            groups=groups,
            bias=bias,
        )

    def _channels(self, operator: str, x: Tensor, rank: int, name: str | None) -> int:
        if len(x.shape) != rank + 2:
            label = operator if name is None else f"{operator} {name!r}"
            raise ShapeError(
                f"{label}: x has rank {len(x.shape)} (shape {x.shape}); {_AXES[rank]} needed"
            )
        return x.shape[1]

    def _grouped(self, label: str, x: Tensor, channels: int, groups: int) -> int:
        given = x.shape[1]
        if groups < 1 or given % groups or channels < 1 or channels % groups:
            raise ShapeError(
                f"{label}: {given} input and {channels} output channels found;"
                f" multiples of groups {groups} needed"
            )
        return given
