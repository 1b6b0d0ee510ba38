"""Regions of images, read between pixels: an item is a channel of a region."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.ir.ops.windows.roi_align import MOST_PLACES, check_regions
from soapstone.kernels.cpu.indexing.slices import outside
from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.intrinsics import f32p
from soapstone.native.threads.parallel import parallel_for, useful_threads

# size: of the images; bins: of a region; ratio: places of a bin along an axis, or 0; most: whether
# the largest is taken; half: whether places are half a pixel earlier.
_REGIONS = Fields(
    "x rois images wide y count channels size(h w) bins(h w) ratio most half x_step(n c h w)"
    " rois_step(r b) images_step y_step(r c h w)",
    reals="scale",
)
_regions_of = _REGIONS.at


@helper
def _places(extent: Any, bins: int, ratio: int) -> int:
    """How many places of a bin are read, or -1 where they are too many."""
    if not -1e30 < extent < 1e30:
        return -1
    count = math.ceil(extent / np.float32(bins)) if ratio == 0 else ratio
    return -1 if count > MOST_PLACES else max(count, 0)


@helper
def _inside(at: Any, size: int) -> Any:
    return np.float32(-1) <= at <= np.float32(size)


@helper
def _on(at: Any, size: int) -> Any:
    """A place moved onto the pixels."""
    return min(max(at, np.float32(0)), np.float32(size - 1))


@native("body")
def _align(block: Any, begin: int, end: int) -> int:
    w = _regions_of(block)
    one, half = np.float32(1), np.float32(0.5)
    scale, shift = np.float32(w.scale), np.float32(0.5) * np.float32(w.half)
    for item in range(begin, end):
        r, c = item // w.channels, item % w.channels
        image = integer_at(w.images + r * w.images_step, w.wide)
        if image < 0 or image >= w.count:
            return 1
        roi = w.rois + r * w.rois_step_r
        x0 = f32p(roi)[0] * scale - shift
        y0 = f32p(roi + w.rois_step_b)[0] * scale - shift
        width = f32p(roi + 2 * w.rois_step_b)[0] * scale - shift - x0
        height = f32p(roi + 3 * w.rois_step_b)[0] * scale - shift - y0
        if w.half == 0:
            width, height = max(width, one), max(height, one)
        rows, columns = _places(height, w.bins_h, w.ratio), _places(width, w.bins_w, w.ratio)
        if rows < 0 or columns < 0 or not -1e30 < x0 < 1e30 or not -1e30 < y0 < 1e30:
            return 1
        step_h, step_w = height / np.float32(w.bins_h), width / np.float32(w.bins_w)
        plane = w.x + image * w.x_step_n + c * w.x_step_c
        share = one / np.float32(max(rows * columns, 1))
        for i in range(w.bins_h):
            for j in range(w.bins_w):
                total, first = np.float32(0), True
                for row in range(rows):
                    y = y0 + np.float32(i) * step_h
                    y += (np.float32(row) + half) * step_h / np.float32(rows)
                    for column in range(columns):
                        x = x0 + np.float32(j) * step_w
                        x += (np.float32(column) + half) * step_w / np.float32(columns)
                        a = b = d = e = np.float32(0)
                        if _inside(y, w.size_h) and _inside(x, w.size_w):
                            at_y, at_x = _on(y, w.size_h), _on(x, w.size_w)
                            top, left = np.int64(at_y), np.int64(at_x)
                            down = w.x_step_h if top < w.size_h - 1 else 0
                            right = w.x_step_w if left < w.size_w - 1 else 0
                            corner = plane + top * w.x_step_h + left * w.x_step_w
                            v, u = at_y - np.float32(top), at_x - np.float32(left)
                            a = f32p(corner)[0] * (one - v) * (one - u)
                            b = f32p(corner + right)[0] * (one - v) * u
                            d = f32p(corner + down)[0] * v * (one - u)
                            e = f32p(corner + down + right)[0] * v * u
                        if w.most == 0:
                            total += a + b + d + e
                        else:
                            largest = max(max(a, b), max(d, e))
                            total = largest if first else max(total, largest)
                        first = False
                to = w.y + r * w.y_step_r + c * w.y_step_c + i * w.y_step_h + j * w.y_step_w
                f32p(to)[0] = total * share if w.most == 0 else total
    return 0


@variant("roi_align", "numba")
def roi_align(call: Call) -> Entry | None:
    """Regions in float32, of images of any strides."""
    (x, rois, images), (y,), at = call.inputs, call.outputs, call.attributes
    if not is_float32(x, rois, y) or not images.flags.aligned:
        return None
    if not is_integer(images) or x.size == 0:
        return None
    if y.size == 0:
        return noop()
    block = _REGIONS.pack(
        x=x,
        rois=rois,
        images=images,
        wide=images.dtype == np.int64,
        y=y,
        count=x.shape[0],
        channels=x.shape[1],
        size=x.shape[2:],
        bins=at["size"],
        ratio=at["sampling_ratio"],
        most=at["mode"] == "max",
        half=at["half_pixel"],
        x_step=x.strides,
        rois_step=rois.strides,
        images_step=images.strides[0],
        y_step=y.strides,
        scale=at["spatial_scale"],
    )
    threads = useful_threads(call.threads, 64 * y.nbytes)
    status = outside(call.operator, check_regions, at, x.shape[0], rois, images)
    return parallel_for(_align, block, x.shape[1] * len(rois), threads, status)
