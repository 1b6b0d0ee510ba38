"""Writes graphs of inference as ONNX files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import helper

import soapstone.frontend.onnx.export.movement
import soapstone.frontend.onnx.export.quantized  # noqa: F401
from soapstone.files import naming, write
from soapstone.frontend.arguments import count
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.export.batch import for_any
from soapstone.frontend.onnx.export.rules import Given
from soapstone.frontend.onnx.file.read import LAYOUTS
from soapstone.frontend.onnx.file.tensors import ONNX_OF, SINCE, as_tensor, stored
from soapstone.frontend.onnx.values import unused
from soapstone.ir.files.layouts import Layouts, layouts_to_text
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec, spec_of

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx.model import OnnxModel

OPSET = 20
OPSETS = range(20, 24)  # those whose operators the rules are written for
EXTERNAL_BYTES = 1 << 20  # smaller weights stay in the model's file
_MOST_MESSAGE = (1 << 31) - (1 << 26)  # bytes of weights in one Protocol Buffers message
_ALIGNMENT = 4096


class Writer:
    """Collects the nodes and constants of an ONNX graph."""

    def __init__(self, names: Sequence[str], opset: int) -> None:
        self.opset = opset
        self.domains: dict[str, int] = {}  # custom ones, with their versions
        self.typed: dict[str, TensorSpec] = {}  # results that ONNX's inference does not know
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self._known: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._names = set(names)

    def new(self, base: str) -> str:
        """Return a name that nothing has."""
        return unused(base, self._names)

    def constant(self, array: Array) -> str:
        """Return the name of a small constant; equal ones are one."""
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self.new("constant")
            self.constants.append(as_tensor(array, self._known[key]))
        return self._known[key]

    def add(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: str | Sequence[str] | None,
        attributes: Mapping[str, Any],
        base: str,
        domain: str = "",
    ) -> str:
        """Add a node and return its first output."""
        if outputs is None:
            outputs = self.new(f"{base}.{kind.lower()}")
        made = [outputs] if isinstance(outputs, str) else list(outputs)
        given = {key.rstrip("_"): value for key, value in attributes.items()}
        name = f"{base}/{kind}.{len(self.nodes)}"
        self.nodes.append(
            helper.make_node(kind, list(inputs), made, name=name, domain=domain, **given)
        )
        return made[0]


def onnx_graph(
    graph: Graph, weights: Mapping[str, Array], *, opset: int = OPSET
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a graph as an ONNX model without its weights, and those weights by name.

    An output that is an input or a weight, or an output twice, is called `NAME.output` in the file.

    Raises:
        UnsupportedError: an operator has no counterpart, or the graph is one of training.
        OnnxError: a weight is missing or does not fit.
    """
    if opset not in OPSETS:
        raise UnsupportedError(f"opset {opset} found; {OPSETS[0]} to {OPSETS[-1]} are written")
    if graph.updates:
        name = next(iter(graph.updates))
        raise UnsupportedError(
            f"graph {graph.name!r} updates {name!r}; a graph of inference needed"
        )
    for name, spec in graph.tensors.items():
        since = SINCE.get(spec.dtype, 0)
        if since > opset:
            raise UnsupportedError(
                f"value {name!r}: {spec} found, a type of opset {since}; opset {opset} is written"
            )
    writer = Writer([*graph.tensors, *(node.name for node in graph.nodes)], opset)
    inputs, held = [], {}
    for name, role in graph.roles.items():
        spec = graph.tensors[name]
        if role is Role.INPUT or (role is Role.SCALAR and name not in weights):
            inputs.append(_value(name, spec))
            continue
        if name not in weights:
            raise OnnxError(f"weight {name!r} is missing; {spec} needed")
        if spec_of(weights[name]) != spec:
            raise OnnxError(f"weight {name!r}: {spec_of(weights[name])} found, {spec} needed")
        held[name] = weights[name]
    for node in graph.nodes:
        Given(writer, graph, node).write()
    outputs = []
    for position, name in enumerate(graph.outputs):
        made = name
        if name in graph.roles or name in graph.outputs[:position]:
            # In a file each output is a value of its own, made by a node.
            made = writer.new(f"{name}.output")
            writer.add("Identity", [name], made, {}, made)
        outputs.append(_value(made, graph.tensors[name]))
    typed = [_value(name, spec) for name, spec in writer.typed.items() if name not in graph.outputs]
    proto = helper.make_graph(
        writer.nodes, graph.name, inputs, outputs, writer.constants, value_info=typed
    )
    imports = [helper.make_opsetid("", opset)]
    version = helper.find_min_ir_version_for(imports)
    imports += [helper.make_opsetid(*item) for item in writer.domains.items()]
    model = helper.make_model(
        proto, opset_imports=imports, ir_version=version, producer_name="soapstone"
    )
    return model, held


def _value(name: str, spec: TensorSpec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_OF[spec.dtype], spec.shape)


