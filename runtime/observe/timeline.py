"""Profiles as trace-event files, for Perfetto, Chrome and `soapstone profile show`.

A rank is a process, a processor or link one of its threads. What Perfetto does not know is in
`args` of the events and in `otherData`, so the file is all there is of a profile. Reading checks
everything: files may come from anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from soapstone.files import read_text, write
from soapstone.json_text import parse, shown, wrong
from soapstone.runtime.errors import ProfileError
from soapstone.runtime.observe.profile import Event, Profile, Row

FORMAT, VERSION = "soapstone timeline", 1
_TEXTS = ("operator", "source", "target", "message")
_WHOLES = {"point": 0, "number": -1, "nbytes": 0, "step": 0}


def to_json(profile: Profile) -> dict[str, Any]:
    """The timeline in the trace-event format, times in microseconds from its first event."""
    events = profile.events
    origin = events[0].start_ns if events else 0
    found: list[dict[str, Any]] = []
    for rank in sorted({rank for rank, _ in profile.rows} or {profile.rank}):
        several = len({rank for rank, _ in profile.rows}) > 1
        name = f"rank {rank}: {profile.name}" if several else profile.name
        found.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
    for (rank, number), row in sorted(profile.rows.items()):
        about = {"name": f"{row.name} ({row.kind})", "row": row.name, "kind": row.kind}
        found.append({"ph": "M", "pid": rank, "tid": number, "name": "thread_name", "args": about})
    for event in events:
        extra: dict[str, Any] = {"point": event.point}
        for key in (*_WHOLES, *_TEXTS):
            value = getattr(event, key)
            if value != _WHOLES.get(key, ""):
                extra[key] = value
        if event.after:
            extra["after"] = list(event.after)
        found.append(
            {
                "ph": "X",
                "pid": event.rank,
                "tid": event.processor,
                "name": event.name,
                "cat": event.category,
                "ts": (event.start_ns - origin) / 1000,
                "dur": event.duration_ns / 1000,
                "args": extra,
            }
        )
    other = {
        "format": FORMAT,
        "version": VERSION,
        "name": profile.name,
        "rank": profile.rank,
        "offset_ns": profile.offset_ns,
        "origin_ns": origin,
        "memories": list(profile.memories),
    }
    return {"traceEvents": found, "displayTimeUnit": "ns", "otherData": other}


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the timeline to a JSON file, whole or not at all."""
    write(path, json.dumps(to_json(profile)).encode())


def load(path: str | os.PathLike[str]) -> Profile:
    """The profile of a file.

    Raises: ProfileError for a file that is no timeline of ours; OSError.
    """
    what = f"timeline {os.fspath(path)!r}"
    return from_json(parse(read_text(path, what, ProfileError), what, ProfileError), what)


def from_json(found: object, what: str = "timeline") -> Profile:
    """The profile that `to_json` wrote.

    Raises: ProfileError naming the event and the field that are wrong.
    """
    whole = _object(found, what)
    about = _object(whole.get("otherData", {}), f"{what}: field 'otherData'")
    if about.get("format") != FORMAT:
        raise ProfileError(
            f"{what}: {wrong(about, 'format', repr(FORMAT))}: "
            "`soapstone train --profile` and `strategy simulate --timeline` write it"
        )
    if about.get("version") != VERSION:
        raise ProfileError(f"{what}: {wrong(about, 'version', str(VERSION))}")
    name, rank = _text(about, "name", what), _whole(about, "rank", what)
    profile = Profile(None, name, rank, _whole(about, "offset_ns", what, least=None))
    origin = _whole(about, "origin_ns", what, least=None)
    memories = about.get("memories")
    if not isinstance(memories, list) or not all(isinstance(m, str) for m in memories):
        raise ProfileError(f"{what}: {wrong(about, 'memories', 'a list of names')}")
    profile.memories = tuple(memories)
    items = whole.get("traceEvents")
    if not isinstance(items, list):
        raise ProfileError(f"{what}: {wrong(whole, 'traceEvents', 'a list')}")
    events: list[Event] = []
    for place, item in enumerate(items):
        where = f"{what}: event {place}"
        fields = _object(item, where)
        if fields.get("ph") == "X":
            events.append(_event(fields, origin, where))
        elif fields.get("ph") == "M" and fields.get("name") == "thread_name":
            given = _object(fields.get("args"), f"{where}: field 'args'")
            key = _whole(fields, "pid", where), _whole(fields, "tid", where)
            profile.rows[key] = Row(_text(given, "row", where), _text(given, "kind", where))
    _check(profile, events, what)
    profile.put(events)
    profile._step = max((event.step for event in events), default=0)
    return profile


def _event(fields: Mapping[str, Any], origin: int, where: str) -> Event:
    extra = _object(fields.get("args"), f"{where}: field 'args'")
    start = origin + _time(fields, "ts", where)
    after = extra.get("after", [])
    if not isinstance(after, list) or not all(_is_whole(number) for number in after):
        raise ProfileError(f"{where}: {wrong(extra, 'after', 'a list of numbers')}")

    given: dict[str, Any] = {
        key: _whole(extra, key, where, least=least)
        for key, least in _WHOLES.items()
        if key in extra
    }
    given |= {key: _text(extra, key, where) for key in _TEXTS if key in extra}
    return Event(
        name=_text(fields, "name", where),
        category=_text(fields, "cat", where),
        processor=_whole(fields, "tid", where),
        start_ns=start,
        end_ns=start + _time(fields, "dur", where),
        rank=_whole(fields, "pid", where),
        after=tuple(after),
        **{"point": 0, **given},
    )


def _check(profile: Profile, events: list[Event], what: str) -> None:
    numbers: dict[int, Event] = {}
    for event in events:
        if (event.rank, event.processor) not in profile.rows:
            raise ProfileError(
                f"{what}: event {event.name!r} is on rank {event.rank}, row {event.processor}, "
                "which has no name"
            )
        if event.number >= 0 and event.number in numbers:
            raise ProfileError(f"{what}: two events have number {event.number}")
        if event.number >= 0:
            numbers[event.number] = event
    for event in events:
        for number in event.after:
            if number == event.number:
                raise ProfileError(f"{what}: event {event.name!r} depends on itself")


def _object(found: object, where: str) -> Mapping[str, Any]:
    if not isinstance(found, dict):
        raise ProfileError(f"{where}: {shown(found)} found, an object needed")
    return found


def _is_whole(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _whole(fields: Mapping[str, Any], key: str, where: str, least: int | None = 0) -> int:
    found = fields.get(key)
    if not _is_whole(found) or (least is not None and found < least):  # type: ignore[operator]
        also = "" if least is None else f" >= {least}"
        raise ProfileError(f"{where}: {wrong(fields, key, f'an integer{also}')}")
    return int(found)  # type: ignore[arg-type]


def _text(fields: Mapping[str, Any], key: str, where: str) -> str:
    found = fields.get(key)
    if not isinstance(found, str):
        raise ProfileError(f"{where}: {wrong(fields, key, 'a string')}")
    return found


def _time(fields: Mapping[str, Any], key: str, where: str) -> int:
    """A time in microseconds as nanoseconds."""
    found = fields.get(key)
    good = isinstance(found, int | float) and not isinstance(found, bool)
    if not good or not 0 <= found < 1e15:  # type: ignore[operator]
        raise ProfileError(f"{where}: {wrong(fields, key, 'microseconds >= 0')}")
    return round(found * 1000)  # type: ignore[operator]
