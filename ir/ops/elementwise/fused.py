"""`fused_elementwise`: a chain of element-wise operators run as one pass over memory.

The program numbers its operands: inputs first, then the steps, one result each. It holds operator
names and attributes, so its meaning is that of the operators it is made of. Dims: d0, d1, …
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Operand, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Node, signature_of
from soapstone.ir.ops.elementwise.pointwise import pointwise
from soapstone.ir.spec import Case, GradientContext, OpSpec, define, operator
from soapstone.ir.tensor import Array, TensorSpec


def program_steps(
    attributes: Attributes, inputs: int
) -> Iterator[tuple[OpSpec, tuple[int, ...], dict[str, Any]]]:
    """Yield each step of a program: the operator, its operands' numbers and all its attributes.

    Raises:
        GraphError: a step is malformed, unknown, not element-wise, or uses a later operand.
    """
    for position, step in enumerate(attributes["program"]):
        where = f"attribute program: step {position}"
        match step:
            case (str(name), tuple(operands), tuple(pairs)):
                pass
            case _:
                needed = "(operator, operands, attributes)"
                raise GraphError(f"{where}: {step!r} found, {needed} needed")
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
                raise GraphError(f"{where}: attribute {pair!r} found, (name, value) needed")
        try:
            spec = operator(name)
            values = spec.normalise(dict(pairs))
        except GraphError as error:
            raise GraphError(f"{where}: {error}") from None
        if not spec.elementwise:
            raise GraphError(f"{where}: operator {name!r} is not element-wise")
        for operand in operands:
            if not isinstance(operand, int) or not 0 <= operand < inputs + position:
                raise GraphError(
                    f"{where}: operand {operand!r} found, 0 to {inputs + position - 1} needed"
                )
        yield spec, operands, values


def of_step(spec: OpSpec, inputs: Sequence[TensorSpec], values: Attributes) -> Signature:
    """Return the signature of a step of `program_steps`, which a node had before it became one."""
    return signature_of(spec.name, tuple(sorted(values.items())), tuple(inputs))


def steps_flops(attributes: Attributes, inputs: Sequence[TensorSpec]) -> float:
    """Return the arithmetic operations of the steps of a program on these inputs."""
    specs, flops = list(inputs), 0.0
    for spec, operands, values in program_steps(attributes, len(inputs)):
        given = [specs[i] for i in operands]
        bound = of_step(spec, given, values)
        flops += spec.flops(bound, given, values)
        specs += bound.output_specs
    return flops


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    whole = pointwise(inputs)
    specs = list(inputs)
    for position, (spec, operands, values) in enumerate(program_steps(attributes, len(inputs))):
        try:
            specs += of_step(spec, [specs[i] for i in operands], values).output_specs
        except ShapeError as error:
            raise ShapeError(f"step {position} ({spec.name}): {error}") from None
    results = attributes["results"]
    if not results:
        raise GraphError("attribute results: 0 numbers found, 1 or more needed")
    shape = whole.outputs[0].shape
    for result in results:
        if not len(inputs) <= result < len(specs):
            raise GraphError(
                f"attribute results: {result} found, {len(inputs)} to {len(specs) - 1} needed"
            )
        if specs[result].shape != shape:
            raise ShapeError(f"result {result} has shape {specs[result].shape}; {shape} needed")
    outputs: tuple[Operand, ...] = whole.outputs * len(results)
    return replace(whole, outputs=outputs, dtypes=tuple(specs[i].dtype for i in results))


def _reference(attributes: Attributes, *arrays: Array) -> tuple[Array, ...]:
    values = list(arrays)
    for spec, operands, given in program_steps(attributes, len(arrays)):
        values += spec.compute(given, *(values[i] for i in operands))
    return tuple(values[i] for i in attributes["results"])


def _aligned_rename(shape: tuple[int, ...], whole: tuple[int, ...]) -> Mapping[str, str]:
    """Return what the dims of a step are among the chain's, which may have more of them."""
    lead = len(whole) - len(shape)
    return {
        f"d{axis}": f"d{axis + lead}" if extent == whole[axis + lead] else ""
        for axis, extent in enumerate(shape)
    }


def _gradient(g: GradientContext) -> list[str | None]:
    """Differentiate the chain step by step; steps that are no results are computed again."""
    results, names, nodes = g.attributes["results"], list(g.inputs), []
    whole = g.spec(g.outputs[0]).shape
    for spec, operands, values in program_steps(g.attributes, len(g.inputs)):
        used = tuple(names[i] for i in operands)
        if len(names) in results:
            made = g.outputs[results.index(len(names))]
        else:
            shape = spec.bind([g.spec(name) for name in used], values).outputs[0].shape
            made = g.emit(spec.name, *used, rename=_aligned_rename(shape, whole), **values)
        names.append(made)
        nodes.append((operands, Node(g.node.name, spec.name, used, (made,), tuple(values.items()))))
    arriving: list[list[str]] = [[] for _ in names]
    for result, grad in zip(results, g.grads):
        if grad is not None:
            arriving[result].append(grad)

    def total(position: int) -> str | None:
        parts = arriving[position]
        if len(parts) < 2:
            return parts[0] if parts else None
        rename = _aligned_rename(g.spec(names[position]).shape, whole)
        return g.emit("accumulate", *parts, rename=rename)

    for position in range(len(names) - 1, len(g.inputs) - 1, -1):
        operands, node = nodes[position - len(g.inputs)]
        grad = total(position)
        if grad is None:
            continue
        if node.spec.gradient is None:
            raise GraphError(f"{g.node.label}: operator {node.operator!r} has no gradient")
        emit = g.emit.renamed(_aligned_rename(g.spec(names[position]).shape, whole))
        context = GradientContext(emit, node, node.inputs, node.outputs, (grad,))
        for operand, part in zip(operands, node.spec.gradient(context), strict=True):
            if part is not None:
                arriving[operand].append(part)
    return [total(position) for position in range(len(g.inputs))]


define(
    name="fused_elementwise",
    tiles_free=True,
    mixes_types=True,
    inputs=("x*",),
    outputs=("y*",),
    signature=_signature,
    reference=_reference,
    attributes={"program": Attribute("program"), "results": Attribute("ints", minimum=0)},
    gradient=_gradient,
    operations=lambda _, inputs, attributes: steps_flops(attributes, inputs),
    cases=(
        Case(
            ("3 4", "4"),
            {"program": (("add", (0, 1), ()), ("relu", (2,), ())), "results": (3,)},
        ),
        Case(
            ("2 3", "2 3"),
            {
                "program": (
                    ("mul", (0, 1), ()),
                    ("affine", (2,), (("scale", 2.0), ("shift", -0.5))),
                    ("sigmoid", (3,), ()),
                    ("mul", (3, 4), ()),
                ),
                "results": (5, 2),
            },
        ),
        Case(
            ("3 1", "4"),
            {
                "program": (
                    ("tanh", (1,), ()),
                    ("sub", (0, 2), ()),
                    ("accumulate", (3, 3, 3), ()),
                ),
                "results": (4,),
            },
        ),
        Case(("",), {"program": (("leaky_relu", (0,), (("alpha", 0.2),)),), "results": (1,)}),
        Case(("0 3",), {"program": (("exp", (0,), ()),), "results": (1,)}),
    ),
    layer=None,
    doc="program: (operator, operand numbers, attribute pairs) a step; results: their numbers",
)
