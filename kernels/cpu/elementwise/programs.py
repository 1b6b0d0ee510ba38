"""Chains of element-wise operators as programs of the element-wise machine.

An operator becomes one or a few instructions; results are written where they are wanted, and what
is only passed on lives in a register, reused as soon as its value is dead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from soapstone.dtypes import BYTES, HALVES
from soapstone.ir.operations import COMPARISONS, LOGIC
from soapstone.ir.spec import operator as declared
from soapstone.kernels.cpu.elementwise.conversions import KINDS
from soapstone.kernels.cpu.elementwise.formulas import instruction_of, names, parameters_of
from soapstone.kernels.cpu.elementwise.simplify import Value, simplify
from soapstone.records import dataclass

_UNBOUNDED = {"low": -math.inf, "high": math.inf}  # where an attribute is None

_FLOAT, _BOOL = "float32", "bool"
_INTEGERS = ("int32", "int64", *BYTES)
_TESTS = frozenset({"is_nan", "is_inf"})

_NOTHING: Mapping[int, float] = MappingProxyType({})
Node = tuple[str, tuple[int, ...], Mapping[str, Any]]


class Step(NamedTuple):
    """One instruction. Places: n >= 0 is external n (inputs, then outputs), -1 - r register r."""

    name: str  # of an instruction
    to: int
    a: int
    b: int
    c: int
    p: float
    q: float


@dataclass(frozen=True)
class Program:
    """A straight line of instructions.

    `written[o]`: the step that writes output o; `read[i]`: the last step that reads input i;
    `weight`: about how many streamed floats a lane's arithmetic is worth; `types`: of the inputs,
    then of the outputs. Registers hold float32.
    """

    steps: tuple[Step, ...]
    registers: int
    written: tuple[int, ...]
    read: tuple[int, ...]
    weight: int
    types: tuple[str, ...]


def result_type(
    operator: str, operands: Sequence[str], attributes: Mapping[str, Any]
) -> str | None:
    """Return the type of an operator's result on operands of these types.

    None where arithmetic in float32 would not be the operator's meaning. Truth values count as the
    numbers 0 and 1; integers only as what is cast, or an exponent.
    """
    kinds = set(operands)
    if operator == "cast":
        source, target = operands[0], str(attributes["to"])
        exact = source in (_FLOAT, *HALVES, _BOOL, *BYTES) or target == _FLOAT
        exact = exact or (target == _BOOL and source in _INTEGERS)
        return target if exact and {source, target} <= KINDS.keys() else None
    if operator in COMPARISONS:
        return _BOOL if kinds in ({_FLOAT}, {_BOOL}) else None
    if operator in LOGIC:
        return _BOOL if kinds == {_BOOL} else None
    if operator in _TESTS:
        return _BOOL if kinds == {_FLOAT} else None
    if operator == "where":
        chosen = set(operands[1:])
        return operands[1] if operands[0] == _BOOL and chosen in ({_FLOAT}, {_BOOL}) else None
    if operator == "quantize":
        return str(attributes["to"]) if operands[:2] == [_FLOAT, _FLOAT] else None
    if operator == "dequantize":
        return _FLOAT if operands[1] == _FLOAT and kinds <= {_FLOAT, *_INTEGERS} else None
    if operator == "pow":
        return _FLOAT if operands[0] == _FLOAT and operands[1] in (_FLOAT, *_INTEGERS) else None
    return _FLOAT if operands[0] == _FLOAT and kinds <= {_FLOAT, _BOOL} else None


def _expand(
    operator: str, operands: tuple[int, ...], attributes: Mapping[str, Any], first: int
) -> list[Value]:
    """The values, numbered from `first`, of which the last is the operator's result."""
    if operator == "accumulate":
        if len(operands) == 1:
            return [("copy", operands, 0.0, 0.0)]
        made: list[Value] = []
        total = operands[0]
        for operand in operands[1:]:
            made.append(("add", (total, operand), 0.0, 0.0))
            total = first + len(made) - 1
        return made
    if operator == "power":
        return _power(operands[0], float(attributes["exponent"]), first)
    if operator == "cast":
        made_by = {_BOOL: "truth", "float16": "half"}
        made_by |= {name: name for name in ("bfloat16", *BYTES)}  # later steps see it as stored
        return [(made_by.get(attributes["to"], "copy"), operands, 0.0, 0.0)]
    named, choice, defaults = _arguments(operator)
    numbers = []
    for name, default in defaults:
        value = attributes.get(name, default)
        numbers.append(_UNBOUNDED[name] if value is None else float(value))
    p, q = (*numbers, 0.0, 0.0)[:2]
    return [(named.get(attributes.get(*choice), operator), operands, p, q)]


