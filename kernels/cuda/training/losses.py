"""Cross-entropy, gradients of losses, and what is found by labels: one_hot, pick, correct."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, sequence
from soapstone.kernels.cuda.normalization.rowwise import Phase, rowwise, taken
from soapstone.kernels.cuda.normalization.softmax import largest, powers
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.reduction.reduce import clipped
from soapstone.kernels.cuda.substrate.arrays import View, scratch, views, zeros
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]
OUTSIDE = 1  # the status of a label that is no class


def _flagged(call: Call, classes: int) -> tuple[DeviceArray, dict[int, str]]:
    status = zeros(1, "int32", (call.inputs or call.outputs)[0])
    text = f"a label outside of its classes found, 0 to {classes - 1} needed"
    return status, {OUTSIDE: f"{call.operator}: {text}"}


def _check(text: Text, label: Value, classes: int) -> None:
    """Add the statement that takes down a label which is no class."""
    text.do(f"if {label.name} < 0 or {label.name} >= {classes}: status[0] = {OUTSIDE}")


def _at(text: Text, kind: str, column: Value, count: int) -> Value:
    """Return the element of operand 0 in a row's column, or zero where that is none of so many."""
    element = f"{kind}({taken(0, column.name)})"
    test = f"{column.name} >= 0 and {column.name} < {count}"
    return text.set(f"({element} if {test} else {literal(0, kind)})", kind)


def column(view: View) -> View:
    """Return values of rows with an axis of one after them."""
    return View(view.span, (*view.shape, 1), (*view.strides, 0), view.dtype, view.offset)


def _mean(rows: View, loss: View, count: int) -> DeviceEntry:
    """Return the entry of the sum of rows over a count."""
    kind = rows.dtype

    def end(text: Text, values: Values) -> list[Value]:
        return [text.set(f"{values[0].name} / {literal(count, kind)}", kind)]

    return fold([rows], [0], [("sum", kind)], [loss], epilogue=end)


