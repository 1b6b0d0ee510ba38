"""Random task programs: each equal to its sequential execution, on any executor.

    python benchmarks/correctness/random_programs.py --count 1000 --executor all --check

Programs (tests/helpers/runtime/scenarios.py) follow from their seeds. They run in a process of
their own, or under `mpiexec` in one a rank; one that says nothing for three minutes is ended and
reported. The first that fails on the local executor is made smaller and printed. With --check the
offline checker must accept the log of every program, and refuse it once it is edited
(tests/helpers/runtime/log_edits.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write
from helpers import legate_environment
from helpers.runtime.log_edits import refuse_an_edit
from helpers.runtime.scenarios import Scenario, execute, scenario, shrink

HUNG_S = 180
EXECUTORS = ("local", "processes", "mpi", "legate")
FIGURES = ("launches", "points", "copies", "folds", "captures", "steps replayed", "launches traced")


def attempt(
    given: Scenario, log: Path | None = None, ranks: int = 1, judges: bool = True
) -> dict[str, Any]:
    """Run one program; what failed, if anything did, and what it was made of.

    log: where to write a log, which the offline checker must accept, and once edited refuse.
    judges: whether this is the process that edits it.
    """
    begin = time.perf_counter()
    row: dict[str, Any] = {"seed": given.seed, "failed": ""}
    try:
        row |= execute(given, log)
        if log is not None and judges:
            row["edits"] = bool(refuse_an_edit(log, ranks, given.seed))
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    row["seconds"] = time.perf_counter() - begin
    return row


def serve(first: int, count: int, executor: str, checked: bool) -> None:
    """Run programs and print a row for each (the first process of a run does)."""
    speaks, ranks = True, 1
    folder = ""
    if executor == "mpi":
        from soapstone.runtime.executors.mpi.executor import connect

        speaks, ranks = connect().Get_rank() == 0, connect().Get_size()
    if speaks:
        folder = tempfile.mkdtemp()
    if ranks > 1:
        folder = connect().bcast(folder)
    log = Path(folder) / "run.log" if checked and executor != "legate" else None
    try:
        for seed in range(first, first + count):
            given = scenario(seed, executor)
            row = attempt(given, log, ranks, speaks)
            if speaks or row["failed"]:
                print(json.dumps(row), flush=True)
            if row["failed"] and executor in ("mpi", "legate"):
                os._exit(1)  # the other processes may wait for this one
    finally:
        if speaks:
            shutil.rmtree(folder, ignore_errors=True)


def rows(
    first: int,
    count: int,
    executor: str,
    ranks: int,
    checked: bool,
    environment: Mapping[str, str],
) -> Iterator[dict[str, Any]]:
    """The rows of all programs; after one that fails or hangs, a fresh process goes on."""
    seed, last = first, first + count
    while seed < last:
        command = [sys.executable, __file__, "--serve", "--first", str(seed)]
        command += ["--count", str(last - seed), "--executor", executor]
        command += ["--check"] * checked
        if executor == "mpi":
            command = [mpiexec() or "mpiexec", "-n", str(ranks), *command]
        with subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            for line in lines(process):
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                if row["seed"] == seed:
                    yield row
                    seed += 1
                if row["failed"] and executor in ("mpi", "legate"):
                    break
            else:
                if seed < last:
                    how = "nothing heard for three minutes" if process.poll() is None else "died"
                    yield {"seed": seed, "failed": how, "seconds": HUNG_S}
                    seed += 1
            end(process)


def lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of output until it ends, or until nothing has come for long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        # Second by second: one that was stopped for a while, as all was, has not hung.
        while any(selector.select(1.0) for _ in range(HUNG_S)):
            line = process.stdout.readline()
            if not line:
                process.wait(10)
                return
            yield line


def end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until_interrupted(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows; an interrupt ends them, and what was found until then is kept."""
    try:
        yield from rows
    except KeyboardInterrupt:
        print("interrupted: the table is of what has run", flush=True)


def mpiexec() -> str | None:
    """The launcher of ranks, if there is one."""
    return shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.defpath}")


def environment_of(executor: str, folder: Path) -> dict[str, str]:
    """The variables of processes that run an executor.

    Raises: ImportError when it is not installed here.
    """
    if executor == "legate":
        return legate_environment.environment(folder)
    if executor == "mpi" and (mpiexec() is None or not importlib.util.find_spec("mpi4py")):
        raise ImportError("mpi4py or mpiexec is not installed: pip install 'soapstone[mpi]'")
    return dict(os.environ)


def smallest(given: Scenario) -> Scenario:
    """The smallest program found that fails in the same way."""

    def kind(one: Scenario) -> str:
        with tempfile.TemporaryDirectory() as folder:
            return str(attempt(one, Path(folder) / "run.log")["failed"]).partition(":")[0]

    wanted = kind(given)
    return shrink(given, lambda one: kind(one) == wanted)[0] if wanted else given


def run(
    executor: str, first: int, count: int, ranks: int, checked: bool, folder: Path
) -> dict[str, Any]:
    """Run programs on one executor; the figures of all together."""
    name = f"{executor}, {ranks} ranks" if executor == "mpi" else executor
    try:
        environment = environment_of(executor, folder)
    except ImportError as error:
        print(f"{executor}: {error}", flush=True)
        return {"executor": name, "programs": 0}
    totals: Counter[str] = Counter()
    failed: list[dict[str, Any]] = []
    made = rows(first, count, executor, ranks, checked, environment)
    for row in until_interrupted(made):
        if row["failed"]:
            failed.append(row)
            print(json.dumps({"executor": executor, **row}), flush=True)
        totals.update({k: v for k, v in row.items() if isinstance(v, int | float)})
        totals["programs"] += 1
        totals["automatic"] += bool(row.get("launches_traced"))
        if totals["programs"] % 100 == 0:
            print(f"{totals['programs']} programs, {executor}", flush=True)
    if failed and executor == "local":
        print(smallest(scenario(failed[0]["seed"])))
    judges = checked and executor != "legate"
    return {
        "executor": name,
        "programs": totals["programs"],
        "failed": len(failed),
        "logs accepted": totals["programs"] - len(failed) if judges else "not logged",
        "edited logs refused": totals["edits"] if judges else "",
        "programs traced automatically": totals["automatic"],
        **{figure: totals[figure.replace(" ", "_")] for figure in FIGURES},
        "seconds": totals["seconds"],
    }


def main() -> None:
    """Run programs, print what failed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--executor", choices=(*EXECUTORS, "all"), default="local")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the mpi executor")
    parser.add_argument(
        "--check", action="store_true", help="log each, and have the offline checker judge it"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.first, given.count, given.executor, given.check)
        return
    chosen = EXECUTORS if given.executor == "all" else (given.executor,)
    table = []
    with tempfile.TemporaryDirectory() as folder:
        for number, executor in enumerate(chosen):
            first, end = (given.count * n // len(chosen) for n in (number, number + 1))
            mine = given.first + first, end - first
            table.append(run(executor, *mine, given.ranks, given.check, Path(folder)))
    count = sum(row["programs"] for row in table)
    options = (
        f"--count {count} --first {given.first} --executor {given.executor}"
        + " --check" * given.check
    )
    write(
        f"random_programs_{given.executor}",
        f"Random task programs, executors: {', '.join(chosen)}",
        f"python benchmarks/correctness/random_programs.py {options}",
        list(dict.fromkeys(key for row in table for key in row)),
        table,
    )
    sys.exit(any(row.get("failed") for row in table))


if __name__ == "__main__":
    main()
