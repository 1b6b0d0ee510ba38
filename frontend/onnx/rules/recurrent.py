"""ONNX recurrent layers: LSTM, GRU, RNN in one or both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.values import PLAIN, Value, rule

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
# ONNX has i o f c and z r h; the operators here have i f g o and r z n.
_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2)}
_ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
_EMITTED = {"Sigmoid": "sigmoid", "Tanh": "tanh", "Relu": "relu"}
MOST_STEPS = 512  # of a layer that is unrolled


@rule("LSTM", "GRU", "RNN", even=PLAIN)
def recurrent(n: Call) -> Any:
    return layer(n, n.kind, n.value(1), n.value(2))


def layer(n: Call, kind: str, w: Value, r: Value) -> list[Value]:
    """Return the outputs of a layer of a kind with these weights, and the rest as the node says.

    w, r: (directions, gates * hidden, features), as ONNX has them.
    """
    x = n.value(0)
    if x.rank != 3 or w.rank != 3 or r.rank != 3:
        raise OnnxError("operands of rank 3 needed")
    if n.attribute("layout", 0):
        x = n.transpose(x, (1, 0, 2))
    steps, batch, _ = x.shape
    hidden = r.shape[2]
    if n.attribute("hidden_size", hidden) != hidden:
        raise OnnxError(f"attribute 'hidden_size' does not fit the weights' {hidden}")
    n.refuse("activation_alpha", "activation_beta")
    direction = n.text("direction", "forward", ("forward", "reverse", "bidirectional"))
    backwards = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    directions = backwards[direction]
    if w.shape[0] != len(directions):
        raise OnnxError(f"weights of {w.shape[0]} directions found, {len(directions)} needed")
    made = [_Direction(n, kind, x, hidden, i, back) for i, back in enumerate(directions)]
    runs = [direction.run(w, r) for direction in made]
    y = _joined(n, [n.reshape(y, (steps, 1, batch, hidden)) for y, _ in runs], 1)
    last = [
        _joined(n, [n.reshape(state[i], (1, batch, hidden)) for _, state in runs], 0)
        for i in range(len(runs[0][1]))
    ]
    if n.attribute("layout", 0):
        y = n.transpose(y, (2, 0, 1, 3))
        last = [n.transpose(value, (1, 0, 2)) for value in last]
    return [y, *last][: max(1, len(n.node.output))]


def _joined(n: Call, parts: Sequence[Value], axis: int) -> Value:
    return parts[0] if len(parts) == 1 else n("concat", *parts, axis=axis)


class _Direction:
    """One direction of a layer: its weights in the order of the operators here."""

    def __init__(
        self, n: Call, kind: str, x: Value, hidden: int, number: int, backwards: bool
    ) -> None:
        self.n, self.kind, self.x, self.hidden = n, kind, x, hidden
        self.number, self.backwards = number, backwards
        self.gates = _GATES[kind]
        given = n.attribute("activations")
        self.activations = _ACTIVATIONS[kind]
        each = len(self.activations)
        if given is not None:
            if len(given) < each * (number + 1):
                raise OnnxError(f"{len(given)} activations found; {each} a direction needed")
            self.activations = tuple(given[each * number : each * (number + 1)])

    def part(self, value: Value) -> Value:
        """Return this direction's part of an input."""
        if value.shape[0] == 1:
            return self.n.reshape(value, value.shape[1:])
        return self.n.row(value, 0, self.number)

    def ordered(self, value: Value) -> Value:
        """Return rows gate by gate in the order of the operator."""
        order = _ORDER.get(self.kind)
        if order is None:
            return value
        h = self.hidden
        parts = [self.n.part(value, 0, gate * h, (gate + 1) * h) for gate in order]
        return self.n("concat", *parts, axis=0)

    def weights(self, value: Value) -> Value:
        return self.n.transpose(self.ordered(self.part(value)), (1, 0))

    def biases(self) -> tuple[Value, Value]:
        size = self.gates * self.hidden
        if not self.n.has(3):
            zero = self.n.known(np.zeros(self.n.room(size)), self.x.dtype)
            return zero, zero
        halves = self.n.all("split", self.part(self.n.value(3)), axis=0, sizes=(size, size))
        return self.ordered(halves[0]), self.ordered(halves[1])

    def state(self, position: int) -> Value:
        batch = self.x.shape[1]
        value = self.n.maybe(position)
        if value is None:
            return self.n("full", shape=(batch, self.hidden), value=0.0, dtype=self.x.dtype)
        if self.n.attribute("layout", 0):
            return self.n.row(self.n.transpose(value, (1, 0, 2)), 0, self.number)
        return self.part(value)

    def lengths(self) -> tuple[Value, ...]:
        """Return how many steps samples have, if some have less than all."""
        value = self.n.maybe(4)
        if value is None:
            return ()
        known = value.lasting
        if known is not None and (known == self.x.shape[0]).all():
            return ()
        return (value,)

    def run(self, weights: Value, recurrent: Value) -> tuple[Value, list[Value]]:
        """Return all outputs and the last states."""
        n = self.n
        w, r, (wb, rb) = self.weights(weights), self.weights(recurrent), self.biases()
        states = [self.state(5), self.state(6)] if self.kind == "LSTM" else [self.state(5)]
        if not self._fused():
            return self._unrolled(w, r, wb, rb, states)
        more: dict[str, Any] = {"reverse": self.backwards}
        biases = [wb, rb] if self.kind == "GRU" else [n("add", wb, rb)]
        if self.kind == "GRU":
            more["linear_before_reset"] = bool(n.attribute("linear_before_reset", 0))
        elif self.kind == "RNN":
            more["activation"] = _EMITTED[self.activations[0]]
        operands = (self.x, w, r, *biases, *states, *self.lengths())
        y, *made = n.all(self.kind.lower(), *operands, **more)
        return y, made[: len(states)]

    def _fused(self) -> bool:
        """Return whether one operator here says all that the layer does."""
        n = self.n
        if n.attribute("clip") or n.attribute("input_forget") or n.has(7):
            return False
        return self.activations == _ACTIVATIONS[self.kind] or self.activations == ("Relu",)

    def _unrolled(
        self, w: Value, r: Value, wb: Value, rb: Value, states: list[Value]
    ) -> tuple[Value, list[Value]]:
        """Return the same by operators of each step, for layers that no one operator says."""
        n, (steps, batch, _) = self.n, self.x.shape
        if steps > MOST_STEPS:
            raise UnsupportedError(
                f"{steps} steps with clip, input_forget, peepholes or other activations found;"
                f" {MOST_STEPS} at most"
            )
        lengths = self.lengths()
        ends = n.reshape(lengths[0], (batch, 1)) if lengths else None
        cells: dict[str, Callable[..., list[Value]]]
        cells = {"LSTM": self._lstm, "GRU": self._gru, "RNN": self._rnn}
        outputs: list[Value] = []
        for step in range(steps)[:: -1 if self.backwards else 1]:
            made = cells[self.kind](n.row(self.x, 0, step), w, r, wb, rb, *states)
            y = made[0]
            if ends is not None:  # after its last step a sample keeps its states, and y is 0
                there = n("greater", ends, n.like(step, ends))
                y = n("where", there, y, n.like(0, y))
                made = [n("where", there, new, old) for new, old in zip(made, states)]
            states = made
            outputs.append(n.reshape(y, (1, batch, self.hidden)))
        if self.backwards:
            outputs.reverse()
        return _joined(n, outputs, 0), states

    def _activated(self, which: int, x: Value) -> Value:
        """Return an activation of what is clipped before, as ONNX says of every gate."""
        name = _EMITTED.get(self.activations[which])
        if name is None:
            raise UnsupportedError(f"activation {self.activations[which]!r} is not supported")
        most = float(self.n.attribute("clip", 0.0))
        return self.n(name, self.n("clip", x, low=-most, high=most) if most else x)

    def _lstm(
        self, x: Value, w: Value, r: Value, wb: Value, rb: Value, h: Value, c: Value
    ) -> list[Value]:
        n, sizes = self.n, (self.hidden,) * 4
        both = n("add", n("linear", x, w, n("add", wb, rb)), n("linear", h, r, bias=False))
        i, f, g, o = n.all("split", both, axis=1, sizes=sizes)
        sight = n.all("split", self.part(n.value(7)), axis=0, sizes=sizes[1:]) if n.has(7) else ()
        if sight:  # ONNX orders them i o f
            i, f = n("add", i, n("mul", sight[0], c)), n("add", f, n("mul", sight[2], c))
        i = self._activated(0, i)
        joined = bool(n.attribute("input_forget", 0))
        f = n("sub", n.like(1, i), i) if joined else self._activated(0, f)
        c = n("add", n("mul", f, c), n("mul", i, self._activated(1, g)))
        if sight:
            o = n("add", o, n("mul", sight[1], c))
        name = _EMITTED.get(self.activations[2])
        if name is None:
            raise UnsupportedError(f"activation {self.activations[2]!r} is not supported")
        return [n("mul", self._activated(0, o), n(name, c)), c]

    def _gru(self, x: Value, w: Value, r: Value, wb: Value, rb: Value, h: Value) -> list[Value]:
        n, last = self.n, 2 * self.hidden
        own = n("linear", x, w, wb)
        gates = n("linear", h, n.part(r, 1, 0, last), n.part(rb, 0, 0, last))
        both = self._activated(0, n("add", n.part(own, 1, 0, last), gates))
        reset, keep = n.all("split", both, axis=1, sizes=(self.hidden,) * 2)
        new, bias = n.part(r, 1, last, last + self.hidden), n.part(rb, 0, last, last + self.hidden)
        if n.attribute("linear_before_reset", 0):
            seen = n("mul", reset, n("linear", h, new, bias))
        else:
            seen = n("linear", n("mul", reset, h), new, bias)
        made = self._activated(1, n("add", n.part(own, 1, last, last + self.hidden), seen))
        return [n("add", made, n("mul", keep, n("sub", h, made)))]

    def _rnn(self, x: Value, w: Value, r: Value, wb: Value, rb: Value, h: Value) -> list[Value]:
        n = self.n
        both = n("add", n("linear", x, w, n("add", wb, rb)), n("linear", h, r, bias=False))
        return [self._activated(0, both)]
