"""Composites that have no kernel of their own: the primitives they are lowered to, in order.

What they make on the way has memory of its own, which the entry holds; equal primitives on equal
operands run once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.spec import operator, operators
from soapstone.kernels.cuda.entry import DeviceEntry, Work
from soapstone.kernels.cuda.substrate.arrays import allocate
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant, variants
from soapstone.native.memory import NO_STATUSES, Statuses

LOWERED = "lowered"  # the variant's name


def _lowered(name: str, call: Call) -> DeviceEntry | None:
    """Return the entry of a composite's primitives; None where one of them has no kernel."""
    spec = operator(name)
    assert spec.lower is not None
    builder = GraphBuilder("lowered")
    operands = [
        builder.input(f"in{n}", tuple(map(int, x.shape)), np.dtype(x.dtype).name)
        for n, x in enumerate(call.inputs)
    ]
    given = {key: value for key, value in call.attributes.items() if key in spec.attributes}
    builder.apply(name, *operands, name="whole", **given)
    node = builder.nodes[-1]
    signature = spec.bind([builder.spec(value) for value in operands], node.attributes)
    if not any(dim.kind is Kind.LOWERED for dim in signature.dims):
        return None  # with these attributes it is a primitive
    results = spec.lower(Emitter(builder, node, "lowered."), node)
    values: dict[str, Any] = dict(zip(operands, call.inputs))
    last = dict(zip(results, call.outputs))
    known: dict[tuple[Any, ...], list[Any]] = {}
    launches: list[Work] = []
    status: Any = None
    statuses: Statuses = NO_STATUSES
    for step in builder.nodes[1:]:
        inputs = tuple(values[value] for value in step.inputs)
        key = step.operator, repr(step.attributes), tuple(map(id, inputs))
        made = known.get(key)
        if made is not None and not any(value in last for value in step.outputs):
            values.update(zip(step.outputs, made))
            continue
        outputs = [
            last[value] if value in last else allocate(*_form(builder, value), call.inputs[0])
            for value in step.outputs
        ]
        own = Call(step.operator, step.attributes, inputs, tuple(outputs), precision=call.precision)
        entry = _first(own, name)
        if entry is None or (status is not None and entry.status is not None):
            return None
        if entry.status is not None:
            status, statuses = entry.status, entry.statuses
        of = operator(step.operator)
        bound = of.bind([builder.spec(value) for value in step.inputs], step.attributes)
        launches += entry.counted(of.flops(bound)).launches
        known[key] = outputs
        values.update(zip(step.outputs, outputs))
    for value, output in zip(results, call.outputs):
        if values[value] is not output:  # an operand, or one value twice
            entry = _first(Call("accumulate", {}, (values[value],), (output,)), name)
            if entry is None:
                return None
            launches += entry.launches
    return DeviceEntry(tuple(launches), status, statuses)


def _form(builder: GraphBuilder, value: str) -> tuple[tuple[int, ...], str]:
    spec = builder.spec(value)
    return spec.shape, spec.dtype


def _first(call: Call, within: str) -> DeviceEntry | None:
    """Return the entry of the first kernel that serves, which is not `within` lowered again."""
    for each in variants(call.operator, "cuda"):
        if call.operator == within and each.name == LOWERED:
            continue
        entry: DeviceEntry | None = each.bind(call)
        if entry is not None:
            return entry
    return None


for _spec in operators():
    if _spec.lower is not None:
        variant(_spec.name, LOWERED, processor="cuda")(partial(_lowered, _spec.name))
