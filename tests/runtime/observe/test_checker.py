"""The offline checker: random programs are accepted, and edited logs of them are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.runtime.log_edits import Records, judged, needed, read, without
from helpers.runtime.programs import ShuffledMapper, random_program
from helpers.runtime.scenarios import Run, scenario
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Machine,
    Partition,
    ProfileError,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Scope,
    StoppedError,
    Task,
    TaskError,
    Write,
    task,
)
from soapstone.runtime.observe.checker import Report, check_log
from soapstone.runtime.observe.checker.order import ancestors, same_bytes
from soapstone.runtime.observe.checker.records import Operation, Storage


def kinds(report: Report) -> set[str]:
    return {violation.kind for violation in report.violations}


# -- what is right is accepted


@pytest.mark.parametrize("seed", [3, 6, 11, 13, 15, 16])
def test_random_programs_are_accepted(seed: int, tmp_path: Path) -> None:
    given = scenario(seed)
    with given.setup.runtime() as runtime, runtime.log(tmp_path / "run.log"):
        Run(runtime, given).run()
    report = check_log(tmp_path / "run.log")
    assert report.accepted, str(report)
    assert report.operations and report.reads


def test_a_log_may_begin_in_the_middle_of_a_run(tmp_path: Path) -> None:
    x, y = Region((8,), np.int64, "x"), Region((8,), np.int64, "y")
    double = Task("double", (Read, Write), lambda a, b: np.multiply(a, 2, out=b))
    with Runtime(Machine.local(2, memories=2)) as runtime:
        runtime.write(x, np.arange(8))
        runtime.launch(double, Partition.tiled(x, 2), Partition.tiled(y, 2))
        with runtime.log(tmp_path / "run.log"):
            with pytest.raises(StoppedError, match="already"), runtime.log(tmp_path / "other"):
                pass
            runtime.launch(double, y, x)
            view = runtime.array(y)
            view += 1
            runtime.launch(double, Partition.tiled(y, 2), Partition.tiled(x, 2))
            assert runtime.read(x).tolist() == [2 + 4 * n for n in range(8)]
        runtime.launch(double, x, y)
    report = check_log(tmp_path / "run.log")
    assert report.accepted and report.launches == 2, str(report)


# -- what is wrong is refused


def traced(seed: int, path: Path, memories: int = 2) -> Records:
    """The log of two replays of a random program, for which dependences are everything."""
    program = random_program(seed)
    machine = Machine.local(2, memories=memories)
    with Runtime(machine, ShuffledMapper(seed), log=path) as runtime:
        rng = np.random.default_rng(seed)
        for region in program.persistent:
            runtime.write(region, rng.integers(0, 100, size=region.shape).astype(region.dtype))
        trace = runtime.capture(lambda: program.launch(runtime))
        for _ in range(2):
            trace.replay()
        for region in program.persistent:
            runtime.read(region)
    return read(path)


def only(records: Records, kind: str) -> dict[str, Any]:
    return next(record for record in records if record["kind"] == kind)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_dependence_that_is_dropped_is_missed(seed: int, tmp_path: Path) -> None:
    records = traced(seed, tmp_path / "run.log", memories=1 + seed % 2)
    assert judged(records).accepted
    trace = only(records, "trace")
    pairs = list(needed(trace))
    assert pairs
    for source, number in pairs[:: max(1, len(pairs) // 4)]:
        after = next(o["after"] for o in trace["operations"] if o["id"] == number)
        after.remove(source)
        assert "dependence" in kinds(judged(records)), (source, number)
        after.append(source)
    assert judged(records).accepted


def _swap(records: Records) -> None:
    """Run two operations of a replay in the other order."""
    trace, replay = only(records, "trace"), only(records, "replay")
    source, number = next(iter(needed(trace)))
    runs = {run[0]: run for run in replay["runs"]}
    runs[source][1:], runs[number][1:] = runs[number][1:], runs[source][1:]


def _overlap(records: Records) -> None:
    trace, replay = only(records, "trace"), only(records, "replay")
    source, number = next(iter(needed(trace)))
    runs = {run[0]: run for run in replay["runs"]}
    runs[number][1] = runs[source][2] - 1
    runs[source][1] = min(runs[source][1], runs[number][1])


def _skip(records: Records) -> None:
    """Leave out the first point task that writes what another reads."""
    trace = only(records, "trace")
    written = [o for o in trace["operations"] if o["what"] == "task" and not o["idle"]]
    without(records, trace, written[0]["id"])


def _twice(records: Records) -> None:
    tasks = [o for o in only(records, "trace")["operations"] if o["what"] == "task"]
    many = next(o for o in tasks if o["point"] > 0)
    many["point"] -= 1


def _privilege(records: Records) -> None:
    tasks = [o for o in only(records, "trace")["operations"] if o["what"] == "task"]
    use = next(use for o in tasks for use in o["uses"] if use[3] == "r")
    use[3] = "rw"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_swap, "order"),
        (_overlap, "order"),
        (_skip, "launch"),
        (_twice, "launch"),
        (_privilege, "launch"),
    ],
)
@pytest.mark.parametrize("seed", [0, 3])
def test_edited_logs_are_refused(
    change: Callable[[Records], None], kind: str, seed: int, tmp_path: Path
) -> None:
    records = traced(seed, tmp_path / "run.log")
    change(records)
    assert kind in kinds(judged(records))


class Spread(DefaultMapper):
    """Point p on processor p, so that whole reads need copies."""

    def place(self, launch: Launch, point: int) -> int:
        return point % 2


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Halves are written in two memories, added up, read whole, and kept."""
    path = tmp_path_factory.mktemp("small") / "run.log"
    x, total = Region((8,), np.int64, "x"), Region((4,), np.int64, "total")
    tmp = [Region((64,), np.int64, name, transient=True) for name in ("t", "u")]
    start = Task("start", (Write,), lambda out: np.copyto(out, 3))
    bump = Task("bump", (ReadWrite,), lambda out: np.add(out, 1, out=out))
    add = Task("add", (Read, Reduce("sum")), lambda a, out: np.copyto(out, a))
    move = Task("move", (Read, Write), lambda a, out: np.copyto(out, a[: out.size]))
    with Runtime(Machine.local(2, memories=2), Spread(), log=path) as runtime:
        runtime.write(x, np.arange(8))

        def step() -> None:
            runtime.launch(bump, Partition.tiled(x, 2))
            runtime.launch(start, Partition.tiled(tmp[0], 2))
            runtime.launch(move, tmp[0], x)
            runtime.launch(start, Partition.tiled(tmp[1], 2))
            runtime.launch(move, tmp[1], x)
            tiles = Partition.tiled(x, 2)
            runtime.launch(add, tiles, Partition.whole(total, (2,)), initialise=True)

        trace = runtime.capture(step)
        for _ in range(2):
            trace.replay()
        assert runtime.read(total).tolist() == [6] * 4
    return read(path)


