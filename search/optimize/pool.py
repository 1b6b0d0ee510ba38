"""Values under rewriting: every operator application is made once and never changes.

A graph under rewriting is a tuple of values, its outputs. Equal applications are one value, so
common subexpressions are shared, two graphs are equal if their outputs are, and a rewritten graph
shares everything with the old one that did not change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.ir.term import Term, Value
from soapstone.search.rules import language

Items = tuple[tuple[str, Any], ...]


class Reading(NamedTuple):
    """A way to read a value as a term: a symbol and its parameters, applied to the operands."""

    symbol: str
    parameters: tuple[Value, ...]


@dataclass(frozen=True)
class Leaf:
    """A value without operands: an input, or a constant of the language of terms."""

    name: str
    role: Role
    contents: Array | None = None  # of a constant that rules brought in


@dataclass(frozen=True)
class Application:
    """An operator applied to values; `name` is that of its node."""

    operator: str
    items: Items
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    name: str


class Pool:
    """All values that a search has made; a value is a number."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.fixed: list[bool] = []  # whether weights alone determine it
        self.makers: list[Leaf | Application] = []
        self.digests: list[bytes] = []  # what a value is, whatever else the pool has made
        self._leaves: dict[object, int] = {}
        self._known: dict[tuple[str, Items, tuple[int, ...]], tuple[int, ...]] = {}
        self._terms: dict[int, Term] = {}
        self._readings: dict[int, tuple[Reading, ...]] = {}

    def leaf(self, name: str, spec: TensorSpec, role: Role, fixed: bool = False) -> int:
        """Return the value of an input."""
        return self._leaf(name, Leaf(name, role), spec, fixed)

    def constant(self, term: Term, spec: TensorSpec) -> int | None:
        """Return a constant of the language at a shape; None if there is none of that shape."""
        key = (term, spec)
        if key not in self._leaves:
            declared = language.constants()[term.symbol]
            contents = declared.value(term.parameters, spec.shape)
            if contents is None:
                return None
            name = "_".join(map(str, (term.symbol, *term.parameters, *spec.shape)))
            leaf = Leaf(name, Role.PARAMETER, contents.astype(spec.dtype))
            self._terms[self._leaf(key, leaf, spec, True)] = term
        return self._leaves[key]

    def term_of(self, value: int) -> Term | None:
        """Return the constant of the language that a value is, or None."""
        return self._terms.get(value)

    def apply(
        self, name: str, inputs: Sequence[int], attributes: Mapping[str, Any], called: str = ""
    ) -> tuple[int, ...]:
        """Return the outputs of an operator on values.

        Raises:
            GraphError: the operator does not take them.
        """
        spec = operator(name)
        items = tuple(sorted(spec.normalise(attributes).items()))
        return self.apply_normal(name, items, tuple(inputs), called)

    def apply_normal(
        self, name: str, items: Items, inputs: tuple[int, ...], called: str = ""
    ) -> tuple[int, ...]:
        """Return the outputs of an operator whose attributes are in normal form."""
        inputs = self.in_order(name, inputs)
        key = (name, items, inputs)
        outputs = self._known.get(key)
        if outputs is None:
            specs = _specs(name, items, tuple(self.specs[i] for i in inputs))
            fixed = all(self.fixed[i] for i in inputs) and bool(inputs)
            first = len(self.specs)
            outputs = tuple(range(first, first + len(specs)))
            maker = Application(name, items, inputs, outputs, called or name)
            behind = b"".join(self.digests[i] for i in inputs)
            for position, spec in enumerate(specs):
                self._new(maker, spec, fixed, _digest(name, items, position, behind))
            self._known[key] = outputs
        return outputs

    def in_order(self, name: str, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """Return the operands of an operator, those of commutative ones in canonical order."""
        if len(inputs) != 2 or name not in _commutative():
            return inputs
        x, y = sorted(inputs, key=self._place)
        return x, y

    def _place(self, value: int) -> tuple[int, str, bytes]:
        """Return the sort key of a commutative operand: its rank, and what makes it.

        So the operands of equal blocks of a network have the same order, whatever precedes the
        blocks.
        """
        maker = self.makers[value]
        made = "" if isinstance(maker, Leaf) else maker.operator
        return -self.specs[value].rank, made, self.digests[value]

    def _leaf(self, key: object, leaf: Leaf, spec: TensorSpec, fixed: bool) -> int:
        if key not in self._leaves:
            self._leaves[key] = len(self.specs)
            self._new(leaf, spec, fixed, _digest(leaf.name, spec))
        return self._leaves[key]

    def _new(self, maker: Leaf | Application, spec: TensorSpec, fixed: bool, digest: bytes) -> None:
        self.digests.append(digest)
        self.specs.append(spec)
        self.fixed.append(fixed)
        self.makers.append(maker)

    def readings(self, value: int) -> tuple[Reading, ...]:
        """Return the ways to read a value as a term on its operands; none if it is opaque."""
        found = self._readings.get(value)
        if found is None:
            maker = self.makers[value]
            found = () if isinstance(maker, Leaf) else self._read(maker, value)
            self._readings[value] = found
        return found

    def operands(self, value: int) -> tuple[int, ...]:
        """Return the operands of a value."""
        maker = self.makers[value]
        return () if isinstance(maker, Leaf) else maker.inputs

    def _read(self, maker: Application, value: int) -> tuple[Reading, ...]:
        position = maker.outputs.index(value)
        specs = [self.specs[i] for i in maker.inputs]
        attributes = dict(maker.items)
        return tuple(
            Reading(form.symbol, parameters)
            for form in _forms().get(maker.operator, ())
            if form.output == position and form.operands == len(specs)
            for parameters in form.read(attributes, *specs)
        )

    def order(self, outputs: Iterable[int], stop: frozenset[int] = frozenset()) -> list[int]:
        """Return the values that outputs depend on, operands first, without those behind `stop`."""
        seen: set[int] = set()
        ordered: list[int] = []
        pending: list[tuple[int, bool]] = [(value, False) for value in reversed(list(outputs))]
        while pending:
            value, ready = pending.pop()
            if ready:
                ordered.append(value)
                continue
            if value in seen:
                continue
            seen.add(value)
            pending.append((value, True))
            if value not in stop:
                pending += [(i, False) for i in reversed(self.operands(value)) if i not in seen]
        return ordered


def _digest(*parts: object) -> bytes:
    return blake2b(repr(parts).encode(), digest_size=8).digest()


@lru_cache(maxsize=1 << 16)
def _specs(name: str, items: Items, inputs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    return tuple(operator(name).bind(inputs, dict(items)).output_specs)


@lru_cache(maxsize=1)
def _forms() -> Mapping[str, tuple[Any, ...]]:
    """Return the forms of each operator."""
    found: dict[str, list[Any]] = {}
    for declared in language.forms().values():
        found.setdefault(declared.spec.name, []).append(declared.form)
    return {name: tuple(forms) for name, forms in found.items()}


@lru_cache(maxsize=1)
def _commutative() -> frozenset[str]:
    """Return the commutative operators."""
    return frozenset(language.forms()[symbol].spec.name for symbol in language.commutative())
