"""Convolution of images and volumes, with bias and activation fused, its gradients, its transpose.

oneDNN is fast when activations are dense channels-last or in its own blocked format, 2x slower in
plain NCHW and hopeless ("ref") on a tile of a larger array, as
benchmarks/execution/onednn_layouts.py shows. So the primitive runs on dense channels-last
activations; an operand that is anything else is staged through a private dense copy inside the
entry. Weights are reordered to the primitive's format.

A transposed convolution of any rank is the gradient of a convolution with respect to its input; its
bias is added afterwards. Sequences are images of height one (`sequences.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from weakref import finalize

import numpy as np

from soapstone.dtypes import name_of
from soapstone.kernels.cpu.elementwise.machine import bind_program
from soapstone.kernels.cpu.elementwise.programs import compile_program
from soapstone.kernels.cpu.onednn.descriptors import (
    ACTIVATIONS,
    ALGORITHMS,
    ARG_BIAS,
    ARG_DIFF_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    DIFF_SOURCE,
    DIFF_TARGET,
    DIFF_WEIGHTS,
    SOURCE,
    TARGET,
    WEIGHTS,
    Activation,
    Binary,
    Integers,
    Kept,
    Layout,
    Primitive,
    Step,
    attributes,
    compile_primitive,
    describe,
    dims,
    implementation,
    is_channels_first,
    is_nested,
    next_implementation,
    post_argument,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, served
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.cpu.onednn.scaling import Scaling
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.arrays import strided
from soapstone.native.copies import copy
from soapstone.native.entries import sequence
from soapstone.native.memory import aligned_array, extent
from soapstone.records import dataclass

_TRAINING, _INFERENCE, _AUTO = 64, 96, 3
Shape = tuple[int, ...]
_NARROW = 4  # channels below which a strided input gradient is faster in plain layout


@dataclass(frozen=True)
class Follow:
    """A step after the convolution with an operand of this shape, in the result's axis order."""

    algorithm: int
    shape: Shape
    dtype: str

    def laid(self, order: Shape) -> Binary:
        """Return the step on a dense operand in the axis order."""
        return Binary(self.algorithm, Layout.dense(self.shape, order, self.dtype))


@dataclass(frozen=True)
class _Problem:
    """A convolution's sizes, as oneDNN needs them; equal problems share a primitive.

    `x` and `y` are (n, c, *size); `kernel` is (groups, o / groups, c / groups, *window). `kind` is
    the type that x and w are in where they are real numbers, `target` that of y.
    """

    direction: str  # forward, input, weights
    x: Shape
    y: Shape
    kernel: Shape
    stride: Shape
    low: Shape
    high: Shape
    dilation: Shape
    bias: bool
    posts: tuple[Activation | Follow, ...]
    threads: int
    integers: Integers | None = None
    kind: str = "float32"
    target: str = "float32"

    def __str__(self) -> str:
        return f"convolution {self!r}"

    @property
    def types(self) -> tuple[str, str, str]:
        """The types of x, w and y."""
        kinds = self.integers
        if kinds is None:
            return self.kind, self.kind, self.target
        return kinds.source, "int8", kinds.target

    @property
    def weights(self) -> Shape:
        """The shape of the weights: without the group axis where there is one group."""
        return self.kernel if self.kernel[0] > 1 else self.kernel[1:]

    @property
    def pointwise(self) -> bool:
        """Whether this is a matrix product over pixels."""
        ones = {self.kernel[0], *self.kernel[3:], *self.stride} == {1}
        return ones and not any((*self.low, *self.high))

    def legal(self) -> bool:
        """Return whether sizes agree and oneDNN takes the window (no negative padding)."""
        groups, filters, channels, *window = self.kernel
        spans = zip(self.x[2:], window, self.stride, self.dilation, self.low, self.high)
        sizes = tuple(
            (size + low + high - dilation * (extent - 1) - 1) // stride + 1
            for size, extent, stride, dilation, low, high in spans
        )
        return (
            min(*self.low, *self.high) >= 0
            and self.x[1] == groups * channels
            and self.y == (self.x[0], groups * filters, *sizes)
        )


