"""What ONNX itself declares of its operators: versions, types, attributes and function bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import onnx
from onnx import defs

from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.tensors import ONNX_OF, TYPE_STRINGS
from soapstone.frontend.onnx.values import Slot, Value
from soapstone.ir.tensor import TensorSpec


@cache
def schema(domain: str, name: str, version: int) -> Any:
    """Return the declaration of an operator as of an opset, or None."""
    try:
        return defs.get_schema(name, version, domain)
    except defs.SchemaError:
        return None


@cache
def _formals(domain: str, name: str, version: int) -> tuple[tuple[str, frozenset[str], bool], ...]:
    """Return each input's type variable, the types allowed, and whether all of many are alike."""
    declared = schema(domain, name, version)
    return tuple(
        (formal.type_str, frozenset(formal.types), formal.is_homogeneous)
        for formal in declared.inputs
    )


def check_call(
    domain: str,
    name: str,
    version: int,
    attributes: Mapping[str, onnx.AttributeProto],
    inputs: Sequence[Slot | None],
    node: onnx.NodeProto,
) -> None:
    """Check a node against the declaration of its operator.

    Raises:
        OnnxError: the number of inputs or outputs, a type or an attribute does not fit.
    """
    declared = schema(domain, name, version)
    if declared.deprecated:
        raise UnsupportedError(f"the operator is deprecated in opset {version}")
    if not declared.min_input <= len(inputs) <= declared.max_input:
        found, most = len(inputs), declared.max_input
        raise OnnxError(f"{found} inputs found, {declared.min_input} to {most} needed")
    if not declared.min_output <= len(node.output) <= declared.max_output:
        raise OnnxError(
            f"{len(node.output)} outputs found,"
            f" {declared.min_output} to {declared.max_output} needed"
        )
    known = declared.attributes
    for key, attribute in attributes.items():
        if key not in known:
            raise OnnxError(f"attribute {key!r} does not exist; attributes are {', '.join(known)}")
        if attribute.type != known[key].type.value:
            raise OnnxError(f"attribute {key!r} has another type than {known[key].type.name}")
    for key, item in known.items():
        if item.required and key not in attributes:
            raise OnnxError(f"attribute {key!r} is missing")
    formals = _formals(domain, name, version)
    bound: dict[str, tuple[str, int]] = {}
    for position, slot in enumerate(inputs):
        if not isinstance(slot, Value):
            continue
        variable, allowed, alike = formals[min(position, len(formals) - 1)]
        kind = TYPE_STRINGS[slot.dtype]
        if kind not in allowed:
            raise OnnxError(f"input {position} is {slot.spec}; its type is not allowed here")
        if not variable.startswith("tensor(") and (alike or position < len(formals) - 1):
            first = bound.setdefault(variable, (kind, position))
            if first[0] != kind:
                raise OnnxError(
                    f"types of inputs differ: {first[0]} in input {first[1]} but {kind} in input"
                    f" {position}"
                )


def function_of(
    domain: str,
    name: str,
    version: int,
    node: onnx.NodeProto,
    types: Sequence[TensorSpec | None],
) -> onnx.FunctionProto | None:
    """Return the body by which ONNX defines an operator for these inputs, or None."""
    declared = schema(domain, name, version)
    body = b""
    if declared.context_dependent_function_opset_versions:
        versions = [v for v in declared.context_dependent_function_opset_versions if v <= version]
        if versions:
            known = [_type(spec).SerializeToString() for spec in types]
            body = declared.get_context_dependent_function_with_opset_version(
                max(versions), node.SerializeToString(), known
            )
    if not body and declared.function_opset_versions:
        versions = [v for v in declared.function_opset_versions if v <= version]
        if versions:
            body = declared.get_function_with_opset_version(max(versions))
    if not body:
        return None
    function = onnx.FunctionProto()
    function.ParseFromString(body)
    return function


def _type(spec: TensorSpec | None) -> onnx.TypeProto:
    if spec is None:
        return onnx.TypeProto()
    return onnx.helper.make_tensor_type_proto(ONNX_OF[spec.dtype], spec.shape)
