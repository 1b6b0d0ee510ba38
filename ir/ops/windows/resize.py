"""`resize`: an image of another size by nearest, linear or cubic interpolation, as ONNX has it.

Along each axis an output is a weighted sum of a few inputs; the weights of all axes multiply. They
are made once from the attributes. Dims: d0, d1, … by the output's axes. A resized axis of the input
is needed whole by every tile, whose attributes tell which outputs are its own.
Source: ONNX operator Resize, opset 19.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Axis, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, GradientContext, Tile, box_shape, define
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.records import dataclass

_COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_ATTRIBUTES = {
    "sizes": Attribute("ints", minimum=0, extents=True),
    "scales": Attribute("floats", None),
    "mode": Attribute("str", "nearest", choices=("nearest", "linear", "cubic")),
    "coordinate_transformation_mode": Attribute("str", "half_pixel", choices=_COORDINATES),
    "nearest_mode": Attribute("str", "round_prefer_floor", choices=_NEAREST),
    "cubic_coeff_a": Attribute("float", -0.75),
    "exclude_outside": Attribute("bool", False),
    "antialias": Attribute("bool", False),
    "extrapolation_value": Attribute("float", 0.0),
    "roi": Attribute("floats", None),
}


@dataclass(frozen=True)
class Taps:
    """One axis: output i is the sum over t of weight[i, t] * input[index[i, t]].

    Where `outside` holds, the output is the extrapolation value instead.
    """

    index: Array  # (outputs, taps) int64
    weight: Array  # (outputs, taps) float64
    outside: Array  # (outputs,) bool

    @property
    def identity(self) -> bool:
        """Whether outputs are the inputs of the same number (of a tile: of consecutive ones)."""
        return (
            self.index.shape[1] == 1
            and bool((np.diff(self.index[:, 0]) == 1).all())
            and bool((self.weight == 1).all())
            and not self.outside.any()
        )


def _scale(attributes: Attributes, axis: int, size: int, made: int) -> float:
    scales = attributes["scales"]
    return float(scales[axis]) if scales is not None else made / max(size, 1) or 1.0


def _coordinates(attributes: Attributes, axis: int, size: int, made: int) -> tuple[Array, float]:
    """Return where each output lies among the inputs, and the axis's scale."""
    # A file's scales have single precision, and which element is nearest goes by it.
    given, nearest = attributes["scales"] is not None, attributes["mode"] == "nearest"
    number: Any = np.float32 if given and nearest else np.float64
    scale = number(_scale(attributes, axis, size, made))
    at = np.arange(made, dtype=number)
    mode = attributes["coordinate_transformation_mode"]
    # With scales the exact length differs from the whole number of outputs.
    exact = size * scale if given else number(made)
    if mode == "align_corners":
        return (at * (size - 1) / (exact - 1) if exact != 1 else at * 0), scale
    if mode == "asymmetric":
        return at / scale, scale
    if mode == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale, scale
    if mode == "tf_crop_and_resize":
        rank = len(attributes["sizes"])
        start, stop = attributes["roi"][axis], attributes["roi"][axis + rank]
        if exact > 1:
            step = (stop - start) * (size - 1) / (exact - 1)
            return start * (size - 1) + at * step, scale
        return at * 0 + 0.5 * (start + stop) * (size - 1), scale
    if mode == "pytorch_half_pixel" and exact <= 1:
        return at * 0, scale
    if mode == "half_pixel_symmetric":
        centre, adjust = size / 2, made / exact
        return centre * (1 - adjust) + (at + 0.5) / scale - 0.5, scale
    return (at + 0.5) / scale - 0.5, scale


def _nearest(mode: str, at: Array) -> Array:
    if mode == "floor":
        return np.floor(at)
    if mode == "ceil":
        return np.ceil(at)
    return np.asarray(np.ceil(at - 0.5) if mode == "round_prefer_floor" else np.floor(at + 0.5))


def _kernel(attributes: Attributes, distance: Array) -> Array:
    """Return the weights of inputs at these distances, in inputs."""
    d = np.abs(distance)
    if attributes["mode"] == "linear":
        return np.asarray(np.maximum(0, 1 - d))
    a = attributes["cubic_coeff_a"]
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


