"""ONNX operators that move elements, make constants, or read shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soapstone.frontend.onnx import extent_axes as follow, extent_cuts as cuts
from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.tensors import dtype_of, shape_of
from soapstone.frontend.onnx.texts import TEXT
from soapstone.frontend.onnx.values import PLAIN, Even, Value, rule
from soapstone.ir.ops.movement.slicing import slice_bounds


@rule("Constant", even=PLAIN)
def constant(n: Call) -> Value:
    if len(n.attributes) != 1:
        raise OnnxError(f"{len(n.attributes)} attributes found, 1 needed")
    ((key, _),) = n.attributes.items()
    value = n.attribute(key)
    types = {
        "value_float": "float32",
        "value_floats": "float32",
        "value_int": "int64",
        "value_ints": "int64",
        "value_string": TEXT,
        "value_strings": TEXT,
    }
    if key == "value":
        return n.known(value)
    if key not in types:
        raise UnsupportedError(f"attribute {key!r} is not supported")
    return n.known(np.asarray(value, object if types[key] == TEXT else types[key]))


@rule("Shape", even=Even(counts=True, elements=follow.of_shape))
def shape(n: Call) -> Value:
    extents = n.value().shape
    return n.known(np.asarray(extents[n.attribute("start", 0) : n.attribute("end")], np.int64))


@rule("Size")
def size(n: Call) -> Value:
    return n.known(np.asarray(n.value().spec.size, np.int64))


@rule("ConstantOfShape", even=Even(shape=0))
def constant_of_shape(n: Call) -> Value:
    fill = n.attribute("value", np.zeros(1, np.float32))
    extents = shape_of(n.ints("shape", 0) or (), "input 0", fill.dtype.name)
    if fill.size != 1:
        raise OnnxError(f"attribute 'value' has {fill.size} elements, 1 needed")
    item = fill.reshape(())
    if not _real(item.item()):
        return n.broadcast(n.known(item), extents)
    return n("full", shape=extents, value=float(item), dtype=item.dtype.name)


@rule("Range", even=Even(shape=1, within=cuts.counted))
def range_(n: Call) -> Value:
    start, stop, step = (n.array(position) for position in range(3))
    if start.size != 1 or stop.size != 1 or step.size != 1 or step.item() == 0:
        raise OnnxError("three numbers needed, the step not 0")
    count = (stop.item() - start.item()) / step.item()
    if not math.isfinite(count):
        raise OnnxError(f"{count} elements found; a number needed")
    count = n.room(max(0, math.ceil(count)))
    if n.emitter.shaped and start.dtype.kind in "iu" and step.item() == 1:
        ones = n("full", shape=(count,), value=1.0, dtype=start.dtype.name)
        places = n("cumsum", ones, axis=0, exclusive=True)
        return n("add", places, n.known(start.reshape(()))) if start.item() else places
    made = start.reshape(()) + np.arange(count).astype(start.dtype) * step.reshape(())
    return n.known(made, start.dtype.name)


@rule("EyeLike")
def eye_like(n: Call) -> Value:
    x = n.value()
    if x.rank != 2 or x.spec.size > 1 << 24:
        raise OnnxError(f"input 0 is {x.spec}; a matrix needed, not too large")
    code = n.attribute("dtype")
    dtype = x.dtype if code is None else dtype_of(code, "attribute 'dtype'")
    rows, columns = x.shape
    return n.known(np.eye(rows, columns, k=n.attribute("k", 0), dtype=dtype))


@rule("Reshape", even=Even(linear="first", shape=1, axes=follow.reshaped))
def reshape(n: Call) -> Value:
    x = n.value()
    wanted = n.ints("shape", 1)
    if wanted is None:
        raise OnnxError("a shape is needed")
    return n.reshape(x, reshaped(x.shape, wanted, bool(n.attribute("allowzero", 0))))


def reshaped(old: tuple[int, ...], wanted: tuple[int, ...], allow_zero: bool) -> tuple[int, ...]:
    """Return the extents that a shape with 0 (as before) and -1 (what is left) means.

    Raises:
        OnnxError: the numbers of elements differ.
    """
    if not allow_zero and any(e == 0 and i >= len(old) for i, e in enumerate(wanted)):
        raise OnnxError(f"shape {wanted} found; 0 at an axis that the input {old} does not have")
    new = [old[i] if e == 0 and not allow_zero else e for i, e in enumerate(wanted)]
    if new.count(-1) == 1:
        rest = math.prod(extent for extent in new if extent != -1)
        if rest == 0 or math.prod(old) % rest:
            raise OnnxError(f"shape {wanted} does not fit the input's {old}")
        new[new.index(-1)] = math.prod(old) // rest
    if any(extent < 0 for extent in new) or math.prod(new) != math.prod(old):
        raise OnnxError(f"shape {wanted} does not fit the input's {old}")
    return tuple(new)


@rule("Flatten", even=Even(linear="first"))
def flatten(n: Call) -> Value:
    x = n.value()
    axis = n.axis(x.rank, 1, most=x.rank)
    return n.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))


@rule("Squeeze", even=Even(linear="first"))
def squeeze(n: Call) -> Value:
    x = n.value()
    given = n.ints("axes", 1)
    axes = n.axes_of(given, x.rank) if given is not None else None
    if axes is None:
        axes = tuple(axis for axis, extent in enumerate(x.shape) if extent == 1)
    for axis in axes:
        if x.shape[axis] != 1:
            raise OnnxError(f"axis {axis} is {x.shape[axis]}; 1 needed")
    return n.reshape(x, [e for axis, e in enumerate(x.shape) if axis not in axes])


@rule("Unsqueeze", even=Even(linear="first", axes=follow.unsqueezed))
def unsqueeze(n: Call) -> Value:
    x, given = n.value(), n.ints("axes", 1)
    if given is None:
        raise OnnxError("axes are needed")
    rank = x.rank + len(given)
    axes = n.axes_of(given, rank)
    rest = iter(x.shape)
    return n.reshape(x, [1 if axis in axes else next(rest) for axis in range(rank)])


@rule("Transpose", even=Even(linear="first", axes=follow.transposed))
def transpose(n: Call) -> Value:
    x = n.value()
    permutation = n.attribute("perm") or tuple(reversed(range(x.rank)))
    if sorted(permutation) != list(range(x.rank)):
        raise OnnxError(f"attribute 'perm' is {permutation}; each axis below {x.rank} once needed")
    return n.transpose(x, permutation)


@rule("Expand", even=Even(shape=1, places=True, axes=follow.expanded))
def expand(n: Call) -> Value:
    x = n.value()
    wanted = shape_of(n.ints("shape", 1) or (), "input 1")
    try:
        result = np.broadcast_shapes(x.shape, wanted)
    except ValueError:
        raise OnnxError(f"shape {wanted} does not fit the input's {x.shape}") from None
    return n.broadcast(x, result)


@rule("Tile")
def tile(n: Call) -> Value:
    x = n.value()
    if n.version < 6 or len(n) == 3:
        raise UnsupportedError("the form before opset 6 is not supported")
    repeats = n.ints("repeats", 1) or ()
    if len(repeats) != x.rank or any(count < 0 for count in repeats):
        raise OnnxError(f"repeats {repeats} found; {x.rank} numbers of 0 or more needed")
    shape_of([count * extent for count, extent in zip(repeats, x.shape)], "the result")
    return x if set(repeats) <= {1} else n("tile", x, repeats=repeats)


@rule("Concat", even=Even(linear="all", aligned=True, elements=follow.joined))
def concat(n: Call) -> Value:
    values = n.values()
    axis = n.axis(values[0].rank, 1)
    parts = [v for v in values if v.shape != (0,)] if values[0].rank == 1 else values
    if len(parts) < 2:
        return (parts or values)[0]
    return n("concat", *parts, axis=axis)


@rule("Split", even=Even(places=True, axes=follow.kept))
def split(n: Call) -> Any:
    x = n.value()
    axis, sizes = n.axis(x.rank, 0), n.ints("split", 1)
    if sizes is None:
        count = n.attribute("num_outputs", len(n.node.output))
        size = -(-x.shape[axis] // count) if count > 0 else 0
        sizes = tuple(min(size, max(x.shape[axis] - size * i, 0)) for i in range(count))
    if sum(sizes) != x.shape[axis] or any(e < 0 for e in sizes) or not sizes:
        raise OnnxError(f"sizes {sizes} found; axis {axis} has {x.shape[axis]}")
    if len(sizes) != len(n.node.output):
        raise OnnxError(f"{len(sizes)} sizes found for {len(n.node.output)} outputs")
    return n.all("split", x, axis=axis, sizes=sizes) if len(sizes) > 1 else [x]


@rule(
    "Slice",
    even=Even(
        linear="first",
        shape=2,
        within=cuts.part_of_constant,
        cut=cuts.part,
        places=True,
        axes=follow.kept,
        elements=follow.sliced,
    ),
)
def slice_(n: Call) -> Value:
    x = n.value()
    starts, ends = n.ints("starts", 1), n.ints("ends", 2)
    if starts is None or ends is None or len(starts) != len(ends):
        raise OnnxError("as many starts as ends needed")
    given = n.ints("axes", 3)
    axes = [n.axis_of(a, x.rank) for a in (range(len(starts)) if given is None else given)]
    steps = n.ints("steps", 4) or (1,) * len(starts)
    if len(axes) != len(starts) or len(steps) != len(starts) or 0 in steps:
        raise OnnxError("as many axes and steps as starts needed, no step 0")
    if len(set(axes)) != len(axes):
        raise OnnxError(f"axes {axes} found; each at most once needed")
    # Python's slices, except that one backwards from before the first element begins with that.
    starts = tuple(max(start, -x.shape[axis]) for start, axis in zip(starts, axes))
    return sliced(n, x, dict(zip(axes, zip(starts, ends, steps))))


def sliced(n: Call, x: Value, cut: dict[int, tuple[int, int, int]]) -> Value:
    """Return the part of x that Python slices (start, stop, step) by axis give."""
    bounds = [
        slice_bounds(extent, *cut.get(axis, (0, extent, 1))) for axis, extent in enumerate(x.shape)
    ]
    if all(bound == (0, extent, 1) for bound, extent in zip(bounds, x.shape)):
        return x
    starts, stops, steps = zip(*bounds)
    return n("slice", x, starts=starts, stops=stops, steps=steps)


@rule("Pad", even=Even(places=True, axes=follow.kept))
def pad(n: Call) -> Value:
    x = n.value()
    mode = n.text("mode", "constant", ("constant", "edge", "reflect", "wrap"))
    pads = n.ints("pads", 1)
    if pads is None:
        raise OnnxError("pads are needed")
    axes = n.ints("axes", 3) if n.version >= 18 else None
    axes = tuple(range(x.rank)) if axes is None else tuple(n.axis_of(a, x.rank) for a in axes)
    if len(pads) != 2 * len(axes) or len(set(axes)) != len(axes):
        raise OnnxError(f"{len(pads)} pads found, {2 * len(axes)} needed")
    low, high = [0] * x.rank, [0] * x.rank
    for position, axis in enumerate(axes):
        low[axis], high[axis] = pads[position], pads[position + len(axes)]
    filled = mode == "constant" and max((*low, *high), default=0) > 0
    if filled and x.is_text:
        filler = n.value(2) if n.has(2) else n.known(np.asarray("", object))
        return _bordered_by(n, x, low, high, n.reshape(filler, ()))
    value = (n.number("value", 2, 0.0) or 0.0) if filled else 0.0
    if not _real(value):
        return _bordered_by(n, x, low, high, n.known(value, x.dtype))
    return bordered(n, x, low, high, value=float(value), mode=mode)


def _real(value: Any) -> bool:
    """Return whether attributes, which are real numbers, hold a number; not all large integers."""
    return not isinstance(value, int) or abs(value) <= 1 << 53


def _bordered_by(
    n: Call, x: Value, low: Sequence[int], high: Sequence[int], filler: Value
) -> Value:
    """Return x with a border of what no attribute of padding holds: a text, a large integer."""
    inside = bordered(n, n.known(np.ones(x.shape, bool)), low, high)
    if not x.spec.size:
        return n.broadcast(filler, inside.shape)
    return n("where", inside, bordered(n, x, low, high, mode="edge"), filler)


def bordered(n: Call, x: Value, low: Sequence[int], high: Sequence[int], **more: Any) -> Value:
    """Return x with a border before and after each axis; a negative one cuts.

    The elements beyond it are gone before others are repeated.
    """
    cut = {
        axis: (max(0, -a), x.shape[axis] - max(0, -b), 1)
        for axis, (a, b) in enumerate(zip(low, high))
        if a < 0 or b < 0
    }
    x = sliced(n, x, cut)
    low, high = [max(0, a) for a in low], [max(0, b) for b in high]
    shape_of([a + e + b for a, e, b in zip(low, x.shape, high)], "the result")
    if not any(low) and not any(high):
        return x
    return n("pad", x, low=low, high=high, interior=(0,) * x.rank, **more)


@rule("CenterCropPad")
def center_crop_pad(n: Call) -> Value:
    x = n.value()
    wanted, given = n.ints("shape", 1) or (), n.attribute("axes")
    axes = range(x.rank) if given is None else [n.axis_of(a, x.rank) for a in given]
    if len(wanted) != len(axes):
        raise OnnxError(f"{len(wanted)} extents found, {len(axes)} needed")
    low, high = [0] * x.rank, [0] * x.rank
    for axis, extent in zip(axes, shape_of(wanted, "input 1")):
        more = extent - x.shape[axis]
        low[axis] = more // 2 if more > 0 else -(-more // 2)
        high[axis] = more - low[axis]
    if x.is_text:
        return _bordered_by(n, x, low, high, n.known(np.asarray("", object)))
    return bordered(n, x, low, high)
