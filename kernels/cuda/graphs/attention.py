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
    Fold,
    Loads,
    checked,
    folded,
    largest_and_sum,
    merged,
    sums,
)
from soapstone.kernels.cuda.movement.copies import copy
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import read
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


def _number(numbers: Sequence[View]) -> Loads:
    """Return what is loaded for the number that an entry's other end has in the whole graph."""
    return {"number": ("numbers", ["column"])} if numbers else {}


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
    ends: Loads = {"own": ("target", row), "other": ("source", ["column", "at_1"])}
    scored = [
        "raw = own + other",
        f"score = raw if raw > {kind}(0) else raw * {slope}",
    ]
    sums_of = ["total", "above"]
    term = [
        *scored,
        "value = score",
        *largest_and_sum(kind, sums_of),
        f"if raw > {kind}(0): above += power",
    ]
    state = {"most": (kind, f"{kind}(-inf)"), **dict.fromkeys(sums_of, (kind, f"{kind}(0)"))}
    write = {
        "scale": f"log(total) + most if end > begin else {kind}(0)",
        "share": f"above / total if end > begin else {kind}(0)",
    }
    weighed = [
        *scored,
        "weight = exp(score - logarithm)",
        *_drawn(
            call.attributes, kind, step, "number" if numbers else "column", f"at_0 + {_base(call)}"
        ),
        "term = weight * factor * one",
        "total += term",
        f"if raw > {kind}(0): above += term",
    ]
    given = {"source": source, "target": target, "indptr": indptr, "indices": indices}
    given["scale"] = kept
    fold = Fold(state, ends, term, merged(kind, sums_of), write, columns=x.shape[0])
    launches = folded(call, fold, scale.shape, {**given, "share": share}, entries, status)
    features = {**given, "x": x, "y": y, "positive": positive, **_extra(step, numbers)}
    loads: Loads = {**ends, "logarithm": ("scale", row), "one": ("x", ["column", "at_1", "at_2"])}
    loads |= _number(numbers)
    second = {"y": "total", "positive": "above"}
    fold = sums(sums_of, kind, loads, weighed, second, x.shape[0])
    launches += folded(call, fold, y.shape, features, entries, status)
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
        "raw = own + other",
        f"score = raw if raw > {kind}(0) else raw * {slope}",
        "weight = exp(score - logarithm)",
        *_drawn(
            call.attributes, kind, step, f"at_0 + {_base(call)}", "number" if numbers else "column"
        ),
    ]
    features = [*weighed, "total += weight * factor * one"]
    product = f"{read('dy', dy, [*end, 'd'])} * {read('x', x, [*row, 'd'])}"
    scores = [
        *weighed,
        f"inner = {kind}(0)",
        f"for d in range({x.shape[2]}):",
        f"    inner += {product}",
        "part = weight * (factor * inner - dot)",
        f"total += part if raw > {kind}(0) else part * {slope}",
    ]
    given = {"source": source, "target": target, "scale": scale, "dy": dy}
    given |= {"indptr": indptr, "indices": indices, **_extra(step, numbers)}
    loads: Loads = {"own": ("source", row), "other": ("target", end), "logarithm": ("scale", end)}
    loads |= _number(numbers)
    launches: tuple[Work, ...] = ()
    for term, also, result, operands in (
        (features, {"one": ("dy", [*end, "at_2"])}, {"dx": dx}, given),
        (scores, {"dot": ("dots", end)}, {"dsource": dsource}, {**given, "x": x, "dots": dots}),
    ):
        ((name, made),) = result.items()
        fold = sums(["total"], kind, {**loads, **also}, term, {name: "total"}, dy.shape[0])
        launches += folded(call, fold, made.shape, {**operands, **result}, entries, status)
    return DeviceEntry(launches, status, statuses)
