"""Layers that only record their operator: made from its declaration, in `declared.pyi` with types.

An operator with a gradient is a layer of its name: its operands and attributes are the arguments,
its `doc` begins the docstring, and `OpSpec.layer` holds defaults that are the layer's own. An
operator that is registered later, by a plugin, becomes one when it is registered. A method of a
class that stands before `DeclaredLayers` in the order of bases takes the place of a declared one.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from soapstone.frontend.arguments import checked
from soapstone.frontend.layers.base import LayerBase
from soapstone.ir.attributes import KINDS, REQUIRED, Attribute
from soapstone.ir.spec import OpSpec, operators, when_registered

if TYPE_CHECKING:
    from collections.abc import Callable


def layer_signature(spec: OpSpec) -> inspect.Signature:
    """Return the signature of an operator's layer; annotations are strings."""
    one, by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter("self", one)]
    after = one
    for operand in spec.inputs:
        name = operand.rstrip("?*")
        if operand.endswith("*"):
            after, many = by_name, inspect.Parameter.VAR_POSITIONAL
            parameters.append(inspect.Parameter(name, many, annotation="Tensor"))
        elif operand.endswith("?"):
            after, kind = by_name, "Tensor | None"
            parameters.append(inspect.Parameter(name, one, default=None, annotation=kind))
        else:
            kind = "Tensor | float" if takes_numbers(spec) else "Tensor"
            parameters.append(inspect.Parameter(name, one, annotation=kind))
    settings = []
    for name, attribute in spec.attributes.items():
        default = (spec.layer or {}).get(name, attribute.default)
        kind = KINDS[attribute.kind].annotation + (" | None" if default is None else "")
        given = inspect.Parameter.empty if default is REQUIRED else default
        settings.append(inspect.Parameter(name, after, default=given, annotation=kind))
    parameters += sorted(settings, key=lambda item: item.default is not inspect.Parameter.empty)
    parameters.append(inspect.Parameter("name", by_name, default=None, annotation="str | None"))
    count = len(spec.outputs)
    result = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    return inspect.Signature(parameters, return_annotation=result)


def takes_numbers(spec: OpSpec) -> bool:
    """Return whether numbers may be operands: of pointwise operators of several, some of them."""
    return spec.formula is not None and len(spec.inputs) > 1


def documentation(spec: OpSpec) -> str:
    """Return the docstring of an operator's layer, as its declaration has it.

    The shapes of a pointwise operator follow from its being one; `spec.doc` has those of others.
    """
    first, _, more = spec.doc.partition("\n")
    text = [f"Return {first}." if first else f"Record the operator {spec.name}."]
    if more:
        text += ["", f"{more}."]
    names = ", ".join(operand.rstrip("?*") for operand in spec.inputs)
    if spec.formula is not None and len(spec.inputs) == 1:
        text += ["", f"{names}: any shape, which is also the result's."]
    elif spec.formula is not None:
        text += ["", f"{names}: shapes that broadcast as NumPy's do; the result has that shape."]
        text += ["A number stands for a tensor of it, but one operand at least is a tensor."]
    if spec.attributes:
        text += ["", "Args:"]
    for name, attribute in spec.attributes.items():
        text.append(f"    {name}: {_described(attribute, (spec.layer or {}).get(name, REQUIRED))}.")
    text += ["", "Raises:", "    ShapeError: operands whose types or shapes do not fit."]
    text += ["    GraphError: an argument of another kind or range, or a name that is taken."]
    entry = spec.onnx_entry
    if entry is not None:
        where = f" (domain {entry.domain})" if entry.domain else ""
        text += ["", f"Counterpart in ONNX: {entry.name}{where}."]
    return "\n".join(text)


def _described(attribute: Attribute, default: Any) -> str:
    """Return an attribute's kind, range and default in words."""
    text = KINDS[attribute.kind].words
    if attribute.choices is not None:
        text = "one of " + ", ".join(map(repr, attribute.choices))
    if attribute.minimum is not None and attribute.kind not in ("axis", "axes"):
        text += f" of {attribute.minimum:g} or more"
    value = attribute.default if default is REQUIRED else default
    if value is None:
        return text + ("; all by default" if attribute.kind == "axes" else "; none by default")
    return text if value is REQUIRED else f"{text}; {value!r} by default"


def layer_of(spec: OpSpec) -> Callable[..., Any]:
    """Return the method that records an operator."""
    signature = layer_signature(spec)
    numbers = takes_numbers(spec)
    variadic = bool(spec.inputs) and spec.inputs[-1].endswith("*")
    names = [operand.rstrip("?") for operand in spec.inputs]

    def layer(self: LayerBase, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        operands = given[names[-1][:-1]] if variadic else [given[name] for name in names]
        operands = [operand for operand in operands if operand is not None]
        if numbers:
            operands = self._filled(spec.name, operands)
        attributes = {}
        for name, attribute in spec.attributes.items():
            value = given[name]
            if attribute.kind == "axes" and isinstance(value, int):
                value = (value,)
            if attribute.kind == "axis":
                value = self._axis(spec.name, operands[0], value)
            elif attribute.kind == "axes" and value is not None:
                value = tuple(self._axis(spec.name, operands[0], axis) for axis in value)
            attributes[name] = value
        made = self.apply_all(spec.name, *operands, name=given["name"], **attributes)
        return made[0] if len(spec.outputs) == 1 else made

    layer.__name__ = spec.name
    layer.__qualname__ = f"Layers.{spec.name}"
    layer.__doc__ = documentation(spec)
    layer.__signature__ = signature  # type: ignore[attr-defined]
    return checked(layer)


class DeclaredLayers(LayerBase):
    """The layers that the operators' declarations give."""


def _add(spec: OpSpec) -> None:
    if spec.gradient is not None and spec.layer is not None:
        setattr(DeclaredLayers, spec.name, layer_of(spec))


for _spec in operators():
    _add(_spec)
when_registered(_add)
