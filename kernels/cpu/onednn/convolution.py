"""Convolution, with bias and activation fused, and its two gradients.

oneDNN is fast when activations are dense channels-last or in its own blocked format, 2x slower in
plain NCHW and hopeless ("ref") on a tile of a larger array (benchmarks/onednn_layouts.py). So the
primitive runs on dense channels-last activations; an operand that is anything else is staged
through a private dense copy inside the entry. Weights are reordered to the primitive's format.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from soapstone.kernels.cpu.onednn.descriptors import (
    ACTIVATIONS,
    ARG_BIAS,
    ARG_DIFF_BIAS,
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DIFF_WEIGHTS,
    ARG_DST,
    ARG_SRC,
    ARG_WEIGHTS,
    CHANNELS_LAST_4D,
    DIFF_SOURCE,
    DIFF_TARGET,
    DIFF_WEIGHTS,
    LOGISTIC,
    PLAIN_4D,
    SOURCE,
    TARGET,
    WEIGHTS,
    Activation,
    Binary,
    Layout,
    Primitive,
    Step,
    attributes,
    compile_primitive,
    describe,
    dims,
    implementation,
    is_nested,
    is_plain,
    post_argument,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.cpu.substrate.copies import copy
from soapstone.kernels.cpu.substrate.native import sequence
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.memory import aligned_array

_TRAINING, _INFERENCE, _AUTO = 64, 96, 3
_NARROW = 4  # channels below which a strided input gradient is faster in plain layout


@dataclass(frozen=True)
class Follow:
    """A step after the convolution with an operand of this shape, in the result's axis order."""

    algorithm: int
    shape: tuple[int, ...]

    def laid(self, order: tuple[int, ...]) -> Binary:
        """Return the step on a dense operand in the axis order."""
        return Binary(self.algorithm, Layout.dense(self.shape, order))


@dataclass(frozen=True)
class _Problem:
    """A convolution's sizes, as oneDNN needs them; equal problems share a primitive.

    `x` and `y` are (n, c, h, w); `kernel` is (groups, o / groups, c / groups, kh, kw).
    """

    direction: str
    x: tuple[int, ...]
    y: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]
    dilation: tuple[int, int]
    bias: bool
    posts: tuple[Activation | Follow, ...]
    threads: int

    @property
    def weights(self) -> tuple[int, ...]:
        """The shape of the weights: without the group axis where there is one group."""
        return self.kernel if self.kernel[0] > 1 else self.kernel[1:]

    @property
    def pointwise(self) -> bool:
        """Whether this is a matrix product over pixels."""
        return (
            self.kernel[3:] == (1, 1)
            and self.kernel[0] == 1
            and self.stride == (1, 1)
            and not any(self.padding)
        )

    def legal(self) -> bool:
        """Return whether sizes agree and oneDNN takes the window (no negative padding)."""
        top, left, bottom, right = self.padding
        groups, filters, channels, *window = self.kernel
        spans = zip(self.x[2:], window, self.stride, self.dilation, (top, left), (bottom, right))
        sizes = tuple(
            (size + low + high - dilation * (extent - 1) - 1) // stride + 1
            for size, extent, stride, dilation, low, high in spans
        )
        return (
            min(self.padding) >= 0
            and self.x[1] == groups * channels
            and self.y == (self.x[0], groups * filters, *sizes)
        )


def _window(problem: _Problem) -> tuple[Any, Any, Any, Any]:
    dilation = dims([step - 1 for step in problem.dilation])
    top_left, bottom_right = problem.padding[:2], problem.padding[2:]
    return dims(problem.stride), dilation, dims(top_left), dims(bottom_right)