def _description(problem: _Problem, order: Shape) -> Handle:
    """Return the primitive descriptor of the problem on dense activations in the axis order."""
    types = problem.types
    x = Layout.dense(problem.x, order, types[0]).descriptor
    y = Layout.dense(problem.y, order, types[2]).descriptor
    weights = Layout.any(problem.weights, types[1]).descriptor
    bias = Layout.dense((problem.y[1],)).descriptor if problem.bias else None
    posts = (post.laid(order) if isinstance(post, Follow) else post for post in problem.posts)
    attribute = attributes(*posts, integers=problem.integers)
    dilation = dims([step - 1 for step in problem.dilation])
    window = (dims(problem.stride), dilation, dims(problem.low), dims(problem.high))
    kind = _INFERENCE if problem.direction == "forward" else _TRAINING
    ends = (engine(), kind, _AUTO, x, weights, bias, y)
    forward = describe("convolution_forward", *ends, *window, attribute, what=problem)
    if problem.direction == "forward":
        return forward
    hints = (*window, forward, attribute)
    if problem.direction == "input":
        data = (engine(), _AUTO, x, weights, y)
        return describe("convolution_backward_data", *data, *hints, what=problem)
    both = (engine(), _AUTO, x, weights, bias, y)
    return describe("convolution_backward_weights", *both, *hints, what=problem)


# oneDNN 3.2 keeps the machine code of this implementation's kernels for good, equal code once. That
# of activations holds addresses and is never equal (30 to 60 KB a primitive; of bytes, with AMX, up
# to 200). So of those that nobody has any more there are so many at most: where a process sees ever
# more shapes, it gets other implementations from then on, which take up to a tenth longer.
_KEPT, _MOST_KEPT = "brgconv", 256
_left: list[None] = []  # one for each of which there is no more than its machine code


@Kept
def _primitive(problem: _Problem, channels_first: bool | None) -> Primitive | None:
    """Return the primitive, which has an axis order of its activations; None: oneDNN has none.

    channels_first: whether an image's activations are stored so, which then costs no staging; None
    is a volume's convolution, or a transposed one.
    """
    own = tuple(range(len(problem.x)))
    orders = [(0, *own[2:], 1), own]
    if channels_first is not None:
        few = problem.direction == "input" and problem.x[1] <= _NARROW
        # brgconv_strided wastes the vector on few channels; a plain product needs no staging.
        pointwise = channels_first and problem.pointwise and problem.direction != "weights"
        pointwise = pointwise and problem.kind == "float32"  # others are copied either way
        # The plain implementation's sigmoid turns NaN into 0.
        functions = [post.algorithm for post in problem.posts if isinstance(post, Activation)]
        if (few and max(problem.stride) > 1) or (
            pointwise and ALGORITHMS["logistic"] not in functions
        ):
            orders.reverse()
    best: tuple[int, Handle, Shape] | None = None
    with threads(problem.threads):
        for order in orders:
            try:
                found = _description(problem, order)
            except UnsupportedError:
                continue
            if _KEPT in implementation(found) and len(_left) >= _MOST_KEPT:
                while _KEPT in implementation(found) and next_implementation(found):
                    pass
            # Generated for the layout is best, then im2col, then plain loops.
            name = implementation(found)
            im2col = (
                "gemm" in name and channels_first is not None and (order, orders[0]) != (own, own)
            )
            badness = 2 if "ref" in name else int(im2col)
            if best is None or badness < best[0]:
                best = (badness, found, order)
            if not badness:
                break
        if best is None:
            return None
        if best[0] == 2 and any(isinstance(post, Follow) for post in problem.posts):
            return None  # what follows is no reason for plain loops: a pass of its own does it
        made = compile_primitive("convolution", *best[1:])
        if _KEPT in made.implementation:
            finalize(made, _left.append, None).atexit = False
        return made


