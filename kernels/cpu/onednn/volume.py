"""Convolution of volumes with its gradients, and transposed convolution of any rank.

A transposed convolution is the gradient of a convolution with respect to its input; its bias is
added afterwards. Activations are computed on dense channels-last, or plain where oneDNN is better
there; an operand that is anything else is staged. Images' own convolution is in convolution.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    DIFF_SOURCE,
    DIFF_TARGET,
    DIFF_WEIGHTS,
    SOURCE,
    TARGET,
    WEIGHTS,
    Activation,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    describe,
    dims,
    implementation,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_TRAINING, _INFERENCE, _AUTO = 64, 96, 3
Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Problem:
    """A convolution's sizes. x, y: (n, c, *size); kernel: (groups, o / groups, c / groups, *k)."""

    direction: str  # forward, input, weights
    x: Shape
    y: Shape
    kernel: Shape
    stride: Shape
    low: Shape
    high: Shape
    dilation: Shape
    bias: bool
    activation: Activation | None
    threads: int

    @property
    def weights(self) -> Shape:
        return self.kernel if self.kernel[0] > 1 else self.kernel[1:]

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


def _describe(problem: _Problem, order: Shape) -> Handle:
    x = Layout.dense(problem.x, order).descriptor.address
    y = Layout.dense(problem.y, order).descriptor.address
    weights = Layout.any(problem.weights).descriptor.address
    bias = Layout.dense((problem.y[1],)).descriptor.address if problem.bias else None
    dilation = dims([step - 1 for step in problem.dilation])
    window = (dims(problem.stride), dilation, dims(problem.low), dims(problem.high))
    attribute = attributes(*((problem.activation,) if problem.activation else ())).address
    kind = _INFERENCE if problem.direction == "forward" else _TRAINING
    what = f"convolution {problem.direction} {problem}"
    ends = (engine(), kind, _AUTO, x, weights, bias, y)
    forward = describe("convolution_forward", *ends, *window, attribute, what=what)
    if problem.direction == "forward":
        return forward
    hints = (*window, forward.address, attribute)
    if problem.direction == "input":
        data = (engine(), _AUTO, x, weights, y)
        return describe("convolution_backward_data", *data, *hints, what=what)
    both = (engine(), _AUTO, x, weights, bias, y)
    return describe("convolution_backward_weights", *both, *hints, what=what)


@lru_cache(maxsize=512)
def _primitive(problem: _Problem) -> tuple[Primitive, Shape] | None:
    """Return the primitive and the axis order of its activations, or None: oneDNN has none."""
    plain = tuple(range(len(problem.x)))
    best: tuple[bool, Handle, Shape] | None = None
    with threads(problem.threads):
        for order in ((0, *plain[2:], 1), plain):
            try:
                found = _describe(problem, order)
            except UnsupportedError:
                continue
            slow = "ref" in implementation(found)
            if best is None or (best[0] and not slow):
                best = (slow, found, order)
        return None if best is None else (compile_primitive("convolution", best[1]), best[2])


