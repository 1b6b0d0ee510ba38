"""Profiles: clocks, merging, files, and what a summary says of runs whose answer is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.runtime import (
    Machine,
    Partition,
    Profile,
    ProfileError,
    ReadWrite,
    Region,
    Runtime,
    Task,
    estimate_offset,
)
from soapstone.runtime.observe.profile import Event
from soapstone.runtime.observe.summary import longest_chain, summarise
from soapstone.runtime.observe.timeline_picture import picture

RUN = CliRunner()


def profile_of(events: list[Event], rank: int = 0, name: str = "run") -> Profile:
    found = Profile(Machine.local(2), name, rank)
    found.put(events)
    return found


def op(name: str, processor: int, start: int, end: int, number: int, *after: int, **more: Any):
    """An event of microseconds."""
    return Event(
        name, "task", processor, 0, start * 1000, end * 1000, number=number, after=after, **more
    )


# -- clocks


@pytest.mark.parametrize("seed", range(20))
def test_offsets_of_synthetic_clocks_are_within_half_the_shortest_round_trip(seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(-(10**12), 10**12))
    samples, now, trips = [], int(rng.integers(0, 10**12)), []
    for _ in range(30):
        there, back = (int(t) for t in rng.exponential(3000, size=2) + 500)
        samples.append((now, now + there - offset, now + there + back))
        trips.append(there + back)
        now += there + back + int(rng.integers(0, 10_000))
    assert abs(estimate_offset(samples) - offset) <= min(trips) / 2 + 1


def test_a_symmetric_round_trip_gives_the_exact_offset() -> None:
    assert estimate_offset([(100, 5060, 120), (200, 5990, 1200)]) == 110 - 5060


@pytest.mark.parametrize("samples", [[], [(10, 0, 9)]])
def test_samples_that_make_no_sense_are_refused(samples: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ProfileError, match="estimate_offset"):
        estimate_offset(samples)


# -- merging


def test_ranks_merge_on_one_clock_and_messages_connect() -> None:
    send = Event("send x", "send", 0, 0, 1000, 1500, number=1, after=(0,), nbytes=64)
    first = [op("make", 0, 0, 1, 0), send]
    first[1] = Event(**{**vars(send), "message": "x0", "source": "system"})
    late = 10**9  # rank 1's clock is a second ahead
    receive = Event("recv x", "recv", 1, 0, late + 1200, late + 2000, 1, "", 0, message="x0")
    use = Event("use", "task", 1, 0, late + 2000, late + 3000, 1, "", 1, (0,))
    other = profile_of([Event(**{**vars(receive), "target": "system"}), use], rank=1)
    merged = Profile.merge([other, profile_of(first)], [-late, 0])
    names = {event.name: event for event in merged.events}
    assert names["use"].start_ns == 2000 and names["use"].rank == 1
    assert names["recv x"].after == (names["send x"].number,)
    found = summarise(merged)
    assert [event.name for event in found.chain] == ["make", "send x", "recv x", "use"]
    (link,) = found.links
    assert (link.source, link.target, link.nbytes, link.count, link.busy_ns) == (
        *("rank0/system", "rank1/system"),
        *(64, 1, 1000),  # from the start of the send to the end of the receive
    )
    assert [row.busy_ns for row in found.rows if row.kind == "link"] == [1000]
    assert len({event.number for event in merged.events if event.number >= 0}) == 4
    again = Profile.from_json(json.loads(json.dumps(merged.to_json())))
    assert again.rows == merged.rows and len(again.events) == 5


def test_what_receives_waits_and_the_path_goes_on_where_it_was_sent() -> None:
    send = Event("send", "send", 0, 0, 8000, 8100, 0, "", 1, (0,), 8, "a", "b", "m")
    receive = Event("recv", "recv", 0, 0, 1000, 9000, 1, "", 1, (), 8, "a", "b", "m")
    one = profile_of([op("make", 0, 0, 8, 0), send])
    two = profile_of([op("early", 0, 0, 1, 0, rank=1), receive], rank=1)
    found = summarise(Profile.merge([one, two]))
    assert [event.name for event in found.chain] == ["make", "send", "recv"]
    assert {part.name: part.total_ns for part in found.path} == {
        "make": 8000,
        "send": 100,
        "recv": 900,
    }
    waits = {(row.rank, row.name): (row.busy_ns, row.wait_ns) for row in found.rows}
    assert waits[1, "cpu0"] == (1000, 8000)


def test_merging_uses_the_offsets_of_profiles_and_refuses_what_does_not_fit() -> None:
    one, two = profile_of([op("a", 0, 0, 1, 0)]), profile_of([op("b", 0, 5, 6, 0)], rank=1)
    two.offset_ns = -4000
    assert [e.start_ns for e in Profile.merge([one, two]).events] == [0, 1000]
    for wrong, offsets in (([], None), ([one, one], None), ([one, two], [1])):
        with pytest.raises(ProfileError, match="merge"):
            Profile.merge(wrong, offsets)


# -- summaries


def test_the_critical_path_follows_dependences_processors_and_gaps() -> None:
    events = [
        op("a", 0, 0, 10, 0),
        op("b", 1, 0, 4, 1),
        op("c", 1, 12, 20, 2, 0),  # waits for a, and 2 us more
        op("d", 0, 10, 13, 3),
        op("e", 1, 20, 25, 4, 1),  # held up by c on its processor only
    ]
    found = summarise(profile_of(events))
    assert [event.name for event in found.chain] == ["a", "c", "e"]
    assert {part.name: part.total_ns for part in found.path} == {
        "a": 10_000,
        "c": 8000,
        "e": 5000,
        "wait": 2000,
    }
    assert found.wall_ns == 25_000 and sum(part.share for part in found.path) == pytest.approx(1)
    assert found.bound_ns == longest_chain(events) == 18_000
    assert [row.busy_ns for row in found.rows] == [13_000, 17_000]
    assert found.utilisation == pytest.approx(30 / 50)


def test_steps_follow_each_other_on_the_critical_path() -> None:
    events = [op("a", 0, 0, 10, 0, step=1), op("b", 1, 11, 12, 1, step=3)]
    found = summarise(profile_of(events))
    assert [event.name for event in found.chain] == ["a", "b"] and found.steps == 2
    assert found.bound_ns == 11_000


def test_imbalance_is_the_longest_point_over_the_mean() -> None:
    events = [op("a", 0, 0, 30, 0), op("a", 1, 0, 10, 1)]
    (work,) = summarise(profile_of(events)).work
    assert (work.count, work.total_ns, work.share) == (2, 40_000, 1.0)
    assert work.imbalance == pytest.approx(1.5)


@pytest.mark.parametrize("memories", [1, 2])
def test_profiles_of_runs_hold_dependences_steps_and_links(memories: int) -> None:
    bump = Task("bump", (ReadWrite,), lambda x: np.add(x, 1, out=x))
    with Runtime(Machine.local(2, memories=memories)) as runtime:
        x = Region((64,), np.float64, "x")

        def step() -> None:
            runtime.launch(bump, Partition.tiled(x, 2), name="halves")
            runtime.launch(bump, x, name="whole")

        trace = runtime.capture(step)
        found = trace.replay(profile=True)
        assert trace.replay(profile=found) is found and found is not None
        with runtime.profile() as live:
            step()
    summary = summarise(found)
    assert summary.steps == 2
    names = {event.number: event for event in found.events if event.number >= 0}
    for event in found.events:
        if event.name == "whole":  # both halves, or the copy of one and the other
            assert {names[n].step for n in event.after} == {event.step}
            assert {names[n].name for n in event.after} <= {"halves", "copy x"}
            assert len(event.after) == 2
    copies = [event for event in found.events if event.category == "copy"]
    assert bool(copies) == (memories > 1)
    assert sum(link.nbytes for link in summary.links) == sum(e.nbytes for e in copies)
    assert all(e.nbytes == 256 and e.source != e.target for e in copies)
    whole = next(event for event in live.events if event.name == "whole")
    numbered = {event.number: event.name for event in live.events if event.number >= 0}
    assert {numbered[n] for n in whole.after} <= {"halves", "copy x"}
    joined = Profile(runtime.machine)
    joined.extend(found)
    joined.extend(live)
    assert summarise(joined).steps == 3
    assert len({e.number for e in joined.events if e.number >= 0}) == summarise(joined).events


# -- files


def test_a_timeline_is_read_as_it_was_written(tmp_path: Path) -> None:
    events = [
        op("a", 0, 3, 10, 0, operator="mul", step=1),
        Event("c", "copy", 1, 2, 11_001, 12_003, 0, "", 1, (0,), 64, "m0", "m1", "", 1),
        Event("wait", "wait", 1, 0, 9000, 11_001),
    ]
    profile = profile_of(events)
    profile.save(tmp_path / "t.json")
    found = Profile.load(tmp_path / "t.json")
    assert found.events == profile.events
    assert (found.rows, found.memories, found.name) == (profile.rows, profile.memories, "run")


def _edited(change: Any) -> Any:
    found = profile_of([op("a", 0, 0, 1, 0), op("b", 1, 1, 2, 1, 0)]).to_json()
    change(found)
    return found


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda f: f.pop("otherData"), "field 'format' is missing; 'soapstone timeline' needed"),
        (lambda f: f["otherData"].update(format="x"), "field 'format': \"x\" found"),
        (lambda f: f["otherData"].update(version=9), "field 'version': 9 found, 1 needed"),
        (lambda f: f.update(traceEvents=3), "traceEvents"),
        (lambda f: f["traceEvents"].append(4), "event 5: 4 found, an object needed"),
        (lambda f: f["traceEvents"][-1].update(ts=float("nan")), "number NaN found"),
        (lambda f: f["traceEvents"][-1].update(ts=10**400), "event 4: field 'ts': 1000"),
        (lambda f: f["traceEvents"][-1].update(dur=-1), "field 'dur': -1 found"),
        (lambda f: f["traceEvents"][-1].update(tid=7), "row 7"),
        (lambda f: f["traceEvents"][-1]["args"].update(number=0), "two events have number 0"),
        (lambda f: f["traceEvents"][-1]["args"].update(after=[1]), "depends on itself"),
        (lambda f: f["traceEvents"][-1]["args"].update(after="0"), "field 'after'"),
        (lambda f: f["traceEvents"][-1].pop("name"), "field 'name' is missing"),
    ],
)
def test_wrong_timelines_get_one_clear_error(change: Any, text: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(_edited(change)))
    shown = RUN.invoke(app, ["profile", "show", str(path)])
    assert shown.exit_code == 1
    assert text in shown.output and "wrong.json" in shown.output and "\n" not in shown.output[:-1]


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    for contents, said in (
        (b"\x80\x04", "other bytes found, UTF-8 text needed"),
        (b"", "nothing found, JSON needed"),
        (b"PK", "not JSON"),
        (b"null", "null found, an object needed"),
    ):
        (tmp_path / "t.json").write_bytes(contents)
        with pytest.raises(ProfileError, match=f"t.json': {said}"):
            Profile.load(tmp_path / "t.json")


def test_show_prints_compares_and_draws(tmp_path: Path) -> None:
    events = [op("a", 0, 0, 10, 0, operator="mul"), op("b", 1, 10, 12, 1, 0)]
    profile_of(events, name="real").save(tmp_path / "t.json")
    profile_of(events[:1], name="simulated").save(tmp_path / "s.json")
    args = ["profile", "show", str(tmp_path / "t.json")]
    shown = RUN.invoke(app, args)
    assert shown.exit_code == 0 and "mul" in shown.output and "critical path" in shown.output
    drawn = RUN.invoke(app, [*args, "--json", "--by", "name", "-o", str(tmp_path / "t.svg")])
    found = json.loads(drawn.stdout)
    assert found["wall_us"] == 12 and found["operators"][0]["name"] == "a"
    assert (tmp_path / "t.svg").read_text().count("a point 0: 10.0 us") == 2  # row, critical path
    both = RUN.invoke(app, [*args, str(tmp_path / "s.json")])
    assert both.exit_code == 0 and "0.833" in both.output
    assert RUN.invoke(app, [*args, "-o", str(tmp_path / "t.png")]).exit_code == 1


def test_pictures_join_what_is_too_narrow_to_see() -> None:
    many = [op("a", 0, i, i + 1, i) for i in range(100_000)]
    assert len(picture(profile_of(many))) < 2_000_000
