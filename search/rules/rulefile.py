"""Rule files: JSON, one rule a line, in which the same contents are always the same bytes.

Reading is strict: every field that is missing, unknown or wrong is an error that names the rule and
the field. Steps of proofs are short lists, `["matmul-associative", "->", [0], {"x": "relu(y)"}]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from soapstone.garbage_collection import paused
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields
from soapstone.ir.files.json_fields import Fields
from soapstone.ir.term import Term, Value, is_variable, parse, size
from soapstone.search.rules.proof import Chain, Proof, Step
from soapstone.search.rules.rule import (
    FORMAT,
    SHIPPED,
    VERSION,
    Rejected,
    Rule,
    RuleError,
    RuleFile,
    StatedSpace,
    Terms,
    leaves,
)

# Writing


def step_json(step: Step) -> list[Any]:
    """Return a step as a short list: law, direction, path and what the match leaves open.

    A binding of a parameter variable has its name in brackets.
    """
    result: list[Any] = [step.law, "->" if step.forward else "<-", list(step.path)]
    if step.bindings:
        result.append(
            {
                name if isinstance(value, Term) else f"[{name}]": (
                    str(value) if isinstance(value, Term) else value
                )
                for name, value in sorted(step.bindings.items())
            }
        )
    return result


def proof_json(proof: Proof) -> list[list[list[Any]]]:
    """Return a proof as lists: chains of steps."""
    return [[step_json(step) for step in chain] for chain in proof]


def rule_json(rule: Rule) -> dict[str, Any]:
    """Return a rule as the file has it."""
    return {
        "id": rule.identity,
        "source": [str(term) for term in rule.source],
        "target": [str(term) for term in rule.target],
        "ranks": [dict(ranks) for ranks in rule.ranks],
        "guard": list(rule.guard),
        "size": rule.size,
        "domain": list(rule.domain),
        "derivable": rule.derivable,
        "spaces": list(rule.spaces),
        "proof": proof_json(rule.proof),
    }


def rejected_json(candidate: Rejected) -> dict[str, Any]:
    """Return a rejected candidate as the file has it."""
    return {
        "source": [str(term) for term in candidate.source],
        "target": [str(term) for term in candidate.target],
        "reason": candidate.reason,
        "spaces": list(candidate.spaces),
    }


def space_json(space: StatedSpace) -> dict[str, Any]:
    """Return a space as the file has it."""
    return {
        "name": space.name,
        "max_operators": space.max_operators,
        "inputs": [[name, kind, list(shape)] for name, kind, shape in space.inputs],
        "operators": [list(use) for use in space.operators],
        "repeated": space.repeated,
    }


def dumps(file: RuleFile) -> str:
    """Return the text of a rule file: one space, rule or rejected candidate a line."""

    def line(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    def block(items: Iterable[Any]) -> str:
        lines = ",\n".join(line(item) for item in items)
        return f"[\n{lines}\n]" if lines else "[]"

    parts = {
        "format": line(FORMAT),
        "version": line(VERSION),
        "laws": line(file.laws),
        "max_operators": line(file.max_operators),
        "spaces": block(space_json(space) for space in file.spaces),
        "counts": line({name: dict(counts) for name, counts in file.counts.items()}),
        "rules": block(rule_json(rule) for rule in file.rules),
        "unproved": block(rejected_json(item) for item in file.unproved),
        "refuted": block(rejected_json(item) for item in file.refuted),
    }
    return "{\n" + ",\n".join(f'"{name}": {text}' for name, text in parts.items()) + "\n}\n"


def save(file: RuleFile, path: str | Path) -> None:
    """Write a rule file, whole or not at all.

    Raises:
        RuleError: the folder does not exist.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise RuleError(f"file {str(path)!r}: folder {str(target.parent)!r} does not exist")
    json_fields.save(target, dumps(file))


# Reading


def load(path: str | Path = SHIPPED) -> RuleFile:
    """Return the rules of a file; by default of the one that the package carries, read once.

    Raises:
        RuleError: a field is missing, unknown or wrong; names the rule and the field.
    """
    return _shipped() if path == SHIPPED else _loaded(path)


@lru_cache(maxsize=1)
def _shipped() -> RuleFile:
    return _loaded(SHIPPED)


def _loaded(path: str | Path) -> RuleFile:
    with paused():  # a collector that walks over terms, which all stay, is a third of a load
        return file_from_json(json_fields.read(path, RuleError, own=False), f"file {str(path)!r}")


def file_from_json(data: Any, where: str) -> RuleFile:
    """Return the rules of a parsed file; raises as `load` does."""
    top = Fields(data, where, RuleError)
    top.header(FORMAT, VERSION)
    counts = Fields(top.mapping("counts"), f"{where}: counts", RuleError)
    result = RuleFile(
        laws=top.text("laws"),
        max_operators=top.integer("max_operators", 1),
        spaces=tuple(_space(item, f"space {at}") for at, item in enumerate(top.items("spaces"))),
        counts={name: _counts(counts.mapping(name), name) for name in top.mapping("counts")},
        rules=tuple(rule_from_json(i, f"rule {n}") for n, i in enumerate(top.items("rules"))),
        unproved=_rejected(top, "unproved"),
        refuted=_rejected(top, "refuted"),
    )
    top.finish()
    names = {space.name for space in result.spaces}
    for rule in result.rules:
        for name in rule.spaces:
            if name not in names:
                raise RuleError(
                    f"rule {rule.identity}: field 'spaces': {name!r} found,"
                    f" one of {', '.join(sorted(names))} needed"
                )
    return result