def to_onnx(
    model: Graph | Model | OnnxModel,
    weights: Mapping[str, Array] | str | Path | None = None,
    path: str | Path | None = None,
    *,
    opset: int = OPSET,
    external_data: bool | None = None,
    dims: Mapping[str, int | str] | None = None,
    layouts: Layouts | None = None,
) -> None:
    """Write a graph of inference as an ONNX file; names of values are kept.

    `model`: a graph with its weights, or a Model or OnnxModel, whose own are taken unless given:
    `to_onnx(model, "net.onnx")`. `dims`: the extents of an OnnxModel's symbolic dims, or {"batch":
    n} of a Model; {"batch": "n"} of a Model writes it for any batch size, called n in the file.
    Weights go into a second file, the name with `.data` added, if `external_data` says so or they
    exceed 2 GB. `opset`: the version of the standard operators that are written. `path`: of the
    file. What is written passed ONNX's checker with strict shape inference. `layouts`: axis orders
    of values, which go into the file's metadata, for soapstone alone.

    Raises:
        UnsupportedError: an operator has no counterpart, or not for any batch size; names it.
        OnnxError: an argument of another kind, a weight is missing, or the checker refuses it.
        OSError: a file cannot be written.
    """
    if isinstance(weights, str | Path) and path is None:
        weights, path = None, weights
    if not isinstance(path, str | Path):
        found = "None" if path is None else type(path).__name__
        raise OnnxError(f"to_onnx: path: {found} found, the path of a file needed")
    if weights is not None and not isinstance(weights, Mapping):
        raise OnnxError(f"to_onnx: weights: {type(weights).__name__} found, arrays by name needed")
    if dims is not None and not isinstance(dims, Mapping):
        raise OnnxError(f"to_onnx: dims: {dims!r} found, extents by name needed")
    proto, held = _written(model, weights, dims, opset)
    if layouts is not None:
        made = {name for node in proto.graph.node for name in node.output}
        kept = {name: order for name, order in layouts.items() if name in made}
        proto.metadata_props.add(key=LAYOUTS, value=layouts_to_text(kept))
    path = Path(path)
    total = sum(array.nbytes for array in held.values())
    if external_data is None:
        external_data = total > _MOST_MESSAGE
    if total > _MOST_MESSAGE and not external_data:
        raise OnnxError(f"weights of {total} bytes found; they need external_data")
    if not path.parent.is_dir():
        raise OnnxError(f"file {str(path)!r}: folder {str(path.parent)!r} does not exist")
    if external_data:
        _write_apart(proto, held, path)
        return
    _add_weights(proto, held, None)
    whole = proto.SerializeToString()
    _check(whole)
    write(path, whole)


def _write_apart(proto: onnx.ModelProto, weights: Mapping[str, Array], path: Path) -> None:
    """Write a model, and its weights to a second file.

    Both are made beside the old ones, which the weights may be read from, and then renamed.
    """
    written = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside, final = written.with_suffix(".data"), path.with_name(f"{path.name}.data")
    try:
        with naming(path):
            _add_weights(proto, weights, beside)
            written.write_bytes(proto.SerializeToString())
            _check(str(written))
            _point_to(proto, final.name)
            written.write_bytes(proto.SerializeToString())
            beside.replace(final)
            written.replace(path)
    finally:
        written.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)


def _check(model: bytes | str) -> None:
    """Check a model, or the file of one, by ONNX's own checker.

    Raises:
        OnnxError: it refuses the model.
    """
    try:
        onnx.checker.check_model(model, full_check=True)
    except (
        onnx.checker.ValidationError,
        onnx.shape_inference.InferenceError,
        RuntimeError,
    ) as error:
        raise OnnxError(f"the checker refuses the model: {error}") from None


def _point_to(model: onnx.ModelProto, location: str) -> None:
    """Make the initializers outside the file be in another one."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location


def _written(
    model: Graph | Model | OnnxModel,
    weights: Mapping[str, Array] | None,
    dims: Mapping[str, int | str] | None,
    opset: int,
) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model without its weights, and those weights by name."""
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx.model import OnnxModel

    if isinstance(model, Graph):
        return onnx_graph(model, weights or {}, opset=opset)
    if isinstance(model, OnnxModel):
        graph = model.graph(dims)  # type: ignore[arg-type]  # which refuses names for extents
        return onnx_graph(graph, model.weights if weights is None else weights, opset=opset)
    if not isinstance(model, Model):
        needed = "a Model, a Graph or an OnnxModel"
        raise OnnxError(f"to_onnx: {type(model).__name__} found, {needed} needed")
    unknown = next((name for name in dims or {} if name != "batch"), None)
    if unknown is not None:
        raise OnnxError(f"to_onnx: dims: {unknown!r} found, 'batch' alone needed of a Model")
    batch = (dims or {}).get("batch")
    held = model.weights() if weights is None else weights
    if isinstance(batch, str) and batch:
        kept: list[dict[str, Array]] = []

        def written(size: int) -> onnx.ModelProto:
            graph = model.build(size)
            proto, own = onnx_graph(graph, {**model.constants, **held}, opset=opset)
            kept.append(own)
            return proto

        return for_any(written, batch), kept[0]
    if batch is not None:
        batch = count("to_onnx: dims: batch", batch, error=OnnxError)
    graph = model.build(batch)
    return onnx_graph(graph, {**model.constants, **held}, opset=opset)


def _add_weights(model: onnx.ModelProto, weights: Mapping[str, Array], beside: Path | None) -> None:
    """Add the weights as initializers, the large ones in a file beside the model's."""
    if beside is None:
        model.graph.initializer.extend(as_tensor(a, name) for name, a in weights.items())
        return
    with beside.open("wb") as file:
        for name, array in weights.items():
            if array.nbytes < EXTERNAL_BYTES:
                model.graph.initializer.append(as_tensor(array, name))
                continue
            file.write(b"\0" * (-file.tell() % _ALIGNMENT))
            tensor = model.graph.initializer.add(
                name=name,
                data_type=ONNX_OF[array.dtype.name],
                dims=array.shape,
                data_location=onnx.TensorProto.EXTERNAL,
            )
            data = stored(array)
            where = {"location": beside.name, "offset": file.tell(), "length": data.nbytes}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=str(value))
            file.write(data.data)