def _problem(
    call: Call, direction: str, x: Shape, w: Shape, y: Shape, bias: bool = False
) -> _Problem | None:
    at, rank = call.attributes, len(x) - 2
    groups = int(at["groups"])
    filters, channels, *extent = w
    activation = at.get("activation")
    if filters % groups or activation not in ACTIVATIONS:
        return None
    problem = _Problem(
        direction,
        x,
        y,
        (groups, filters // groups, channels, *extent),
        tuple(at["stride"]),
        tuple(at["padding"][:rank]),
        tuple(at["padding"][rank:]),
        tuple(at["dilation"]),
        bias,
        ACTIVATIONS[activation],
        call.threads,
    )
    return problem if problem.legal() else None


def _grouped(w: Array, problem: _Problem) -> Layout:
    """Return the layout of the weights `w` with their filters split by group."""
    layout = Layout.of(w)
    if problem.kernel[0] == 1 or layout.strides is None:
        return layout
    strides = (problem.kernel[1] * layout.strides[0], *layout.strides)
    return Layout(problem.kernel, strides)


@variant("conv3d", "onednn")
def conv3d(call: Call) -> Entry | None:
    """Return the entry of y = activation(conv3d(x, w) + b)."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    if not float32(call, rank=5, only=(0, 1, -1)):
        return None
    if y.size == 0:
        return empty()
    problem = _problem(call, "forward", x.shape, w.shape, y.shape, bool(rest))
    made = _primitive(problem) if problem and x.size and w.size else None
    if problem is None or made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    weights = primitive.descriptor(WEIGHTS)
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, order), primitive.descriptor(SOURCE)),
        ARG_WEIGHTS: program.source(w, _grouped(w, problem), weights, constant=1 in call.constants),
        ARG_DST: program.target(y, Layout.of(y, order), primitive.descriptor(TARGET)),
    }
    if rest:
        bias = primitive.descriptor(WEIGHTS, 1)
        arguments[ARG_BIAS] = program.source(rest[0], Layout.of(rest[0]), bias)
    program.step(primitive, arguments)
    return program.entry()


def _to_input(call: Call, dy: Array, w: Array, dx: Array) -> Entry | None:
    """Return the entry of dx, the gradient of a convolution whose output has gradient dy."""
    if not float32(Call(call.operator, {}, (dy, w), (dx,)), rank=dx.ndim):
        return None
    if dx.size == 0:
        return empty()
    problem = _problem(call, "input", dx.shape, w.shape, dy.shape)
    made = _primitive(problem) if problem and dy.size and w.size else None
    if problem is None or made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    weights = primitive.descriptor(WEIGHTS)
    arguments = {
        ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), primitive.descriptor(DIFF_TARGET)),
        ARG_WEIGHTS: program.source(w, _grouped(w, problem), weights, constant=1 in call.constants),
        ARG_DIFF_SRC: program.target(dx, Layout.of(dx, order), primitive.descriptor(DIFF_SOURCE)),
    }
    program.step(primitive, arguments)
    return program.entry()


@variant("conv3d_grad_input", "onednn")
def conv3d_grad_input(call: Call) -> Entry | None:
    """Return the entry of dx from (dy, w)."""
    (dy, w), (dx,) = call.inputs, call.outputs
    return _to_input(call, dy, w, dx) if dx.ndim == 5 else None


@variant("conv3d_grad_weight", "onednn")
def conv3d_grad_weight(call: Call) -> Entry | None:
    """Return the entry of dw, and db where the attribute `bias` asks for it, from (x, dy)."""
    x, dy = call.inputs
    dw, *rest = call.outputs
    if not float32(call, rank=5, only=(0, 1, 2)) or len(rest) != bool(call.attributes["bias"]):
        return None
    problem = _problem(call, "weights", x.shape, dw.shape, dy.shape, bool(rest))
    made = _primitive(problem) if problem and x.size and dy.size and dw.size else None
    if problem is None or made is None:
        return None
    primitive, order = made
    program = Program(call.threads)
    weights = primitive.descriptor(DIFF_WEIGHTS)
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, order), primitive.descriptor(SOURCE)),
        ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), primitive.descriptor(DIFF_TARGET)),
        ARG_DIFF_WEIGHTS: program.target(dw, _grouped(dw, problem), weights),
    }
    if rest:
        bias = primitive.descriptor(DIFF_WEIGHTS, 1)
        arguments[ARG_DIFF_BIAS] = program.target(rest[0], Layout.of(rest[0]), bias)
    program.step(primitive, arguments)
    return program.entry()


@variant(("conv_transpose2d", "conv_transpose3d"), "onednn")
def conv_transpose(call: Call) -> Entry | None:
    """Return the entry of y = conv_transpose(x, w) + b."""
    from soapstone.kernels.cpu.elementwise.machine import bind_program
    from soapstone.kernels.cpu.elementwise.programs import compile_program
    from soapstone.kernels.cpu.substrate.native import sequence

    x, w, *rest = call.inputs
    (y,) = call.outputs
    if not 4 <= y.ndim <= 5:
        return None
    entry = _to_input(call, x, w, y)
    if entry is None or not rest or y.size == 0:
        return entry
    program = compile_program(2, [("add", (0, 1), {})], (2,))
    bias = rest[0].reshape(1, -1, *(1,) * (y.ndim - 2))
    added = None if program is None else bind_program(program, [y, bias], [y], call.threads)
    return None if added is None else sequence([entry, added])
