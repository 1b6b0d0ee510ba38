"""`roi_align`: regions of images, each read at places between pixels and pooled to one size.

A region is parted into bins, and a bin is the mean or the largest of what lies at a few places in
it, linear between pixels; of the largest, each pixel counts by its weight. Dims: n, the images; c,
their channels; h, w; r, the regions; y, x, the bins.

Source: He, Gkioxari, Dollár and Girshick, Mask R-CNN, 2017, and ONNX's operator RoiAlign.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Operand, Signature, Whole
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float, need_integer, need_rank
from soapstone.ir.ops.signatures import DimTable, along, finish
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

MOST_PLACES = 1 << 12  # of a bin along an axis
_MODES = ("avg", "max")


class Axis(NamedTuple):
    """Places along one axis, (bins, places): pixels before and after, and their weights."""

    low: Array
    high: Array
    before: Array
    after: Array


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    for position, axes in enumerate(("n c h w", "r b", "r")):
        need_rank(inputs, position, axes)
    need_float(inputs, 0, 1)
    need_integer(inputs, 2)
    images, regions, _ = inputs
    if regions.shape[1] != 4:
        raise ShapeError(f"input 1 has shape {regions.shape}; 4 numbers of each region needed")
    table = DimTable()
    channel = along(table, "c", images.shape[1], "input 0")
    region = along(table, "r", regions.shape[0], "input 1")
    table.add("r", inputs[2].shape[0], "input 2")
    count, _, height, width = map(Whole, images.shape)
    made = [along(table, n, e, "attribute size") for n, e in zip("yx", attributes["size"])]
    kinds = {"y": Kind.WHOLE, "x": Kind.WHOLE}
    operands = [
        Operand((count, channel, height, width)),
        Operand((region, Whole(4))),
        Operand((region,)),
    ]
    return finish(table, operands, [Operand((region, channel, *made))], [images.dtype], kinds)


def places_of(attributes: Attributes, start: float, extent: float, bins: int) -> int:
    """Return how many places of a bin are read along an axis, from a region's start and extent.

    Raises:
        GraphError: the region is not finite, or too large.
    """
    if not math.isfinite(start) or not math.isfinite(extent):
        raise GraphError(f"roi_align: a region from {start} that is {extent} long found")
    given = attributes["sampling_ratio"]
    count = math.ceil(extent / bins) if given == 0 else given
    if count > MOST_PLACES:
        raise GraphError(
            f"roi_align: a bin of {extent / bins:.0f} pixels found; {MOST_PLACES} at most"
        )
    return max(count, 0)


def region_of(attributes: Attributes, roi: Array) -> tuple[float, float, float, float]:
    """Return where a region begins and how long it is: y, x, height, width, in pixels."""
    kind = roi.dtype.type
    shift = kind(0.5 if attributes["half_pixel"] else 0.0)
    x, y, right, bottom = roi * kind(attributes["spatial_scale"]) - shift
    height, width = bottom - y, right - x
    if not attributes["half_pixel"]:
        height, width = max(height, kind(1)), max(width, kind(1))
    return y, x, height, width


def check_regions(
    operator: str, attributes: Attributes, images: int, rois: Array, of: Array
) -> None:
    """Check that each region lies in an image that is there, and is not too large.

    Raises:
        GraphError: one does not; names the operator and what was found.
    """
    wrong = (of < 0) | (of >= images)
    if wrong.any():
        raise GraphError(f"{operator}: image {of[wrong].flat[0]} found, 0 to {images - 1} needed")
    for roi in rois:
        y, x, height, width = region_of(attributes, roi)
        places_of(attributes, y, height, attributes["size"][0])
        places_of(attributes, x, width, attributes["size"][1])


def _axis(attributes: Attributes, start: float, extent: float, bins: int, size: int) -> Axis:
    count = places_of(attributes, start, extent, bins)
    kind = type(start)
    step = extent / kind(bins)
    at = np.arange(bins, dtype=kind)[:, None] * step
    at = start + at + (np.arange(count, dtype=kind) + kind(0.5)) * step / kind(max(count, 1))
    inside = (at >= -1) & (at <= size)
    at = np.clip(at, 0, size - 1)
    low = at.astype(np.int64)
    after = (at - low) * inside
    return Axis(low, np.minimum(low + 1, size - 1), inside - after, after)


def _roi_align(attributes: Attributes, x: Array, rois: Array, of: Array) -> Array:
    bins = attributes["size"]
    made = np.zeros((len(rois), x.shape[1], *bins), x.dtype)
    check_regions("roi_align", attributes, x.shape[0], rois, of)
    if not made.size or not x.size:
        return made
    for roi, image, out in zip(rois, of, made):
        y0, x0, height, width = region_of(attributes, roi)
        rows = _axis(attributes, y0, height, bins[0], x.shape[2])
        columns = _axis(attributes, x0, width, bins[1], x.shape[3])
        corners = []
        for h, by in ((rows.low, rows.before), (rows.high, rows.after)):
            for w, bx in ((columns.low, columns.before), (columns.high, columns.after)):
                weight = (by[:, :, None, None] * bx).astype(x.dtype)
                corners.append(x[image][:, h[:, :, None, None], w] * weight)
        if not corners[0].size:
            continue
        if attributes["mode"] == "avg":
            out[:] = sum(corners).mean(axis=(2, 4))
        else:
            out[:] = np.maximum.reduce(corners).max(axis=(2, 4))
    return made


_REGIONS = {1: ((1, 1, 5, 4), (0, 2, 9, 7), (-3, -2, 2, 3)), 2: (0, 1, 0)}
_SIZE = {"size": (2, 3)}
define(
    name="roi_align",
    inputs=("x", "rois", "images"),
    signature=_signature,
    reference=_roi_align,
    attributes={
        "size": Attribute("ints", minimum=1),
        "mode": Attribute("str", "avg", choices=_MODES),
        "sampling_ratio": Attribute("int", 0, minimum=0),
        "spatial_scale": Attribute("float", 1.0),
        "half_pixel": Attribute("bool", True),
    },
    flops_per_point=60,
    cases=(
        Case(("2 3 8 9", "3 4", "int32 3"), _SIZE, contents=_REGIONS),
        Case(("2 3 8 9", "3 4", "int64 3"), {**_SIZE, "mode": "max"}, contents=_REGIONS),
        Case(
            ("2 1 8 9", "3 4", "int32 3"),
            {**_SIZE, "sampling_ratio": 2, "spatial_scale": 0.5, "half_pixel": False},
            contents=_REGIONS,
        ),
        Case(("1 1 1 1", "1 4", "int32 1"), {"size": (1, 1)}, contents={2: (0,)}),
        Case(("1 2 3 3", "0 4", "int32 0"), _SIZE),
    ),
    doc="the bins (r, c, y, x) of regions of images x (n, c, h, w): rois (r, 4) are left, top,"
    " right and bottom, images (r,) where each lies",
)