def _problem(
    call: Call,
    direction: str,
    x: Shape,
    w: Shape,
    y: Shape,
    bias: bool,
    steps: Sequence[Step],
    integers: Integers | None,
    kinds: tuple[str, str],
) -> _Problem | None:
    """Return the problem of these shapes, or None when sizes or windows are not oneDNN's."""
    at, rank = call.attributes, len(x) - 2
    groups = int(at["groups"])
    filters, channels, *extent = w
    name = at.get("activation")
    if filters % groups or name not in ACTIVATIONS:
        return None
    activation = ACTIVATIONS[name]
    posts = (
        step
        if isinstance(step, Activation)
        else Follow(step[0], step[1].shape, name_of(step[1].dtype))
        for step in steps
    )
    problem = _Problem(
        *(direction, x, y, (groups, filters // groups, channels, *extent)),
        *(tuple(at["stride"]), tuple(at["padding"][:rank]), tuple(at["padding"][rank:])),
        *(tuple(at["dilation"]), bias, (*((activation,) if activation else ()), *posts)),
        call.threads,
        integers,
        *kinds,
    )
    return problem if problem.legal() else None


def _grouped(w: Array, problem: _Problem) -> Layout:
    """Return the layout of the weights `w` with their filters split by group."""
    layout = Layout.of(w)
    if problem.kernel[0] == 1 or layout.strides is None:
        return layout
    strides = (problem.kernel[1] * layout.strides[0], *layout.strides)
    return Layout(problem.kernel, strides, layout.dtype)


# Of each direction: what it makes, and the argument and the descriptor of x, w, y and the bias.
_ROLES = {
    "forward": (
        "y",
        {"x": (ARG_SRC, SOURCE), "w": (ARG_WEIGHTS, WEIGHTS), "y": (ARG_DST, TARGET)}
        | {"bias": (ARG_BIAS, WEIGHTS)},
    ),
    "input": (
        "x",
        {"y": (ARG_DIFF_DST, DIFF_TARGET), "w": (ARG_WEIGHTS, WEIGHTS)}
        | {"x": (ARG_DIFF_SRC, DIFF_SOURCE)},
    ),
    "weights": (
        "w bias",
        {"x": (ARG_SRC, SOURCE), "y": (ARG_DIFF_DST, DIFF_TARGET)}
        | {"w": (ARG_DIFF_WEIGHTS, DIFF_WEIGHTS), "bias": (ARG_DIFF_BIAS, DIFF_WEIGHTS)},
    ),
}


def bind(
    call: Call,
    direction: str,
    arrays: Mapping[str, Array],
    steps: Sequence[Step] = (),
    transposed: bool = False,
    scaling: Scaling | None = None,
    kind: str = "float32",
) -> Entry | None:
    """Return the entry that makes x, w or y of the others, or None where oneDNN does not.

    arrays: x, w and y of a convolution, perhaps its bias. Constant weights are reordered here.
    scaling: of x, w and y that are integers. kind: what x and w are rounded to otherwise.
    """
    made, roles = _ROLES[direction]
    x, w, y = (arrays[name] for name in "xwy")
    if direction == "forward" and x.size and y.size and x.ndim == y.ndim == w.ndim:
        x = _stored(call, x, w, y)
        arrays = {**arrays, "x": x}
    sources = tuple(array for name, array in arrays.items() if name not in made.split())
    targets = tuple(array for name, array in arrays.items() if name in made.split())
    if not (x.ndim == w.ndim == y.ndim and 4 <= x.ndim <= 5):
        return None
    types = () if scaling else ("float32", kind)
    if not served(Call(call.operator, {}, sources, targets), *types):
        return None
    if all(array.size == 0 for array in targets):
        return empty()
    grouped = int(call.attributes["groups"]) > 1
    integers = scaling.integers(x, y, 3 if grouped else 1) if scaling else None
    shapes = x.shape, w.shape, y.shape
    kinds = kind, name_of(y.dtype)
    problem = _problem(call, direction, *shapes, "bias" in arrays, steps, integers, kinds)
    if problem is None or 0 in (x.size, w.size, y.size):
        return None
    images = x.ndim == 4 and not transposed
    first = is_channels_first(x) and is_channels_first(y) if images else None
    primitive = _primitive(problem, first)
    if primitive is None:
        return None
    order = primitive.order
    program = Program(call.threads)
    arguments = {}
    for name, (argument, what) in roles.items():
        if name not in arrays:
            continue
        array = arrays[name]
        if name == "w":
            layout = _grouped(array, problem)
        else:
            layout = Layout.of(array, order if name in "xy" else None)
        wanted = primitive.descriptor(what, int(name == "bias"))
        if name in "xy" and _lies_apart(array, order, problem.types["xwy".index(name)]):
            stage = program.dense_target if name in made.split() else program.dense_source
            array = stage(array, order)
            layout = Layout.of(array, order)
        if name in made.split():
            arguments[argument] = program.target(array, layout, wanted)
        else:
            constant = name == "w" and 1 in call.constants
            arguments[argument] = program.source(array, layout, wanted, constant=constant)
    for index, step in enumerate(steps, len(problem.posts) - len(steps)):
        if not isinstance(step, Activation):
            flat = Layout.dense(step[1].shape, order, name_of(step[1].dtype)).descriptor
            operand = program.source(step[1], Layout.of(step[1], order), flat)
            arguments[post_argument(index)] = operand
    if scaling is not None:
        arguments |= scaling.arguments(program)
    program.step(primitive, arguments)
    return program.entry()


def _lies_apart(array: Array, order: Shape, kind: str) -> bool:
    """Return whether an array is of the type, and dense in the axis order but for its rows."""
    near = array.strides[order[-1]] == array.itemsize and name_of(array.dtype) == kind
    return near and not array.transpose(order).flags.c_contiguous


def _stored(call: Call, x: Array, w: Array, y: Array) -> Array:
    """Return an image with the pixels that lie between its rows, where no window reaches them.

    What a strided window never reaches is no part of a tile; without it the rows of an image lie
    apart, and would be copied.
    """
    at, rank, root = call.attributes, x.ndim - 2, x
    while isinstance(root.base, np.ndarray):
        root = root.base
    shape = list(x.shape)
    for axis, (step, dilation, low, high) in enumerate(
        zip(at["stride"], at["dilation"], at["padding"][:rank], at["padding"][rank:]), 2
    ):
        outer = axis - 1 if axis > 2 else 0
        if x.shape[outer] > 1 and x.strides[axis] > 0 and not high:
            there = x.strides[outer] // x.strides[axis]
            windows = (there + low - dilation * (w.shape[axis] - 1) - 1) // step + 1
            if windows == y.shape[axis]:
                shape[axis] = max(there, x.shape[axis])
    if tuple(shape) == x.shape:
        return x
    wider = strided(x, shape, x.strides)
    return wider if extent(wider)[1] <= extent(root)[1] else x


def _biased(arrays: dict[str, Array], rest: Sequence[Array]) -> dict[str, Array]:
    return arrays | dict(zip(("bias",), rest))


def _copied(call: Call, steps: Sequence[Step], kind: str) -> Entry | None:
    """Return the entry of the convolution of a channels-last copy of its image."""
    x, *rest = call.inputs
    n, c, *size = x.shape
    dense = np.moveaxis(aligned_array((n, *size, c), x.dtype), -1, 1)
    first = copy(dense, x, call.threads)
    return sequence([first, convolution(replace(call, inputs=(dense, *rest)), steps, kind)])


@variant(("conv2d", "conv3d"), "onednn", promises=True)
def convolution(call: Call, steps: Sequence[Step] = (), kind: str = "float32") -> Entry | None:
    """Return the entry of y = activation(conv(x, w) + b), then the steps.

    kind: what x and w are rounded to.
    """
    x, w, *rest = call.inputs
    (y,) = call.outputs
    if len(rest) != bool(call.attributes.get("bias", False)):
        return None
    if x.ndim == 4 and x.size and not is_nested(x):
        return _copied(call, steps, kind)
    return bind(call, "forward", _biased({"x": x, "w": w, "y": y}, rest), steps, kind=kind)


@variant(("conv2d_grad_input", "conv3d_grad_input"), "onednn")
def grad_input(call: Call) -> Entry | None:
    """Return the entry of dx from (dy, w)."""
    (dy, w), (dx,) = call.inputs, call.outputs
    return bind(call, "input", {"y": dy, "w": w, "x": dx})


@variant(("conv2d_grad_weight", "conv3d_grad_weight"), "onednn")
def grad_weight(call: Call) -> Entry | None:
    """Return the entry of dw, and db where the attribute `bias` asks for it, from (x, dy)."""
    (x, dy), (dw, *rest) = call.inputs, call.outputs
    if len(rest) != bool(call.attributes.get("bias", False)):
        return None
    return bind(call, "weights", _biased({"x": x, "y": dy, "w": dw}, rest))


@variant(("conv_transpose2d", "conv_transpose3d"), "onednn")
def transposed(call: Call) -> Entry | None:
    """Return the entry of y = conv_transpose(x, w) + b."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    entry = bind(call, "input", {"y": x, "w": w, "x": y}, transposed=True)
    if entry is None or not rest or y.size == 0:
        return entry
    program = compile_program(2, [("add", (0, 1), {})], (2,))
    bias = rest[0].reshape(1, -1, *(1,) * (y.ndim - 2))
    added = None if program is None else bind_program(program, [y, bias], [y], call.threads)
    return sequence([entry, added])
