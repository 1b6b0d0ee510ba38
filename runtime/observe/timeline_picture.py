"""Timelines as pictures: a row a processor, a colour a kind of work, the critical path above."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape

from soapstone.files import check_suffix, write
from soapstone.runtime.observe.profile import MESSAGE, WAIT, Event, Profile
from soapstone.runtime.observe.summary import critical_path

_WIDTH, _LEFT, _ROW, _GAP, _TOP = 1200, 130, 22, 8, 46
_LEAST = 0.4  # pixels: what is narrower joins its neighbour of the same colour
_KEYS = 14
STYLE = "text{font:11px system-ui,sans-serif;fill:#3a4347}.title{font-size:14px}"
_WAITING = "#d9dde0"


def picture(profile: Profile) -> str:
    """A profile as an SVG document: time to the right, a row for each processor and link."""
    events = profile.events
    first = min((event.start_ns for event in events), default=0)
    wall = max((event.end_ns for event in events), default=0) - first or 1
    totals: dict[str, int] = {}
    for event in events:
        if event.category != WAIT:
            totals[_key(event)] = totals.get(_key(event), 0) + event.duration_ns
    order = sorted(totals, key=lambda key: -totals[key])
    colours = {key: _colour(place) for place, key in enumerate(order)}
    rows = {key: place for place, key in enumerate(sorted(profile.rows))}
    bottom = _TOP + (len(rows) + 1) * (_ROW + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 40}"'
        f' viewBox="0 0 {_WIDTH} {bottom + 40}"><style>{STYLE}</style>',
        f'<text class="title" x="10" y="20">{escape(profile.name)}: {wall / 1e3:,.1f} us</text>',
        _row(
            "critical path",
            _TOP,
            critical_path([e for e in events if e.category not in (WAIT, MESSAGE)]),
            colours,
            first,
            wall,
        ),
    ]
    for key, place in rows.items():
        row = profile.rows[key]
        several = len({rank for rank, _ in profile.rows}) > 1
        name = f"rank {key[0]} {row.name}" if several else row.name
        mine = [event for event in events if (event.rank, event.processor) == key]
        y = _TOP + (place + 1) * (_ROW + _GAP)
        parts.append(_row(name, y, mine, colours, first, wall))
    for place, work in enumerate([*order[:_KEYS], WAIT]):
        x, y = 10 + place * (_WIDTH - 20) / (_KEYS + 1), bottom + 10
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="10" height="10"'
            f' fill="{colours.get(work, _WAITING)}"/>'
            f'<text x="{x + 13:.1f}" y="{y + 9}">{escape(work[:10])}<title>{escape(work)}</title>'
            "</text>"
        )
    return "".join([*parts, "</svg>\n"])


def save_picture(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the picture of a profile, whole or not at all.

    Raises: DataError for a file that is no .svg; OSError.
    """
    check_suffix(path, ".svg", what="picture")
    write(path, picture(profile).encode())


def _key(event: Event) -> str:
    return (event.operator or event.name) if event.category == "task" else event.category


def _colour(place: int) -> str:
    return f"hsl({place * 137.5 % 360:.0f} 55% {48 + 12 * (place % 3)}%)"


def _row(
    name: str,
    y: int,
    events: Sequence[Event],
    colours: dict[str, str],
    first: int,
    wall: int,
) -> str:
    scale = (_WIDTH - _LEFT - 10) / wall
    parts = [f'<text x="10" y="{y + _ROW - 7}">{escape(name[:20])}</text>']
    bars: list[tuple[str, float, float, str]] = []  # colour, from, to, what it says
    for event in sorted(events, key=lambda e: e.start_ns):
        colour = colours.get(_key(event), _WAITING)
        a = _LEFT + (event.start_ns - first) * scale
        b = _LEFT + (event.end_ns - first) * scale
        if bars and bars[-1][0] == colour and a - bars[-1][2] < _LEAST and b - a < _LEAST:
            bars[-1] = (colour, bars[-1][1], max(b, bars[-1][2]), bars[-1][3])
            continue
        about = f"{event.name} point {event.point}: {event.duration_ns / 1e3:,.1f} us"
        bars.append((colour, a, b, about))
    for colour, a, b, about in bars:
        parts.append(
            f'<rect x="{a:.2f}" y="{y}" width="{max(b - a, 0.2):.2f}" height="{_ROW}"'
            f' fill="{colour}"><title>{escape(about)}</title></rect>'
        )
    return "".join(parts)