@pytest.fixture
def small(logged: Records) -> Records:
    """A copy of that log, to be edited."""
    return deepcopy(logged)


def test_every_copy_fold_and_fill_is_needed(small: Records) -> None:
    report = judged(small)
    assert report.accepted, str(report)
    moved = [o for o in only(small, "trace")["operations"] if o["what"] in ("copy", "fold")]
    assert {o["what"] for o in moved} == {"copy", "fold"}
    for operation in moved:
        operation["idle"] = True
        assert "value" in kinds(judged(small)), operation
        operation["idle"] = False


def test_folds_need_every_part_once_and_in_its_place(small: Records) -> None:
    fold = next(o for o in only(small, "trace")["operations"] if o["what"] == "fold")
    parts = fold["parts"]
    assert len(parts) > 1
    for wrong in (parts[:-1], [*parts, parts[0]], parts[::-1]):
        fold["parts"] = wrong
        report = judged(small)
        assert kinds(report) == {"value"} and "reduction" in str(report)
    fold["parts"] = parts
    fold["fresh"] = None
    assert "value" in kinds(judged(small))


def test_memory_that_is_reused_too_early_is_seen(small: Records) -> None:
    """One instance is moved onto the bytes of another that is still to be read."""
    regions = {r["name"]: r["id"] for r in small if r["kind"] == "region"}
    spaces = [r for r in small if r["kind"] == "storage"]
    (mine,) = (s for s in spaces if s["region"] == regions["x"] and s["memory"] == 0)
    other = next(s for s in spaces if s["region"] == regions["t"] and s["memory"] == 0)
    mine["address"] = other["address"]
    report = judged(small)
    assert kinds(report) >= {"value"} and "overwrote" in str(report)
    assert "'x'" in str(report)


