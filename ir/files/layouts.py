"""Axis orders of values as files carry them, parsed strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from soapstone import json_text
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields

Order = tuple[int, ...]  # of axes, outermost first
Layouts = Mapping[str, Order]  # by value; those left out are in C order
FORMAT, VERSION = "soapstone-layouts", 1


def layouts_to_json(layouts: Layouts) -> dict[str, Any]:
    """Return axis orders as JSON-ready data."""
    orders = {name: list(order) for name, order in layouts.items()}
    return {"format": FORMAT, "version": VERSION, "orders": orders}


def layouts_from_json(data: Any, where: str, error: type[GraphError]) -> dict[str, Order]:
    """Return the axis orders that JSON data describes.

    Raises:
        GraphError (as `error`): a field is unknown, missing, or no axis order; names it.
    """
    reader = json_fields.Fields(data, where, error)
    reader.header(FORMAT, VERSION)
    orders = reader.integers_mapping("orders")
    reader.finish()
    for name, order in orders.items():
        if sorted(order) != list(range(len(order))):
            raise reader.fail(f"orders.{name}", list(order), f"each axis below {len(order)} once")
    return orders


def layouts_from_text(text: str, where: str, error: type[GraphError]) -> dict[str, Order]:
    """Return the axis orders that JSON text describes; raises as `layouts_from_json`."""
    return layouts_from_json(json_text.parse(text, where, error), where, error)


def layouts_to_text(layouts: Layouts) -> str:
    """Return axis orders as JSON text."""
    return json.dumps(layouts_to_json(layouts), separators=(",", ":"))
