"""Form and laws of two-dimensional convolution (TASO, Table 2.2), corrected for groups.

The table's convolution has one group. Here the number of groups is a parameter: `depthwise` is one
group a channel. With several groups, outputs for one image are not simply put side by side, so
`conv2d-outputs` and `conv2d-inputs` say one group; what holds instead is `conv2d-groups`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.ops.elementwise.laws_arithmetic import TABLE
from soapstone.ir.ops.elementwise.laws_pointwise import ranks
from soapstone.ir.ops.forms import PADDINGS, STRIDES, kernel_size, read_window, window_of
from soapstone.ir.ops.movement.laws_movement import joined_law
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Value

_ACTIVATIONS: dict[Any, Value] = {None: "none", "relu": "relu"}


def _groups(value: Value, image: TensorSpec, kernel: TensorSpec) -> int | None:
    """Return how many groups a parameter says, None where the channels are not theirs."""
    (channels, (outputs, inputs)) = image.shape[1], kernel.shape[:2]
    if value == "depthwise":
        return channels if inputs == 1 and outputs == channels else None
    if not isinstance(value, int) or value < 1:
        return None
    return value if channels == value * inputs and outputs % value == 0 else None


def _conv2d(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    if any(spec.rank != 4 for spec in specs):
        return None
    groups = _groups(parameters[0], *specs)
    window = window_of(parameters[1], parameters[2], specs[1].shape[2:])
    activation = [name for name, word in _ACTIVATIONS.items() if word == parameters[3]]
    if groups is None or window is None or not activation:
        return None
    return {**window, "groups": groups, "bias": False, "activation": activation[0]}


def _read_conv2d(attributes: Attributes, *specs: TensorSpec) -> list[tuple[Value, ...]]:
    activation = _ACTIVATIONS.get(attributes["activation"])
    if attributes["bias"] or activation is None:
        return []
    image, kernel = specs
    groups = [
        value
        for value in (attributes["groups"], "depthwise")
        if _groups(value, image, kernel) == attributes["groups"]
    ]
    windows = read_window(attributes, kernel.shape[2:])
    return [(g, s, p, activation) for g, (s, p) in itertools.product(groups, windows)]


def _identity(parameters: Sequence[Value], shape: tuple[int, ...]) -> Array | None:
    """Return the kernel that leaves an image as it is: the first shape is (c, c, h, w).

    Of shape (c, c/g, h, w) it does so with g groups.
    """
    size = kernel_size(parameters[0])
    if len(shape) != 4 or shape[2:] != size or not all(extent % 2 for extent in size):
        return None
    outputs, inputs = shape[:2]
    if inputs == 0 or outputs % inputs:
        return None
    kernel = np.zeros(shape)
    channels = np.arange(outputs)
    kernel[channels, channels % inputs, size[0] // 2, size[1] // 2] = 1
    return kernel


CONV2D_FORMS = (
    Form(
        "conv2d",
        2,
        {
            "g": (1, 2, "depthwise"),
            "s": STRIDES,
            "p": PADDINGS,
            "c": tuple(_ACTIVATIONS.values()),
        },
        _conv2d,
        _read_conv2d,
    ),
)
IDENTITY_KERNEL = Constant("identity_kernel", 4, {"k": ("3x3", "1x3", "1x1")}, _identity)

_ONE = ranks("x y", "44")
_TWO = ranks("x y z", "444")
_PAIRS = ranks("x y z w", "4444")
_SCALED = ranks("x y w", "440")
_POINT = ("dim(y,-2) = 1", "dim(y,-1) = 1")


def _like(x: str, y: str) -> tuple[str, ...]:
    """Return the condition that neither is broadcast over the other's rows and columns."""
    return tuple(f"dim({x},{axis}) = dim({y},{axis})" for axis in (-2, -1))


