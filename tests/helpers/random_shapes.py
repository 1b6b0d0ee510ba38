"""Random ONNX models that compute shapes from those of their inputs, and answers for many shapes.

A model is drawn from a seed: an image or a sequence with symbolic extents goes through steps as
exporters write them (group norms, attention, positions, padded and cut parts, strides), whose
shapes come from `Shape`. One session answers for many extents, with graphs that it derives from
those of others (`frontend/inference/families.py`); half of the models are served in steps too where
rows are apart (`in_rows.py`). ONNX Runtime says what is right.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from soapstone import InferenceSession, from_onnx

SHAPES = 12  # that a model is run for
CHANNELS = 8
Shape = tuple[int, ...]


class Drawing:
    """A model while it is drawn."""

    def __init__(self, seed: int) -> None:
        self.random, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.in_steps = bool(seed % 2)  # whether batches are answered in steps where that may be
        self.image = self.random.random() < 0.6
        self.sides = self.image and self.random.random() < 0.5  # of images, whether they vary

    def model(self) -> bytes:
        steps, (first, last, axes) = (IMAGES, ENDS[0]) if self.image else (SEQUENCES, ENDS[1])
        x = first(self, "x")
        for _ in range(self.random.randint(2, 7)):
            x = self.random.choice(steps)(self, x)
        self.nodes.append(helper.make_node(last, [x, self.ints(*axes)], ["y"], keepdims=0))
        sides = ["h", "w"] if self.sides else [9, 12]
        shape = ["n", 3, *sides] if self.image else ["n", "t", CHANNELS]
        x_type = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        y_type = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "drawn", [x_type], [y_type], self.constants)
        opsets = [helper.make_opsetid("", 18)]
        made: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        return bytes(made.SerializeToString())

    def shapes(self) -> Iterator[Shape]:
        draw = self.random.randint
        kinds = [(3, draw(7, 17), draw(7, 17)) for _ in range(2 if self.in_steps else SHAPES)]
        for number in range(SHAPES):
            rows, (_, h, w) = self.random.choice([1, 2, 2, 3, 4, 5, 7]), kinds[number % len(kinds)]
            if self.image:
                yield (rows, 3, h, w) if self.sides else (rows, 3, 9, 12)
            else:
                yield rows, h + w - 9, CHANNELS

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, **attributes: Any) -> list[str]:
        made = [f"v{len(self.nodes)}.{number}" for number in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, **attributes))
        return made

    def constant(self, array: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def floats(self, *shape: int) -> str:
        made = self.numbers.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        return self.constant(made.astype(np.float32))

    def either(self, *ways: Any) -> Any:
        return self.random.choice(ways)

    def extent(self, x: str, axis: int) -> str:
        """An extent as one number along an axis, in one of the ways of exporters."""
        shape = self.op("Shape", x)
        way = self.random.randrange(3)
        if way == 0:
            return self.op("Slice", shape, self.ints(axis), self.ints(axis + 1))
        if way == 1:
            return self.op("Gather", shape, self.ints(axis))
        return self.op("Unsqueeze", self.op("Gather", shape, self.constant(axis)), self.ints(0))

    def shaped(self, x: str, *extents: str | int) -> str:
        """What is reshaped: to extents of values, and numbers."""
        parts = [self.ints(each) if isinstance(each, int) else each for each in extents]
        return self.op("Reshape", x, self.op("Concat", *parts, axis=0))

    def counted(self, length: str) -> str:
        """The numbers from zero to before a length."""
        end = self.op("Squeeze", length, self.ints(0))
        return self.op("Range", self.constant(0), end, self.constant(1))

    def windows(self, x: str, channels: int, stride: int, rank: int) -> str:
        filters = self.floats(CHANNELS, channels, *[3] * rank)
        at = {"kernel_shape": [3] * rank, "strides": [stride] * rank, "pads": [1] * 2 * rank}
        return self.op("Conv", x, filters, **at)

    def spread(self, x: str, axes: Sequence[int]) -> str:
        mean = self.op("ReduceMean", x, self.ints(*axes), keepdims=1)
        return self.op("Add", x, self.op("Expand", mean, self.op("Shape", x)))

    def attended(self, x: str, mask: str | None = None) -> str:
        met = self.op("MatMul", x, self.turned(x))
        if mask is not None:
            met = self.op("Where", mask, self.constant(np.float32(-1000)), met)
        return self.op("MatMul", self.op("Softmax", met, axis=-1), x)

    def turned(self, x: str) -> str:
        rank = 4 if not self.image else 3
        return self.op("Transpose", x, perm=[*range(rank - 2), rank - 1, rank - 2])


def _group_norm(d: Drawing, x: str) -> str:
    groups = d.op("Reshape", x, d.ints(0, 2, -1))
    one, none = (d.constant(np.full(2, value, np.float32)) for value in (1, 0))
    return d.op("Reshape", d.op("InstanceNormalization", groups, one, none), d.op("Shape", x))


def _embedded_mean(d: Drawing, x: str) -> str:
    mean = d.op("ReduceMean", x, d.ints(2, 3), keepdims=0)
    made = d.op("Gemm", mean, d.floats(CHANNELS, CHANNELS), transB=1)
    return d.op("Add", x, d.op("Unsqueeze", made, d.ints(2, 3)))


def _image_attention(d: Drawing, x: str) -> str:
    n, h, w = (d.extent(x, axis) for axis in (0, 2, 3))
    rows = d.op("Transpose", x, perm=[0, 2, 3, 1])
    flat = d.shaped(rows, n, d.either(-1, d.op("Mul", h, w)), CHANNELS)
    back = d.shaped(d.attended(flat), n, h, w, CHANNELS)
    return d.op("Add", x, d.op("Transpose", back, perm=[0, 3, 1, 2]))


def _padded_and_cut(d: Drawing, x: str) -> str:
    padded = d.op("Pad", x, d.ints(0, 0, d.either(0, 1), d.either(0, 2), 0, 0, 1, 1))
    first = d.ints(d.either(0, 1), d.either(0, 1))
    return d.op("Slice", padded, first, d.ints(d.either(99, -1, 6), 99), d.ints(2, 3))


def _by_an_extent(d: Drawing, x: str) -> str:
    axis = d.either(0, 2, 3) if d.image else 1
    return d.op("Div", x, d.op("Cast", d.extent(x, axis), to=1))


def _positions(d: Drawing, x: str) -> str:
    column = d.op("Unsqueeze", d.op("Cast", d.counted(d.extent(x, 2)), to=1), d.ints(1))
    return d.op("Add", x, column)


def _shuffled(d: Drawing, x: str) -> str:
    n, h, w = (d.extent(x, axis) for axis in (0, 2, 3))
    pairs = d.shaped(x, n, 2, CHANNELS // 2, h, w)
    return d.shaped(d.op("Transpose", pairs, perm=[0, 2, 1, 3, 4]), n, CHANNELS, h, -1)


def _pooled(d: Drawing, x: str) -> str:
    if d.either(True, False):
        return d.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    return d.op("AveragePool", x, kernel_shape=[3, 3], strides=[1, 1], pads=[1, 1, 1, 1])


def _halves(d: Drawing, x: str) -> str:
    a, b = d.ops("Split", x, d.ints(CHANNELS // 2, CHANNELS // 2), outputs=2, axis=1)
    return d.op("Concat", b, d.op("Relu", a), axis=1)


def _enlarged(d: Drawing, x: str) -> str:
    twice = d.constant(np.array([1, 1, 2, 2], np.float32))
    at = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return d.op("Resize", x, "", twice, mode="nearest", **at)


def _all_in_one(d: Drawing, x: str) -> str:
    n, sides = d.extent(x, 0), d.op("Slice", d.op("Shape", x), d.ints(2), d.ints(4))
    return d.shaped(d.op("Relu", d.shaped(x, -1, sides)), n, CHANNELS, sides)


def _heads(d: Drawing, x: str) -> str:
    n, t = d.extent(x, 0), d.extent(x, 1)
    heads = d.op("Transpose", d.shaped(x, n, d.either(t, -1), 2, 4), perm=[0, 2, 1, 3])
    mask = None
    if d.either(True, False):
        places = d.counted(t)
        mask = d.op("Less", d.op("Unsqueeze", places, d.ints(1)), places)
    back = d.op("Transpose", d.attended(heads, mask), perm=[0, 2, 1, 3])
    return d.shaped(back, n, t, d.either(-1, CHANNELS))


def _strided(d: Drawing, x: str) -> str:
    made = d.windows(d.op("Transpose", x, perm=[0, 2, 1]), CHANNELS, 2, 1)
    return d.op("Transpose", made, perm=[0, 2, 1])


def _placed(d: Drawing, x: str) -> str:
    part = d.op("Slice", d.floats(64, CHANNELS), d.ints(0), d.extent(x, 1), d.ints(0))
    return d.op("Add", x, part)


def _cut(d: Drawing, x: str) -> str:
    return d.op("Slice", x, d.ints(d.either(0, 1)), d.ints(d.either(-1, 5, 99)), d.ints(1))


def _one_more(d: Drawing, x: str) -> str:
    shape = d.op("Concat", d.extent(x, 0), d.ints(1, CHANNELS), axis=0)
    return d.op("Concat", d.op("Expand", d.floats(1, 1, CHANNELS), shape), x, axis=1)


def _rows(d: Drawing, x: str) -> str:
    n, t = d.extent(x, 0), d.extent(x, 1)
    flat = d.shaped(x, d.either(-1, d.op("Mul", n, t)), CHANNELS)
    made = d.op("Gemm", flat, d.floats(CHANNELS, CHANNELS), transB=d.either(0, 1))
    return d.shaped(made, n, t, CHANNELS)


def _longer(d: Drawing, x: str) -> str:
    return d.op("Pad", x, d.ints(0, d.either(0, 1, 2), 0, 0, d.either(0, 1), 0))


def _with_an_axis(d: Drawing, x: str) -> str:
    return d.op("Squeeze", d.op("Relu", d.op("Unsqueeze", x, d.ints(2))), d.ints(2))


def _twice_as_long(d: Drawing, x: str) -> str:
    n, t = d.extent(x, 0), d.extent(x, 1)
    twice = d.either(d.op("Add", t, t), d.op("Mul", t, d.ints(2)))
    return d.shaped(d.op("Relu", d.shaped(x, n, twice, CHANNELS // 2)), n, t, CHANNELS)


def _of_rows_counted(d: Drawing, x: str) -> str:
    one = d.op("Exp", d.op("ConstantOfShape", d.extent(x, 0)))
    return d.op("Div", x, d.op("ReduceSum", one, keepdims=0))


def _in_columns(d: Drawing, x: str) -> str:
    first = d.op("Shape", x)
    column = d.op("Softmax", d.op("Reshape", x, d.ints(d.either(2, CHANNELS), -1)), axis=0)
    return d.op("Reshape", column, first)


def _masked_alike(d: Drawing, x: str) -> str:
    n, mask = d.extent(x, 0), d.floats(1, 4)
    masks = d.op("Expand", mask, d.op("Concat", n, d.ints(4), axis=0))
    flat = d.op("Add", d.shaped(x, d.op("Mul", n, d.ints(4)), -1), d.shaped(masks, -1, 1))
    return d.op("Reshape", flat, d.op("Shape", x))


def _less_their_mean(d: Drawing, x: str) -> str:
    return d.op("Sub", x, d.op("ReduceMean", x, d.ints(0), keepdims=1))


def _stretched(d: Drawing, x: str) -> str:
    shape = d.op("Mul", d.op("Shape", x), d.ints(1, 1, 2, d.either(1, 2)))
    at = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return d.op("Resize", x, "", "", shape, mode="nearest", **at)


def _viewed(d: Drawing, x: str) -> str:
    """A view as torch exports it: each element by its place, late ones all from one place."""
    first, size = d.op("Shape", x), d.op("Unsqueeze", d.op("Size", x), d.ints(0))
    late = d.op("Greater", d.counted(size), d.constant(d.either(400, 1500, 1 << 20)))
    places = d.op("Where", late, d.constant(3), d.counted(size))
    return d.op("Reshape", d.op("Gather", d.op("Reshape", x, d.ints(-1)), places), first)


BY_ROWS = (_viewed, _of_rows_counted, _in_columns, _masked_alike, _less_their_mean)
IMAGES = (
    _stretched,
    *BY_ROWS,
    *(_group_norm, _embedded_mean, _image_attention, _padded_and_cut, _by_an_extent, _positions),
    *(_shuffled, _pooled, _halves, _enlarged, _all_in_one),
    lambda d, x: d.windows(x, CHANNELS, 2, 2),
    lambda d, x: d.spread(x, (2, 3)),
)
SEQUENCES = (
    *BY_ROWS,
    *(_heads, _strided, _placed, _cut, _one_more, _rows, _longer, _with_an_axis, _by_an_extent),
    _twice_as_long,
    lambda d, x: d.op("MatMul", x, d.floats(CHANNELS, CHANNELS)),
    lambda d, x: d.spread(x, (1,)),
)
ENDS: tuple[Any, Any] = (
    (lambda d, x: d.windows(x, 3, d.either(1, 2), 2), "ReduceMean", (2, 3)),
    (lambda d, x: x, "ReduceMean", (1,)),
)


def differences(seed: int) -> tuple[int, list[str]]:
    """Return how many shapes of a model were compared, and those with other answers, as texts."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # what it refuses is not compared
    drawing, compared, wrong = Drawing(seed), 0, list[str]()
    model = drawing.model()
    right = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    options = {"threads": 1, "bound_shapes": 3, "tune": drawing.in_steps}
    with InferenceSession(from_onnx(model), **options) as session:
        for number, shape in enumerate(drawing.shapes()):
            x = np.random.default_rng(number).standard_normal(shape).astype(np.float32)
            try:
                expected = right.run(None, {"x": x})[0]
            except Exception:  # too small for a window
                continue
            if not np.isfinite(expected).all():  # the mean of nothing
                continue
            compared += 1
            try:
                found = session.run({"x": x})["y"]
                session.serial.bounds.wait()  # further graphs are derived
                np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-4)
            except Exception as error:
                if "or more needed for a mean" in str(error):  # of nothing, which is refused
                    continue
                wrong.append(f"seed {seed}, shape {shape}: {type(error).__name__}: {error}")
    return compared, wrong
