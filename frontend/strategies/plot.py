"""A cost frontier as a picture (TensorOpt, figures 6 and 8): time against memory, or devices."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from soapstone.files import write
from soapstone.frontend.strategies.preferences import Option, Preferred

Curve = tuple[str, str, Sequence[tuple[float, float]], bool]  # name, colour, points, joined

_WIDTH, _HEIGHT, _LEFT, _TOP = 560, 360, 64, 34
_INNER = (_WIDTH - _LEFT - 20, _HEIGHT - _TOP - 46)
_STYLE = "text{font:11px system-ui,sans-serif;fill:#3a4347}.title{font-size:14px}"
_COLOURS = ("#1f6f8b", "#c2571a", "#6b8e23", "#7d5ba6", "#b03060", "#8a6d3b")


def save_plot(found: Preferred, title: str, path: str | Path) -> None:
    """Write the picture as SVG."""
    write(Path(path), plot(found, title).encode())


def plot(found: Preferred, title: str) -> str:
    """Return the picture: of the chosen frontier, or, of profiling, of all numbers of devices."""
    if found.option is Option.PROFILING:
        fastest = [(n, each.simulated_us / 1e3) for n, each in found.fastest.items() if each]
        data = {n: each.baselines["data"] for n, each in found.frontiers.items()}
        plain = [(n, each.simulated_us / 1e3) for n, each in data.items() if not each.missing_bytes]
        curves: list[Curve] = [
            ("found", _COLOURS[0], fastest, True),
            ("data parallelism, where it fits", _COLOURS[1], plain, True),
        ]
        return chart(title, "devices", "ms a step", curves)
    frontier = found.frontiers[found.devices or max(found.frontiers)]
    points = frontier.points
    simulated = [each for each in points if not each.recomputed]
    sums = [(p.memory_bytes / 1e9, p.time_us / 1e3) for p in points]
    steps = [(p.simulated_bytes / 1e9, p.simulated_us / 1e3) for p in simulated]
    curves = [("sums", _COLOURS[0], sums, True), ("simulated", _COLOURS[1], steps, False)]
    for part, colour in (("network", _COLOURS[2]), ("compute", _COLOURS[3])):
        where = [(p.memory_bytes / 1e9, getattr(p, f"{part}_us") / 1e3) for p in points]
        curves.append((f"{part} (of sums)", colour, where, True))
    for (name, each), colour in zip(frontier.baselines.items(), _COLOURS[4:]):
        curves.append((name, colour, [(each.memory_bytes / 1e9, each.time_us / 1e3)], False))
    return chart(title, "GB of the fullest device", "ms a step", curves)


def chart(title: str, across: str, up: str, curves: Sequence[Curve]) -> str:
    """Return curves, or points that are not joined, with axes from 0, as an SVG document."""
    every = [point for _, _, points, _ in curves for point in points] or [(1.0, 1.0)]
    most = [max(1e-9, 1.05 * max(point[axis] for point in every)) for axis in (0, 1)]

    def at(point: tuple[float, float]) -> tuple[float, float]:
        x = _LEFT + point[0] / most[0] * _INNER[0]
        return round(x, 1), round(_TOP + _INNER[1] * (1 - point[1] / most[1]), 1)

    bottom = _TOP + _INNER[1]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}"><style>{_STYLE}</style>',
        f'<text class="title" x="{_LEFT}" y="20">{escape(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{_LEFT + _INNER[0]}" fill="none" stroke="#888"/>',
        f'<text x="{_WIDTH - 20}" y="{bottom + 32}" text-anchor="end">{escape(across)}</text>',
        f'<text x="6" y="{_TOP - 6}">{escape(up)}</text>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = at((share * most[0], share * most[1]))
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{share * most[0]:.3g}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{share * most[1]:.3g}</text>'
        )
    for number, (name, colour, points, joined) in enumerate(curves):
        where = [at(point) for point in points]
        if joined and where:
            line = " ".join(f"{x},{y}" for x, y in where)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in where]
        y = _TOP + 10 + 16 * number
        parts.append(f'<circle cx="{_WIDTH - 190}" cy="{y - 4}" r="4" fill="{colour}"/>')
        parts.append(f'<text x="{_WIDTH - 180}" y="{y}">{escape(name)}</text>')
    return "".join([*parts, "</svg>\n"])