def _description(problem: _Problem, order: tuple[int, ...]) -> Handle:
    """Return the primitive descriptor of the problem on dense activations in the axis order."""
    x, y = Layout.dense(problem.x, order), Layout.dense(problem.y, order)
    posts = (post.laid(order) if isinstance(post, Follow) else post for post in problem.posts)
    weights = Layout.any(problem.weights).descriptor.address
    bias_layout = Layout.dense((problem.y[1],)).descriptor.address if problem.bias else None
    window, what = _window(problem), f"convolution {problem.direction} {problem}"
    ends = (x.descriptor.address, weights)
    target = y.descriptor.address
    attribute = attributes(*posts).address
    inference = problem.direction == "forward"
    forward = describe(
        "convolution_forward",
        *(engine(), _INFERENCE if inference else _TRAINING, _AUTO),
        *(*ends, bias_layout, target, *window, attribute),
        what=what,
    )
    if problem.direction == "forward":
        return forward
    hint = forward.address
    if problem.direction == "input":
        return describe(
            "convolution_backward_data",
            *(engine(), _AUTO, *ends, target, *window, hint, attribute),
            what=what,
        )
    return describe(
        "convolution_backward_weights",
        *(engine(), _AUTO, *ends, bias_layout, target, *window, hint, attribute),
        what=what,
    )


def _rank(name: str) -> int:
    """Return how bad an implementation is: 0 generated for the layout, 1 im2col, 2 plain loops."""
    return 2 if "ref" in name else 1 if "gemm" in name else 0


@lru_cache(maxsize=1024)
def _primitive(problem: _Problem, plain: bool) -> tuple[Primitive, tuple[int, ...]] | None:
    """Return the primitive and the axis order of its activations, or None: oneDNN has none.

    `plain` tells that the call's activations are plain, so that plain costs no staging.
    """
    orders = [CHANNELS_LAST_4D, PLAIN_4D]
    narrow = problem.direction == "input" and problem.x[1] <= _NARROW and max(problem.stride) > 1
    # brgconv_strided wastes the vector on few channels; a plain matrix product needs no staging.
    pointwise = plain and problem.pointwise and problem.direction != "weights"
    # The plain implementation's sigmoid turns NaN into 0.
    functions = [post.algorithm for post in problem.posts if isinstance(post, Activation)]
    if narrow or (pointwise and LOGISTIC not in functions):
        orders.reverse()
    best: tuple[int, Handle, tuple[int, ...]] | None = None
    with threads(problem.threads):
        for order in orders:
            try:
                found = _description(problem, order)
            except UnsupportedError:
                continue
            rank = _rank(implementation(found))
            if order == PLAIN_4D and orders[0] == PLAIN_4D and rank == 1:
                rank = 0
            if best is None or rank < best[0]:
                best = (rank, found, order)
        if best is None:
            return None
        return compile_primitive("convolution", best[1]), best[2]


