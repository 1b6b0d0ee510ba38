"""Resharding paths in files, and whether a graph can have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soapstone.ir.dims import Operand
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.files import json_fields
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import (
    COLLECTIVES,
    Configuration,
    Copies,
    Reshard,
    Step,
    check_configuration,
)
from soapstone.ir.strategy.movement import Tiles, lacking

Reshards = Mapping[tuple[str, str], Reshard]


def reshards_to_json(reshards: Reshards) -> list[dict[str, Any]]:
    """Return reshards as JSON-ready data; a step without a layout is its collective's name."""

    def said(step: Step) -> Any:
        if step.layout is None:
            return step.collective
        return {"collective": step.collective, "layout": json_fields.as_data(step.layout)}

    return [
        {
            "value": value,
            "consumer": consumer,
            "path": [said(step) for step in item.path],
            "kept": str(item.kept),
        }
        for (value, consumer), item in reshards.items()
    ]


def reshards_from_json(items: Sequence[Any]) -> dict[tuple[str, str], Reshard]:
    """Return the reshards that JSON data describes; errors name the field.

    Older files say how many copies are kept (`copies_kept`): of one it is that before the path.
    """
    result: dict[tuple[str, str], Reshard] = {}
    for position, item in enumerate(items):
        where = f"strategy: reshards[{position}]"
        reader = json_fields.Fields(item, where, StrategyError)
        key = reader.text("value"), reader.text("consumer")
        path = tuple(
            _step(reader, where, number, step) for number, step in enumerate(reader.items("path"))
        )
        if "copies_kept" in item:
            kept = Copies.BOTH if reader.integer("copies_kept") > 1 else Copies.BEFORE
        else:
            kept = Copies(reader.text("kept", tuple(Copies)))
        reader.finish()
        if key in result:
            raise StrategyError(f"{where}: value {key[0]!r} to {key[1]!r} appears twice")
        result[key] = Reshard(path, kept)
    return result


def _step(outer: json_fields.Fields, where: str, number: int, data: Any) -> Step:
    if not isinstance(data, dict):
        if data not in COLLECTIVES:
            raise outer.fail("path", data, f"one of {', '.join(COLLECTIVES)}")
        return Step(data)
    reader = json_fields.Fields(data, f"{where}.path[{number}]", StrategyError)
    collective = reader.text("collective", COLLECTIVES)
    layout = reader.take("layout", "an object", lambda value: True)
    inner = json_fields.Fields(layout, f"{where}.path[{number}].layout", StrategyError)
    reader.finish()
    return Step(collective, inner.record(Configuration))


def check_reshard(
    graph: Graph, value: str, consumer: Node, item: Reshard, reading: Configuration
) -> None:
    """Check that a path's steps are known, its layouts legal, and its end what the consumer reads.

    reading: the consumer's configuration.

    Raises:
        StrategyError: names the value, the consumer and the step.
    """
    label = f"reshards: {value!r} to {consumer.name!r}"
    if value not in consumer.inputs:
        raise StrategyError(f"reshards: operator {consumer.name!r} does not read {value!r}")
    if value in consumer.overwrites.values():
        raise StrategyError(f"{label}: found for a value that it writes over; no path needed")
    copy = copy_node(graph, value)
    table = graph.signature(consumer).inputs[consumer.inputs.index(value)]
    needed = _tiles(graph, consumer, table, reading)
    for number, step in enumerate(item.path, 1):
        where = f"{label}: step {number} of {len(item.path)}, {step.collective!r}"
        if step.collective not in COLLECTIVES:
            raise StrategyError(f"{where} found; {', '.join(COLLECTIVES)} needed")
        if step.layout is None:
            if number < len(item.path):
                raise StrategyError(
                    f"{where}: no layout found; one needed for every step but the last"
                )
            continue
        try:
            check_configuration(
                copy, copy.spec.bind([graph.tensors[value]], copy.attributes), step.layout
            )
        except GraphError as error:
            raise StrategyError(f"{where}: layout: {error}") from None
        if step.layout.replicated:
            names = ", ".join(step.layout.replicated)
            raise StrategyError(f"{where}: layout: replicated {names} found, none needed")
        if step.layout.devices and len(step.layout.devices) != step.layout.points:
            raise StrategyError(
                f"{where}: layout: {len(step.layout.devices)} devices found,"
                f" {step.layout.points} needed, one a point"
            )
    last = item.path[-1].layout if item.path else None
    if last is None or not last.devices or not reading.devices:
        return
    signature = copy.spec.bind([graph.tensors[value]], copy.attributes)
    _, lo, hi = signature.points(last.degrees, last.cuts)
    held = Tiles(*signature.outputs[0].tiles(lo, hi, last.points), last.devices)
    for device, nbytes in lacking(graph.tensors[value], held, needed).items():
        if nbytes:
            raise StrategyError(
                f"{label}: the path ends in {item.path[-1]}, where device {device} has"
                f" {nbytes} bytes less than the consumer reads there; a layout with all of them"
                " needed, or a last step without one"
            )


def copy_node(graph: Graph, value: str, name: str = "copy") -> Node:
    """Return a node that copies a value: its dims are d0, d1, ... of the value's axes."""
    items = (("shape", graph.tensors[value].shape),)
    return Node(name, "broadcast", (value,), (name,), items)


def layout_of(shape: Sequence[int], tiles: Tiles) -> Configuration | None:
    """Return the layout that has these tiles of a value.

    None where there is none: an element is in two, or they are not equal parts of axes.
    """
    lows = [np.unique(tiles.lo[:, axis]) for axis in range(len(shape))]
    counts = [len(each) for each in lows]
    sides = tiles.hi - tiles.lo
    if math.prod(counts) != len(tiles.lo) or len(np.unique(tiles.lo, axis=0)) != len(tiles.lo):
        return None
    if any((sides[:, axis] * counts[axis] != extent).any() for axis, extent in enumerate(shape)):
        return None
    order = np.lexsort(tiles.lo.T[::-1]) if len(shape) else range(1)
    degrees = {f"d{axis}": count for axis, count in enumerate(counts) if count > 1}
    return Configuration(degrees, tuple(int(tiles.places[i]) for i in order))  # type: ignore[call-overload]


def read_in(
    graph: Graph, value: str, consumer: Node, configuration: Configuration
) -> Configuration | None:
    """Return the layout in which a consumer reads a value, if it is one (`layout_of`)."""
    table = graph.signature(consumer).inputs[consumer.inputs.index(value)]
    tiles = _tiles(graph, consumer, table, configuration)
    return layout_of(graph.tensors[value].shape, tiles)


def _tiles(graph: Graph, node: Node, operand: Operand, configuration: Configuration) -> Tiles:
    _, lo, hi = graph.signature(node).points(*configuration.cutting)
    return Tiles(*operand.tiles(lo, hi, configuration.points), configuration.devices)
