"""One step of each recurrent cell, as expressions: references, graphs and kernels are made of them.

Gradients are those of the sums before the gates' functions, and of the states before. They are
derived; what the forward step saves, the gates after their functions, stands for itself in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from soapstone.ir.expression import Expression, evaluate, lerp, make, sigmoid, tanh, variable
from soapstone.ir.operations import adjoints

D = variable("dy")  # the gradient that arrives at the state
DC = variable("dcell")  # and at the cell


class Cell(NamedTuple):
    """A step: what it reads, what it saves for the gradient, what it makes, and its gradients.

    reads: the sums before the gates' functions, then the states before.
    gradients: with respect to what is read, from what arrives at the results.
    """

    reads: tuple[Expression, ...]
    saved: tuple[Expression, ...]
    results: tuple[Expression, ...]
    gradients: tuple[Expression, ...]

    def step(self, functions: Functions, *values: Any) -> tuple[Any, ...]:
        """Return the results, then what is saved, of values in the order of `reads`."""
        known = dict(zip(self.reads, values, strict=True))
        return tuple(evaluate(one, known, functions) for one in (*self.results, *self.saved))

    def back(self, functions: Functions, known: Mapping[Expression, Any]) -> tuple[Any, ...]:
        """Return the gradients, given what arrives, what was saved and what they need besides."""
        values = dict(known)
        return tuple(evaluate(one, values, functions) for one in self.gradients)


Functions = Mapping[str, Callable[..., Any]]


def _cell(
    reads: Sequence[Expression],
    saved: Sequence[Expression],
    results: Mapping[Expression, Expression],
) -> Cell:
    """Return the cell of results that gradients arrive at."""
    derived = adjoints(results, reads)
    gradients = tuple(one for one in derived if one is not None)
    return Cell(tuple(reads), tuple(saved), tuple(results), gradients)


def _variables(names: str) -> tuple[Expression, ...]:
    return tuple(map(variable, names.split()))


def rnn(activation: str) -> Cell:
    """Return the plain recurrence: an activation of the sum."""
    total = variable("total")
    return _cell([total], [], {make(activation, total): D})


def _lstm() -> Cell:
    *sums, cell = _variables("i f g o cell")
    i, f, g, o = gates = [tanh(x) if k == 2 else sigmoid(x) for k, x in enumerate(sums)]
    new = f * cell + i * g
    return _cell([*sums, cell], gates, {o * tanh(new): D, new: DC})


LSTM = _lstm()


def _gru() -> tuple[Cell, Cell, Cell]:
    reset_in, update_in, new_in, product, state = _variables("reset update new product state")
    reset, update = sigmoid(reset_in), sigmoid(update_in)
    new = tanh(new_in + reset * product)
    whole = _cell(
        [reset_in, update_in, new_in, product, state],
        [reset, update, new],
        {lerp(new, state, update): D},
    )
    scaled = reset * state
    first = _cell(
        [reset_in, update_in, state],
        [reset, update],
        {scaled: variable("dscaled"), update: variable("dupdate")},
    )
    given = variable("gate")  # the update gate, after its function
    new = tanh(new_in)
    second = _cell([new_in, given, state], [new], {lerp(new, state, given): D})
    return whole, first, second


# With the reset gate after the product of the state; the two halves of a step with it before.
GRU, GRU_FIRST, GRU_SECOND = _gru()


def _sru() -> Cell:
    candidate, forget_in, reset_in, cell, past = _variables("candidate forget reset cell past")
    forget, reset = sigmoid(forget_in), sigmoid(reset_in)
    new = lerp(candidate, cell, forget)
    return _cell(
        [candidate, forget_in, reset_in, cell, past],
        [forget, reset],
        {lerp(past, new, reset): D, new: DC},
    )


SRU = _sru()
FUNCTIONS = ("sigmoid", "relu", "sigmoid", "relu", "tanh", "sigmoid", "tanh", "sigmoid")
PRODUCT = 3  # the gate of `NAS` whose two sums are multiplied


def _nas() -> Cell:
    left = _variables(" ".join(f"left{k}" for k in range(8)))
    right = _variables(" ".join(f"right{k}" for k in range(8)))
    cell = variable("cell")
    gates = [
        make(name, p * q if k == PRODUCT else p + q)
        for k, (name, p, q) in enumerate(zip(FUNCTIONS, left, right))
    ]
    inner = tanh(tanh(gates[0] * gates[1]) + cell)
    new = inner * tanh(gates[2] + gates[3])
    outer = tanh(tanh(gates[4] * gates[5]) + sigmoid(gates[6] + gates[7]))
    return _cell([*left, *right, cell], gates, {tanh(new * outer): D, new: DC})


NAS = _nas()
