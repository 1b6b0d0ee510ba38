"""Operators by the folders that declare them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from soapstone.ir.spec import OpSpec, operators


def families() -> Iterator[tuple[str, list[str]]]:
    """Yield families, by the folders that declare them, and their operators."""
    found: dict[str, list[str]] = {}
    for spec in operators():
        found.setdefault(family(spec), []).append(spec.name)
    yield from sorted(found.items())


def family(spec: OpSpec) -> str:
    """Return the folder of an operator's declaration."""
    function = spec.reference
    while isinstance(function, partial):
        function = function.func
    return "elementwise" if spec.elementwise else str(function.__module__).split(".")[-2]
