"""Compiled rewrites: one direction of a law or rule as functions over an e-graph.

Equality saturation spends its time matching patterns and building their instances, so each rewrite
becomes three small Python functions of straight-line code: `find` lists the matches at a node,
`known` tells whether the result is already represented, `build` adds the exact instance of both
sides. The e-graph (`egraph.py`) and these functions share the tables named in `HEADER`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

from soapstone.ir.term import (
    SPLITS,
    Term,
    Value,
    instantiate_value,
    is_variable,
    parameter_variables,
    subterms,
    variables,
)

if TYPE_CHECKING:
    from soapstone.rules.proving.egraph import EGraph

Bound: TypeAlias = "tuple[Any, ...]"  # nodes of tensor variables, then parameters' values
Finder: TypeAlias = "Callable[[EGraph, int], list[Bound]]"
Builder: TypeAlias = "Callable[[EGraph, Bound], tuple[int, int] | None]"
Lookup: TypeAlias = "Callable[[EGraph, Bound], tuple[int, ...]]"
HEADER = "children, parameters, root, members = g.children, g.parameters, g.root, g.members"


class Heads:
    """Numbers for symbols with their parameters, the same for all e-graphs of a process."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, tuple[Value, ...]], int] = {}
        self.symbols: list[str] = []
        self.parameters: list[tuple[Value, ...]] = []
        self.split: list[bool] = []

    def number(self, symbol: str, parameters: tuple[Value, ...] = ()) -> int:
        """Return the number of a symbol with parameters."""
        key = (symbol, parameters)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.symbols)
            self.symbols.append(symbol)
            self.parameters.append(parameters)
            self.split.append(symbol in SPLITS)
        return number


HEADS = Heads()


def splits(whole: Value) -> list[tuple[Value, Value]]:
    """Return the pairs that add up to a parameter's value: positive numbers, or words of a sum."""
    if isinstance(whole, int):
        return [(part, whole - part) for part in range(1, whole)]
    words = whole.split("+")
    pairs: list[tuple[Value, Value]] = []
    for count in range(1, len(words)):
        for chosen in combinations(range(len(words)), count):
            rest = "+".join(word for at, word in enumerate(words) if at not in chosen)
            pairs.append(("+".join(words[at] for at in chosen), rest))
    return pairs


def determined(terms: Iterable[Term]) -> set[str]:
    """Return the variables that matching a side binds: all but those only in a sum."""
    bound: set[str] = set()
    for term in terms:
        for part in term.subterms():
            if part.is_variable:
                bound.add(part.symbol)
            bound.update(str(value) for value in part.parameters if is_variable(value))
    return bound


