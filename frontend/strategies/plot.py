"""Curves as pictures: cost frontiers (TensorOpt, figures 6 to 8), memory plans node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, Literal

from soapstone.files import check_suffix, write
from soapstone.frontend.strategies.preferences import Option, Preferred
from soapstone.ir.analysis.footprint import Footprint
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.runtime.observe.timeline_picture import STYLE

Place = tuple[float, float]
Frontier = Mapping[str, Any]  # as `CostFrontier.as_dict` says it
COLOURS = ("#1f6f8b", "#c2571a", "#6b8e23", "#7d5ba6", "#b03060", "#8a6d3b", "#5b6770")
BASELINES = {"data": "data parallelism", "tofu": "ToFu"}

_WIDTH, _LEFT, _TOP, _RIGHT = 560, 64, 40, 20
_ACROSS, _UP = _WIDTH - _LEFT - _RIGHT, 280
_COLUMNS, _ROW = 3, 16  # of the legend
_FAR = 2.5  # times as much as a frontier's most: a point that is named, not drawn


@dataclass(frozen=True)
class Curve:
    """Points of one colour, across and up.

    Attributes:
        name: in the legend; empty: it is not there.
        line: that joins the points; they are drawn as such if there is none, or a solid one.
    """

    name: str
    colour: str
    points: Sequence[Place]
    line: Literal["solid", "dotted", "none"] = "solid"


def save_plot(found: Preferred, title: str, path: str | Path) -> None:
    """Write the picture as SVG."""
    check_suffix(path, ".svg", what="picture")
    write(Path(path), plot(found, title).encode())


def plot(found: Preferred, title: str) -> str:
    """Return the picture: of the chosen frontier, or, of profiling, of all numbers of devices."""
    if found.option is Option.PROFILING:
        best = {n: each.as_dict() for n, each in found.fastest.items() if each}
        data = {n: each.baselines["data"] for n, each in found.frontiers.items()}
        fits = {n: each.as_dict() for n, each in data.items() if not each.missing_bytes}
        curves = [
            devices_curve("found", COLOURS[0], best, "simulated_us"),
            devices_curve("its network (of sums)", COLOURS[0], best, "network_us", "dotted"),
            devices_curve("data parallelism, where it fits", COLOURS[1], fits, "simulated_us"),
        ]
        return chart(title, "devices", "ms a step", curves)
    frontier = found.frontiers[found.devices or max(found.frontiers)]
    return chart(title, *FRONTIER_AXES, frontier_curves(frontier.as_dict()))


FRONTIER_AXES = "GB of the fullest device", "ms a step"


def devices_curve(
    name: str,
    colour: str,
    points: Mapping[int, Frontier],
    time: str,
    line: Literal["solid", "dotted", "none"] = "solid",
) -> Curve:
    """Return a time of a point for each number of devices.

    Args:
        points: as `FrontierPoint.as_dict` says them. time: the name of the figure, in us.
    """
    return Curve(name, colour, [(n, each[time] / 1e3) for n, each in points.items()], line)


def frontier_curve(
    name: str, colour: str, points: Sequence[Frontier], line: Literal["solid", "none"] = "solid"
) -> Curve:
    """Return points by sums. points: as `FrontierPoint.as_dict` says them."""
    return Curve(name, colour, [_place(each, "time_us") for each in points], line)


def frontier_curves(found: Frontier) -> list[Curve]:
    """Return a frontier with the parts of its times, what is simulated of it, and baselines.

    Baselines far outside are named in the legend, with their figures.
    """
    points = found["points"]
    curves = [frontier_curve("frontier, by sums", COLOURS[0], points)]
    for part, colour in (("network", COLOURS[2]), ("compute", COLOURS[3])):
        where = [_place(each, f"{part}_us") for each in points]
        curves.append(Curve(f"of it {part}", colour, where, "dotted"))
    steps = [
        (each["simulated_bytes"] / 1e9, each["simulated_us"] / 1e3)
        for each in points
        if each["simulated_us"] is not None
    ]
    if steps:
        curves.append(Curve("simulated", COLOURS[6], steps, "none"))
    curves.append(frontier_curve("OptCNN: its fast end", COLOURS[4], points[-1:], "none"))
    most = [_FAR * max(place) for place in zip(*curves[0].points)]
    others = {"Mesh-TensorFlow": found["mesh"]}
    others |= {
        BASELINES[name]: [each] for name, each in found["baselines"].items() if name in BASELINES
    }
    for (name, each), colour in zip(others.items(), (COLOURS[5], COLOURS[1], "#111111")):
        near = [p for p in each if all(a <= b for a, b in zip(_place(p, "time_us"), most))]
        if not near and each:
            x, y = _place(each[0], "time_us")
            name += f": {x:,.4g} GB, {y:,.0f} ms"
        curves.append(frontier_curve(name, colour, near, "solid" if len(near) > 1 else "none"))
    return curves


def _place(point: Frontier, time: str) -> Place:
    return point["memory_bytes"] / 1e9, point[time] / 1e3


def memory_chart(plan: MemoryPlan, footprint: Footprint, title: str) -> str:
    """Return the bytes that are taken while each node of a memory plan runs, by what holds them.

    Each curve is above the one before. footprint: of what the plan is.
    """
    resident: dict[str, int] = {}
    rows: list[tuple[float, float, float]] = []
    for step in plan.steps:
        if step.action is Action.RUN:
            given = sum(size for value, size in resident.items() if value in footprint.given)
            held = sum(resident.values())
            rows.append((given / 1e6, held / 1e6, (held + step.nbytes) / 1e6))
        elif step.action in (Action.ALLOCATE, Action.FETCH):
            resident[step.name] = step.nbytes
        else:
            del resident[step.name]
    names = "weights, inputs, results", "and other values", "and workspace"
    curves = [
        Curve(name, COLOURS[n], [(at + 1, row[n]) for at, row in enumerate(rows)])
        for n, name in enumerate(names)
    ]
    full = plan.capacity_bytes / 1e6
    ends: list[Place] = [(1, full), (len(rows), full)]
    return chart(title, "node", "MB", [*curves, Curve("capacity", "#111111", ends, "dotted")])


def chart(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """Return curves with axes and a legend below, as an SVG document.

    Axes begin at 0; that across where the least is, if that is more than half of the most.
    """
    every = [place for curve in curves for place in curve.points] or [(1.0, 1.0)]
    most = [max(1e-9, 1.05 * max(place[axis] for place in every)) for axis in (0, 1)]
    first = 0.97 * min(place[0] for place in every)
    first = first if first > most[0] / 2 else 0.0

    def at(x: float, y: float) -> Place:
        share = (x - first) / (most[0] - first)
        return round(_LEFT + share * _ACROSS, 1), round(_TOP + _UP * (1 - y / most[1]), 1)

    named = [curve for curve in curves if curve.name]
    bottom = _TOP + _UP
    height = bottom + 44 + _ROW * -(-len(named) // _COLUMNS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"'
        f' width="{_WIDTH}" height="{height}"><style>{STYLE}</style>',
        f'<text class="title" x="{_LEFT}" y="18">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _ACROSS}" fill="none" stroke="#888"/>',
        f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 30}" text-anchor="end">{escape(across)}</text>',
        f'<text x="6" y="{_TOP - 8}">{escape(up)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = first + share * (most[0] - first), share * most[1]
        x, y = at(*value)
        left, below = (f"{each:,.0f}" if each >= 100 else f"{each:.3g}" for each in value[::-1])
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{below}</text>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{left}</text>')
    for curve in curves:
        parts += _drawn(curve, [at(*place) for place in curve.points])
    for number, curve in enumerate(named):
        x = _LEFT + number % _COLUMNS * (_ACROSS // _COLUMNS)
        y = bottom + 48 + _ROW * (number // _COLUMNS)
        parts += _drawn(curve, [(x - 20, y - 4), (x - 6, y - 4)][curve.line == "none" :])
        parts.append(f'<text x="{x}" y="{y}">{escape(curve.name)}</text>')
    return "".join([*parts, "</svg>\n"])


def _drawn(curve: Curve, where: Sequence[Place]) -> list[str]:
    parts = []
    if curve.line != "none" and len(where) > 1:
        places = " ".join(f"{x},{y}" for x, y in where)
        dashes = ' stroke-dasharray="2 3"' if curve.line == "dotted" else ""
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{curve.colour}"'
            f' stroke-width="1.5"{dashes}/>'
        )
    if curve.line != "dotted":
        size = 4 if curve.line == "none" and len(where) == 1 else 2.5
        parts += [f'<circle cx="{x}" cy="{y}" r="{size}" fill="{curve.colour}"/>' for x, y in where]
    return parts


def beside(charts: Sequence[str], columns: int = 2) -> str:
    """Return charts in rows, as one SVG document."""
    heights = [int(each.partition('height="')[2].partition('"')[0]) for each in charts]
    rows = [heights[i : i + columns] for i in range(0, len(charts), columns)]
    width, height = _WIDTH * min(columns, len(charts)), sum(max(row) for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" height="{height}">'
    ]
    for number, each in enumerate(charts):
        x, y = _WIDTH * (number % columns), sum(max(row) for row in rows[: number // columns])
        parts.append(f'<g transform="translate({x},{y})">{each.strip()}</g>')
    return "".join([*parts, "</svg>\n"])