CONV2D_LAWS = (
    Law(
        "conv2d-scaled",
        "conv2d[g,s,p,c](smul(x, w), y) = conv2d[g,s,p,c](x, smul(y, w))",
        ranks=_SCALED,
        source=TABLE,
    ),
    Law(
        "conv2d-smul",
        "smul(conv2d[g,s,p,none](x, y), w) = conv2d[g,s,p,none](smul(x, w), y)",
        ranks=_SCALED,
        source=TABLE,
    ),
    Law(
        "conv2d-add-kernels",
        "conv2d[g,s,p,none](x, add(y, z))"
        " = add(conv2d[g,s,p,none](x, y), conv2d[g,s,p,none](x, z))",
        where=_like("y", "z"),
        ranks=_TWO,
        source=f"{TABLE}, for kernels of one size",
    ),
    Law(
        "conv2d-add-images",
        "conv2d[g,s,p,none](add(x, y), z)"
        " = add(conv2d[g,s,p,none](x, z), conv2d[g,s,p,none](y, z))",
        where=_like("x", "y"),
        ranks=_TWO,
        source=f"{TABLE}, for images of one size",
    ),
    Law(
        "conv2d-enlarge",
        "conv2d[g,s,same,c](x, y) = conv2d[g,s,same,c](x, enlarge[k](y))",
        ranks=_ONE,
        source=TABLE,
    ),
    Law(
        "conv2d-relu",
        "conv2d[g,s,p,relu](x, y) = relu(conv2d[g,s,p,none](x, y))",
        ranks=_ONE,
        source=TABLE,
    ),
    Law(
        "conv2d-identity",
        "conv2d[g,1,same,none](x, identity_kernel[k]) = x",
        ranks=ranks("x", "4"),
        source=TABLE,
    ),
    Law(
        "conv2d-batch",
        "concat[-4](conv2d[g,s,p,c](x, z), conv2d[g,s,p,c](y, z))"
        " = conv2d[g,s,p,c](concat[-4](x, y), z)",
        ranks=_TWO,
        source=TABLE,
    ),
    Law(
        "conv2d-outputs",
        "concat[-3](conv2d[1,s,p,c](x, y), conv2d[1,s,p,c](x, z))"
        " = conv2d[1,s,p,c](x, concat[-4](y, z))",
        ranks=_TWO,
        source=f"{TABLE}, with one group",
    ),
    Law(
        "conv2d-inputs",
        "conv2d[1,s,p,none](concat[-3](x, z), concat[-3](y, w))"
        " = add(conv2d[1,s,p,none](x, y), conv2d[1,s,p,none](z, w))",
        ranks=_PAIRS,
        source=f"{TABLE}, with one group",
    ),
    Law(
        "conv2d-groups",
        "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))"
        " = conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))",
        where=("dim(y,-4)*h = dim(w,-4)*g",),
        ranks=_PAIRS,
        source="groups are independent; each has as many outputs",
    ),
    Law(
        "conv2d-repeated",
        "conv2d[2,s,p,c](concat[-3](x, x), y) = conv2d[1,s,p,c](x, y)",
        ranks=_ONE,
        source="both groups see the same image",
    ),
    Law(
        "conv2d-depthwise",
        "concat[-3](conv2d[depthwise,s,p,c](x, y), conv2d[depthwise,s,p,c](z, w))"
        " = conv2d[depthwise,s,p,c](concat[-3](x, z), concat[-4](y, w))",
        ranks=_PAIRS,
        source="channels are independent",
    ),
    Law(
        "conv2d-depthwise-groups",
        "conv2d[depthwise,s,p,c](x, y) = conv2d[g,s,p,c](x, y)",
        where=("dim(x,-3) = g",),
        ranks=_ONE,
        source="depthwise is a group a channel",
    ),
    Law(
        "conv2d-point-padding",
        "conv2d[g,s,same,c](x, y) = conv2d[g,s,valid,c](x, y)",
        where=_POINT,
        ranks=_ONE,
        source="a kernel of one point has no padding",
    ),
    Law(
        "conv2d-rows",
        "concat[-2](conv2d[g,1,p,c](x, y), conv2d[g,1,p,c](z, y))"
        " = conv2d[g,1,p,c](concat[-2](x, z), y)",
        where=_POINT[:1],
        ranks=_TWO,
        source="a kernel of one row takes rows alone",
    ),
    Law(
        "conv2d-columns",
        "concat[-1](conv2d[g,1,p,c](x, y), conv2d[g,1,p,c](z, y))"
        " = conv2d[g,1,p,c](concat[-1](x, z), y)",
        where=_POINT[1:],
        ranks=_TWO,
        source="a kernel of one column takes columns alone",
        follows=("conv2d-rows", "conv2d-transpose", "concat-transpose", "transpose-inverse"),
    ),
    Law(
        "conv2d-transpose",
        "transpose(conv2d[g,s,p,c](x, y)) = conv2d[g,s,p,c](transpose(x), transpose(y))",
        ranks=_ONE,
        source="rows and columns exchanged",
    ),
    Law(
        "conv2d-depthwise-order",
        "conv2d[depthwise,s,valid,none](conv2d[depthwise,1,valid,none](x, y), z)"
        " = conv2d[depthwise,s,valid,none](conv2d[depthwise,1,valid,none](x, z), y)",
        ranks=_TWO,
        source="convolutions of one channel commute where nothing is padded",
    ),
    Law(
        "relu-conv2d",
        "relu(conv2d[g,s,p,none](relu(x), relu(y))) = conv2d[g,s,p,none](relu(x), relu(y))",
        ranks=_ONE,
        source="relu's range",
    ),
    joined_law("conv2d-joined-image", "conv2d[g,s,p,c]({}, w)", "a = -3", ranks=_PAIRS),
    joined_law("conv2d-joined-kernel", "conv2d[g,s,p,c](w, {})", "a = -3", ranks=_PAIRS),
    Law("relu-identity-kernel", "relu(identity_kernel[k]) = identity_kernel[k]"),
    Law(
        "identity-kernel-square",
        "mul(identity_kernel[k], identity_kernel[k]) = identity_kernel[k]",
        source="of zeros and ones",
    ),
    Law(
        "enlarge-identity-kernel",
        "enlarge[k](identity_kernel[h]) = identity_kernel[k]",
        source="a larger border of zeros",
    ),
    Law(
        "transpose-identity-kernel",
        "transpose(identity_kernel[k]) = identity_kernel[k]",
        source="the centre stays",
    ),
)
