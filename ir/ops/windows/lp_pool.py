"""Lp pooling, the p-norm of each window, along one to three axes. Dims: as in pooling.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.onnx_entry import Onnx
from soapstone.ir.ops.checks import need_float, need_rank
from soapstone.ir.ops.windows.pooling import pool_grad_signature, pool_signature
from soapstone.ir.ops.windows.window import (
    ONNX_WINDOW,
    gather,
    local_padding,
    positions_of,
    scatter,
    spatial_dims,
)
from soapstone.ir.spec import Case, GradientContext, Tile, define
from soapstone.ir.tensor import Array, TensorSpec

_P = {"p": Attribute("int", 2, minimum=1)}
# The rank is the kernel's: what is left out along its axes is one, or zero padding.
_ATTRIBUTES = {
    "kernel": Attribute("ints", minimum=1),
    "stride": Attribute("ints", None, minimum=1),
    "padding": Attribute("ints", None, minimum=0),
    "dilation": Attribute("ints", None, minimum=1),
    "ceil_mode": Attribute("bool", False),
}


def filled(attributes: Attributes) -> dict[str, Any]:
    """Return the attributes with a number for each axis.

    Raises:
        GraphError: the kernel has none, or more than three.
    """
    rank = len(attributes["kernel"])
    if not 1 <= rank <= 3:
        raise GraphError(f"attribute kernel: {rank} numbers found, 1 to 3 needed")
    defaults = {"stride": (1,) * rank, "padding": (0,) * (2 * rank), "dilation": (1,) * rank}
    given = {name: value for name, value in attributes.items() if value is not None}
    return {**defaults, **given}


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    return pool_signature(len(attributes["kernel"]), inputs, filled(attributes))


def _lp_pool(attributes: Attributes, x: Array) -> Array:
    attributes = filled(attributes)
    kernel, p = attributes["kernel"], attributes["p"]
    count = positions_of(attributes, x.shape[2:], kernel)
    powers = gather(np.abs(x) ** p, attributes, kernel, count)
    total = powers.sum(axis=tuple(range(x.ndim, powers.ndim)))
    return np.asarray(total ** x.dtype.type(1 / p))


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    attributes = filled(attributes)
    box = tile.inputs[-1]
    padding = local_padding(attributes, tile, box, attributes["kernel"])
    return {**attributes, "padding": padding, "ceil_mode": False}


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0, 1, 2)
    size = inputs[2].shape[2:]
    rank = len(attributes["kernel"])
    need_rank(inputs, 2, " ".join(("n", "c", *spatial_dims(rank))))
    return pool_grad_signature(rank, inputs, filled(attributes), size, 2)


def _lp_pool_grad(attributes: Attributes, dy: Array, y: Array, x: Array) -> Array:
    attributes = filled(attributes)
    kernel, p = attributes["kernel"], attributes["p"]
    shares = np.where(y == 0, 0, dy / np.where(y == 0, 1, y) ** (p - 1)).astype(x.dtype)
    wide = shares.reshape(*dy.shape, *(1,) * len(kernel))
    spread = scatter(np.broadcast_to(wide, (*dy.shape, *kernel)), attributes, x.shape[2:])
    return np.asarray(spread * np.sign(x) * np.abs(x) ** (p - 1))


def _gradient(g: GradientContext) -> Sequence[str | None]:
    return [g.emit("lp_pool_grad", g.grad(), g.outputs[0], g.inputs[0], **g.attributes)]


_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("2 3 7 6", "2 3 4 3", {"kernel": (3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)}),
    ("1 2 7", "1 2 3", {"kernel": (3,), "stride": (2,), "p": 3}),
    ("1 2 4 3 4", "1 2 2 2 2", {"kernel": (2, 2, 2), "stride": (2, 1, 2), "p": 2}),
    ("1 2 6", "1 2 3", {"kernel": (3,), "stride": (2,), "ceil_mode": True}),
    ("1 1 5 5", "1 1 3 3", {"kernel": (2, 2), "dilation": (2, 2), "p": 1}),
    ("0 2 4", "0 2 3", {"kernel": (2,)}),
)

define(
    name="lp_pool",
    inputs=("x",),
    signature=_signature,
    reference=_lp_pool,
    attributes=_ATTRIBUTES | _P,
    gradient=_gradient,
    localize=_localize,
    flops_per_point=3,
    onnx=Onnx("LpPool", attributes=ONNX_WINDOW),
    cases=tuple(Case((x,), attributes) for x, _, attributes in _CASES),
    doc="(the sum of |x|^p)^(1/p) over each window; the rank is that of the kernel",
)
define(
    name="lp_pool_grad",
    inputs=("dy", "y", "x"),
    outputs=("dx",),
    signature=_grad_signature,
    reference=_lp_pool_grad,
    attributes=_ATTRIBUTES | _P,
    localize=_localize,
    flops_per_point=4,
    cases=tuple(Case((y, y, x), attributes, (), True) for x, y, attributes in _CASES),
)
