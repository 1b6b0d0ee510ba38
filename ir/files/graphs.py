"""Native graph files: a graph as versioned JSON, and its values as safetensors beside it.

Files come from users, so they are parsed strictly and rebuilt through `GraphBuilder`: every
operator, attribute and shape is checked again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from soapstone import files, json_text
from soapstone.dtypes import DTYPES, name_of
from soapstone.errors import warn
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields, storage
from soapstone.ir.files.layouts import Layouts, Order, layouts_from_json, layouts_to_json
from soapstone.ir.graph import Graph, Initial, Node, inferred, topological
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Role, TensorSpec, spec_of

FORMAT, VERSION = "soapstone-graph", 1
_SPECIAL = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def save_graph(
    graph: Graph,
    path: str | Path,
    values: Mapping[str, Array] | None = None,
    layouts: Layouts | None = None,
) -> None:
    """Write a graph as JSON and, when given, the values of its inputs as safetensors beside it.

    Axis orders of values (layouts), when given, are a field of the JSON: see `load_layouts`. Both
    files are replaced whole or not at all. Values must hold every parameter and state; they go to
    the file with the same name and the suffix `.safetensors`, which is written first.

    Raises:
        GraphError: a value is missing, of another shape or type, or of no input.
    """
    path = Path(path)
    beside = None
    if values is not None:
        _check_values(graph, {name: spec_of(value) for name, value in values.items()}, "values")
        beside = path.with_suffix(".safetensors")
        if beside == path:
            raise GraphError(f"path {str(path)!r} found; a suffix other than .safetensors needed")
        _write_values(beside, graph, values)
    data = graph_to_json(graph, beside.name if beside else None)
    if layouts is not None:
        data["layouts"] = layouts_to_json(layouts)
    json_fields.save(path, json_fields.dump(data, GraphError))


def load_graph(path: str | Path) -> tuple[Graph, dict[str, Array]]:
    """Return the graph of a file, and the values saved with it (empty when there are none).

    Raises:
        GraphError: a file cannot be read, a field is wrong, an operator, attribute, value or shape
            does not fit; names it.
    """
    path = Path(path)
    graph, beside = json_fields.load(path, GraphError, graph_from_json)
    if beside is None:
        return graph, {}
    return graph, _read_values(path.parent / beside, graph)


def load_layouts(path: str | Path) -> dict[str, Order] | None:
    """Return the axis orders that a graph file has for its values, None where it has none.

    Raises:
        GraphError: as `load_graph`.
    """
    load_graph(path)
    return _layouts(json_fields.read(path, GraphError, own=False))


def _layouts(data: Any) -> dict[str, Order] | None:
    """Return the axis orders that a graph's JSON data has."""
    if not isinstance(data, dict) or "layouts" not in data:
        return None
    return layouts_from_json(data["layouts"], "graph: field 'layouts'", GraphError)


