"""ONNX files as parts of models that are trained: which weights are, layers of a file, and saving.

A file does not say which of its floating-point initializers are weights. Here they are those with
an axis and finite contents: scalars are settings, and infinities masks. The statistics of batch
normalisation are states, as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from soapstone.dtypes import kind_of
from soapstone.errors import hint
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.file.messages import as_onnx
from soapstone.frontend.onnx.file.read import Source, read
from soapstone.frontend.onnx.file.tensors import ONNX_OF, as_tensor
from soapstone.frontend.onnx.model import OnnxModel, from_onnx
from soapstone.frontend.onnx.nodes import needed, read_by
from soapstone.frontend.onnx.values import Wanted
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor
    from soapstone.frontend.trainable import Trainable

_STATISTICS = {"BatchNormalization": 3}  # the input from which on all are statistics


def taken_in(where: str, value: Any) -> OnnxModel:
    """Return an ONNX model of a file, its bytes, a message or one that was taken in.

    Raises:
        GraphError: another value; `where` is what it calls it.
        OnnxError: the file is malformed, or needs what is not supported.
        OSError: the file cannot be read.
    """
    if isinstance(value, OnnxModel):
        return value
    if not isinstance(value, str | Path | bytes | onnx.ModelProto):
        raise GraphError(
            f"{where}: {type(value).__name__} found, the path of an .onnx file or what"
            " soapstone.from_onnx returns needed"
        )
    return from_onnx(value)


def roles_of(source: Source) -> dict[str, Role]:
    """Return which initializers of a file are parameters and states; the others are constants."""
    statistics, others = set[str](), set[str]()
    for node in source.graph.node:
        first = _STATISTICS.get(node.op_type)
        statistics |= set(node.input[first:] if first else ())
        others |= set(node.input[:first]) if first else read_by(node)
    return {
        name: Role.STATE if name in statistics - others else Role.PARAMETER
        for name, array in source.weights.items()
        if kind_of(array.dtype) == "f" and array.ndim and np.isfinite(array).all()
    }


def record(
    model: Trainable,
    net: OnnxModel,
    inputs: Sequence[Tensor],
    outputs: str | Sequence[str] | None,
    name: str | None,
) -> Tensor | tuple[Tensor, ...]:
    """Record the layers of a file; see `Model.onnx`."""
    label = f"onnx {net.name!r}"
    if len(inputs) != len(net.inputs):
        needs = ", ".join(map(str, net.inputs))
        raise GraphError(f"{label}: {len(inputs)} tensors found, {len(net.inputs)} needed: {needs}")
    for declared, tensor in zip(net.inputs, inputs):
        if tensor.dtype != declared.dtype:
            raise ShapeError(
                f"{label}: input {declared.name!r}: {tensor.dtype} found, {declared.dtype} needed"
            )
    wanted = Wanted(_named(label, net, outputs), roles_of(net.source))
    before = f"{name}." if name else ""
    built: dict[tuple[tuple[int, ...], ...], Graph] = {}

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        shapes = tuple(builder.spec(value).shape for value in values)
        graph = built.get(shapes) or _graph(label, net, shapes, wanted)
        known = dict(zip((declared.name for declared in net.inputs), values))
        made = inlined(builder, graph, known, before, label)
        if shapes not in built:
            built[shapes], weights = graph, net.weights
            for own in graph.inputs(Role.CONSTANT):  # some of which follow from the batch size
                model.constants[before + own] = np.array(weights[own])
        return made

    made = model.record(emit, inputs)
    again = model.given is not None and model.given.calls  # whose weights may be set by now
    graph, weights = built[tuple(tensor.shape for tensor in inputs)], net.weights
    for own, role in () if again else graph.roles.items():
        if role in (Role.PARAMETER, Role.STATE):
            kind = _kept_as(role, graph.tensors[own].dtype)
            model.values[before + own] = np.array(weights[own], kind)
    one = isinstance(outputs, str) or (outputs is None and len(made) == 1)
    return made[0] if one else made


def _named(label: str, net: OnnxModel, outputs: str | Sequence[str] | None) -> tuple[str, ...]:
    if outputs is None:
        return tuple(declared.name for declared in net.outputs)
    names = (outputs,) if isinstance(outputs, str) else outputs
    if not isinstance(names, tuple | list) or not names:
        raise GraphError(f"{label}: outputs: {outputs!r} found, a name or several needed")
    known = {*net.values, *(declared.name for declared in net.outputs)}
    for name in names:
        if name not in known:
            near = hint(name, known) or f"; its last ones are {', '.join(net.values[-4:])}"
            raise GraphError(f"{label}: outputs: no value {name!r} in the file{near}")
    return tuple(names)


def _graph(label: str, net: OnnxModel, shapes: Sequence[tuple[int, ...]], wanted: Wanted) -> Graph:
    for declared, shape in zip(net.inputs, shapes):
        fixed = declared.shape[0] if declared.shape else ""
        if isinstance(fixed, int) and shape and shape[0] != fixed:
            raise ShapeError(
                f"{label}: input {declared.name!r}: a first axis of {shape[0]} found, {fixed}"
                " needed, which the file fixes; export it with a first axis of any extent"
                " (`dynamic_axes` or `dynamic_shapes` of torch.onnx.export)"
            )
    try:
        dims = net.bind({each.name: shape for each, shape in zip(net.inputs, shapes)})
        return net.graph(dims, wanted=wanted)
    except OnnxError as error:
        raise type(error)(f"{label}: {error}") from None


def inlined(
    builder: GraphBuilder, graph: Graph, known: Mapping[str, str], before: str, label: str
) -> tuple[str, ...]:
    """Add a graph's nodes to a builder, and return its outputs there.

    Args:
        known: what its inputs are there. before: what stands before all other names.
        label: what errors call the graph.

    Raises:
        GraphError: a parameter, state or constant of that name exists, of something else.
    """
    there = dict(known)
    for name, role in graph.roles.items():
        if role is Role.INPUT:
            continue
        own, spec = before + name, graph.tensors[name]
        if builder.has(own) and not builder.shared:
            raise GraphError(
                f"{label}: {own!r} exists already; name=… puts a name before those of the file"
            )
        if builder.has(own) and role is Role.CONSTANT:
            there[name] = own
            continue
        kind = _kept_as(role, spec.dtype)
        value = builder.input(own, spec.shape, kind, role)
        if kind != spec.dtype:
            (value,) = builder.apply("cast", value, name=f"{own}.{spec.dtype}", to=spec.dtype)
        there[name] = value
    outputs = set(graph.outputs)
    for node in graph.nodes:
        ends = len(node.outputs) == 1 and node.outputs[0] in outputs
        name = before + (node.outputs[0] if ends else node.name)
        operands = tuple(there[each] for each in node.inputs)
        specs = [graph.tensors[each] for each in node.outputs]
        made = builder.add(replace(node, name=name, inputs=operands), specs)
        there.update(zip(node.outputs, made))
    return tuple(there[name] for name in graph.outputs)


def _kept_as(role: Role, dtype: str) -> str:
    """Return the element type of an initializer here: what is trained is in single precision."""
    return "float32" if role is Role.PARAMETER else dtype


def written(
    net: OnnxModel, carried: Collection[str], outputs: Any, name: str | None
) -> tuple[Array, dict[str, str]]:
    """Return a file's message as bytes, and by initializer the weights that are kept beside it.

    What no chosen output needs is left out. A weight that is also a statistic stays in the message
    too: the statistic has the contents of the file however the weight is trained. carried: the
    weights that are there; outputs and name are as of `Model.onnx`.
    """
    source, before = net.source, f"{name}." if name else ""
    nodes = list(source.graph.node)
    if outputs is not None:
        nodes = needed(nodes, (outputs,) if isinstance(outputs, str) else outputs)
    ends = {declared.name for declared in source.outputs} if outputs is None else set[str]()
    read_here = ends.union(*map(read_by, nodes))
    roles, statistics = roles_of(source), _statistics(nodes)
    beside: dict[str, str] = {}
    graph = onnx.GraphProto(name=source.name)
    for name_here, items in (
        ("node", nodes),
        ("input", source.graph.input),
        ("output", source.graph.output),
    ):
        for item in items:
            as_onnx(item, getattr(graph, name_here).add())
    for own, array in source.weights.items():
        if own not in read_here:
            continue
        both = own in statistics and roles.get(own) is Role.PARAMETER
        if own in roles and before + own in carried and not both:
            beside[own] = before + own
            kind = ONNX_OF[array.dtype.name]
            tensor = onnx.TensorProto(name=own, dims=array.shape, data_type=kind)
        else:
            tensor = as_tensor(array, own)
        graph.initializer.append(tensor)
    opsets = [onnx.helper.make_opsetid(*each) for each in source.opsets.items()]
    functions = [as_onnx(each, onnx.FunctionProto()) for each in source.functions.values()]
    message = onnx.ModelProto(
        ir_version=onnx.IR_VERSION, graph=graph, opset_import=opsets, functions=functions
    )
    return np.frombuffer(message.SerializeToString(), np.uint8), beside


def _statistics(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Return the names of what nodes read as statistics, and of what that is a copy of."""
    copied = {node.output[0]: node.input[0] for node in nodes if node.op_type == "Identity"}
    found = set[str]()
    for node in nodes:
        for name in node.input[_STATISTICS.get(node.op_type, len(node.input)) :]:
            found.add(name)
            while name in copied and copied[name] not in found:
                name = copied[name]
                found.add(name)
    return found


def restored(message: Array, beside: Mapping[str, Array]) -> OnnxModel:
    """Return the model of a message that `written` made, and of the weights beside it.

    Raises:
        OnnxError: it is malformed, or a weight does not fit.
    """
    return OnnxModel(read(message.tobytes(), beside), {})
