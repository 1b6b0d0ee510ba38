"""ONNX scans: trips that need nothing of one another at once, in blocks; others are unrolled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
from soapstone.frontend.onnx.rules.control import MOST_TRIPS, stacked
from soapstone.frontend.onnx.values import Slot, Value, rule
from soapstone.ir.analysis.samples import for_samples
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Node

_BLOCK = 1 << 18  # elements of the largest value that a block of trips makes
_MOST_BLOCKS = 1024  # into which trips are divided, however large their values are


@rule("Scan")
def scan(n: Call) -> Any:
    """Apply the body to blocks of trips, or unroll it over its inputs' extents."""
    body, count = n.attribute("body"), n.attribute("num_scan_inputs", 0)
    if n.version < 9:
        return _scan_of_samples(n)
    values = n.values()
    states: list[Slot] = list(values[: len(values) - count])
    inputs = values[len(values) - count :]
    outputs = len(body.output) - len(states)

    def listed(name: str, number: int) -> list[int]:
        found = list(n.attribute(name) or (0,) * number)
        if len(found) != number:
            raise OnnxError(f"attribute {name!r} has {len(found)} numbers, {number} needed")
        return found

    if count < 1 or outputs < 0:
        raise OnnxError("1 scanned input or more needed")
    axes = [n.axis_of(a, v.rank) for a, v in zip(listed("scan_input_axes", count), inputs)]
    back = listed("scan_input_directions", count)
    trips = {value.shape[axis] for value, axis in zip(inputs, axes)}
    if len(trips) != 1:
        raise OnnxError(f"scanned extents {sorted(trips)} found; one needed")
    down_out = listed("scan_output_directions", outputs)
    out_axes = listed("scan_output_axes", outputs)
    if not any((*back, *down_out)):
        mapped = _mapped(n, states, inputs, axes)
        if mapped is not None:
            moved = (_moved(n, y, 0, n.axis_of(axis, y.rank)) for y, axis in zip(mapped, out_axes))
            return [*states, *moved]
    if max(trips) > MOST_TRIPS:
        raise UnsupportedError(f"{max(trips)} trips found, of which each needs the one before it")
    states, collected = _scanned(n, states, inputs, axes, back)
    made = []
    for rows, down, axis in zip(collected, down_out, out_axes):
        rank = rows[0].rank + 1 if rows else 1
        made.append(stacked(n, rows[::-1] if down else rows, n.axis_of(axis, rank)))
    return [*states, *made]


