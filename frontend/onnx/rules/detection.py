"""ONNX operators of the boxes that a detector proposes: which are kept, and what lies in them."""

from __future__ import annotations

import math

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.values import Value, rule


@rule("NonMaxSuppression")
def non_max_suppression(n: Call) -> Value:
    """Return (batch, class, box) of what is kept, by batch and class, the best scores first."""
    from soapstone.frontend.onnx.rules.overlaps import apart  # imports Numba

    boxes, scores = n.array(0, apart=True), n.array(1, apart=True)
    if boxes.ndim != 3 or scores.ndim != 3 or boxes.shape[2] != 4:
        raise OnnxError(f"boxes {boxes.shape} and scores {scores.shape} found; 3 axes each needed")
    if (boxes.shape[0], boxes.shape[1]) != (scores.shape[0], scores.shape[2]):
        raise OnnxError(f"boxes {boxes.shape} and scores {scores.shape} found; others needed")
    most, overlap, least = (
        n.array(position, apart=True).reshape(()).item() if n.has(position) else default
        for position, default in ((2, 0), (3, 0.0), (4, -np.inf))
    )
    if n.attribute("center_point_box", 0):
        half = boxes[..., 2:] / 2
        boxes = np.concatenate((boxes[..., :2] - half, boxes[..., :2] + half), -1)
    low = np.minimum(boxes[..., :2], boxes[..., 2:])
    high = np.maximum(boxes[..., :2], boxes[..., 2:])
    kept = []
    for image, classes in enumerate(scores):
        for number, row in enumerate(classes):
            places = np.flatnonzero(row > least) if n.has(4) else np.arange(row.size)
            places = places[np.argsort(-row[places], kind="stable")]
            chosen = np.empty(min(max(int(most), 0), places.size), np.int64)
            found = apart(low[image, places], high[image, places], overlap, chosen)
            kept += [(image, number, place) for place in places[chosen[:found]]]
    return n.known(np.asarray(kept, np.int64).reshape(-1, 3))


@rule("RoiAlign")
def roi_align(n: Call) -> Value:
    default = "output_half_pixel" if n.version < 16 else "half_pixel"
    kind = n.text("coordinate_transformation_mode", default, ("half_pixel", "output_half_pixel"))
    return n(
        "roi_align",
        *n.values(),
        size=(n.attribute("output_height", 1), n.attribute("output_width", 1)),
        mode=n.text("mode", "avg", ("avg", "max")),
        sampling_ratio=n.attribute("sampling_ratio", 0),
        spatial_scale=n.attribute("spatial_scale", 1.0),
        half_pixel=kind == "half_pixel",
    )


@rule("MaxRoiPool")
def max_roi_pool(n: Call) -> Value:
    """The largest pixel of each bin of regions whose corners are rounded to pixels."""
    x, rois = n.array(0, apart=True), n.array(1, apart=True)
    bins, scale = n.attribute("pooled_shape", ()), n.attribute("spatial_scale", 1.0)
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5 or len(bins) != 2 or min(bins) < 1:
        raise OnnxError(f"images {x.shape}, regions {rois.shape}, bins {bins} found; others needed")
    numbers = rois[:, 0].astype(np.int64)
    if ((numbers < 0) | (numbers >= len(x))).any() or not np.isfinite(rois).all():
        raise OnnxError(f"regions of images {numbers} found, of 0 to {len(x) - 1} needed")
    shape = (len(rois), x.shape[1], *bins)
    n.room(math.prod(shape))
    made = np.zeros(shape, x.dtype)
    corners = np.floor(rois[:, 1:] * rois.dtype.type(scale) + rois.dtype.type(0.5))
    for image, (left, top, right, bottom), out in zip(x[numbers], corners, made):
        edges = []
        for start, end, count, size in (
            (top, bottom, bins[0], x.shape[2]),
            (left, right, bins[1], x.shape[3]),
        ):
            step = rois.dtype.type(max(end - start + 1, 1) / count)
            low = start + np.floor(np.arange(count, dtype=rois.dtype) * step)
            high = start + np.ceil(np.arange(1, count + 1, dtype=rois.dtype) * step)
            edges.append([np.clip(each, 0, size).astype(np.int64) for each in (low, high)])
        for i, j in np.ndindex(*bins):
            part = image[:, edges[0][0][i] : edges[0][1][i], edges[1][0][j] : edges[1][1][j]]
            if part.size:
                out[:, i, j] = part.max(axis=(1, 2))
    return n.known(made)
