"""Mapper plugins: who runs what, and where. No mapper can change a result."""

from __future__ import annotations

from pathlib import Path

from soapstone.engine.mapper import GraphMapper
from soapstone.ir.errors import StrategyError
from soapstone.ir.strategy import Strategy
from soapstone.mappers.plugins import StrategyMapper
from soapstone.runtime import MapperError
from soapstone.runtime.model.named import made, mapper_class, mapper_names as names

__all__ = ["load", "names"]


def load(mapper: object, strategy: Strategy | str | Path | None = None) -> GraphMapper:
    """Return a mapper from its name, from `module:Class`, or from itself.

    Args:
        strategy: what the mapper `strategy` follows; giving one selects that mapper.

    Raises:
        StrategyError: an unknown name, a class that is no mapper, or one that cannot be made.
    """
    if isinstance(mapper, GraphMapper):
        return mapper
    if strategy is not None:
        return StrategyMapper(strategy)
    if mapper == StrategyMapper.name:
        raise StrategyError("mapper 'strategy' needs a strategy; give a Strategy or its file")
    if not isinstance(mapper, str):
        raise StrategyError(f"mapper {mapper!r} found; a name, module:Class or GraphMapper needed")
    try:
        kind = mapper_class(mapper)
        if not (isinstance(kind, type) and issubclass(kind, GraphMapper)):
            raise StrategyError(f"mapper {mapper!r}: {kind!r} is not a subclass of GraphMapper")
        plugin: GraphMapper = made(mapper, kind)
    except MapperError as error:
        raise StrategyError(str(error)) from None
    return plugin
