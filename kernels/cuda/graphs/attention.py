"""Graph attention: softmax of scores over a row's entries, which weigh the rows they name.

One fold finds each row's and head's largest score and sum, a second adds up features, whose
weights it makes again from those: nothing of an entry is kept. Dropout draws by an entry's ends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.ir.ops.normalization.dropout import INDEX, MASK, MIX_1, MIX_2, SEED, STEP
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, Work
from soapstone.kernels.cuda.graphs.entries import (
    checked,
    column_of,
    folded,
    largest_and_sum,
    merged,
    summed,
)
from soapstone.kernels.cuda.movement.copies import copy
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import place, read
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def _drawn(
    attributes: Mapping[str, Any], kind: str, step: Sequence[View], source: str, target: str
) -> list[str]:
    """Return the statements that make `factor`, by which dropout multiplies an entry's weight."""
    if not step:
        return [f"factor = {kind}(1)"]
    seed, rate = attributes["seed"] + attributes.get("head", 0), attributes["rate"]
    return [
        f"z = uint64((int64({source}) << 32) | int64({target})) * uint64({INDEX})",
        f"z = z + uint64(step[o_step]) * uint64({STEP})",
        f"z = z + uint64({seed * SEED & MASK}) + uint64(at_1) * uint64({SEED})",
        f"z = (z ^ (z >> uint64(30))) * uint64({MIX_1})",
        f"z = (z ^ (z >> uint64(27))) * uint64({MIX_2})",
        "z = (z ^ (z >> uint64(31))) >> uint64(32)",
        f"kept = z >= uint64({math.ceil(rate * 2**32)})",
        f"factor = {kind}({1 / (1 - rate)!r}) if kept else {kind}(0)",
    ]


def _number(numbers: Sequence[View]) -> str:
    """Return the text of the number that an entry's other end has in the whole graph."""
    return f"numbers[{place('numbers', ['column'])}]" if numbers else "column"


def _extra(step: Sequence[View], numbers: Sequence[View]) -> dict[str, View]:
    return dict([*(("step", one) for one in step), *(("numbers", one) for one in numbers)])


@variant("graph_attention", "numba", processor="cuda")
def graph_attention(call: Call) -> DeviceEntry:
    """Return the entry of attention over each row's entries."""
    (x, source, target, indptr, indices, _, _, *more), outputs = views(call)
    y, positive, scale, share = outputs
    step, numbers = more[:1], more[1:]
    kind, entries = wide(x.dtype), indices.size
    # The scale is used as wide as it was computed.
    kept = scale if kind == x.dtype else room(scale.shape, kind, call.outputs[0])
    status, statuses = checked(call, x.shape[0], entries)
    slope = f"{kind}({call.attributes['slope']!r})"
    row = ["at_0", "at_1"]
    scored = [
        f"raw = {read('target', target, row)} + {read('source', source, ['column', 'at_1'])}",
        f"score = raw if raw > {kind}(0) else raw * {slope}",
    ]
    sums = ["total", "above"]
    term = [
        *scored,
        "value = score",
        *largest_and_sum(kind, sums),
        f"if raw > {kind}(0): above += power",
    ]
    state = {"most": (kind, f"{kind}(-inf)"), **dict.fromkeys(sums, (kind, f"{kind}(0)"))}
    write = [
        f"scale[{place('scale', row)}] = log(total) + most if end > begin else {kind}(0)",
        f"share[{place('share', row)}] = {x.dtype}(above / total if end > begin else {kind}(0))",
    ]
    weighed = [
        *scored,
        f"weight = exp(score - {read('scale', kept, row)})",
        *_drawn(call.attributes, kind, step, _number(numbers), f"at_0 + {_base(call)}"),
        f"term = weight * factor * {read('x', x, ['column', 'at_1', 'at_2'])}",
        "total += term",
        f"if raw > {kind}(0): above += term",
    ]
    whole = [*row, "at_2"]
    second = [
        f"y[{place('y', whole)}] = {y.dtype}(total)",
        f"positive[{place('positive', whole)}] = {y.dtype}(above)",
    ]
    given = {"source": source, "target": target, "indptr": indptr, "indices": indices}
    given["scale"] = kept
    looked = column_of(x.shape[0], term)
    ends = scale.shape, {**given, "share": share}, entries, status
    launches = folded(call, state, looked, merged(kind, sums), write, *ends)
    features = {**given, "x": x, "y": y, "positive": positive, **_extra(step, numbers)}
    term = column_of(x.shape[0], weighed)
    rest = y.shape, features, entries, status
    launches += summed(call, sums, kind, term, second, *rest)
    if kept is not scale:
        launches += copy(kept, scale).launches
    return DeviceEntry(launches, status, statuses)


def _base(call: Call) -> int:
    return int(call.attributes.get("base", 0))


@variant("graph_attention_grad", "numba", processor="cuda")
def graph_attention_grad(call: Call) -> DeviceEntry:
    """Return the entry of the gradients of features and of sources' scores, by sources' rows."""
    inputs, (dx, dsource) = views(call)
    dy, x, source, target, scale, dots, indptr, indices, *more = inputs
    step, numbers = more[:1], more[1:]
    kind, entries = wide(x.dtype), indices.size
    status, statuses = checked(call, dy.shape[0], entries)
    slope = f"{kind}({call.attributes['slope']!r})"
    row, end = ["at_0", "at_1"], ["column", "at_1"]
    weighed = [
        f"raw = {read('source', source, row)} + {read('target', target, end)}",
        f"score = raw if raw > {kind}(0) else raw * {slope}",
        f"weight = exp(score - {read('scale', scale, end)})",
        *_drawn(call.attributes, kind, step, f"at_0 + {_base(call)}", _number(numbers)),
    ]
    features = [*weighed, f"total += weight * factor * {read('dy', dy, [*end, 'at_2'])}"]
    first = [f"dx[{place('dx', [*row, 'at_2'])}] = {dx.dtype}(total)"]
    product = f"{read('dy', dy, [*end, 'd'])} * {read('x', x, [*row, 'd'])}"
    scores = [
        *weighed,
        f"inner = {kind}(0)",
        f"for d in range({x.shape[2]}):",
        f"    inner += {product}",
        f"part = weight * (factor * inner - {read('dots', dots, end)})",
        f"total += part if raw > {kind}(0) else part * {slope}",
    ]
    second = [f"dsource[{place('dsource', row)}] = {dx.dtype}(total)"]
    given = {"source": source, "target": target, "scale": scale, "dy": dy}
    given |= {"indptr": indptr, "indices": indices, **_extra(step, numbers)}
    ends = {**given, "x": x, "dots": dots, "dsource": dsource}
    launches: tuple[Work, ...] = ()
    for term, finish, shape, operands in (
        (features, first, dx.shape, {**given, "dx": dx}),
        (scores, second, dsource.shape, ends),
    ):
        inner = column_of(dy.shape[0], term)
        launches += summed(call, ["total"], kind, inner, finish, shape, operands, entries, status)
    return DeviceEntry(launches, status, statuses)
