"""What operators of a graph are in ONNX: one rule an operator, the inverse of the importer's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.declared import entry_of, writable, write_declared
from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.file.tensors import ONNX_OF
from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.elementwise.fused import program_steps
from soapstone.ir.ops.windows.conv_transpose import within_strides
from soapstone.ir.ops.windows.convolution import CONVOLUTIONS
from soapstone.ir.tensor import TensorSpec

if TYPE_CHECKING:
    from soapstone.frontend.onnx.export.write import Writer

ExportRule = Callable[["Given"], None]
EXPORTS: dict[str, ExportRule] = {}


def export(*names: str) -> Callable[[ExportRule], ExportRule]:
    """Register how operators are written; a rule writes all outputs of a node."""

    def add(function: ExportRule) -> ExportRule:
        for name in names:
            EXPORTS[name] = function
        return function

    return add


class Given:
    """A node to export: its operands and attributes, and how to write ONNX nodes."""

    def __init__(
        self,
        writer: Writer,
        graph: Graph,
        node: Node,
        names: Mapping[str, str] = MappingProxyType({}),
        depth: int = 0,
    ) -> None:
        """`names`: what values of the graph are called in the file, where that is another name."""

        def named(values: Sequence[str]) -> tuple[str, ...]:
            return tuple(names.get(name, name) for name in values)

        self.writer, self.node, self.depth = writer, node, depth
        self.inputs, self.outputs = named(node.inputs), named(node.outputs)
        self.specs = [graph.tensors[name] for name in node.inputs]
        self.made = [graph.tensors[name] for name in node.outputs]
        used = [n for n in node.outputs if graph.consumers[n] or n in graph.outputs]
        self.read = set(named(used))

    def write(self) -> None:
        """Write the node by the rule of its operator.

        Raises:
            UnsupportedError: it has no counterpart in ONNX.
        """
        rule_of(self.node, self.writer.opset)(self)

    def write_instead(self, make: Callable[[Emitter], Sequence[str]]) -> None:
        """Write the operators that `make` emits of the operands, and returns the results of."""
        if self.depth > _MOST_DEPTH:
            raise UnsupportedError(f"{self.node.label} has no counterpart in ONNX")
        builder = GraphBuilder()
        for name, spec in dict(zip(self.node.inputs, self.specs)).items():
            builder.input(name, spec.shape, spec.dtype)
        results = make(Emitter(builder, self.node, ""))
        builder.output(*results)
        graph = builder.build().pruned()
        names = dict(zip(results, self.outputs)) | dict(zip(self.node.inputs, self.inputs))
        for node in graph.nodes:
            for output in node.outputs:
                names[output] = names.get(output) or self.writer.new(output)
        for node in graph.nodes:
            Given(self.writer, graph, node, names, self.depth + 1).write()
        for result, output in zip(results, self.outputs):
            if names[result] != output:
                self("Identity", names[result], to=output)

    def __getitem__(self, name: str) -> Any:
        return self.node.attributes[name]

    def __call__(
        self, kind: str, *inputs: str, to: str | Sequence[str] | None = None, **attributes: Any
    ) -> str:
        """Write a node and return its first output: a new name, unless `to` gives it."""
        return self.writer.add(kind, inputs, to, attributes, self.node.name)

    def last(self, kind: str, *inputs: str, **attributes: Any) -> None:
        """Write the node that makes the only output."""
        self(kind, *inputs, to=self.outputs[0], **attributes)

    def ints(self, values: Sequence[int]) -> str:
        """Return the name of a constant list of integers."""
        return self.writer.constant(np.asarray(values, np.int64))

    def number(self, value: float, spec: TensorSpec | None = None) -> str:
        """Return the name of a constant scalar of the first operand's type."""
        return self.writer.constant(np.asarray(value, (spec or self.specs[0]).dtype))

    def unread(self, first: int) -> None:
        """Refuse saved outputs that something reads."""
        for name in self.outputs[first:]:
            if name in self.read:
                raise UnsupportedError(
                    f"{self.node.label}: output {name!r} exists only in training; ONNX has none"
                )


