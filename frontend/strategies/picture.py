"""Strategies as pictures (Jia, Figures 3.14 and 3.15): a box an operator, cut as it is split.

Rows of a box are parts of the first dim that is split, samples where they are; columns are those of
the others. The colour of a cell is the device that runs it.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path

from soapstone.files import check_suffix, write
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Strategy
from soapstone.ir.strategy.configuration import Configuration

_BOX, _GAP, _TEXT, _ACROSS = 74, 14, 26, 10
_STYLE = (
    "text{font:9px system-ui,sans-serif;fill:#3a4347}rect{stroke:#fff;stroke-width:.6}"
    ".title{font-size:14px}"
)


def picture(strategy: Strategy, graph: Graph | None = None) -> str:
    """Return the picture as an SVG document.

    Args:
        graph: shows its forward operators in program order; without it, those of the strategy.
    """
    names = [name for name in strategy.configurations if name != DEFAULT]
    if graph is not None:
        names = [
            node.name
            for node in graph.nodes
            if node.origin is None and not node.spec.updates and node.name in names
        ]
    devices = 1 + max(
        (max(item.devices, default=0) for item in strategy.configurations.values()), default=0
    )
    rows = math.ceil(len(names) / _ACROSS)
    width = _ACROSS * (_BOX + _GAP) + _GAP
    height = 60 + rows * (_BOX + _TEXT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}"><style>{_STYLE}</style>',
        f'<text class="title" x="{_GAP}" y="22">{escape(_title(strategy))}</text>',
        *(_key(device, devices) for device in range(min(devices, 64))),
    ]
    for number, name in enumerate(names):
        x = _GAP + number % _ACROSS * (_BOX + _GAP)
        y = 50 + number // _ACROSS * (_BOX + _TEXT + _GAP)
        parts.append(_operator(name, strategy.configurations[name], x, y, devices))
    return "".join([*parts, "</svg>\n"])


def save_picture(strategy: Strategy, graph: Graph | None, path: str | Path) -> None:
    """Write the picture of a strategy, an SVG file; graph: what it is of, for shapes and order."""
    check_suffix(path, ".svg", what="picture")
    write(Path(path), picture(strategy, graph).encode())


def _title(strategy: Strategy) -> str:
    step = strategy.provenance.get("step_us")
    time = f", {step:,.0f} us a step" if isinstance(step, int | float) else ""
    return f"{strategy.model or 'strategy'} on {strategy.machine.get('name', 'any machine')}{time}"


def _colour(device: int, devices: int) -> str:
    hue = 360 * device / max(devices, 1)
    return f"hsl({hue:.0f} 55% {45 + 14 * (device % 3)}%)"


def _key(device: int, devices: int) -> str:
    x = _GAP + device * 13
    return (
        f'<rect x="{x}" y="30" width="12" height="10" fill="{_colour(device, devices)}">'
        f"<title>device {device}</title></rect>"
    )


def _operator(name: str, item: Configuration, x: int, y: int, devices: int) -> str:
    degrees = [(dim, degree) for dim, degree in item.degrees.items() if degree > 1]
    rows = degrees[0][1] if degrees else 1
    columns = math.prod(degree for _, degree in degrees[1:])
    cells = []
    for point in range(rows * columns):
        device = item.devices[point] if item.devices else point
        cells.append(
            f'<rect x="{x + point % columns * _BOX / columns:.2f}"'
            f' y="{y + point // columns * _BOX / rows:.2f}" width="{_BOX / columns:.2f}"'
            f' height="{_BOX / rows:.2f}" fill="{_colour(device, devices)}"/>'
        )
    split = str(item)
    where = f"{name}: {split} on {', '.join(map(str, item.devices)) or 'any device'}"
    return (
        f"<g><title>{escape(where)}</title>{''.join(cells)}"
        f'<text x="{x}" y="{y + _BOX + 11}">{escape(name[:15])}</text>'
        f'<text x="{x}" y="{y + _BOX + 22}">{escape(split[:15])}</text></g>'
    )
