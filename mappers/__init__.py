"""Mapper plugins: who runs what, and where. No mapper can change a result."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path

from soapstone.ir.errors import StrategyError
from soapstone.ir.strategy import Strategy
from soapstone.mappers.base import GraphMapper
from soapstone.mappers.plugins import StrategyMapper

GROUP = "soapstone.mappers"


def names() -> tuple[str, ...]:
    """Return the names of the installed mappers."""
    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def load(mapper: object, strategy: Strategy | str | Path | None = None) -> GraphMapper:
    """Return a mapper from its name, from `module:Class`, or from itself.

    Args:
        strategy: what the mapper `strategy` follows; giving one chooses that mapper.

    Raises:
        StrategyError: an unknown name, or a class that is no mapper.
    """
    if isinstance(mapper, GraphMapper):
        return mapper
    if strategy is not None:
        return StrategyMapper(strategy)
    if mapper == StrategyMapper.name:
        raise StrategyError("mapper 'strategy' needs a strategy; give a Strategy or its file")
    if not isinstance(mapper, str):
        raise StrategyError(f"mapper {mapper!r} found; a name, module:Class or GraphMapper needed")
    if ":" in mapper:
        module, _, attribute = mapper.partition(":")
        try:
            kind = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise StrategyError(f"mapper {mapper!r}: {error}") from None
    else:
        found = {point.name: point for point in entry_points(group=GROUP)}
        if mapper not in found:
            have = ", ".join(sorted(found))
            raise StrategyError(f"mapper {mapper!r} found; one of {have}, or module:Class needed")
        kind = found[mapper].load()
    if not (isinstance(kind, type) and issubclass(kind, GraphMapper)):
        raise StrategyError(f"mapper {mapper!r}: {kind!r} is not a subclass of GraphMapper")
    return kind()
