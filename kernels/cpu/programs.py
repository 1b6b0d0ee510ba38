"""Chains of elementwise operators as programs of the elementwise machine.

An operator becomes one or a few instructions; results are written where they are wanted, and what
is only passed on lives in a register, reused as soon as its value is dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from soapstone.kernels.cpu.opcodes import CODES

_HEAVY = frozenset({"gelu", "gelu_tanh", "sigmoid", "tanh", "exp", "log", "power"})
_PARAMETERS: Mapping[str, tuple[tuple[str, float], ...]] = {
    "leaky_relu": (("alpha", 0.01),),
    "leaky_relu_grad": (("alpha", 0.01),),
    "affine": (("scale", 1.0), ("shift", 0.0)),
}

# A value: its operator's machine name, operands and parameters.
_Value = tuple[str, tuple[int, ...], float, float]
Node = tuple[str, tuple[int, ...], Mapping[str, Any]]


class Step(NamedTuple):
    """One instruction. Places: n >= 0 is external n (inputs, then outputs), -1 - r register r."""

    code: int
    to: int
    a: int
    b: int
    p: float
    q: float


@dataclass(frozen=True)
class Program:
    """A straight line of instructions.

    `written[o]`: the step that writes output o; `read[i]`: the last step that reads input i;
    `weight`: about how many streamed floats a lane's arithmetic is worth.
    """

    steps: tuple[Step, ...]
    registers: int
    written: tuple[int, ...]
    read: tuple[int, ...]
    weight: int


def _expand(
    operator: str, operands: tuple[int, ...], attributes: Mapping[str, Any], first: int
) -> list[_Value]:
    """The values, numbered from `first`, of which the last is the operator's result."""
    if operator == "accumulate":
        if len(operands) == 1:
            return [("copy", operands, 0.0, 0.0)]
        made: list[_Value] = []
        total = operands[0]
        for operand in operands[1:]:
            made.append(("add", (total, operand), 0.0, 0.0))
            total = first + len(made) - 1
        return made
    if operator == "power":
        return _power(operands[0], float(attributes["exponent"]), first)
    if operator in ("gelu", "gelu_grad") and attributes.get("approximate", "none") == "tanh":
        operator = operator.replace("gelu", "gelu_tanh")
    named = [
        float(attributes.get(name, default)) for name, default in _PARAMETERS.get(operator, ())
    ]
    p, q = (*named, 0.0, 0.0)[:2]
    return [(operator, operands, p, q)]


def _power(x: int, exponent: float, first: int) -> list[_Value]:
    if exponent == 0.5:
        return [("sqrt", (x,), 0.0, 0.0)]
    if exponent == 1.0:
        return [("copy", (x,), 0.0, 0.0)]
    if not (exponent.is_integer() and 1 <= abs(exponent) <= 8):
        return [("power", (x,), exponent, 0.0)]
    made: list[_Value] = []
    value, rest, result = x, int(abs(exponent)), None
    while True:
        if rest & 1:
            if result is None:
                result = value
            else:
                made.append(("mul", (result, value), 0.0, 0.0))
                result = first + len(made) - 1
        rest >>= 1
        if not rest:
            break
        made.append(("square", (value,), 0.0, 0.0))
        value = first + len(made) - 1
    if exponent < 0:
        made.append(("reciprocal", (x if result is None else result,), 0.0, 0.0))
    return made


def compile_program(inputs: int, nodes: Sequence[Node], results: Sequence[int]) -> Program | None:
    """Return the program of the nodes, or None if it has an operator the machine does not know.

    nodes: (operator, operands, attributes); operands and results number the inputs first, then
    the nodes.
    """
    numbers = list(range(inputs))
    values: list[_Value] = []
    for operator, operands, attributes in nodes:
        made = _expand(
            operator, tuple(numbers[i] for i in operands), attributes, inputs + len(values)
        )
        if any(name not in CODES for name, *_ in made):
            return None
        values.extend(made)
        numbers.append(inputs + len(values) - 1)

    # A result is written straight to its output, once; an input or a second copy is copied there.
    home: dict[int, int] = {}
    for output, result in enumerate(results):
        value = numbers[result]
        if value < inputs or value in home:
            values.append(("copy", (value,), 0.0, 0.0))
            value = inputs + len(values) - 1
        home[value] = inputs + output

    last = {v: i for i, (_, operands, _, _) in enumerate(values) for v in operands}
    places = {i: i for i in range(inputs)} | home
    free: list[int] = []
    registers = 0
    steps = []
    for i, (name, operands, p, q) in enumerate(values):
        value = inputs + i
        # Lanes are read before they are written, so a step may write over its own operand.
        for v in set(operands):
            if places[v] < 0 and last[v] == i:
                free.append(places[v])
        if value not in places:
            if not free:
                registers += 1
                free.append(-registers)
            places[value] = free.pop()
            if value not in last:
                free.append(places[value])
        a, b = places[operands[0]], places[operands[-1]]
        steps.append(Step(CODES[name], places[value], a, b, p, q))
    weight = sum(8 if name in _HEAVY or "_grad" in name else 1 for name, *_ in values)
    written = tuple(
        next(v - inputs for v, place in home.items() if place == inputs + o)
        for o in range(len(results))
    )
    read = tuple(last.get(i, -1) for i in range(inputs))
    return Program(tuple(steps), registers, written, read, weight)