@cache
def _arguments(
    operator: str,
) -> tuple[Mapping[Any, str], tuple[str, Any], tuple[tuple[str, Any], ...]]:
    """Return an operator's instructions, and the attributes they need, with their defaults.

    The first is the one that chooses an instruction.
    """
    spec = declared(operator)
    choice = spec.formula.choice if spec.formula is not None else ""
    default = spec.attributes[choice].default if choice else None
    parameters = parameters_of(spec) if spec.formula is not None else ()
    defaults = tuple((name, spec.attributes[name].default) for name in parameters)
    return names(operator), (choice, default), defaults


def _power(x: int, exponent: float, first: int) -> list[Value]:
    if exponent == 0.5:
        return [("sqrt", (x,), 0.0, 0.0)]
    if exponent == 1.0:
        return [("copy", (x,), 0.0, 0.0)]
    if not (exponent.is_integer() and 1 <= abs(exponent) <= 8):
        return [("power", (x,), exponent, 0.0)]
    made: list[Value] = []
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


def compile_program(
    inputs: int,
    nodes: Sequence[Node],
    results: Sequence[int],
    types: Sequence[str] | None = None,
    known: Mapping[int, float] = _NOTHING,
) -> Program | None:
    """Return the program of the nodes, or None if it has an operator the machine does not know.

    nodes: (operator, operands, attributes); operands and results number the inputs first, then
    the nodes. types: of the inputs, float32 where none are given; known: the inputs that are one
    number each, and never another.
    """
    told = tuple([(name, tuple(of), tuple(attributes.items())) for name, of, attributes in nodes])
    kinds = tuple(types or (_FLOAT,) * inputs)
    given = inputs, told, tuple(results), kinds, tuple(known.items())
    return _compiled(repr(given), *given)  # which tells 0.0 from -0.0


@lru_cache(maxsize=1 << 8)
def _compiled(
    _: str,
    inputs: int,
    nodes: tuple[tuple[str, tuple[int, ...], tuple[tuple[str, Any], ...]], ...],
    results: tuple[int, ...],
    types: tuple[str, ...],
    known: tuple[tuple[int, float], ...],
) -> Program | None:
    numbers = list(range(inputs))
    kinds = list(types)
    values: list[Value] = []
    for operator, operands, items in nodes:
        attributes = dict(items)
        kind = result_type(operator, [kinds[i] for i in operands], attributes)
        made = _expand(
            operator, tuple(numbers[i] for i in operands), attributes, inputs + len(values)
        )
        if kind is None or any(instruction_of(name) is None for name, *_ in made):
            return None
        values.extend(made)
        numbers.append(inputs + len(values) - 1)
        kinds.append(kind)
    if any(result < inputs and kinds[result] not in (_FLOAT, _BOOL) for result in results):
        return None  # float32 does not hold every integer

    values, ends = simplify(inputs, values, [numbers[result] for result in results], dict(known))

    # A result is written straight to its output, once; an input or a second copy is copied there.
    home: dict[int, int] = {}
    for output, value in enumerate(ends):
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
        a, b, c = (places[operands[min(k, len(operands) - 1)]] for k in range(3))
        steps.append(Step(name, places[value], a, b, c, p, q))
    used = [instruction_of(step.name) for step in steps]
    weight = sum(one.cost for one in used if one is not None)
    written = tuple(
        next(v - inputs for v, place in home.items() if place == inputs + o)
        for o in range(len(results))
    )
    read = tuple(last.get(i, -1) for i in range(inputs))
    held = (*kinds[:inputs], *(kinds[result] for result in results))
    return Program(tuple(steps), registers, written, read, weight, held)