def axis_taps(attributes: Attributes, axis: int, size: int) -> Taps:
    """Return the taps of an axis of `size` inputs; of a tile, those of its own outputs."""
    made = attributes.get("full_sizes", attributes["sizes"])[axis]
    first = attributes.get("offsets", (0,) * len(attributes["sizes"]))[axis]
    mine = slice(first, first + attributes["sizes"][axis])
    crop = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if _plain(attributes, axis, size, made):
        index = np.arange(made)[mine, None]
        return Taps(index, np.ones(index.shape), np.zeros(len(index), bool))
    coordinates, scale = _coordinates(attributes, axis, size, made)
    outside = (coordinates < 0) | (coordinates > size - 1) if crop else np.zeros(made, bool)
    at, outside = coordinates[mine], outside[mine]
    if attributes["mode"] == "nearest":
        near = np.clip(_nearest(attributes["nearest_mode"], at), 0, size - 1)
        index = near.astype(np.int64)[:, None]
        return Taps(index, np.ones(index.shape), outside)
    reach = 1 if attributes["mode"] == "linear" else 2
    # Shrinking with antialias stretches the kernel over all inputs that an output stands for.
    stretch = min(scale, 1.0) if attributes["antialias"] else 1.0
    if stretch < 1:
        count = 2 * math.ceil(reach / stretch)
        start = np.floor(at).astype(np.int64) - count // 2 + 1
    else:
        count, start = 2 * reach, np.floor(at).astype(np.int64) - reach + 1
    index = start[:, None] + np.arange(count)
    weight = _kernel(attributes, (index - at[:, None]) * stretch)
    if attributes["exclude_outside"]:
        weight = np.where((index < 0) | (index >= size), 0, weight)
    if attributes["exclude_outside"] or stretch < 1:
        total = weight.sum(axis=1, keepdims=True)
        weight = weight / np.where(total == 0, 1, total)
    return Taps(np.clip(index, 0, size - 1), weight, outside)


def _plain(attributes: Attributes, axis: int, size: int, made: int) -> bool:
    """Return whether an axis is left as it is."""
    crop = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if crop:
        rank = len(attributes["sizes"])
        start, stop = attributes["roi"][axis], attributes["roi"][axis + rank]
        return size == made and start == 0 and stop == 1
    return size == made and (not size or _scale(attributes, axis, size, made) == 1)


def _check(attributes: Attributes, shape: Sequence[int]) -> None:
    rank = len(shape)
    for name, count in (("sizes", rank), ("scales", rank), ("roi", 2 * rank)):
        values = attributes[name]
        if values is not None and len(values) != count:
            raise ShapeError(
                f"input 0 has rank {rank} (shape {tuple(shape)}); attribute {name} has"
                f" {len(values)} numbers, {count} needed"
            )
    if attributes["scales"] is not None and min(attributes["scales"]) <= 0:
        raise GraphError(f"attribute scales: {min(attributes['scales'])} found, above 0 needed")
    crop = attributes["coordinate_transformation_mode"] == "tf_crop_and_resize"
    if crop and attributes["roi"] is None:
        raise GraphError("attribute roi: None found; tf_crop_and_resize needs its numbers")
    for axis, (size, made) in enumerate(zip(shape, attributes["sizes"])):
        if made and not size:
            raise ShapeError(f"dim d{axis}: {made} outputs of no input found; 1 input needed")


def _operands(
    table: DimTable, shape: Sequence[int], attributes: Attributes
) -> tuple[Operand, Operand]:
    """Return the operands of the given and of the resized image."""
    given: list[Axis] = []
    made: list[Axis] = []
    for axis, (size, count) in enumerate(zip(shape, attributes["sizes"])):
        out = along(table, f"d{axis}", count, "attribute sizes")
        made.append(out)
        given.append(out if _plain(attributes, axis, size, count) else Whole(size, gathered=True))
    return Operand(tuple(given)), Operand(tuple(made))


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    (x,) = inputs
    if attributes["mode"] != "nearest":
        need_float(inputs, 0)
    _check(attributes, x.shape)
    table = DimTable()
    given, made = _operands(table, x.shape, attributes)
    return finish(table, [given], [made], [x.dtype])


def _resize(attributes: Attributes, x: Array) -> Array:
    y = x
    for axis in range(x.ndim):
        taps = axis_taps(attributes, axis, x.shape[axis])
        if attributes["mode"] == "nearest" or taps.identity:
            y = np.take(y, taps.index[:, 0], axis)
        else:
            parts = np.take(y, taps.index, axis)
            shape = [1] * parts.ndim
            shape[axis], shape[axis + 1] = taps.weight.shape
            y = (parts * taps.weight.reshape(shape).astype(x.dtype)).sum(axis=axis + 1)
        if taps.outside.any():
            shape = [1] * y.ndim
            shape[axis] = -1
            value = x.dtype.type(attributes["extrapolation_value"])
            y = np.where(taps.outside.reshape(shape), value, y)
    return np.asarray(y)


