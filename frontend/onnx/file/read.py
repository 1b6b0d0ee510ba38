"""Reads an ONNX model from a file, bytes or a message, and checks its structure.

Nothing here depends on the extents of symbolic dims; `build.py` makes graphs of what it returns.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.files import reason
from soapstone.frontend.inference.sources import Field
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.messages import model_of
from soapstone.frontend.onnx.file.schema import newest_opset
from soapstone.frontend.onnx.file.tensors import Files, array_of, dtype_of, shape_of
from soapstone.frontend.onnx.nodes import order_of
from soapstone.frontend.onnx.values import domain_of
from soapstone.ir.files.layouts import Layouts, layouts_from_text
from soapstone.ir.tensor import Array, rounded
from soapstone.native.arrays import let_go
from soapstone.records import dataclass

if TYPE_CHECKING:
    import onnx

LAYOUTS = "soapstone.layouts"  # the metadata in which axis orders are


@dataclass(frozen=True)
class Declared(Field):
    """An input or output as the file declares it; a symbolic dim is its name.

    Of the extents of what `holds` tensors nothing is said, nor how many axes they have.
    """

    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Metadata:
    """What a file says of itself, and of its producer; "" or 0 where it says nothing."""

    producer: str = ""
    domain: str = ""
    description: str = ""
    graph: str = ""
    graph_description: str = ""
    version: int = 0
    entries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A checked model: its graph without weights, and the weights as views of the file.

    `constants` are nodes of the graph, by identity, with the values that they are in all graphs.
    """

    name: str
    graph: onnx.GraphProto
    opsets: Mapping[str, int]
    weights: Mapping[str, Array]
    unsupported: Mapping[str, OnnxError]  # initializers of types that soapstone does not have
    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...]
    functions: Mapping[tuple[str, str], onnx.FunctionProto] = field(default_factory=dict)
    layouts: Layouts | None = None
    metadata: Metadata = Metadata()
    files: Files = field(default_factory=lambda: Files(None))
    constants: dict[int, tuple[onnx.NodeProto, Any]] = field(default_factory=dict)


def read(
    model: str | Path | bytes | memoryview | onnx.ModelProto,
    given: Mapping[str, Array] = MappingProxyType({}),
    name: str = "model",
) -> Source:
    """Return a model, checked.

    given: contents of initializers that stand elsewhere, by name. name: of a model that is given by
    its bytes or as a message, and whose graph has none.

    Raises:
        OnnxError: the file is malformed, or needs what is not supported.
        OSError: the file cannot be read.
    """
    if is_message(model):
        return _source(_in_order(model), Files(None), name, given)
    files, label = Files(None), "file"
    if isinstance(model, str | Path):
        path = Path(model)
        label = f"file {str(path)!r}"
        files, title = Files(path.parent), path.stem
        try:
            data = files.map(path)
        except OSError as error:
            raise type(error)(f"{label}: {reason(error)}") from None
    elif not isinstance(model, bytes | bytearray | memoryview):
        kind = type(model).__name__
        raise OnnxError(f"model: {kind} found; a path, the bytes of a file or a message needed")
    else:
        data, title = np.frombuffer(model, np.uint8), name
    if not data.size:
        raise OnnxError(f"{label}: empty; an ONNX model needed")
    try:
        proto = model_of(data.data)
    except OnnxError as error:
        raise OnnxError(f"{label}: {error}") from None
    let_go(data)  # with what lies between the tensors come pages of theirs
    return _source(_in_order(proto), files, title, given)


def is_message(model: object) -> bool:
    """Return whether a model is an `onnx.ModelProto`; where there is one, ONNX is imported."""
    onnx = sys.modules.get("onnx")
    return onnx is not None and isinstance(model, onnx.ModelProto)


def _in_order(model: Any) -> Any:
    """Return a model whose nodes come after those that make what they read.

    ONNX wants them so in files; but ONNX Runtime sorts them, and some of its tools rely on it.
    """
    order = order_of(model.graph.node)
    if order is None:
        return model
    made = type(model)()
    made.CopyFrom(model)
    nodes = list(made.graph.node)
    del made.graph.node[:]
    made.graph.node.extend(nodes[place] for place in order)
    return made


def _source(
    model: onnx.ModelProto,
    files: Files,
    title: str,
    given: Mapping[str, Array],
) -> Source:
    graph = model.graph
    _check_text(model)
    opsets = _opsets(model.opset_import)
    if not graph.output:
        raise OnnxError("model: a graph without outputs found; 1 or more needed")
    if graph.sparse_initializer:
        raise UnsupportedError("model: sparse initializers are not supported")
    weights: dict[str, Array] = {}
    unsupported: dict[str, OnnxError] = {}
    for position, tensor in enumerate(graph.initializer):
        if not tensor.name:
            raise OnnxError(f"initializer {position}: a name is needed")
        if tensor.name in weights or tensor.name in unsupported:
            raise OnnxError(f"initializer {tensor.name!r} exists twice")
        if tensor.name in given:
            weights[tensor.name] = _fitting(tensor, given[tensor.name])
            continue
        try:
            weights[tensor.name] = array_of(tensor, files)
        except UnsupportedError as error:
            unsupported[tensor.name] = error
    known = weights.keys() | unsupported.keys()
    inputs = tuple(_declared(v, "input") for v in graph.input if v.name not in known)
    outputs = tuple(_declared(v, "output") for v in graph.output)
    for what, values in (("input", inputs), ("output", outputs)):
        names = [value.name for value in values]
        if len(set(names)) != len(names):
            raise OnnxError(f"{what} {max(names, key=names.count)!r} exists twice")
    functions = {}
    for function in model.functions:
        key = (domain_of(function.domain), function.name)
        if key in functions:
            raise OnnxError(f"function {function.name!r} exists twice")
        functions[key] = function
    name = re.sub(r"\s+", " ", graph.name).strip() or title
    layouts = _layouts(model)
    metadata = Metadata(
        model.producer_name,
        model.domain,
        model.doc_string,
        graph.name,
        graph.doc_string,
        model.model_version,
        {entry.key: entry.value for entry in model.metadata_props},
    )
    return Source(
        *(name, graph, opsets, weights, unsupported, inputs, outputs, functions),
        *(layouts, metadata, files),
    )