def test_reads_of_python_are_checked(small: Records) -> None:
    host = next(r for r in small if r["kind"] == "host" and r["action"] == "read")
    host["seen"] = []
    report = judged(small)
    assert kinds(report) == {"value"} and "part of region 'total'" in str(report)


# -- tasks that launch tasks


@task
def bump(x: ReadWrite) -> None:
    x += 1


@task
def halves(scope: Scope, x: ReadWrite, y: Read) -> None:
    """Two launches of which the second depends on the first; then the body itself writes."""
    scope.launch(bump, Partition.tiled(scope.region("x"), 2))
    scope.launch(bump, Partition.tiled(scope.region("x"), 3))
    scope.wait()
    x += y.sum()
    scope.launch(bump, scope.region("x"))
    assert scope.read(scope.region("y")).size == 2


@pytest.fixture(scope="module")
def scoped(tmp_path_factory: pytest.TempPathFactory) -> Records:
    """Two points that launch tasks, untraced and in a trace."""
    path = tmp_path_factory.mktemp("scoped") / "run.log"
    x, y = Region((12,), np.int64, "x"), Region((4,), np.int64, "y")
    with Runtime(Machine.local(2), log=path) as runtime:
        for _ in range(2):
            with runtime.trace():
                runtime.launch(halves, Partition.tiled(x, 2), Partition.tiled(y, 2))
        runtime.launch(halves, Partition.tiled(x, 2), Partition.tiled(y, 2))
        assert runtime.read(x).tolist() == [9] * 12
    return read(path)


def _of_scope(records: Records, kind: str, **fields: Any) -> Records:
    """The records of one kind in the first scope that was opened."""
    return [
        r
        for r in records
        if r["kind"] == kind
        and r.get("scope") == 1
        and all(r[name] == value for name, value in fields.items())
    ]


def _sub_order(records: Records) -> None:
    """The second launch runs before the first."""
    runs = _of_scope(records, "run")
    for one, two in zip(runs[:2], runs[2:4]):
        for key in ("start", "end"):
            one[key], two[key] = two[key], one[key]


def _sub_dependence(records: Records) -> None:
    """The second launch does not wait for the first, which ends late."""
    for operation in _of_scope(records, "operation"):
        operation["after"], operation["issued"] = [], 0


def _sub_lost(records: Records) -> None:
    operation = _of_scope(records, "operation")[0]
    run = _of_scope(records, "run", operation=operation["id"])[0]
    records[:] = [r for r in records if r is not operation and r is not run]


def _sub_late(records: Records) -> None:
    run = max(_of_scope(records, "run"), key=lambda run: run["end"])
    run["end"] += 10**12


def _sub_elsewhere(records: Records) -> None:
    _of_scope(records, "storage")[0]["address"] += 8


def _sub_more(records: Records) -> None:
    """The task had less than it gave to those that it launched."""
    _of_scope(records, "region", name="x")[0]["held"] = "r"


