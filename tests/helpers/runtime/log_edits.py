"""Edits of logs after which a run can no longer have obeyed its program: each must be refused.

Logs are records as JSON has them, of one process or of all ranks of a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.runtime import ProfileError
from soapstone.runtime.observe.checker import Report, check, parse
from soapstone.runtime.observe.log import path_of_rank

Records = list[dict[str, Any]]


def read(path: Path) -> Records:
    """The records of one file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_all(path: Path, ranks: int) -> list[Records]:
    """The records of all ranks."""
    return [read(path_of_rank(path, rank)) for rank in range(ranks)]


def judged(*logs: Records) -> Report:
    """What the checker says of them."""
    return check(*(parse(map(json.dumps, records)) for records in logs))


def needed(trace: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """The dependences of a trace that nothing else implies, between operations that do work.

    Messages may imply one: what comes before a send comes before what another rank answers.
    """
    operations = {operation["id"]: operation for operation in trace["operations"]}
    before: dict[int, set[int]] = {}
    everything: dict[int, set[int]] = {}
    last: dict[int, int] = {}
    turns: dict[int, int | None] = {}
    for number in trace["order"]:
        operation = operations[number]
        turn = turns[number] = last.get(operation["processor"])
        before[number] = {*operation["after"], *([] if turn is None else [turn])}
        everything[number] = before[number].union(*(everything[n] for n in before[number]))
        last[operation["processor"]] = number
    sends = [n for n, operation in operations.items() if operation["what"] == "send"]
    sent = {*sends}.union(*(everything[n] for n in sends))
    for number in trace["order"]:
        operation, turn = operations[number], turns[number]
        answered = any(operations[n]["what"] == "recv" for n in (number, *everything[number]))
        for source in operation["after"]:
            works = not operation["idle"] and not operations[source]["idle"]
            others = before[number] - {source}
            implied = any(source in everything[n] for n in others) or (answered and source in sent)
            if works and source != turn and not implied:
                yield source, number


def _touch(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Whether two operations use the same elements of one instance, and one of them writes."""
    for a, low, high, access in one["uses"]:
        for b, other_low, other_high, other in two["uses"]:
            same = a is not None and a == b and "w" in access + other
            if same and all(
                max(p, q) < min(r, s) for p, q, r, s in zip(low, other_low, high, other_high)
            ):
                return True
    return False


def without(records: Records, trace: dict[str, Any], gone: int) -> None:
    """Remove an operation of a trace, in its log and all replays."""
    trace["operations"] = [o for o in trace["operations"] if o["id"] != gone]
    for operation in trace["operations"]:
        operation["after"] = [n - (n > gone) for n in operation["after"] if n != gone]
        operation["id"] -= operation["id"] > gone
    trace["order"] = [n - (n > gone) for n in trace["order"] if n != gone]
    for record in records:
        if record["kind"] == "replay" and record["trace"] == trace["id"]:
            record["runs"] = [[n - (n > gone), a, b] for n, a, b in record["runs"] if n != gone]


def _traces(logs: list[Records]) -> Iterator[tuple[Records, dict[str, Any]]]:
    for records in logs:
        for record in records:
            if record["kind"] == "trace":
                yield records, record


def drop_dependence(logs: list[Records], rng: np.random.Generator) -> str:
    """Forget a dependence between operations of a trace that use the same bytes."""
    found = []
    for _, trace in _traces(logs):
        operations = {o["id"]: o for o in trace["operations"]}
        for source, number in needed(trace):
            if _touch(operations[source], operations[number]):
                found.append((operations[number], source))
    if not found:
        return ""
    operation, source = found[int(rng.integers(0, len(found)))]
    operation["after"].remove(source)
    return "dependence"


def drop_message(logs: list[Records], rng: np.random.Generator) -> str:
    """Lose a message: one end of it never was."""
    found: list[Callable[[], None]] = []
    for records, trace in _traces(logs):
        for operation in trace["operations"]:
            if operation["what"] in ("send", "recv", "sent", "post"):
                found.append(lambda r=records, t=trace, n=operation["id"]: without(r, t, n))
    for records in logs:
        for record in records:
            if record["kind"] == "operation" and record["what"] in ("send", "recv"):
                found.append(lambda r=records, one=record: _forget(r, one))
    if not found:
        return ""
    found[int(rng.integers(0, len(found)))]()
    return "message"


def _forget(records: Records, operation: dict[str, Any]) -> None:
    """Remove an untraced operation and its run."""
    number = operation["id"]
    records[:] = [
        r
        for r in records
        if r is not operation
        and not (r["kind"] == "run" and "scope" not in r and r["operation"] == number)
    ]
    records[0]["first"] = max(records[0]["first"], number + 1)


def drop_task(logs: list[Records], rng: np.random.Generator) -> str:
    """Leave out a point task."""
    found: list[Callable[[], None]] = []
    for records, trace in _traces(logs):
        for operation in trace["operations"]:
            if operation["what"] == "task":
                found.append(lambda r=records, t=trace, n=operation["id"]: without(r, t, n))
    for records in logs:
        for record in records:
            if record["kind"] == "operation" and record["what"] == "task":
                found.append(lambda r=records, one=record: _forget(r, one))
    if not found:
        return ""
    found[int(rng.integers(0, len(found)))]()
    return "launch"


def drop_launch(logs: list[Records], rng: np.random.Generator) -> str:
    """Let one rank leave out a fill or a replay that the others have."""
    if len(logs) < 2:
        return ""
    records = logs[int(rng.integers(0, len(logs)))]
    found = [r for r in records if r["kind"] in ("replay", "fill", "wait") and "scope" not in r]
    if not found:
        return ""
    gone = found[int(rng.integers(0, len(found)))]
    records[:] = [record for record in records if record is not gone]
    return "program"


def swap_runs(logs: list[Records], rng: np.random.Generator) -> str:
    """Run two operations of a replay that use the same bytes in the other order."""
    found = []
    for records, trace in _traces(logs):
        operations = {o["id"]: o for o in trace["operations"]}
        pairs = [p for p in needed(trace) if _touch(operations[p[0]], operations[p[1]])]
        replays = [r for r in records if r["kind"] == "replay" and r["trace"] == trace["id"]]
        found += [(replay, *pair) for replay in replays for pair in pairs]
    if not found:
        return ""
    replay, source, number = found[int(rng.integers(0, len(found)))]
    runs = {run[0]: run for run in replay["runs"]}
    runs[source][1:], runs[number][1:] = runs[number][1:], runs[source][1:]
    return "order"


EDITS = (drop_dependence, drop_message, drop_task, drop_launch, swap_runs)


def refuse_an_edit(path: Path, ranks: int, seed: int) -> str:
    """Edit a log as a seed says, and see that it is refused; returns which edit, "" if none can be.

    Raises: AssertionError for one that the checker accepts.
    """
    rng = np.random.default_rng([seed, 3])
    for number in rng.permutation(len(EDITS)).tolist():
        logs, edit = read_all(path, ranks), EDITS[number]
        kind = edit(logs, rng)
        if kind:
            try:
                found = {violation.kind for violation in judged(*logs).violations}
            except ProfileError:  # it is no log any more
                found = {kind}
            assert kind in found, f"{edit.__name__}: {kind} is not among {found}"
            return edit.__name__
    return ""
