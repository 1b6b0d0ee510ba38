"""Chains of substitutions: the result of a search, in a file, applied again without a search.

A chain holds the passes that were kept, each with the steps in every distinct piece, in order.
Values are identified by content, not by the order of creation, so pieces, matches and their numbers
are the same when a graph is rewritten again. Each step is checked again when it is applied.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields
from soapstone.ir.files.json_fields import Fields
from soapstone.ir.graph import Graph
from soapstone.search.optimize.backtracking import Step

FORMAT, VERSION = "soapstone-chain", 1


@dataclass(frozen=True)
class Pass:
    """One pass over a graph: the whole, or its pieces when cuts are shifted by a number."""

    shift: float | None
    parts: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True)
class Chain:
    """The substitutions that lead from a graph, known by its hash, to a better one."""

    graph: str
    target: str
    passes: tuple[Pass, ...]

    def checked(self, graph: Graph, target: str) -> Chain:
        """Return the chain, checked against a graph and a target.

        Raises:
            GraphError: it is of another graph, or for another target.
        """
        for what, found, needed in (
            ("graph", self.graph, graph.structural_hash),
            ("target", self.target, target),
        ):
            if found != needed:
                raise GraphError(f"chain: field {what!r}: {found!r} found, {needed!r} needed")
        return self

    def save(self, path: str | Path) -> None:
        """Save the chain to a file, atomically."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "graph": self.graph,
            "target": self.target,
            "passes": [
                {"shift": each.shift, "parts": [list(map(_listed, part)) for part in each.parts]}
                for each in self.passes
            ],
        }
        json_fields.save(path, json.dumps(data))

    @staticmethod
    def load(path: str | Path) -> Chain:
        """Return the chain of a file.

        Raises:
            GraphError: a field is missing, unknown or wrong; names it.
        """
        where = f"file {str(path)!r}"
        top = Fields(json_fields.read(path, GraphError), where, GraphError)
        top.header(FORMAT, VERSION)
        passes = tuple(
            _pass(item, f"{where}: pass {n}") for n, item in enumerate(top.items("passes"))
        )
        chain = Chain(top.text("graph"), top.text("target"), passes)
        top.finish()
        return chain


def _listed(step: Step) -> list[Any]:
    return [step.rule, step.match, step.count]


def _pass(data: Mapping[str, Any], where: str) -> Pass:
    each = Fields(data, where, GraphError)
    shift = each.take("shift", "null or a number from 0 to 1", _is_shift)
    parts = []
    for part in each.items("parts"):
        if not isinstance(part, list) or not all(map(_is_step, part)):
            raise each.fail("parts", part, "lists of [rule, match or null, count]")
        parts.append(tuple(Step(*step) for step in part))
    each.finish()
    return Pass(None if shift is None else float(shift), tuple(parts))


def _is_shift(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return 0 <= value <= 1


def _is_step(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3:
        return False
    rule, match, count = value
    at = match is None or (type(match) is int and match >= 0)
    return isinstance(rule, str) and at and type(count) is int and count >= 1
