"""Rules of other systems: read from a plain JSON form, and judged by the rule set.

A foreign rule is two lists of operators and the mapping of their outputs (Jia et al., TASO, section
2.3.1), in symbols of this project (`docs/rules.md`). It is refuted where a counterexample is found;
otherwise it is in the set, or derivable from it, or unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields
from soapstone.ir.files.json_fields import Fields
from soapstone.ir.term import Term, Value, is_variable, parse, subterms
from soapstone.rules.laws.domain import EXACT
from soapstone.search.rules import language
from soapstone.search.rules.proof import equation
from soapstone.search.rules.rule import RuleError, Terms

FORMAT, VERSION = "soapstone-foreign-rules", 1
_LETTERS = "xyzwuvtrqnm"


@dataclass(frozen=True)
class ForeignRule:
    """A rule of another system in terms.

    `where` holds the conditions that came with it, `domain` the numbers beside the reals for which
    it is said: `integers`, `booleans`.
    """

    name: str
    source: Terms
    target: Terms
    ranks: Mapping[str, int]
    where: tuple[str, ...] = ()
    domain: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"  where {' and '.join(self.where)}" if self.where else ""
        return f"{equation(self.source, self.target)}{where}"


def load(path: str | Path) -> tuple[ForeignRule, ...]:
    """Return the rules of a file.

    Raises:
        RuleError: a field is missing, unknown or wrong; names the rule, the operator and the field.
    """
    return rules_from_json(json_fields.read(path, RuleError, own=False), f"file {str(path)!r}")


def rules_from_json(data: Any, where: str) -> tuple[ForeignRule, ...]:
    """Return the rules of a parsed file; raises as `load` does."""
    top = Fields(data, where, RuleError)
    top.header(FORMAT, VERSION)
    rules = tuple(_rule(item, position) for position, item in enumerate(top.items("rules")))
    top.finish()
    return rules


def _rule(data: Any, position: int) -> ForeignRule:
    named = isinstance(data, dict) and isinstance(data.get("name"), str)
    each = Fields(data, f"rule {data['name']!r}" if named else f"rule {position}", RuleError)
    name = each.text("name")
    given = each.mapping("inputs")
    inputs: dict[str, Term] = {}
    ranks: dict[str, int] = {}
    reader = Fields(given, f"{each.where}: inputs", RuleError)
    for number, tensor in enumerate(given):
        turn, place = divmod(number, len(_LETTERS))
        # A letter is its own variable; other names get one that is not taken.
        inputs[tensor] = Term(tensor if is_variable(tensor) else f"{_LETTERS[place]}9{turn}")
        ranks[inputs[tensor].symbol] = reader.integer(tensor)
    source = _graph(each, "source", inputs, ranks)
    target = _graph(each, "target", inputs, ranks)
    pairs = each.items("outputs")
    if not pairs:
        raise each.fail("outputs", pairs, "at least one pair of tensors")
    sides: list[tuple[Term, Term]] = []
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2):
            raise each.fail("outputs", pair, "a pair: a tensor of source and one of target")
        for tensor, graph, side in zip(pair, (source, target), ("source", "target")):
            if not isinstance(tensor, str) or tensor not in graph:
                raise each.fail("outputs", tensor, f"a tensor of {side}: {', '.join(graph)}")
        sides.append((source[pair[0]], target[pair[1]]))
    where = each.texts("where") if "where" in data else ()
    domain = each.texts("domain") if "domain" in data else ()
    if not set(domain) <= set(EXACT):
        raise each.fail("domain", list(domain), f"some of {', '.join(EXACT)}")
    each.finish()
    left, right = zip(*sides)
    return ForeignRule(name, tuple(left), tuple(right), ranks, where, domain)


def _graph(
    rule: Fields, side: str, inputs: Mapping[str, Term], ranks: dict[str, int]
) -> dict[str, Term]:
    """Return the tensors of a side by name, and note the ranks of its constants."""
    tensors = dict(inputs)
    forms, constants = language.forms(), language.constants()
    for position, item in enumerate(rule.items(side)):
        each = Fields(item, f"{rule.where}: {side} operator {position}", RuleError)
        name, symbol = each.text("name"), each.text("operator")
        if name in tensors:
            raise each.fail("name", name, "a name that no other tensor has")
        values = tuple(_value(each, value) for value in each.items("parameters"))
        operands = []
        for tensor in each.texts("inputs"):
            if tensor not in tensors:
                raise each.fail("inputs", tensor, f"one of {', '.join(tensors)}")
            operands.append(tensors[tensor])
        if symbol in constants:
            constant = constants[symbol]
            _count(each, "parameters", values, len(constant.parameters))
            _count(each, "inputs", operands, 0)
            tensors[name] = Term(symbol, values)
            rank = each.integer("rank") if constant.rank is None else constant.rank
            ranks[str(tensors[name])] = rank
        else:
            both = ("split0", "split1") if symbol == "split" else (symbol,)
            if any(part not in forms for part in both):
                have = ", ".join(sorted({*forms, *constants, "split"} - {"split0", "split1"}))
                raise each.fail("operator", symbol, f"one of {have}")
            form = forms[both[0]].form
            _count(each, "parameters", values, len(form.parameters))
            _count(each, "inputs", operands, form.operands)
            for output, part in enumerate(both):
                label = f"{name}.{output}" if len(both) > 1 else name
                tensors[label] = Term(part, values, tuple(operands))
        each.finish()
    return tensors


def _count(each: Fields, name: str, found: Any, needed: int) -> None:
    if len(found) != needed:
        raise each.fail(name, [str(item) for item in found], f"{needed} of them")


def _value(each: Fields, value: Any) -> Value:
    if type(value) is int:
        return value
    try:
        (parsed,) = parse(f"word[{value}]").parameters if isinstance(value, str) else ()
    except (GraphError, ValueError):
        raise each.fail("parameters", value, "numbers, words or variables") from None
    return parsed


def to_json(rule: ForeignRule) -> dict[str, Any]:
    """Return a rule in the form that `load` reads."""
    forms = language.forms()
    inputs = {
        term.symbol: rule.ranks[term.symbol]
        for term in subterms(rule.source + rule.target)
        if term.is_variable
    }
    sides: list[dict[Term, str]] = []
    lists: list[list[dict[str, Any]]] = []
    for prefix, terms in (("s", rule.source), ("t", rule.target)):
        names: dict[Term, str] = {}
        operators: list[dict[str, Any]] = []
        for term in subterms(terms):
            if term.is_variable:
                names[term] = term.symbol
                continue
            split = term.symbol in ("split0", "split1")
            twin = Term("split0" if term.symbol == "split1" else "split1", *_rest(term))
            if split and twin in names:
                names[term] = f"{names[twin][:-1]}{term.symbol[-1]}"
                continue
            label = f"{prefix}{len(operators)}op"
            names[term] = f"{label}.{term.symbol[-1]}" if split else label
            item: dict[str, Any] = {
                "name": label,
                "operator": "split" if split else term.symbol,
                "parameters": list(term.parameters),
                "inputs": [names[operand] for operand in term.operands],
            }
            if term.symbol not in forms and language.constants()[term.symbol].rank is None:
                item["rank"] = rule.ranks[str(term)]
            operators.append(item)
        sides.append(names)
        lists.append(operators)
    outputs = [[sides[0][one], sides[1][other]] for one, other in zip(rule.source, rule.target)]
    result = {"name": rule.name, "inputs": inputs, "source": lists[0], "target": lists[1]}
    said = {"where": list(rule.where), "domain": list(rule.domain)}
    return {**result, "outputs": outputs, **{name: texts for name, texts in said.items() if texts}}


def _rest(term: Term) -> tuple[tuple[Value, ...], Terms]:
    return term.parameters, term.operands