def _problem(
    call: Call,
    direction: str,
    x: Array | tuple[int, ...],
    w: Array | tuple[int, ...],
    y: Array,
    posts: tuple[Activation | Follow, ...] = (),
) -> _Problem | None:
    """Return the call's problem, or None when sizes or windows are not oneDNN's."""
    at = call.attributes
    groups = int(at["groups"])
    filters, channels, *extent = w if isinstance(w, tuple) else w.shape
    if filters % groups:
        return None
    if at.get("activation") not in ACTIVATIONS:
        return None
    activation = ACTIVATIONS[at.get("activation")]
    problem = _Problem(
        direction,
        tuple(x if isinstance(x, tuple) else x.shape),
        y.shape,
        (groups, filters // groups, channels, *extent),
        tuple(at["stride"]),
        tuple(at["padding"]),
        tuple(at["dilation"]),
        bool(at.get("bias", False)),
        (*((activation,) if activation else ()), *posts),
        call.threads,
    )
    return problem if problem.legal() else None


def _grouped(w: Array, problem: _Problem) -> Layout:
    """Return the layout of the weights `w` with their filters split by group."""
    layout = Layout.of(w)
    if problem.kernel[0] == 1 or layout.strides is None:
        return layout
    filters = problem.kernel[1]
    strides = (filters * layout.strides[0], *layout.strides)
    return Layout(problem.kernel, strides)


def _copied(call: Call, steps: Sequence[Step]) -> Entry | None:
    """Return the entry of the convolution of a channels-last copy of its image."""
    x, *rest = call.inputs
    n, c, h, w = x.shape
    dense = aligned_array((n, h, w, c), x.dtype).transpose(0, 3, 1, 2)
    first = copy(dense, x, call.threads)
    then = conv2d(replace(call, inputs=(dense, *rest)), steps)
    return None if first is None or then is None else sequence([first, then])


@variant("conv2d", "onednn")
def conv2d(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of y = activation(conv2d(x, w) + b), then the steps.

    Constant weights are reordered once, here.
    """
    x, w, *rest = call.inputs
    (y,) = call.outputs
    if x.ndim == 4 and x.size and not is_nested(x):
        return _copied(call, steps)
    if not float32(call, rank=4, only=(0, 1, -1)):
        return None
    if y.size == 0:
        return empty()
    posts = tuple(
        step if isinstance(step, Activation) else Follow(step[0], step[1].shape) for step in steps
    )
    problem = _problem(call, "forward", x, w, y, posts)
    if problem is None or 0 in (x.size, w.size) or len(rest) != problem.bias:
        return None
    made = _primitive(problem, is_plain(x) and is_plain(y))
    if made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    constant = 1 in call.constants
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, order), primitive.descriptor(SOURCE)),
        ARG_WEIGHTS: program.source(
            w, _grouped(w, problem), primitive.descriptor(WEIGHTS), constant=constant
        ),
        ARG_DST: program.target(y, Layout.of(y, order), primitive.descriptor(TARGET)),
    }
    if problem.bias:
        bias = rest[0]
        arguments[ARG_BIAS] = program.source(
            bias, Layout.of(bias), primitive.descriptor(WEIGHTS, 1)
        )
    first = len(problem.posts) - len(steps)
    for index, step in enumerate(steps, first):
        if not isinstance(step, Activation):
            operand = step[1]
            wanted = Layout.dense(operand.shape, order).descriptor.address
            arguments[post_argument(index)] = program.source(
                operand, Layout.of(operand, order), wanted
            )
    program.step(primitive, arguments)
    return program.entry()


@variant("conv2d_grad_input", "onednn")
def conv2d_grad_input(call: Call) -> Entry | None:
    """Return the entry of dx from (dy, w)."""
    dy, w = call.inputs
    (dx,) = call.outputs
    if not float32(call, rank=4):
        return None
    if dx.size == 0:
        return empty()
    problem = _problem(call, "input", dx, w, dy)
    if problem is None or 0 in (dy.size, w.size):
        return None
    made = _primitive(problem, is_plain(dx) and is_plain(dy))
    if made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    arguments = {
        ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), primitive.descriptor(DIFF_TARGET)),
        ARG_WEIGHTS: program.source(w, _grouped(w, problem), primitive.descriptor(WEIGHTS)),
        ARG_DIFF_SRC: program.target(dx, Layout.of(dx, order), primitive.descriptor(DIFF_SOURCE)),
    }
    program.step(primitive, arguments)
    return program.entry()


@variant("conv2d_grad_weight", "onednn")
def conv2d_grad_weight(call: Call) -> Entry | None:
    """Return the entry of dw, and db where the attribute `bias` asks for it, from (x, dy)."""
    x, dy = call.inputs
    dw = call.outputs[0]
    if not float32(call, rank=4, only=(0, 1, 2)):
        return None
    if dw.size == 0 and all(output.size == 0 for output in call.outputs):
        return empty()
    problem = _problem(call, "weights", x, dw, dy)
    if problem is None or 0 in (x.size, dy.size, dw.size):
        return None
    if len(call.outputs) != 1 + problem.bias:
        return None
    made = _primitive(problem, is_plain(x) and is_plain(dy))
    if made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, order), primitive.descriptor(SOURCE)),
        ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), primitive.descriptor(DIFF_TARGET)),
        ARG_DIFF_WEIGHTS: program.target(
            dw, _grouped(dw, problem), primitive.descriptor(DIFF_WEIGHTS)
        ),
    }
    if problem.bias:
        db = call.outputs[1]
        arguments[ARG_DIFF_BIAS] = program.target(
            db, Layout.of(db), primitive.descriptor(DIFF_WEIGHTS, 1)
        )
    program.step(primitive, arguments)
    return program.entry()