@dataclass(frozen=True)
class Rewrite:
    """One direction of an equation between graphs: where `left` is, `right` may be put.

    Attributes:
        name, forward: the law or rule it is a direction of.
        left, right: the graphs, one term an output.
        ranks: what it is said for: the ranks of variables and constants, by text, in rows. No row
            means all tensor variables of one rank from 1 to 4.
        where: conditions, as laws and rules state them.
        tensors, values: the variables of tensors and of parameters, in the order of a `Bound`.
        constants: the constants of both sides.
        extra: their positions, where `left` does not have them: instantiated from the problem.
    """

    name: str
    forward: bool
    left: tuple[Term, ...]
    right: tuple[Term, ...]
    ranks: tuple[Mapping[str, int], ...] = ()
    where: tuple[str, ...] = ()
    tensors: tuple[str, ...] = field(init=False)
    values: tuple[str, ...] = field(init=False)
    constants: tuple[Term, ...] = field(init=False)
    extra: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        both = (*self.left, *self.right)
        tensors, values = variables(both), parameter_variables(both)
        here = (variables(self.left), parameter_variables(self.left))
        known = [name in here[0] for name in tensors] + [name in here[1] for name in values]
        put = object.__setattr__
        put(self, "tensors", tensors)
        put(self, "values", values)
        parts = (part for part in subterms(both) if not part.operands and not part.is_variable)
        put(self, "constants", tuple(dict.fromkeys(parts)))
        put(self, "extra", tuple(i for i, found in enumerate(known) if not found))

    @cached_property
    def given(self) -> tuple[frozenset[str], frozenset[str]]:
        """The variables that matching the left, or the right, side binds."""
        return frozenset(determined(self.left)), frozenset(determined(self.right))

    @cached_property
    def reversible(self) -> bool:
        """Whether the right side determines the left, and is not just any tensor."""
        tensors, values = variables(self.right), parameter_variables(self.right)
        return (
            set(variables(self.left)) <= set(tensors)
            and set(parameter_variables(self.left)) <= set(values)
            and not any(term.is_variable for term in self.right)
        )

    @cached_property
    def finders(self) -> tuple[Finder, ...]:
        """For each output, the function that lists the matches at a node that is the output."""
        return tuple(self._finder(first) for first in range(len(self.left)))

    @cached_property
    def builders(self) -> tuple[Builder, ...]:
        """For each output, the function that adds the exact instances of both sides.

        It adds nothing, and returns None, if one of them is ill-typed or their shapes differ.
        """
        return tuple(self._builder(output) for output in range(len(self.left)))

    @cached_property
    def known(self) -> Lookup:
        """The function that looks up the right side's outputs: their nodes, -1 where none is."""
        return self._known()

    def types(self, graph: EGraph, bound: Bound) -> tuple[int, ...]:
        """Return the types of the tensor variables and of the constants, at a match."""
        count = len(self.tensors)
        types = [graph.types[node] for node in bound[:count]]
        if self.constants:
            given = dict(zip(self.values, bound[count:]))
            for term in self.constants:
                values = tuple(instantiate_value(v, given) or v for v in term.parameters)
                types.append(graph.type_of(HEADS.number(term.symbol, values), ()))
        return tuple(types)

    def bindings(self, graph: EGraph, bound: Bound) -> dict[str, Term | Value]:
        """Return what a match binds, as terms and values."""
        result: dict[str, Term | Value] = dict(zip(self.values, bound[len(self.tensors) :]))
        result.update((name, graph.term(node)) for name, node in zip(self.tensors, bound))
        return result

    @property
    def _names(self) -> tuple[str, ...]:
        """The names in generated code: those of tensors and of values differ."""
        return (*(f"x_{name}" for name in self.tensors), *(f"v_{name}" for name in self.values))

    def _finder(self, first: int) -> Finder:
        lines = ["def run(g, n0):", f" {HEADER}", " found = []"]
        scope = _Scope(lines)
        order = [first, *(i for i in range(len(self.left)) if i != first)]
        for position, output in enumerate(order):
            pattern = self.left[output]
            if pattern.is_variable:
                if not position:
                    scope.bind(f"x_{pattern.symbol}", "n0")
                continue
            name = "n0"
            if position:
                name = scope.loop(f"g.nodes_of({pattern.symbol!r})")
            scope.enter(pattern, name)
        scope.sums()
        items = [name if name in scope.bound else "None" for name in self._names]
        scope.line(f"found.append(({', '.join(items)}{',' if len(items) == 1 else ''}))")
        lines.append(" return found")
        finder: Finder = _compiled(lines)
        return finder

    def _builder(self, output: int) -> Builder:
        lines = ["def run(g, b):"]
        write = _Writer(lines, self._unpack(lines))
        pair = (self.left[output], self.right[output])
        types = [write.type(term) for term in pair]
        lines.append(f" if g.shape_of[{types[0]}] != g.shape_of[{types[1]}]: return None")
        nodes = [write.node(term) for term in pair]
        lines.append(f" return {nodes[0]}, {nodes[1]}")
        builder: Builder = _compiled(lines)
        return builder

    def _known(self) -> Lookup:
        lines = ["def run(g, b):"]
        write = _Writer(lines, self._unpack(lines))
        looks = [write.look(term) for term in self.right]
        lines.append(f" return ({', '.join(looks)},)")
        lookup: Lookup = _compiled(lines)
        return lookup

    def _unpack(self, lines: list[str]) -> frozenset[str]:
        if self._names:
            lines.append(f" {', '.join(self._names)}, = b")
        return frozenset(self._names)


class _Scope:
    """Writes the nested loops of a pattern's match."""

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.indent, self.leave = lines, 1, "return found"
        self.bound: set[str] = set()
        self.pending: list[tuple[str, str]] = []  # sums, and the values they must have
        self.count = 0

    def new(self) -> int:
        self.count += 1
        return self.count

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text)

    def need(self, test: str) -> None:
        self.line(f"if not ({test}): {self.leave}")

    def loop(self, items: str) -> str:
        name = f"n{self.new()}"
        self.line(f"for {name} in {items}:")
        self.indent += 1
        self.leave = "continue"
        return name

    def bind(self, name: str, item: str) -> None:
        if name not in self.bound:
            self.bound.add(name)
            self.line(f"{name} = {item}")
        elif name[0] == "x":
            self.need(f"root[{name}] == root[{item}]")
        else:
            self.need(f"{name} == {item}")

    def enter(self, pattern: Term, node: str) -> None:
        """Match an operator at a node: parameters and variables first, then what is inside."""
        if pattern.parameters:
            self.line(f"p{node} = parameters[{node}]")
        for position, value in enumerate(pattern.parameters):
            item = f"p{node}[{position}]"
            if is_variable(value):
                self.bind(f"v_{value}", item)
            elif isinstance(value, str) and "+" in value:
                self.pending.append((value, item))
            else:
                self.need(f"{item} == {value!r}")
        if pattern.operands:
            self.line(f"c{node} = children[{node}]")
        inside = []
        for position, operand in enumerate(pattern.operands):
            if operand.is_variable:
                self.bind(f"x_{operand.symbol}", f"c{node}[{position}]")
            else:
                inside.append((position, operand))
        for position, operand in inside:
            group = f"members[root[c{node}[{position}]]].get({operand.symbol!r}, ())"
            self.enter(operand, self.loop(group))

    def sums(self) -> None:
        """Write the checks of sums; parts that nothing else binds are tried in all ways."""
        for text, item in self.pending:
            parts = [f"v_{part}" for part in text.split("+")]
            if all(part in self.bound for part in parts):
                self.need(f"total({', '.join(parts)}) == {item}")
            elif len(parts) == 2 and not any(part in self.bound for part in parts):
                self.line(f"for {parts[0]}, {parts[1]} in splits({item}):")
                self.indent += 1
                self.leave = "continue"
                self.bound.update(parts)


