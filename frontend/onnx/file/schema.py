"""What ONNX itself declares of its operators: versions, types, attributes and function bodies.

ONNX takes longer to import than most models to read. So what a process asked it is kept in a file
of the user's cache, for the version of ONNX that said it and for this module as it is now; or has
come with the package (`ship`). Each opset has a file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from soapstone.cache.answers import Answers
from soapstone.cache.environment import installed
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.file.messages import attribute_value, function_in
from soapstone.frontend.onnx.file.tensors import ONNX_OF, TYPE_STRINGS
from soapstone.frontend.onnx.values import Slot, Value
from soapstone.ir.tensor import TensorSpec

if TYPE_CHECKING:
    import onnx

_NEWEST = "newest opset"
_DOMAINS = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.training", "ai.onnx.preview.training")


class Formal(NamedTuple):
    """An input: its type's variable, the types allowed, and whether a variadic one has one type."""

    variable: str
    types: frozenset[str]
    homogeneous: bool


class DeclaredAttribute(NamedTuple):
    """An attribute: its type's code and name, whether it must be given, and its default or None."""

    code: int
    kind: str
    required: bool
    default: Any


class Declaration(NamedTuple):
    """What ONNX declares of an operator; `has_body` says whether others compute it."""

    deprecated: bool
    has_body: bool
    min_input: int
    max_input: int
    min_output: int
    max_output: int
    inputs: tuple[Formal, ...]
    attributes: Mapping[str, DeclaredAttribute]


@cache
def _schema(domain: str, name: str, version: int) -> Declaration | None:
    key = f"{domain}:{name}:{version}"
    return _made(_known(key, version, lambda: _asked(domain, name, version)))


def schema(domain: str, name: str, version: int) -> Declaration | None:
    """Return the declaration of an operator as of an opset, or None."""
    if domain in _DOMAINS:
        return _schema(domain, name, version)
    # Of another domain there is one where the program told ONNX.
    return _made(_asked(domain, name, version)) if "onnx" in sys.modules else None


def newest_opset() -> int:
    """Return the newest opset that ONNX knows."""

    return int(_known(_NEWEST, 0, _newest))


def _newest() -> int:
    from onnx import defs

    return int(defs.onnx_opset_version())


def _asked(domain: str, name: str, version: int) -> Any:
    """Return what ONNX declares, as it is kept: the fields of `Declaration`, or None."""
    from onnx import defs

    try:
        found = defs.get_schema(name, version, domain)
    except defs.SchemaError:
        return None
    attributes = {}
    for key, item in found.attributes.items():
        default = attribute_value(item.default_value) if item.default_value.name else None
        if isinstance(default, list):
            default = [each.decode() if isinstance(each, bytes) else each for each in default]
        default = default.decode() if isinstance(default, bytes) else default
        attributes[key] = [int(item.type.value), item.type.name, item.required, default]
    inputs = [[i.type_str, sorted(i.types), i.is_homogeneous] for i in found.inputs]
    bodies = found.function_opset_versions or found.context_dependent_function_opset_versions
    ends = (found.min_input, found.max_input, found.min_output, found.max_output)
    return [found.deprecated, bool(bodies), *ends, inputs, attributes]


def _made(kept: Any) -> Declaration | None:
    if kept is None:
        return None
    *first, inputs, attributes = kept  # in the order of the fields
    formals = tuple(Formal(variable, frozenset(types), same) for variable, types, same in inputs)
    items = {key: DeclaredAttribute(*item) for key, item in attributes.items()}
    return Declaration._make([*first, formals, items])


_ANSWERS: dict[int, Answers] = {}  # by opset; 0: of none
_learns: bool | None = None  # whether answers are kept: not where others have imported ONNX before


def _answers(version: int) -> Answers:
    def about() -> str:
        return f"{installed('onnx')} {version}"

    return _ANSWERS.setdefault(version, Answers("onnx", about, __file__, about))


def _known(key: str, version: int, asked: Callable[[], Any]) -> Any:
    """Return what ONNX said to an earlier process, or says now; version: of the opset."""
    global _learns
    if _learns is None:
        _learns = "onnx" not in sys.modules
    return _answers(version).answer(key, asked, keep=lambda: _learns)


def remember() -> None:
    """Keep what this process asked ONNX, for those that come after it."""
    for each in list(_ANSWERS.values()):
        each.save()


def ship(folder: Path) -> None:
    """Write what ONNX declares of all its operators, for a package whose `machine_code` it is."""
    from onnx import defs

    names = {(each.domain, each.name) for each in defs.get_all_schemas()}
    for version in range(1, _newest() + 1):
        asked = {f"{d}:{n}:{version}": _asked(d, n, version) for d, n in sorted(names)}
        _answers(version).ship(asked, folder)
    _answers(0).ship({_NEWEST: _newest()}, folder)


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
    assert declared is not None
    if declared.deprecated and not declared.has_body:
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
        if attribute.type != known[key].code:
            raise OnnxError(f"attribute {key!r} has another type than {known[key].kind}")
    for key, item in known.items():
        if item.required and key not in attributes:
            raise OnnxError(f"attribute {key!r} is missing")
    formals = declared.inputs
    bound: dict[str, tuple[str, int]] = {}
    for position, slot in enumerate(inputs):
        if not isinstance(slot, Value):
            continue
        variable, allowed, homogeneous = formals[min(position, len(formals) - 1)]
        kind = TYPE_STRINGS[slot.dtype]
        if kind not in allowed:
            raise OnnxError(f"input {position} is {slot.spec}; its type is not allowed here")
        if not variable.startswith("tensor(") and (homogeneous or position < len(formals) - 1):
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
) -> Any:
    """Return the body by which ONNX defines an operator for these inputs, or None."""
    from onnx import defs

    declared = defs.get_schema(name, version, domain)
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
    return function_in(body) if body else None


def default_attributes(domain: str, name: str, version: int) -> dict[str, onnx.AttributeProto]:
    """Return the attributes that ONNX gives a node which leaves them out."""
    from onnx import defs

    declared = defs.get_schema(name, version, domain).attributes
    return {key: a.default_value for key, a in declared.items() if a.default_value.name}


def _type(spec: TensorSpec | None) -> onnx.TypeProto:
    from onnx import TypeProto, helper

    if spec is None:
        return TypeProto()
    return helper.make_tensor_type_proto(ONNX_OF[spec.dtype], spec.shape)