def _mapped(
    n: Call, states: Sequence[Slot], inputs: Sequence[Value], axes: Sequence[int]
) -> list[Value] | None:
    """Return what a scan collects, trips along axis 0, if none of them changes a state.

    The body is translated for one trip, and its operators are applied to blocks of trips, along an
    axis before all others. None: a trip needs another, or an operator cannot be applied so.
    """
    total = inputs[0].shape[axes[0]]
    if total < 2 or n.importer.generators is not None or any(x.is_text for x in inputs):
        return None
    builder = n.emitter.builder
    before = len(builder.nodes)
    rows = [_unknown_row(n, value, axis) for value, axis in zip(inputs, axes)]
    try:
        made = n.importer.subgraph(n.attribute("body"), n.scope, (*states, *rows), "body")
    except UnboundError:
        return None  # what a row holds decides on shapes
    found = {row.name for row in rows}
    nodes = []
    for node in builder.nodes[before:]:
        if found.intersection(node.inputs):
            nodes.append(node)
            found.update(node.outputs)
    results = made[len(states) :]
    collected = [str(y.name) for y in results if isinstance(y, Value) and y.name in found]
    same = all(_is_same(one, other) for one, other in zip(states, made))
    if not same or len(collected) < len(results):
        return None
    largest = max((builder.spec(name).size for node in nodes for name in node.outputs), default=1)
    block = max(_BLOCK // max(largest, 1), math.ceil(total / _MOST_BLOCKS))
    parts: list[list[Value]] = [[] for _ in collected]
    for start in range(0, total, block):
        stop = min(start + block, total)
        values = {
            str(row.name): _moved(n, n.part(x, axis, start, stop), axis, 0)
            for row, x, axis in zip(rows, inputs, axes)
        }
        for node in nodes:
            all_trips = _at_once(n, node, values, stop - start)
            if all_trips is None:
                return None
            values.update(zip(node.outputs, all_trips))
        for part, name in zip(parts, collected):
            part.append(values[name])
    return [n("concat", *part, axis=0) if len(part) > 1 else part[0] for part in parts]


def _unknown_row(n: Call, x: Value, axis: int) -> Value:
    """Return a row of a value, whose contents are not known even if the value's are."""
    starts, stops = [0] * x.rank, list(x.shape)
    stops[axis] = 1
    row = n.kept("slice", x, starts=starts, stops=stops, steps=(1,) * x.rank)
    return n.kept("reshape", row, shape=(*x.shape[:axis], *x.shape[axis + 1 :]))


def _is_same(one: Slot, other: Slot) -> bool:
    if not isinstance(one, Value) or not isinstance(other, Value):
        return False
    return one.name == other.name and one.array is other.array


def _at_once(n: Call, node: Node, values: dict[str, Value], count: int) -> tuple[Value, ...] | None:
    """Return what a node makes for some trips, along axis 0, or None if that is not known.

    values: its operands that differ from trip to trip, for these trips.
    """
    builder, attributes = n.emitter.builder, node.attributes
    single = [builder.spec(name) for name in node.outputs]
    spread = node.operator == "broadcast"
    if spread:
        attributes = {"shape": (count, *attributes["shape"])}
    elif not node.spec.elementwise:
        if len(node.inputs) > 1:
            return None
        try:
            one = builder.spec(node.inputs[0])
            attributes = for_samples(node.spec, attributes, one, count)
        except GraphError:
            return None
    operands = []
    for name in node.inputs:
        spec = builder.spec(name)
        if name not in values:
            operands.append(Value(spec, name, name))
            continue
        ones = single[0].rank - spec.rank if node.spec.elementwise or spread else 0
        operands.append(n.reshape(values[name], (count, *(1,) * ones, *spec.shape)))
    made = n.all(node.operator, *operands, **attributes)
    fits = all(each.shape == (count, *spec.shape) for each, spec in zip(made, single))
    return made if fits else None


def _moved(n: Call, x: Value, axis: int, to: int) -> Value:
    """Return a value with one of its axes at another place."""
    order = [each for each in range(x.rank) if each != axis]
    order.insert(to, axis)
    return n.transpose(x, order)


def _scanned(
    n: Call,
    states: list[Slot],
    inputs: Sequence[Value],
    axes: Sequence[int],
    back: Sequence[int],
) -> tuple[list[Slot], list[list[Value]]]:
    """Return the last states of a scan, and what each trip adds to each output."""
    body = n.attribute("body")
    total = inputs[0].shape[axes[0]]
    collected: list[list[Value]] = [[] for _ in range(len(body.output) - len(states))]
    for trip in range(total):
        parts = []
        for value, axis, down in zip(inputs, axes, back):
            place = total - 1 - trip if down else trip
            parts.append(n.row(value, axis, place))
        made = n.importer.subgraph(body, n.scope, (*states, *parts), "body")
        states = made[: len(states)]
        for place, result in enumerate(made[len(states) :]):
            if not isinstance(result, Value):
                raise UnsupportedError("sequences cannot be collected")
            collected[place].append(result)
    return states, collected


def _scan_of_samples(n: Call) -> Any:
    """Scan as opset 8 has it: along axis 1, each sample of axis 0 by itself."""
    if n.has(0):
        raise UnsupportedError("input 0, lengths of sequences, is not supported")
    count = n.attribute("num_scan_inputs", 0)
    values = [n.value(position) for position in range(1, len(n))]
    states, inputs = values[: len(values) - count], values[len(values) - count :]
    back = list(n.attribute("directions") or (0,) * count)
    extents = {value.shape[:2] for value in inputs}
    if count < 1 or len(back) != count or len(extents) != 1 or min(v.rank for v in values) < 1:
        raise OnnxError(f"scanned extents {sorted(extents)} found; one of samples and trips needed")
    ((samples, trips),) = extents
    if samples * trips > MOST_TRIPS or not samples:
        raise UnsupportedError(f"{samples} samples of {trips} trips; 1 to {MOST_TRIPS} needed")
    made: list[list[Value]] = []
    for sample in range(samples):
        own = [n.row(value, 0, sample) for value in inputs]
        begun: list[Slot] = [n.row(value, 0, sample) for value in states]
        ends, collected = _scanned(n, begun, own, [0] * count, back)
        tensors = [end for end in ends if isinstance(end, Value)]
        if len(tensors) != len(ends):
            raise UnsupportedError("states that are sequences")
        made.append([*tensors, *(stacked(n, rows) for rows in collected)])
    return [stacked(n, list(rows)) for rows in zip(*made)]