def _cross_entropy(dense: bool, call: Call) -> DeviceEntry:
    (logits, expected), (loss, lse) = views(call)
    kind, (n, classes) = wide(logits.dtype), logits.shape
    count = int(call.attributes["count"] or max(n, 1))
    rows = scratch(n, kind, call.inputs[0])
    rows = View(rows.span, (n,), (1,), kind)
    status, statuses = _flagged(call, classes)

    def finished(text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
        return [text.set(f"{known[0].name} + log({folded[0].name})", kind)]

    def part(text: Text, v: Values, known: Values) -> list[Value]:
        return [text.set(f"{v[1].name} * ({known[1].name} - {v[0].name})", kind)]

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        if dense:
            return [known[1], known[2]]
        _check(text, operands[1], classes)
        own = _at(text, kind, operands[1], classes)
        return [known[1], text.set(f"{known[1].name} - {own.name}", kind)]

    phases = [largest(kind), replace(powers(kind), row=finished)]
    phases += [Phase([("sum", kind)], part)] if dense else []
    target = expected if dense else column(expected)
    first = rowwise(
        [logits, target],
        [1],
        phases,
        [],
        lambda t, v, k: [],
        [lse, rows],
        row,
        None if dense else status,
    )
    second = _mean(rows, loss, count)
    launches = (*first.launches, *second.launches)
    return DeviceEntry(launches) if dense else DeviceEntry(launches, status, statuses)


def _cross_entropy_grad(dense: bool, call: Call) -> DeviceEntry:
    (dloss, logits, expected, lse), (dx,) = views(call)
    kind, (n, classes) = wide(logits.dtype), logits.shape
    count = literal(int(call.attributes["count"] or max(n, 1)), kind)
    status, statuses = _flagged(call, classes)

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        d, x, e, end = v
        p = text.set(f"exp({x.name} - {end.name})", kind)
        scale = text.set(f"{d.name} / {count}", kind)
        if dense:
            return [text.set(f"({p.name} * {known[0].name} - {e.name}) * {scale.name}", kind)]
        hit = text.set(f"({literal(1, kind)} if {e.name} == ITEM else {literal(0, kind)})", kind)
        return [text.set(f"({p.name} - {hit.name}) * {scale.name}", kind)]

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        _check(text, operands[2], classes)
        return []

    phases = [Phase([("sum", kind)], lambda text, v, known: [v[2]])] if dense else []
    operands = [dloss, logits, expected if dense else column(expected), column(lse)]
    made = rowwise(
        operands, [1], phases, [dx], item, [], None if dense else row, None if dense else status
    )
    return made if dense else DeviceEntry(made.launches, status, statuses)


for _name, _dense in (("cross_entropy", False), ("cross_entropy_dense", True)):
    variant(_name, "numba", processor="cuda")(partial(_cross_entropy, _dense))
    variant(f"{_name}_grad", "numba", processor="cuda")(partial(_cross_entropy_grad, _dense))


@variant("one_hot", "numba", processor="cuda")
def one_hot(call: Call) -> DeviceEntry:
    """Return the entry of 1 where base + column is the label, else 0."""
    (labels,), (y,) = views(call)
    at = call.attributes
    total = at["base"] + at["classes"] if at["total"] is None else at["total"]
    status, statuses = _flagged(call, total)
    kind = y.dtype

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        hit = f"{v[0].name} == ITEM + {at['base']}"
        return [text.set(f"({literal(1, kind)} if {hit} else {literal(0, kind)})", kind)]

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        _check(text, operands[0], total)
        return []

    wide_labels = column(labels).broadcast(y.shape)
    made = rowwise([wide_labels], [len(y.shape) - 1], [], [y], item, [], row, status)
    return DeviceEntry(made.launches, status, statuses)


@variant("pick", "numba", processor="cuda")
def pick(call: Call) -> DeviceEntry:
    """Return the entry of x[i, labels[i] - base], or 0 where that column is not held."""
    (x, labels), (y,) = views(call)
    kind, base, total = wide(x.dtype), call.attributes["base"], call.attributes["total"]
    classes = base + x.shape[1] if total is None else total
    status, statuses = _flagged(call, classes)

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        _check(text, operands[1], classes)
        own = text.set(f"{operands[1].name} - {base}", "int64")
        return [_at(text, kind, own, x.shape[1])]

    made = rowwise([x, column(labels)], [1], [], [], lambda t, v, k: [], [y], row, status)
    return DeviceEntry(made.launches, status, statuses)


def first_of(name: str, kind: str, count: int, last: bool = False) -> list[Phase]:
    """Return the folds to where operand 0 has its `max` or `min` along a row, first or last.

    count: items of a row.
    """
    index = "int32" if count < 2**31 else "int64"

    def place(text: Text, v: Values, known: Values) -> list[Value]:
        x, most = v[0].name, known[-1].name
        none = f"{index}({-1 if last else 'items'})"
        return [text.set(f"({index}(ITEM) if {x} == {most} or {x} != {x} else {none})", index)]

    return [
        Phase([(name, kind)], lambda text, v, known: [text.cast(v[0], kind)]),
        Phase([("max" if last else "min", index)], place, places=True),
    ]


@variant("correct", "numba", processor="cuda")
def correct(call: Call) -> DeviceEntry:
    """Return the entry of how many rows have their first largest value at the label."""
    (x, labels), (count,) = views(call)
    kind = wide(x.dtype)
    hits = View(scratch(x.shape[0], "float32", call.inputs[0]).span, x.shape[:1], (1,), "float32")

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        hit = f"{known[1].name} == {operands[1].name}"
        return [text.set(f"(float32(1) if {hit} else float32(0))", "float32")]

    phases = first_of("max", kind, x.shape[1])
    found = rowwise([x, column(labels)], [1], phases, [], lambda t, v, k: [], [hits], row)
    total = fold([hits], [0], [("sum", "float32")], [count])
    return sequence((found, total))


# ------------------------------------------------------------------------- gradients of pair losses


@variant("mse_grad", "numba", processor="cuda")
def mse_grad(call: Call) -> DeviceEntry:
    """Return the entry of 2 (prediction - target) dloss / count."""
    inputs, outputs = views(call)
    kind = wide(inputs[1].dtype)
    count = literal(call.attributes["count"] or max(inputs[1].size, 1), kind)

    def write(text: Text, values: Values) -> list[Value]:
        d, p, y = values
        scale = text.set(f"{literal(2, kind)} * {d.name} / {count}", kind)
        return [text.set(f"({p.name} - {y.name}) * {scale.name}", kind)]

    return pointwise(write, inputs, outputs)


@variant(("bce_grad", "bce_target_grad"), "numba", processor="cuda")
def bce_grad(call: Call) -> DeviceEntry:
    """Return the entry of binary cross-entropy's gradient, of prediction or of target."""
    inputs, outputs = views(call)
    kind = wide(inputs[1].dtype)
    count = literal(call.attributes["count"] or max(inputs[1].size, 1), kind)
    one, zero = literal(1, kind), literal(0, kind)

    def write(text: Text, values: Values) -> list[Value]:
        d, x, *target = values
        scale = text.set(f"{d.name} / {count}", kind).name
        if call.attributes["from_logits"]:
            if not target:
                return [text.set(f"-{x.name} * {scale}", kind)]
            e = text.set(f"exp(-abs({x.name}))", kind).name
            p = text.set(f"({one} if {x.name} >= {zero} else {e}) / ({one} + {e})", kind).name
            return [text.set(f"({p} - {target[0].name}) * {scale}", kind)]
        p = clipped(text, x).name
        if not target:
            return [text.set(f"(log1p(-{p}) - log({p})) * {scale}", kind)]
        return [text.set(f"({p} - {target[0].name}) / ({p} * ({one} - {p})) * {scale}", kind)]

    return pointwise(write, inputs, outputs)