class _Writer:
    """Writes the straight-line code that types, adds or looks up an instance of a term."""

    def __init__(self, lines: list[str], names: frozenset[str]) -> None:
        self.lines, self.names = lines, names
        self.done: dict[tuple[str, Term], str] = {}

    def head(self, term: Term) -> str:
        key = ("head", Term(term.symbol, term.parameters))
        if key in self.done:
            return self.done[key]
        if not any(isinstance(value, str) and self._varies(value) for value in term.parameters):
            self.done[key] = str(HEADS.number(term.symbol, term.parameters))
            return self.done[key]
        values = []
        for value in term.parameters:
            if isinstance(value, str) and "+" in value:
                values.append(f"total({', '.join(map(self._value, value.split('+')))})")
            else:
                values.append(self._value(value))
        text = f"number({term.symbol!r}, ({', '.join(values)},))"
        self.done[key] = self._assign("h", text)
        return self.done[key]

    def type(self, term: Term) -> str:
        """Write the code of an instance's type; it returns None where it has none."""
        return self._instance("t", "g.types[x_{}]", "type_of", term)

    def node(self, term: Term) -> str:
        """Write the code that adds an instance."""
        return self._instance("m", "x_{}", "node", term)

    def _instance(self, kind: str, variable: str, make: str, term: Term) -> str:
        def text(term: Term) -> str:
            if term.is_variable:
                return variable.format(term.symbol)
            written = (self._instance(kind, variable, make, each) for each in term.operands)
            operands = "".join(f"{each}, " for each in written)
            return f"g.{make}({self.head(term)}, ({operands}))"

        return self._written(kind, term, text, "{} < 0")

    def look(self, term: Term) -> str:
        """Write the code that finds a node equal to an instance, -1 if there is none."""

        def text(term: Term) -> str:
            if term.is_variable:
                return f"x_{term.symbol}"
            parts = [self.look(operand) for operand in term.operands]
            operands = "".join(f"{part}, " for part in parts)
            inner = [p for p, operand in zip(parts, term.operands) if not operand.is_variable]
            guard = f" if {' >= 0 and '.join(inner)} >= 0 else -1" if inner else ""
            return f"g.look({self.head(term)}, ({operands})){guard}"

        return self._written("k", term, text, "")

    def _written(self, kind: str, term: Term, text: Callable[[Term], str], fail: str) -> str:
        key = (kind, term)
        if key not in self.done:
            name = self._assign(kind, text(term))
            if fail and not (term.is_variable and kind == "m"):
                self.lines.append(f" if {fail.format(name)}: return None")
            self.done[key] = name
        return self.done[key]

    def _assign(self, kind: str, text: str) -> str:
        name = f"{kind}{len(self.done)}_{len(self.lines)}"
        self.lines.append(f" {name} = {text}")
        return name

    def _value(self, value: Value) -> str:
        return f"v_{value}" if f"v_{value}" in self.names else repr(value)

    def _varies(self, value: str) -> bool:
        return any(f"v_{part}" in self.names for part in value.split("+"))


def total(*parts: Value) -> Value:
    """Return the sum of parameters' values, as `instantiate_value` does, or a word for none."""
    names = [f"a{position}" for position in range(len(parts))]
    added = instantiate_value("+".join(names), dict(zip(names, parts)))
    return "undefined" if added is None else added


def _compiled(lines: list[str]) -> Any:
    """Return the function `run` that the lines define.

    Nothing of a file is run: only variables stand in the lines as they are, a letter and digits
    (`is_variable`); every other word of a term is written by `repr`.
    """
    names: dict[str, Any] = {}
    exec("\n".join(lines), {"splits": splits, "total": total, "number": HEADS.number}, names)
    return names["run"]