def _sub_spoiled(records: Records) -> None:
    """A task of its own wrote to bytes of the other argument."""
    x, y = (_of_scope(records, "region", name=name)[0]["id"] for name in "xy")
    theirs = _of_scope(records, "storage", region=x)[0]["address"]
    _of_scope(records, "storage", region=y)[0]["address"] = theirs


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (_sub_order, "order", "started"),
        (_sub_dependence, "dependence", "nothing orders them"),
        (_sub_lost, "launch", "never ran"),
        (_sub_late, "launch", "outside of its time"),
        (_sub_elsewhere, "launch", "on bytes that it did not have"),
        (_sub_more, "launch", "privilege rw on region 'x', on which it has r"),
        (_sub_spoiled, "launch", "region 'y' with r, on bytes that it did not have"),
    ],
)
def test_what_tasks_launch_is_judged(
    scoped: Records, change: Callable[[Records], None], kind: str, text: str
) -> None:
    records = deepcopy(scoped)
    report = judged(records)
    assert report.accepted and report.nested == 36, str(report)
    change(records)
    report = judged(records)
    assert kind in kinds(report) and text in str(report), str(report)


def test_a_scope_that_is_cut_short_is_no_log(scoped: Records) -> None:
    records = [r for r in scoped if r["kind"] != "end" or r.get("scope") != 1]
    with pytest.raises(ProfileError, match="no end"):
        judged(records)


def test_a_timeline_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ProfileError, match="a timeline found"):
        check_log(path)


# -- bytes


def test_what_comes_before_one_that_had_ended_comes_before_too() -> None:
    """A task follows, through a receive that had ended, a task of another rank."""
    ends = [10, 20, 9, 40]  # each rank has its own clock

    def before(issued: int) -> set[int]:
        given = [("task", (), 0, 0), ("send", (0,), 1, 0), ("recv", (1,), 2, 1)]
        given.append(("task", (), issued, 1))
        operations = [
            Operation(n, what, "", None, 0, rank, False, (), after, at, rank=rank)
            for n, (what, after, at, rank) in enumerate(given)
        ]
        mine = ancestors(operations, range(4), False, ends)[3]
        return {n for n in range(4) if mine >> n & 1}

    assert before(issued=9) == {0, 1, 2}
    assert before(issued=8) == set()


def test_boxes_share_bytes_exactly_when_their_elements_do() -> None:
    rng = np.random.default_rng(0)
    verdicts = set()
    for _ in range(300):
        made = []
        for number in range(2):
            extents = tuple(int(n) for n in rng.integers(1, 5, size=2))
            itemsize = int(rng.choice([1, 4, 8]))
            strides = (extents[1] * itemsize, itemsize)
            if rng.integers(0, 2):
                strides = (itemsize, extents[0] * itemsize)
            low = [int(rng.integers(0, n)) for n in extents]
            high = [int(rng.integers(a + 1, n + 1)) for a, n in zip(low, extents)]
            base = 64 + int(rng.integers(0, 12)) * 4
            whole = ((0, 0), extents)
            storage = Storage(number, 0, 0, whole, base, strides, itemsize, None)
            touched = {
                base + i * strides[0] + j * strides[1] + byte
                for i in range(low[0], high[0])
                for j in range(low[1], high[1])
                for byte in range(itemsize)
            }
            made.append((storage, (tuple(low), tuple(high)), touched))
        (one, first, these), (two, second, those) = made
        verdicts.add(bool(these & those))
        assert same_bytes(one, first, two, second) == bool(these & those)
    assert verdicts == {True, False}