@export(
    "reduce_l1",
    "reduce_l2",
    "reduce_log_sum",
    "reduce_log_sum_exp",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_prod",
    "reduce_sum",
    "reduce_sum_square",
)
def _reduce(g: Given) -> None:
    axes = g["axes"]
    if axes is None:
        axes = tuple(range(g.specs[0].rank))
    if g.node.attributes.get("count") is not None:
        raise UnsupportedError(f"{g.node.label}: attribute count has no counterpart in ONNX")
    kind = entry_of(g.node.spec).name
    if not axes:
        g.last(kind, g.inputs[0], keepdims=1, noop_with_empty_axes=1)
    else:
        g.last(kind, g.inputs[0], g.ints(axes), keepdims=int(g["keepdims"]))


@export("affine")
def _affine(g: Given) -> None:
    value, scale, shift = g.inputs[0], g["scale"], g["shift"]
    if scale == 1.0 and shift == 0.0:
        g.last("Identity", value)
        return
    if scale != 1.0:
        to = g.outputs[0] if shift == 0.0 else None
        value = g("Mul", value, g.number(scale), to=to)
    if shift != 0.0:
        g.last("Add", value, g.number(shift))


@export("power")
def _power(g: Given) -> None:
    g.last("Pow", g.inputs[0], g.number(g["exponent"]))


@export("silu")
def _silu(g: Given) -> None:
    x, alpha = g.inputs[0], g["alpha"]
    scaled = x if alpha == 1.0 else g("Mul", x, g.number(alpha))
    g.last("Mul", x, g("Sigmoid", scaled))


@export("clip")
def _clip(g: Given) -> None:
    bounds = ["" if g[name] is None else g.number(g[name]) for name in ("low", "high")]
    while bounds and not bounds[-1]:
        bounds.pop()
    g.last("Clip", g.inputs[0], *bounds)


@export("is_finite")
def _is_finite(g: Given) -> None:
    bad = g("Or", g("IsNaN", g.inputs[0]), g("IsInf", g.inputs[0]))
    count = g("ReduceSum", g("Cast", bad, to_=ONNX_OF["int32"]), keepdims=0)
    g.last("Not", g("Cast", count, to_=ONNX_OF["bool"]))


@export("bit_shift")
def _bit_shift(g: Given) -> None:
    if g.specs[0].dtype.startswith("uint"):
        g.last("BitShift", *g.inputs, direction=g["direction"].upper())
        return
    raise UnsupportedError(f"{g.node.label}: ONNX shifts unsigned integers, not {g.specs[0].dtype}")


@export("mod")
def _mod(g: Given) -> None:
    if g.specs[0].is_float and not g["fmod"]:
        x, y = g.inputs
        g.last("Sub", x, g("Mul", y, g("Floor", g("Div", x, y))))
    else:
        write_declared(g)


@export("cast")
def _cast(g: Given) -> None:
    own: dict[str, Any] = {}
    if g["to"].startswith("float8"):
        own["saturate"] = int(g["saturate"])
    if g["to"] == "float8_e8m0fnu":
        own["round_mode"] = g["round_mode"]
    g.last("Cast", g.inputs[0], to_=ONNX_OF[g["to"]], **own)


@export("softmax", "log_softmax", "hardmax")
def _softmax(g: Given) -> None:
    if g.specs[0].is_float:
        write_declared(g)
        return
    x = g("Cast", g.inputs[0], to_=ONNX_OF["float32"])
    made = g(entry_of(g.node.spec).name, x, axis=g["axis"])
    g.last("Cast", made, to_=ONNX_OF[g.specs[0].dtype])


# Products


@export("matmul")
def _matmul(g: Given) -> None:
    values = []
    for name, spec, key in zip(g.inputs, g.specs, ("transpose_a", "transpose_b")):
        if g[key]:
            order = (*range(spec.rank - 2), spec.rank - 1, spec.rank - 2)
            name = g("Transpose", name, perm=order)
        values.append(name)
    g.last("MatMul", *values)


def activated(g: Given, name: str | None, make: Callable[[str | None], str]) -> None:
    """Write what makes a value (`make`, given the name for it), then an activation."""
    if name is None:
        make(g.outputs[0])
        return
    before = make(None)
    kinds = {"relu": "Relu", "sigmoid": "Sigmoid", "tanh": "Tanh"}
    if name in kinds:
        g.last(kinds[name], before)
    elif name == "leaky_relu":
        g.last("LeakyRelu", before, alpha=0.01)
    else:
        g.last("Gelu", before, approximate="none")