def graph_to_json(graph: Graph, values: str | None = None) -> dict[str, Any]:
    """Return a graph as JSON-ready data; `values` names the file of its values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": graph.name,
        "inputs": [
            {
                "name": name,
                "role": str(role),
                "shape": list(graph.tensors[name].shape),
                "dtype": graph.tensors[name].dtype,
                "initial": json_fields.as_data(graph.initials.get(name)),
            }
            for name, role in graph.roles.items()
        ],
        "nodes": [
            {
                "name": node.name,
                "operator": node.operator,
                "inputs": list(node.inputs),
                "outputs": list(node.outputs),
                "attributes": {name: _attribute_to_json(value) for name, value in node.items},
                "origin": node.origin,
                "rename": dict(node.rename),
            }
            for node in graph.nodes
        ],
        "outputs": list(graph.outputs),
        "updates": dict(graph.updates),
        "values": values,
    }


def graph_from_json(data: Any) -> tuple[Graph, str | None]:
    """Return the graph that JSON data describes, and the name of the file of its values.

    Raises:
        GraphError: a field is unknown, missing or of the wrong type, or the graph is not legal.
    """
    reader = json_fields.Fields(data, "graph", GraphError)
    reader.header(FORMAT, VERSION)
    layouts = _layouts(data)
    if layouts is not None:
        reader.mapping("layouts")
    builder = GraphBuilder(reader.text("name"))
    for position, item in enumerate(reader.items("inputs")):
        _add_input(builder, item, f"graph: inputs[{position}]")
    nodes = [
        _node(item, f"graph: nodes[{position}]")
        for position, item in enumerate(reader.items("nodes"))
    ]
    outputs, updates = reader.texts("outputs"), reader.text_mapping("updates")
    values = reader.optional_text("values")
    if values is not None and (Path(values).name != values or values in ("", ".", "..")):
        raise reader.fail("values", values, "the name of a file in the same folder")
    reader.finish()
    graph = _rebuild(builder, nodes, outputs, updates)
    Strategy({DEFAULT: Configuration()}, layouts=layouts or {}).check(graph)
    return graph, values


def _rebuild(
    builder: GraphBuilder,
    nodes: list[Node],
    outputs: tuple[str, ...],
    updates: Mapping[str, str],
) -> Graph:
    """Return the graph after every node was checked; all names stay as they are given."""
    graph = builder.build()
    tensors = dict(graph.tensors)
    _check_names(nodes, set(tensors))
    checked: list[Node] = []
    for node in topological(nodes, tensors):
        node = replace(node, items=tuple(sorted(_normalised(node).items())))
        made = inferred(node, (tensors[name] for name in node.inputs))
        if len(made) != len(node.outputs):
            raise GraphError(
                f"{node.label}: field 'outputs': {len(node.outputs)} names found,"
                f" {len(made)} needed"
            )
        tensors.update(zip(node.outputs, made))
        checked.append(node)
    named = [("outputs", name) for name in outputs]
    for where, name in [*named, *(("updates", n) for pair in updates.items() for n in pair)]:
        if name not in tensors:
            raise GraphError(f"graph: field {where!r}: value {name!r} does not exist")
    whole = replace(graph, tensors=tensors, nodes=tuple(checked), outputs=outputs)
    builder = GraphBuilder(base=whole)
    for name, value in updates.items():
        builder.update(name, value)
    return builder.build()


def _normalised(node: Node) -> dict[str, Any]:
    try:
        return node.spec.normalise(node.attributes)
    except GraphError as error:
        raise GraphError(f"{node.label}: {error}") from None
    except OverflowError:
        raise GraphError(f"{node.label}: attributes: infinity found, an integer needed") from None


def _check_names(nodes: list[Node], inputs: set[str]) -> None:
    values, names = set(inputs), set()
    for node in nodes:
        if node.name in names:
            raise GraphError(f"{node.label}: field 'name': another node has it; a new one needed")
        names.add(node.name)
        for output in node.outputs:
            if output in values:
                raise GraphError(f"{node.label}: field 'outputs': value {output!r} exists already")
            values.add(output)


def _add_input(builder: GraphBuilder, item: Any, where: str) -> None:
    reader = json_fields.Fields(item, where, GraphError)
    name, role = reader.text("name"), Role(reader.text("role", tuple(Role)))
    shape, dtype = reader.integers("shape"), reader.text("dtype", DTYPES)
    initial = reader.take(
        "initial", "an object or null", lambda v: v is None or isinstance(v, dict)
    )
    if initial is not None:
        initial = json_fields.Fields(initial, f"{where}.initial", GraphError).record(Initial)
    reader.finish()
    try:
        builder.input(name, shape, dtype, role, initial)
    except GraphError as error:
        raise GraphError(f"{where}: field 'name': {error}") from None


def _node(item: Any, where: str) -> Node:
    """Return a node as it stands in the file; its attributes are not checked yet."""
    reader = json_fields.Fields(item, where, GraphError)
    attributes = {
        name: _attribute(value, f"{where}: field 'attributes.{name}'")
        for name, value in reader.mapping("attributes").items()
    }
    node = Node(
        reader.text("name"),
        reader.text("operator"),
        reader.texts("inputs"),
        reader.texts("outputs"),
        tuple(sorted(attributes.items())),
        reader.optional_text("origin"),
        tuple(sorted(reader.text_mapping("rename").items())),
    )
    reader.finish()
    return node


def _attribute_to_json(value: Any) -> Any:
    """Return an attribute for JSON, which has no infinities: they become {"float": "inf"}."""
    if isinstance(value, tuple):
        return [_attribute_to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _attribute(value: Any, where: str) -> Any:
    if isinstance(value, list):
        return tuple(_attribute(item, where) for item in value)
    if isinstance(value, dict):
        special = json_fields.Fields(value, where, GraphError)
        number = _SPECIAL[special.text("float", tuple(_SPECIAL))]
        special.finish()
        return number
    return value


# Values


def _check_values(graph: Graph, specs: Mapping[str, TensorSpec], where: str) -> None:
    for name, spec in specs.items():
        if name not in graph.roles:
            raise GraphError(f"{where}: {name!r} is no input of graph {graph.name!r}")
        if spec != graph.tensors[name]:
            raise GraphError(f"{where}: {name!r}: {spec} found, {graph.tensors[name]} needed")
    for role in (Role.PARAMETER, Role.STATE):
        for name in graph.inputs(role):
            if name not in specs:
                raise GraphError(
                    f"{where}: {role} {name!r} is missing; {graph.tensors[name]} needed"
                )


def _write_values(path: Path, graph: Graph, values: Mapping[str, Array]) -> None:
    # safetensors stores the bytes as they lie in memory, whatever the strides.
    arrays = {name: np.asarray(values[name], order="C") for name in graph.roles if name in values}
    for name, array in arrays.items():
        if not storage.holds(name_of(array.dtype)):
            raise GraphError(
                f"file {str(path)!r}: values: {name!r} of {array.dtype} found; safetensors has no"
                " such type"
            )
    sums = {name: storage.digest(array) for name, array in arrays.items()}
    metadata = {"graph": graph.structural_hash, "checksums": json.dumps(sums)}
    files.write(path, storage.safetensors_writer(arrays, metadata))


def _read_values(path: Path, graph: Graph) -> dict[str, Array]:
    where = f"file {str(path)!r}"
    metadata, arrays = storage.read_safetensors(path, f"{where}: values", GraphError)
    _check_values(graph, _specs(arrays, where), where)
    made_for = metadata.get("graph")
    if made_for != graph.structural_hash:
        raise GraphError(
            f"{where}: values of graph {made_for!r} found, of {graph.structural_hash!r} needed"
        )
    if "checksums" in metadata:
        sums = json_text.parse(metadata["checksums"], where, GraphError)
        for name, array in arrays.items():
            if not isinstance(sums, dict) or sums.get(name) != storage.digest(array):
                raise GraphError(f"{where}: {name!r}: its checksum differs; the file was damaged")
    else:
        warn(f"{where} has no checksums; it is taken as it is")
    return {name: arrays[name] for name in graph.roles if name in arrays}


def _specs(arrays: Mapping[str, Array], where: str) -> dict[str, TensorSpec]:
    try:
        return {name: spec_of(array) for name, array in arrays.items()}
    except GraphError as error:
        raise GraphError(f"{where}: {error}") from None