def _fitting(tensor: onnx.TensorProto, array: Array) -> Array:
    where = f"initializer {tensor.name!r}"
    dtype = dtype_of(tensor.data_type, where)
    shape = shape_of(tensor.dims, where, dtype)
    if array.shape != shape or kind_of(array.dtype) != kind_of(dtype):
        raise OnnxError(
            f"{where}: {array.dtype} of shape {array.shape} found, {dtype} {shape} needed"
        )
    return rounded(array, dtype)


def _layouts(model: onnx.ModelProto) -> Layouts | None:
    """Return the axis orders that soapstone's optimiser chose for the file's values, if any.

    Raises:
        OnnxError: they are malformed, or of what no node makes; names the field.
    """
    found = [entry.value for entry in model.metadata_props if entry.key == LAYOUTS]
    if not found:
        return None
    where = f"model: metadata {LAYOUTS!r}"
    if len(found) > 1:
        raise OnnxError(f"{where} exists {len(found)} times; once needed")
    layouts = layouts_from_text(found[0], where, OnnxError)
    made = {name for node in model.graph.node for name in node.output}
    for name in layouts:
        if name not in made:
            raise OnnxError(f"{where}: field 'orders.{name}': no node makes such a value")
    return layouts


def _check_text(model: onnx.ModelProto) -> None:
    """Check that names are text; Protocol Buffers gives bytes for what is no UTF-8.

    Raises:
        OnnxError: one is not.
    """
    graph = model.graph
    texts = [graph.name, *(item.domain for item in model.opset_import)]
    texts += [tensor.name for tensor in graph.initializer]
    texts += [
        text
        for tensor in graph.initializer
        for e in tensor.external_data
        for text in (e.key, e.value)
    ]
    for value in (*graph.input, *graph.output):
        texts += [value.name, *(dim.dim_param for dim in value.type.tensor_type.shape.dim)]
    bodies = [graph.node, *(function.node for function in model.functions)]
    texts += [text for f in model.functions for text in (f.name, f.domain, *f.input, *f.output)]
    for node in itertools.chain.from_iterable(bodies):
        texts += [node.op_type, node.domain, node.name, *node.input, *node.output]
        texts += [attribute.name for attribute in node.attribute]
    for text in texts:
        if not isinstance(text, str):
            raise OnnxError(f"model: name {text!r} found, which is no UTF-8")


def _opsets(imports: Any) -> dict[str, int]:
    opsets = {domain_of(item.domain): int(item.version) for item in imports}
    if not opsets:
        raise OnnxError("model: field 'opset_import': none found, 1 or more needed")
    newest = newest_opset()
    version = opsets.get("", newest)
    if not 1 <= version <= newest:
        raise UnsupportedError(f"model: opset {version} found, 1 to {newest} needed")
    return opsets


def _declared(value: onnx.ValueInfoProto, what: str) -> Declared:
    where = f"{what} {value.name!r}"
    if not value.name:
        raise OnnxError(f"an {what} without a name found")
    if what == "output" and value.type.sequence_type.elem_type.HasField("map_type"):
        return Declared(value.name, "float32", (), ranked=False)  # scores as ZipMap hands them on
    kind, inner, holds = value.type.WhichOneof("value"), value.type, []
    while kind in ("sequence_type", "optional_type"):
        holds.append(kind.removesuffix("_type"))
        inner = getattr(inner, kind).elem_type
        kind = inner.WhichOneof("value")
    if kind == "map_type" and what == "input" and not holds:
        holds, inner = ["map"], inner.map_type.value_type
        kind = inner.WhichOneof("value")
    if kind != "tensor_type":
        found = (kind or "no type").removesuffix("_type").replace("_", " ")
        raise UnsupportedError(f"{where}: {found} found, a tensor needed")
    tensor = inner.tensor_type
    dtype = dtype_of(tensor.elem_type, where)
    if holds:
        return Declared(value.name, dtype, (), ranked=False, holds=tuple(holds))
    if not tensor.HasField("shape"):
        return Declared(value.name, dtype, (), ranked=False)
    shape: list[int | str] = []
    for axis, dim in enumerate(tensor.shape.dim):
        if dim.HasField("dim_value"):
            if dim.dim_value < 0:
                raise OnnxError(f"{where}: axis {axis} is {dim.dim_value}; 0 or more needed")
            shape.append(int(dim.dim_value))
        else:
            shape.append(dim.dim_param or f"{value.name}.{axis}")
    return Declared(value.name, dtype, tuple(shape))
