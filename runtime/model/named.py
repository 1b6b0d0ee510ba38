"""Mappers by name: plugins are found through the entry-point group `soapstone.mappers`."""

from __future__ import annotations

import importlib
from typing import Any

from soapstone.errors import hint
from soapstone.runtime.errors import MapperError
from soapstone.runtime.model.mapper import DefaultMapper, Mapper

GROUP = "soapstone.mappers"


def mapper_names() -> tuple[str, ...]:
    """The names of the installed mappers, sorted."""
    from importlib.metadata import entry_points

    return tuple(sorted({point.name for point in entry_points(group=GROUP)}))


def mapper_class(name: str) -> Any:
    """What is behind the name of an installed mapper, or behind `module:Class`.

    Raises: MapperError for a name that is unknown or cannot be imported.
    """
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except Exception as error:
            raise MapperError(f"mapper {name!r}: {_said(error)}") from error
    from importlib.metadata import entry_points

    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        have = ", ".join(sorted(points)) or "none"
        raise MapperError(
            f"mapper {name!r} found; one of {have}, or module:Class needed{hint(name, points)}"
        )
    try:
        return points[name].load()
    except Exception as error:
        raise MapperError(f"mapper {name!r} ({points[name].value}): {_said(error)}") from error


def made(name: str, kind: Any) -> Any:
    """A mapper of a class, made without arguments.

    Raises: MapperError for whatever its constructor raises.
    """
    try:
        return kind()
    except Exception as error:
        raise MapperError(
            f"mapper {name!r}: {_said(error)}; make one and give it in place of its name"
        ) from error


def _said(error: Exception) -> str:
    known = isinstance(error, ImportError | AttributeError | TypeError)
    return str(error) if known else f"{type(error).__name__}: {error}"


def as_mapper(mapper: Mapper | str | None) -> Mapper:
    """A mapper from itself or its name; None is the default mapper.

    Raises: MapperError.
    """
    if mapper is None:
        return DefaultMapper()
    if isinstance(mapper, str):
        kind = mapper_class(mapper)
        if not (isinstance(kind, type) and issubclass(kind, Mapper)):
            raise MapperError(f"mapper {mapper!r}: {kind!r} is not a subclass of DefaultMapper")
        mapper = made(mapper, kind)
    if not isinstance(mapper, Mapper):
        raise MapperError(f"mapper {mapper!r} found, a name or a DefaultMapper needed")
    return mapper
