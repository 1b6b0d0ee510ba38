"""Kernels of one-dimensional windows: those of images, on views of height one.

A sequence (n, c, w) is the image (n, c, 1, w) without a copy, whatever its strides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soapstone.kernels.cpu.onednn import convolution, pooling
from soapstone.kernels.cpu.onednn.descriptors import Step, on_operands
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_SINGLE = {"stride": 1, "dilation": 1, "kernel": 1, "size": 1, "origin": 0, "full_size": 1}
_ZEROS = ("excess", "output_padding")


def lifted(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a sequence's windows as those of an image of height one."""
    made = dict(attributes)
    for name, value in _SINGLE.items():
        if name in made:
            made[name] = (value, *made[name])
    for name in _ZEROS:
        if name in made:
            made[name] = (0, *made[name])
    if "padding" in made:
        low, high = made["padding"]
        made["padding"] = (0, low, 0, high)
    return made


def _image(array: Array) -> Array:
    return array[:, :, None] if array.ndim == 3 else array


def as_image(bind: Callable[..., Entry | None]) -> Callable[..., Entry | None]:
    """Return the kernel of a sequence, given that of an image; vectors stay as they are.

    Both may take the steps that follow (`descriptors.Step`).
    """

    def bind_sequence(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
        image = replace(
            call,
            operator=call.operator.replace("1d", "2d"),
            attributes=lifted(call.attributes),
            inputs=tuple(map(_image, call.inputs)),
            outputs=tuple(map(_image, call.outputs)),
        )
        if not steps:
            return bind(image)
        return bind(image, on_operands(steps, _image))

    return bind_sequence


for _operator, _bind in {
    "conv1d": convolution.convolution,
    "conv1d_grad_input": convolution.grad_input,
    "conv1d_grad_weight": convolution.grad_weight,
    "conv_transpose1d": convolution.transposed,
    "max_pool1d": pooling.max_pool2d,
    "max_pool1d_grad": pooling.max_pool2d_grad,
    "avg_pool1d": pooling.avg_pool2d,
    "avg_pool1d_grad": pooling.avg_pool2d_grad,
}.items():
    variant(_operator, "onednn", promises=_operator == "conv1d")(as_image(_bind))