@export("linear")
def _linear(g: Given) -> None:
    x, w, *bias = g.inputs

    def make(to: str | None) -> str:
        if bias and g.specs[0].rank == 2:
            return g("Gemm", x, w, bias[0], to=to)
        y = g("MatMul", x, w, to=None if bias else to)
        return g("Add", y, bias[0], to=to) if bias else y

    activated(g, g["activation"], make)


@export(*CONVOLUTIONS)
def _conv(g: Given) -> None:
    def make(to: str | None) -> str:
        window = {"strides": g["stride"], "pads": g["padding"], "dilations": g["dilation"]}
        return g("Conv", *g.inputs, to=to, **window, group=g["groups"])

    activated(g, g["activation"], make)


@export("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(g: Given) -> None:
    """Write what adds a stride or more so that it adds less, as others need it."""
    attributes, zeros = within_strides(g.node.attributes)
    if attributes == dict(g.node.attributes):
        write_declared(g)
        return

    def steps(emit: Emitter) -> list[str]:
        x, w, *bias = g.node.inputs
        if not any(zeros):
            return [emit(g.node.operator, x, w, *bias, **attributes)]
        none = (0,) * (len(zeros) + 2)
        y = emit(g.node.operator, x, w, **{**attributes, "bias": False})
        y = emit("pad", y, low=none, high=(0, 0, *zeros), interior=none)
        if bias:
            line = (*emit.spec(bias[0]).shape, *(1,) * len(zeros))
            y = emit("add", y, emit("reshape", bias[0], shape=line))
        return [y]

    g.write_instead(steps)


# Normalisation


@export("group_norm")
def _group_norm(g: Given) -> None:
    """Normalise each group as one channel; opset 21's operator is not everywhere."""
    g.unread(1)
    x, gamma, beta = g.inputs
    shape, groups = g.specs[0].shape, g["num_groups"]
    flat = g("Reshape", x, g.ints((shape[0], groups, math.prod(shape[1:]) // max(groups, 1))))
    ones, zeros = (g.writer.constant(np.full(groups, v, g.specs[0].dtype)) for v in (1, 0))
    plain = g("InstanceNormalization", flat, ones, zeros, epsilon=g["epsilon"])
    line = g.ints((shape[1], *(1,) * (len(shape) - 2)))
    back = g("Reshape", plain, g.ints(shape))
    scaled = g("Mul", back, g("Reshape", gamma, line))
    g("Add", scaled, g("Reshape", beta, line), to=g.outputs[0])


@export("rms_norm")
def _rms_norm(g: Given) -> None:
    g.unread(1)
    x, gamma = g.inputs
    rank = g.specs[0].rank
    axes = g.ints(range(g["axis"] % rank, rank))
    mean = g("ReduceMean", g("Mul", x, x), axes, keepdims=1)
    root = g("Sqrt", g("Add", mean, g.number(g["epsilon"])))
    g("Mul", g("Div", x, root), gamma, to=g.outputs[0])


@export("dropout")
def _dropout(g: Given) -> None:
    raise UnsupportedError(f"{g.node.label}: it is of training; export the graph of inference")


@export("fused_elementwise")
def _fused(g: Given) -> None:
    """Write the steps of the chain one after the other."""

    def steps(emit: Emitter) -> list[str]:
        names = list(g.node.inputs)
        for spec, operands, values in program_steps(g.node.attributes, len(names)):
            names.append(emit(spec.name, *(names[i] for i in operands), **values))
        return [names[result] for result in g["results"]]

    g.write_instead(steps)


def rule_of(node: Node, opset: int) -> ExportRule:
    """Return the rule of a node's operator in files of an opset.

    Raises:
        UnsupportedError: there is none; names the operator.
    """
    if node.operator in EXPORTS:
        return EXPORTS[node.operator]
    if writable(node.spec, opset):
        return write_declared
    lower = node.spec.lower
    if lower is not None:
        return lambda g: g.write_instead(lambda emit: lower(emit, g.node))
    hint = node.spec.doc.partition("\n")[0] or "an operator of training or of this runtime"
    raise UnsupportedError(f"{node.label} has no counterpart in ONNX ({hint})")


_MOST_DEPTH = 8
