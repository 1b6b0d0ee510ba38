"""Translation by an operator's own declaration (`OpSpec.onnx`), from ONNX and to ONNX.

Where an operator has no rule of its own in `rules/` or in the exporter, its ONNX counterpart is
read and written as declared: operands by position, attributes by name, or as inputs where newer
opsets have them. Types, versions and default values of ONNX's own operators are those of ONNX's
registry; an operator of a custom domain has those of its declaration here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.schema import schema
from soapstone.frontend.onnx.file.tensors import ONNX_OF, TYPE_STRINGS
from soapstone.ir.attributes import REQUIRED, Attribute
from soapstone.ir.onnx_entry import Onnx, OnnxAttribute
from soapstone.ir.spec import OpSpec

if TYPE_CHECKING:
    from soapstone.frontend.onnx.call import Call
    from soapstone.frontend.onnx.export.rules import Given
    from soapstone.frontend.onnx.values import Value

_OLD = ("axis", "broadcast", "consumed_inputs")  # of operators before opset 7


def entry_of(spec: OpSpec) -> Onnx:
    """Return the operator's counterpart in ONNX.

    Raises:
        UnsupportedError: it has none.
    """
    if spec.onnx_entry is None:
        raise UnsupportedError(f"operator {spec.name!r} has no counterpart in ONNX")
    return spec.onnx_entry


def read_declared(n: Call, spec: OpSpec, inputs: Sequence[Value] = (), **known: Any) -> Any:
    """Return the outputs of a node as its operator here makes them.

    inputs: the operands, by default the node's; known: attributes that need not be read.

    Raises:
        OnnxError: an attribute that does not fit.
        UnsupportedError: one that the operator here does not have, and that is not its default.
    """
    entry = entry_of(spec)
    _refuse_others(n, spec, entry)
    operands = list(inputs) or _operands(n, spec, entry)
    attributes = dict(known)
    for name, attribute in spec.attributes.items():
        given = entry.attribute(name)
        if name not in attributes and given is not None:
            value = _read(n, attribute, given)
            if value is None:
                continue
            if attribute.kind == "axis":
                value = n.axis_of(value, operands[0].rank)
            elif attribute.kind == "axes":
                value = n.axes_of(value, operands[0].rank)
            attributes[name] = value
    made = n.all(spec.name, *operands, **attributes)
    return made[: entry.outputs or len(made)]


def _operands(n: Call, spec: OpSpec, entry: Onnx) -> list[Value]:
    """Return the node's operands in the order of the operator here."""
    if spec.inputs and spec.inputs[-1].endswith("*"):
        return n.values()
    found = []
    for number, name in enumerate(spec.inputs):
        position = entry.position(number)
        if not name.endswith("?") or n.has(position):
            found.append(n.value(position))
    return found


def _read(n: Call, attribute: Attribute, given: OnnxAttribute) -> Any:
    """Return an attribute as the node gives it, or ONNX's default, or None."""
    default = _default(n, given.name)
    if given.input is not None and n.has(given.input):
        many = attribute.kind in ("ints", "axes")
        return n.ints("", given.input) if many else n.number("", given.input)
    value = n.attribute(given.name, default)
    if attribute.kind == "str" and attribute.choices and value is not None:
        return n.text(given.name, value, [choice for choice in attribute.choices if choice])
    if value is None and attribute.default is REQUIRED:
        raise OnnxError(f"attribute {given.name!r} is missing")
    return bool(value) if attribute.kind == "bool" and value in (0, 1) else value


def _default(n: Call, name: str) -> Any:
    """Return the value that ONNX's registry gives an attribute, or None."""
    declared = schema(*n.key, n.version)
    item = declared.attributes.get(name) if declared is not None else None
    return None if item is None else item.default


def _refuse_others(n: Call, spec: OpSpec, entry: Onnx) -> None:
    """Refuse inputs and attributes that the declaration says nothing of."""
    given = [item for name in spec.attributes if (item := entry.attribute(name)) is not None]
    places = {entry.position(number) for number in range(len(spec.inputs))}
    places |= {item.input for item in given if item.input is not None}
    repeats = bool(spec.inputs) and spec.inputs[-1].endswith("*")
    for position in () if repeats else range(len(n)):
        if n.has(position) and position not in places:
            raise UnsupportedError(f"input {position} is not supported")
    for name in n.attributes.keys() - {item.name for item in given}:
        old = n.version < 7 and not entry.domain and name in _OLD
        if not old and n.attribute(name) != _default(n, name):
            raise UnsupportedError(f"attribute {name!r} is not supported")


def writable(spec: OpSpec, opset: int) -> bool:
    """Return whether an operator is written as declared in files of an opset."""
    entry = spec.onnx_entry
    return entry is not None and bool(entry.domain or schema("", entry.name, opset))


def write_declared(g: Given) -> None:
    """Write a node as its operator's counterpart in ONNX.

    Raises:
        UnsupportedError: an attribute that ONNX does not have, and that is not its default.
    """
    spec = g.node.spec
    entry = entry_of(spec)
    inputs: dict[int, str] = {}
    for number, name in enumerate(g.inputs):
        inputs[entry.position(number)] = _allowed(g, entry, number, name)
    attributes: dict[str, Any] = {}
    for name, attribute in spec.attributes.items():
        given, value = entry.attribute(name), g[name]
        if given is None:
            if value != attribute.default and name not in entry.implied:
                raise UnsupportedError(
                    f"{g.node.label}: attribute {name} has no counterpart in ONNX"
                )
        elif value is not None and given.input is not None:
            inputs[given.input] = g.writer.constant(np.asarray(value, np.int64))
        elif value is not None:
            attributes[given.name] = int(value) if attribute.kind == "bool" else value
    outputs = g.outputs[: entry.outputs]
    g.unread(len(outputs))
    names = [inputs.get(position, "") for position in range(max(inputs, default=-1) + 1)]
    if entry.domain:  # of which ONNX knows no types of results
        g.writer.domains[entry.domain] = entry.version
        g.writer.typed |= dict(zip(outputs, g.made))
    g.writer.add(entry.name, names, outputs, attributes, g.node.name, entry.domain)


def _allowed(g: Given, entry: Onnx, operand: int, name: str) -> str:
    """Return an operand, cast where ONNX does not allow its type."""
    to = entry.casts.get(operand)
    if to is None:
        return name
    declared = schema(entry.domain, entry.name, g.writer.opset)
    assert declared is not None  # the exporter writes what is in its opset
    formal = declared.inputs[entry.position(operand)]
    if TYPE_STRINGS[g.specs[operand].dtype] in formal.types:
        return name
    return g("Cast", name, to_=ONNX_OF[to])