def _counts(data: dict[str, Any], where: str) -> dict[str, int]:
    each = Fields(data, f"counts: {where}", RuleError)
    return {name: each.integer(name) for name in data}


def _space(data: Any, where: str) -> StatedSpace:
    each = Fields(data, where, RuleError)
    inputs = []
    for item in each.items("inputs"):
        if (
            not (isinstance(item, list) and len(item) == 3)
            or not all(isinstance(word, str) for word in item[:2])
            or not (isinstance(item[2], list) and all(type(n) is int and n > 0 for n in item[2]))
        ):
            raise each.fail("inputs", item, "[name, kind, shape]")
        inputs.append((item[0], item[1], tuple(item[2])))
    operators = []
    for item in each.items("operators"):
        if not (
            isinstance(item, list) and len(item) == 2 and all(isinstance(w, str) for w in item)
        ):
            raise each.fail("operators", item, "[operator, kinds]")
        operators.append((item[0], item[1]))
    result = StatedSpace(
        *(each.text("name"), each.integer("max_operators", 1), tuple(inputs), tuple(operators)),
        bool(each.take("repeated", "true or false", lambda v: isinstance(v, bool))),
    )
    each.finish()
    return result


def _terms(each: Fields, name: str) -> Terms:
    texts = each.texts(name)
    if not texts:
        raise each.fail(name, [], "at least one term")
    try:
        return tuple(parse(text) for text in texts)
    except GraphError as error:
        raise RuleError(f"{each.where}: field {name!r}: {error}") from None


def _rejected(top: Fields, name: str) -> tuple[Rejected, ...]:
    each = enumerate(top.items(name))
    return tuple(rejected_from_json(item, f"{name} {number}") for number, item in each)


def rejected_from_json(data: Any, where: str) -> Rejected:
    """Return the candidate of a parsed file; raises as `load` does."""
    each = Fields(data, where, RuleError)
    result = Rejected(
        _terms(each, "source"), _terms(each, "target"), each.text("reason"), each.texts("spaces")
    )
    each.finish()
    return result


def rule_from_json(data: Any, where: str) -> Rule:
    """Return the rule that an entry of a file describes.

    Raises:
        RuleError: a field is missing or wrong; names the rule and the field.
    """
    named = isinstance(data, dict) and isinstance(data.get("id"), str)
    each = Fields(data, f"rule {data['id']}" if named else where, RuleError)
    source, target = _terms(each, "source"), _terms(each, "target")
    if len(source) != len(target):
        raise each.fail("target", [*map(str, target)], f"as many terms as source, {len(source)},")
    result = Rule(
        identity=each.text("id"),
        source=source,
        target=target,
        ranks=_ranks(each, leaves(source + target)),
        guard=each.texts("guard"),
        proof=proof_from_json(each.items("proof"), each.where),
        domain=each.texts("domain"),
        size=each.integer("size", 1),
        derivable=bool(each.take("derivable", "true or false", lambda v: isinstance(v, bool))),
        spaces=each.texts("spaces"),
    )
    each.finish()
    found = max(size(source), size(target))
    if result.size != found:
        raise each.fail("size", result.size, f"{found}, the operators of the larger side,")
    if len(result.proof) != len(source):
        raise each.fail("proof", len(result.proof), f"a chain for each of {len(source)} outputs")
    if not result.directions:
        raise each.fail("target", [*map(str, target)], "variables of one side within the other's")
    return result


def _ranks(each: Fields, needed: tuple[str, ...]) -> tuple[dict[str, int], ...]:
    result = []
    for item in each.items("ranks"):
        inner = Fields(item, f"{each.where}: ranks", RuleError)
        result.append({name: inner.integer(name) for name in item})
        if set(item) != set(needed):
            raise each.fail("ranks", item, f"the ranks of {', '.join(needed)}")
    if not result:
        raise each.fail("ranks", [], "at least one typing")
    return tuple(result)


def proof_from_json(data: list[Any], where: str) -> Proof:
    """Return the proof that lists of steps say.

    Raises:
        RuleError: a step has another form; names rule, output and step.
    """

    def chains() -> Iterator[Chain]:
        for output, chain in enumerate(data):
            if not isinstance(chain, list):
                raise RuleError(f"{where}: proof of output {output}: a list of steps needed")
            yield tuple(
                _step(item, f"{where}: proof of output {output}, step {position}")
                for position, item in enumerate(chain)
            )

    return tuple(chains())


def _step(data: Any, where: str) -> Step:
    def fail(found: Any, needed: str) -> RuleError:
        return RuleError(f"{where}: {json.dumps(found)[:60]} found, {needed} needed")

    if not isinstance(data, list) or len(data) not in (3, 4):
        raise fail(data, "[law, direction, path] and maybe bindings")
    law, direction, path = data[:3]
    if not isinstance(law, str):
        raise fail(law, "the name of a law")
    if direction not in ("->", "<-"):
        raise fail(direction, "-> or <-")
    if not isinstance(path, list) or not all(type(item) is int and item >= 0 for item in path):
        raise fail(path, "a list of operand positions")
    given = data[3] if len(data) == 4 else {}
    if not isinstance(given, dict):
        raise fail(given, "an object of bindings")
    bindings: dict[str, Term | Value] = {}
    for name, value in given.items():
        inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
        if not is_variable(inner):
            raise fail(name, "a variable, a parameter's in brackets,")
        if inner != name:
            if not isinstance(value, str) and type(value) is not int:
                raise fail(value, "a parameter's value")
            bindings[inner] = value
            continue
        try:
            bindings[name] = parse(value)
        except (GraphError, TypeError, AttributeError):
            raise fail(value, "a term") from None
    return Step(law, direction == "->", tuple(path), bindings)