def _localize(attributes: Attributes, tile: Tile) -> Attributes:
    box = tile.outputs[0] if "size" not in attributes else tile.inputs[0]
    full = attributes.get("full_sizes", attributes["sizes"])
    local: dict[str, Any] = {
        **attributes,
        "full_sizes": full,
        "sizes": box_shape(box),
        "offsets": tuple(int(start) for start in box[0]),
    }
    # An axis left as it is is split in the input too, where the tile's part begins at zero.
    image = tile.inputs[0] if "size" not in attributes else tile.outputs[0]
    shape = tile.input_shapes[0] if "size" not in attributes else tile.output_shapes[0]
    cut = [_plain(attributes, axis, extent, full[axis]) for axis, extent in enumerate(shape)]
    extents = box_shape(image)
    local["offsets"] = tuple(0 if plain else o for plain, o in zip(cut, local["offsets"]))
    local["full_sizes"] = tuple(
        extent if plain else count for plain, extent, count in zip(cut, extents, full)
    )
    if "size" in attributes:
        local["size"] = extents
    return local


def _grad_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    if inputs[0].rank != len(attributes["size"]):
        raise ShapeError(
            f"input 0 has rank {inputs[0].rank} (shape {inputs[0].shape});"
            f" {len(attributes['size'])} needed"
        )
    _check(attributes, attributes["size"])
    table = DimTable()
    given, made = _operands(table, attributes["size"], attributes)
    for axis, extent in enumerate(inputs[0].shape):
        along(table, f"d{axis}", extent, "input 0")
    return finish(table, [made], [given], [inputs[0].dtype])


def _resize_grad(attributes: Attributes, dy: Array) -> Array:
    dx = dy
    for axis, size in enumerate(attributes["size"]):
        taps = axis_taps(attributes, axis, size)
        weight = np.where(taps.outside[:, None], 0, taps.weight)
        matrix = np.zeros((size, len(taps.index)))
        rows = np.broadcast_to(np.arange(len(taps.index))[:, None], taps.index.shape)
        np.add.at(matrix, (taps.index, rows), weight)
        dx = np.moveaxis(np.tensordot(matrix.astype(dy.dtype), dx, (1, axis)), 0, axis)
    return np.ascontiguousarray(dx)


def _gradient(g: GradientContext) -> Sequence[str | None]:
    x = g.spec(g.inputs[0])
    return [g.emit("resize_grad", g.grad(), size=x.shape, **g.attributes)]


_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("2 3 4 5", {"sizes": (2, 3, 8, 7)}),
    ("1 2 4 4", {"sizes": (1, 2, 7, 9), "mode": "linear"}),
    (
        "1 1 5 4",
        {"sizes": (1, 1, 3, 8), "mode": "cubic", "coordinate_transformation_mode": "asymmetric"},
    ),
    (
        "1 2 6",
        {"sizes": (1, 2, 3), "mode": "linear", "antialias": True, "scales": (1.0, 1.0, 0.6)},
    ),
    (
        "1 1 4 4",
        {
            "sizes": (1, 1, 3, 3),
            "mode": "linear",
            "coordinate_transformation_mode": "tf_crop_and_resize",
            "roi": (0, 0, 0.4, 0.6, 1, 1, 1.2, 0.9),
            "extrapolation_value": 10.0,
        },
    ),
    ("1 1 3 4", {"sizes": (1, 1, 5, 9), "mode": "cubic", "exclude_outside": True}),
    (
        "2 4",
        {
            "sizes": (3, 7),
            "coordinate_transformation_mode": "align_corners",
            "nearest_mode": "ceil",
        },
    ),
    ("0 2 3", {"sizes": (0, 2, 6)}),
)


def _grad_case(shape: str, attributes: dict[str, Any]) -> Case:
    size = tuple(int(extent) for extent in shape.split())
    return Case((" ".join(map(str, attributes["sizes"])),), {**attributes, "size": size}, ())


define(
    name="resize",
    inputs=("x",),
    signature=_signature,
    reference=_resize,
    attributes=_ATTRIBUTES,
    gradient=_gradient,
    localize=_localize,
    flops_per_point=4,
    onnx="Resize",
    cases=tuple(Case((shape,), attributes) for shape, attributes in _CASES),
    doc="x interpolated to `sizes`; `scales`, where given, are the exact ratios of sizes",
)
define(
    name="resize_grad",
    inputs=("dy",),
    outputs=("dx",),
    signature=_grad_signature,
    reference=_resize_grad,
    attributes=_ATTRIBUTES | {"size": Attribute("ints", minimum=0)},
    localize=_localize,
    flops_per_point=4,
    cases=tuple(_grad_case(shape, attributes) for shape, attributes in _CASES),
    doc="the gradient of resize with respect to x, of that size",
)
