"""ONNX normalisations and resizing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.tensors import shape_of
from soapstone.frontend.onnx.values import ALIGNED, Even, Value, rule


@rule("BatchNormalization", even=ALIGNED)
def batch_normalization(n: Call) -> Any:
    x, gamma, beta, mean, var = (n.value(position) for position in range(5))
    # Exporters merge equal initializers: statistics may be another layer's weight.
    mean, var = n.emitter.untrained(mean), n.emitter.untrained(var)
    epsilon = n.attribute("epsilon", 1e-5)
    if n.version < 9 and not n.attribute("spatial", 1):
        raise UnsupportedError("attribute 'spatial' of 0 is not supported")
    if any(v.dtype != x.dtype for v in (gamma, beta, mean, var)):
        gamma, beta, mean, var = (n.cast(v, x.dtype) for v in (gamma, beta, mean, var))
    training = n.attribute("training_mode", 0) if n.version >= 14 else n.wants(1)
    if n.version < 7:
        training = not n.attribute("is_test", 0) and n.wants(1)
    if not training:
        return [n("batch_norm_inference", x, gamma, beta, mean, var, epsilon=epsilon)]
    momentum = n.attribute("momentum", 0.9)
    over = tuple(axis for axis in range(x.rank) if axis != 1)
    line = (x.shape[1], *(1,) * (x.rank - 2))
    batch = n("reduce_mean", x, axes=over, keepdims=False)
    centred = n("sub", x, n.reshape(batch, line))
    spread = n("reduce_mean", n("mul", centred, centred), axes=over, keepdims=False)
    y = n("batch_norm_inference", x, gamma, beta, batch, spread, epsilon=epsilon)

    def mixed(old: Value, new: Value) -> Value:
        kept = n("affine", old, scale=momentum)
        return n("add", kept, n("affine", new, scale=1 - momentum))

    return [y, mixed(mean, batch), mixed(var, spread)]


rule("InstanceNormalization", even=ALIGNED)(Call.declared)


@rule("GroupNormalization", even=ALIGNED)
def group_normalization(n: Call) -> Any:
    return NotImplemented if n.version < 21 else n.declared()


@rule("LayerNormalization", even=ALIGNED)
def layer_normalization(n: Call) -> Any:
    x, gamma, beta = n.value(0), n.value(1), n.maybe(2)
    axis = n.axis(x.rank, -1)
    last = x.shape[axis:]
    plain = gamma.dtype == x.dtype and n.attribute("stash_type", 1) == 1
    if not plain or x.spec.is_half or gamma.rank > len(last):
        return NotImplemented
    bias = n.known(np.zeros(last), x.dtype) if beta is None else n.broadcast(beta, last)
    epsilon = n.attribute("epsilon", 1e-5)
    scale = n.broadcast(gamma, last)
    made = n.all("layer_norm", x, scale, bias, axis=axis - x.rank, epsilon=epsilon)
    if not (n.wants(1) or n.wants(2)):
        return made[:1]
    column = (*x.shape[:axis], *(1,) * len(last))
    return [made[0], *(n.reshape(n.cast(value, "float32"), column) for value in made[1:])]


@rule("RMSNormalization", even=ALIGNED)
def rms_normalization(n: Call) -> Any:
    x, gamma = n.value(0), n.value(1)
    axis = n.axis(x.rank, -1)
    last = x.shape[axis:]
    if gamma.rank > len(last) or gamma.dtype != x.dtype or x.spec.is_half:
        return NotImplemented
    epsilon = n.attribute("epsilon", 1e-5)
    gamma = n.broadcast(gamma, last)
    return n.all("rms_norm", x, gamma, axis=axis - x.rank, epsilon=epsilon)[:1]


@rule("Resize", "Upsample", even=Even(shape=3, scaled=True, places=True))
def resize(n: Call) -> Value:
    x = n.value()
    scales, sizes, region = _resize_inputs(n, x)
    mode = n.text("mode", "nearest", ("nearest", "linear", "cubic", "bilinear"))
    coordinates = n.attribute("coordinate_transformation_mode", "half_pixel")
    if n.kind == "Upsample" or n.version == 10:
        coordinates = "asymmetric"
    crops = coordinates == "tf_crop_and_resize"
    stretched = n.has(3) and n.attribute("keep_aspect_ratio_policy", "stretch") == "stretch"
    # Corners are aligned by the whole number of results, as by ONNX Runtime and PyTorch, though
    # ONNX's tests go by the extent times the scale.
    if crops or coordinates == "align_corners" or (stretched and mode != "nearest"):
        scales = None  # the ratios of the extents, exactly
    outside = n.attribute("extrapolation_value", 0.0)
    attributes = {
        "sizes": sizes,
        "scales": scales,
        "mode": "linear" if mode == "bilinear" else mode,
        "coordinate_transformation_mode": coordinates,
        "nearest_mode": "floor" if n.version < 11 else n.attribute("nearest_mode", _NEAREST),
        "cubic_coeff_a": n.attribute("cubic_coeff_a", -0.75),
        "exclude_outside": bool(n.attribute("exclude_outside", 0)),
        "antialias": bool(n.attribute("antialias", 0)),
        "roi": region if crops else None,
    }
    if x.spec.is_float:
        return n("resize", x, extrapolation_value=outside, **attributes)
    wide = x.dtype in ("int32", "int64", "uint32", "uint64")  # more than float32 holds
    if wide and mode == "nearest" and 0 not in sizes:
        return _taken(n, x, attributes, outside)
    real = n.cast(x, "float64" if wide else "float32")
    made = n("resize", real, extrapolation_value=outside, **attributes)
    return n.cast(made if mode == "nearest" else n("round", made), x.dtype)


def _taken(n: Call, x: Value, attributes: dict[str, Any], outside: float) -> Value:
    """Return x resized to its nearest elements, which are taken as they are."""
    places = n.known(np.arange(n.room(x.spec.size)).reshape(x.shape), "float64")
    at = n("resize", places, extrapolation_value=-1.0, **attributes).array
    assert at is not None  # of known contents
    found = np.asarray(at).astype(np.int64)
    made = n("gather", n.reshape(x, (x.spec.size,)), n.known(np.maximum(found, 0)), axis=0)
    if (found >= 0).all():
        return made
    value = n.broadcast(n.cast(n.known(np.float64(outside)), x.dtype), found.shape)
    return n("where", n.known(found >= 0), made, value)


_NEAREST = "round_prefer_floor"


def _resize_inputs(
    n: Call, x: Value
) -> tuple[tuple[float, ...] | None, tuple[int, ...], tuple[float, ...]]:
    """Return scales and new extents of all axes, and the region to take (starts, then ends)."""
    position = 1 if n.kind == "Upsample" or n.version == 10 else 2
    given = n.attribute("scales")
    if given is None and n.has(position) and n.array(position).size:
        given = n.array(position).tolist()
    chosen = n.attribute("axes")
    axes = list(range(x.rank)) if chosen is None else [n.axis_of(a, x.rank) for a in chosen]
    wanted = n.ints("sizes", 3)
    if (given is None) == (wanted is None):
        raise OnnxError("either scales or sizes needed")
    if len(given if wanted is None else wanted) != len(axes) or len(set(axes)) != len(axes):
        raise OnnxError(f"{len(axes)} scales or sizes needed")
    extents = [x.shape[axis] for axis in axes]
    starts, ends = [0.0] * x.rank, [1.0] * x.rank
    if n.attribute("coordinate_transformation_mode") == "tf_crop_and_resize":
        region = n.array(1)
        if region.size != 2 * len(axes):
            raise OnnxError(f"a region of {2 * len(axes)} numbers needed")
        for i, axis in enumerate(axes):
            starts[axis], ends[axis] = float(region[i]), float(region[i + len(axes)])
    if wanted is None:
        if any(not 0 < scale < 1e6 for scale in given):
            raise OnnxError(f"scales {given} found; positive numbers needed, in range")
        ratios = [float(scale) for scale in given]
        sides = [extent * (ends[axis] - starts[axis]) for axis, extent in zip(axes, extents)]
        wanted = tuple(int(np.float32(side) * np.float32(r)) for side, r in zip(sides, ratios))
    elif n.text("keep_aspect_ratio_policy", "stretch", _POLICIES) == "stretch":
        ratios = [
            size / extent if size and extent else 1.0 for size, extent in zip(wanted, extents)
        ]
    else:
        choose = min if n.attribute("keep_aspect_ratio_policy") == "not_larger" else max
        ratio = choose(size / max(extent, 1) for size, extent in zip(wanted, extents))
        ratios = [ratio] * len(axes)
        wanted = tuple(math.floor(ratio * extent + 0.5) for extent in extents)
    sizes, scales = list(x.shape), [1.0] * x.rank
    for i, axis in enumerate(axes):
        sizes[axis], scales[axis] = wanted[i], ratios[i]
    return tuple(scales), shape_of(sizes, "the result"), (*starts, *ends)


_POLICIES = ("stretch", "not_larger", "not_smaller")
