"""ONNX control flow and sequences, which leave nothing behind in the graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.nodes import single_shape
from soapstone.frontend.onnx.values import ABSENT, Absent, Slot, Value, rule

MOST_TRIPS = 4096


@rule("If")
def if_(n: Call) -> Any:
    """Take the branch of a known condition; of another, both, and choose the results."""
    condition = n.value()
    branches = [n.attribute(f"{name}_branch") for name in ("then", "else")]

    def taken(number: int) -> list[Slot]:
        return n.importer.subgraph(branches[number], n.scope, (), ("then", "else")[number])

    if condition.spec.size != 1:
        raise OnnxError(f"the condition has shape {condition.shape}; one truth value needed")
    if condition.array is not None:
        return taken(0 if condition.array.reshape(()).item() else 1)
    results = []
    flag = n.reshape(condition, ())
    for yes, no in zip(taken(0), taken(1)):
        if not isinstance(yes, Value) or not isinstance(no, Value) or yes.spec != no.spec:
            n.array(condition)  # says which inputs would have to be known
        else:
            results.append(n("where", flag, yes, no))
    return results


@rule("Loop")
def loop(n: Call) -> Any:
    """Unroll a loop of a known count whose condition is known at every step."""
    body = n.attribute("body")
    trips = int(n.array(0, apart=True).reshape(())) if n.has(0) else MOST_TRIPS + 1
    going = n.value(1) if n.has(1) else n.known(True)
    states: list[Slot] = list(n.inputs[2:])  # type: ignore[arg-type]
    if any(state is None for state in states):
        raise OnnxError("an empty state found; a value, or a sequence, needed")
    if len(body.input) != len(states) + 2:
        raise OnnxError(f"body: {len(states) + 2} inputs given, {len(body.input)} needed")
    shapes = [single_shape(each) for each in body.input[:2]]
    collected: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - len(states))]
    trip = 0
    while trip < trips and bool(n.array(going, apart=True).reshape(())):
        if trip >= MOST_TRIPS:
            raise UnsupportedError(f"more than {MOST_TRIPS} trips are not supported")
        step = n.known(np.asarray(trip, np.int64).reshape(shapes[0]))
        going = n.reshape(going, shapes[1])
        first, *made = n.importer.subgraph(body, n.scope, (step, going, *states), "body")
        if not isinstance(first, Value):
            raise OnnxError("body: a truth value needed as the first output")
        going, states = first, made[: len(states)]
        for part, value in zip(collected, made[len(states) :]):
            if not isinstance(value, Value):
                raise UnsupportedError("sequences cannot be collected")
            part.append(value)
        trip += 1
    return [*states, *(stacked(n, parts) for parts in collected)]


def stacked(n: Call, parts: list[Value], axis: int = 0) -> Value:
    if not parts:
        raise UnsupportedError("the results of a loop without trips are not supported")
    shape = parts[0].shape
    column = (*shape[:axis], 1, *shape[axis:])
    rows = [n.reshape(part, column) for part in parts]
    return n("concat", *rows, axis=axis) if len(rows) > 1 else rows[0]


# Sequences: known lists of values


def _sequence(n: Call) -> tuple[Value, ...]:
    slot = n.inputs[0] if n.inputs else None
    if not isinstance(slot, tuple):
        raise OnnxError("input 0: no sequence found; one needed")
    return slot


def _place(n: Call, position: int, length: int, default: int) -> int:
    if not n.has(position):
        return default
    return int(n.array(position).reshape(()))


@rule("Optional")
def optional(n: Call) -> Any:
    return [n.inputs[0] if n.has(0) else ABSENT]


@rule("OptionalHasElement")
def optional_has_element(n: Call) -> Value:
    return n.known(n.has(0) and not isinstance(n.inputs[0], Absent))


@rule("OptionalGetElement")
def optional_get_element(n: Call) -> Any:
    if not n.has(0) or isinstance(n.inputs[0], Absent):
        raise OnnxError("an empty optional value found; one that has an element needed")
    return [n.inputs[0]]


@rule("SequenceConstruct")
def sequence_construct(n: Call) -> Any:
    return [tuple(n.values())]


@rule("SequenceEmpty")
def sequence_empty(n: Call) -> Any:
    return [()]


@rule("SequenceAt")
def sequence_at(n: Call) -> Any:
    parts = _sequence(n)
    return [parts[n.axis_of(_place(n, 1, len(parts), 0), len(parts))]]


@rule("SequenceInsert")
def sequence_insert(n: Call) -> Any:
    parts = _sequence(n)
    place = _place(n, 2, len(parts), len(parts))
    place = n.axis_of(place, len(parts), most=len(parts))
    return [(*parts[:place], n.value(1), *parts[place:])]


@rule("SequenceErase")
def sequence_erase(n: Call) -> Any:
    parts = _sequence(n)
    place = n.axis_of(_place(n, 1, len(parts), len(parts) - 1), len(parts))
    return [(*parts[:place], *parts[place + 1 :])]


@rule("SequenceLength")
def sequence_length(n: Call) -> Value:
    return n.known(np.asarray(len(_sequence(n)), np.int64))


@rule("SequenceMap")
def sequence_map(n: Call) -> Any:
    """Unroll a body over the elements of a sequence; sequences among other inputs go along."""
    body, length = n.attribute("body"), len(_sequence(n))
    made: list[tuple[Value, ...]] = [() for _ in body.output]
    for place in range(length):
        given = []
        for position, slot in enumerate(n.inputs):
            if isinstance(slot, tuple) and len(slot) != length:
                raise OnnxError(f"input {position} has {len(slot)} elements, {length} needed")
            given.append(slot[place] if isinstance(slot, tuple) else n.value(position))
        for k, result in enumerate(n.importer.subgraph(body, n.scope, given, "body")):
            if not isinstance(result, Value):
                raise UnsupportedError("sequences of sequences are not supported")
            made[k] += (result,)
    return made


@rule("ConcatFromSequence")
def concat_from_sequence(n: Call) -> Value:
    parts = _sequence(n)
    if not parts:
        raise OnnxError("an empty sequence found; one or more values needed")
    new = bool(n.attribute("new_axis", 0))
    axis = n.axis_of(n.attribute("axis"), parts[0].rank + new)
    if new:
        return stacked(n, list(parts), axis)
    return n("concat", *parts, axis=axis) if len(parts) > 1 else parts[0]


@rule("SplitToSequence")
def split_to_sequence(n: Call) -> Any:
    x = n.value()
    axis = n.axis(x.rank, 0)
    extent, keep = x.shape[axis], True
    if not n.has(1):
        sizes: tuple[int, ...] = (1,) * extent
        keep = bool(n.attribute("keepdims", 1))
    else:
        given = n.array(1)
        if given.ndim == 0:
            size = int(given)
            if size < 1:
                raise OnnxError(f"a size of {size} found, 1 or more needed")
            sizes = (size,) * (extent // size) + ((extent % size,) if extent % size else ())
        else:
            sizes = tuple(int(size) for size in given)
    if sum(sizes) != extent or not sizes or len(sizes) > MOST_TRIPS:
        raise OnnxError(f"sizes {sizes} do not fit axis {axis} of extent {extent}")
    parts = n.all("split", x, axis=axis, sizes=sizes) if len(sizes) > 1 else (x,)
    if not keep:
        parts = tuple(n.reshape(p, (*p.shape[:axis], *p.shape[axis + 1 :])) for p in parts)
    return [tuple(parts)]
