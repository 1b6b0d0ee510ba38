"""Updates of parameters: `sgd`, `adam`, `store`. Where the flag is false all stays as it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def chosen(text: Text, ok: Value, after: Value, before: Value) -> Value:
    """Return the next value where the flag is true, and the old one elsewhere."""
    return text.set(f"({after.name} if {ok.name} else {before.name})", before.type)


@variant("sgd", "numba", processor="cuda")
def sgd(call: Call) -> DeviceEntry:
    """Return the entry of a step of stochastic gradient descent."""
    inputs, outputs = views(call)
    at = call.attributes

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        w, g, *velocity, lr, ok = values
        kind = w.type
        step = g
        if at["weight_decay"]:
            step = text.set(f"{g.name} + {literal(at['weight_decay'], kind)} * {w.name}", kind)
        state = []
        if velocity:
            momentum = literal(at["momentum"], kind)
            moved = text.set(f"{momentum} * {velocity[0].name} + {step.name}", kind)
            state = [chosen(text, ok, moved, velocity[0])]
            step = (
                text.set(f"{step.name} + {momentum} * {moved.name}", kind)
                if at["nesterov"]
                else moved
            )
        after = text.set(f"{w.name} - {lr.name} * {step.name}", kind)
        return [chosen(text, ok, after, w), *state]

    return pointwise(write, inputs, outputs)


@variant("adam", "numba", processor="cuda")
def adam(call: Call) -> DeviceEntry:
    """Return the entry of a step of Adam, or of AdamW.

    The corrections 1 - beta ** step are -expm1(step log beta): exact where beta ** step is near 1.
    """
    inputs, outputs = views(call)
    at = call.attributes

    def write(text: Text, values: Sequence[Value]) -> list[Value]:
        w, g, m, v, lr, step, ok = values
        kind = w.type
        one = literal(1, kind)

        def t(value: float) -> str:
            return literal(value, kind)

        count = text.set(f"{kind}({step.name} if {step.name} > 1 else 1)", kind).name

        def correction(beta: float) -> str:
            if beta <= 0:
                return one
            return text.set(f"-expm1({count} * {t(math.log(beta))})", kind).name

        start = w
        if at["decoupled"]:
            start = text.set(f"{w.name} * ({one} - {lr.name} * {t(at['weight_decay'])})", kind)
        elif at["weight_decay"]:
            g = text.set(f"{g.name} + {t(at['weight_decay'])} * {w.name}", kind)
        b1, b2 = at["beta1"], at["beta2"]
        first = text.set(f"{t(b1)} * {m.name} + {t(1 - b1)} * {g.name}", kind)
        second = text.set(f"{t(b2)} * {v.name} + {t(1 - b2)} * {g.name} * {g.name}", kind)
        root = f"sqrt({second.name} / {correction(b2)}) + {t(at['epsilon'])}"
        scale = text.set(root, kind).name
        moved = f"{start.name} - {lr.name} * ({first.name} / {correction(b1)}) / {scale}"
        after = text.set(moved, kind)
        return [chosen(text, ok, new, old) for new, old in ((after, w), (first, m), (second, v))]

    return pointwise(write, inputs, outputs)


@variant("store", "numba", processor="cuda")
def store(call: Call) -> DeviceEntry:
    """Return the entry of next values over old ones, pair by pair."""
    inputs, outputs = views(call)
    flags = inputs[2 * len(outputs) :]
    entries = []
    for number, y in enumerate(outputs):
        pair = inputs[2 * number : 2 * number + 2]

        def write(text: Text, values: Sequence[Value]) -> list[Value]:
            new, old, *ok = values
            return [chosen(text, ok[0], new, old) if ok else new]

        entries.append(pointwise(write, (*pair, *flags), (y,)))
    return sequence(tuple(entries))