# -- files


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda r: r.append({"kind": "teleport"}),
            "'kind': \"teleport\" found, one of header",
        ),
        (lambda r: r.pop(), "no end"),
        (lambda r: r.pop(0), "header must come first"),
        (lambda r: r[0].update(version=1), "line 1: field 'version': 1 found, 2 needed"),
        (lambda r: r[0].update(ranks=2), "log of rank 1, is not there"),
        (lambda r: r[0].update(rank=1), "rank 1 of 1 ranks"),
        (lambda r: r[-1].update(whole=False), "stopped by an error"),
        (lambda r: r.insert(-1, {"kind": "failed", "name": "step"}), "'step' failed"),
        (lambda r: only(r, "storage").update(region=99), "region 99 is not known"),
        (lambda r: only(r, "region").update(shape=[-1]), "field 'shape': [-1] found"),
        (lambda r: only(r, "trace")["operations"][0].update(what="warp"), "that is a 'warp'"),
        (lambda r: only(r, "trace").update(order=[0]), "operations and order"),
        (lambda r: only(r, "replay")["runs"].pop(), "one of each of its"),
        (lambda r: only(r, "replay")["runs"][0].__setitem__(2, 0), "ends at 0 before it starts"),
        (lambda r: only(r, "trace")["launches"][0].update(points=3), "2 tiles of region 'x'"),
    ],
)
def test_wrong_logs_get_one_clear_error(
    small: Records, change: Callable[[Records], None], text: str, tmp_path: Path
) -> None:
    change(small)
    path = tmp_path / "wrong.log"
    path.write_text("".join(json.dumps(record) + "\n" for record in small))
    shown = CliRunner().invoke(app, ["profile", "check", str(path)])
    assert shown.exit_code == 1 and text in shown.output, shown.output
    assert "wrong.log" in shown.output and "\n" not in shown.output[:-1]


def test_the_command_says_what_was_checked(small: Records, tmp_path: Path) -> None:
    path = tmp_path / "run.log"
    path.write_text("".join(json.dumps(record) + "\n" for record in small))
    shown = CliRunner().invoke(app, ["profile", "check", str(path)])
    assert shown.exit_code == 0 and shown.output.startswith("accepted: 12 launches")
    for operation in only(small, "trace")["operations"]:
        operation["after"] = []
    path.write_text("".join(json.dumps(record) + "\n" for record in small))
    shown = CliRunner().invoke(app, ["profile", "check", str(path), "--json"])
    found = json.loads(shown.stdout)
    assert shown.exit_code == 1 and not found["accepted"] and found["wrong"] > 0
    assert "nothing orders them" in found["violations"][0]["text"]


def test_logs_of_failed_runs_are_refused(tmp_path: Path) -> None:
    def fail(out: Any) -> None:
        raise ZeroDivisionError

    x = Region((4,), np.int64, "x")
    with (
        pytest.raises(TaskError),
        Runtime(Machine.local(1), log=tmp_path / "run.log") as runtime,
    ):
        runtime.launch(Task("fail", (Write,), fail), x)
        runtime.wait()
    with pytest.raises(ProfileError, match="stopped by an error"):
        check_log(tmp_path / "run.log")


# -- what it has found


class ByName(DefaultMapper):
    """Tasks named "far" on the second processor, all others on the first."""

    def place(self, launch: Launch, point: int) -> int:
        return int(launch.name == "far")


def test_a_trace_sees_instances_made_after_its_last_replay(tmp_path: Path) -> None:
    x, y = Region((4,), np.int64, "x"), Region((4,), np.int64, "y")
    move = Task("move", (Read, Write), lambda a, b: np.copyto(b, a))
    put = Task("put", (Write,), lambda a: np.copyto(a, 5))
    with Runtime(Machine.local(2, memories=2), ByName(), log=tmp_path / "run.log") as runtime:
        runtime.write(x, np.arange(4))
        trace = runtime.capture(lambda: runtime.launch(move, x, y))
        trace.replay()
        runtime.launch(put, x, name="far")  # in a memory where there was no instance before
        trace.replay()
        assert runtime.read(y).tolist() == [5] * 4
    assert check_log(tmp_path / "run.log").accepted
