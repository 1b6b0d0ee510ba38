"""Random task programs: each equal to its sequential execution, on any executor.

Programs (tests/runtime_scenarios.py) follow from their seeds. They run in a process of their own,
or under `mpiexec` in one a rank; one that says nothing for three minutes is ended and reported. The
first that fails is made smaller and printed.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from harness import write
from runtime_scenarios import Scenario, execute, scenario, shrink

HUNG_S = 180.0


def attempt(given: Scenario, checked: bool = False) -> dict[str, Any]:
    """Run one program; what failed, if anything did, and what it was made of.

    checked: the offline checker must also accept a log of it.
    """
    begin = time.perf_counter()
    row: dict[str, Any] = {"seed": given.seed, "failed": ""}
    try:
        with tempfile.TemporaryDirectory() as folder:
            row |= execute(given, Path(folder) / "run.log" if checked else None)
    except Exception as error:
        row["failed"] = f"{type(error).__name__}: {error}"
    row["seconds"] = time.perf_counter() - begin
    return row


def serve(first: int, count: int, executor: str, checked: bool) -> None:
    """Run programs and print a row for each (the first process of a run does)."""
    speaks = True
    if executor == "mpi":
        from soapstone.runtime.executors.mpi import rank

        speaks = rank() == 0
    for seed in range(first, first + count):
        row = attempt(scenario(seed, executor), checked)
        if speaks or row["failed"]:
            print(json.dumps(row), flush=True)
        if row["failed"] and executor != "local":
            os._exit(1)  # the other processes may wait for this one


def rows(
    first: int, count: int, executor: str, ranks: int, checked: bool
) -> Iterator[dict[str, Any]]:
    """The rows of all programs; after one that fails or hangs, a fresh process goes on."""
    seed, end = first, first + count
    while seed < end:
        command = [sys.executable, __file__, "--serve", "--first", str(seed)]
        command += ["--count", str(end - seed), "--executor", executor]
        command += ["--check"] * checked
        if executor == "mpi":
            launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}:{os.defpath}")
            command = [launcher or "mpiexec", "-n", str(ranks), *command]
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            for line in _lines(process):
                if not line.startswith("{"):
                    continue
                row = json.loads(line)
                if row["seed"] == seed:
                    yield row
                    seed += 1
                if row["failed"] and executor != "local":
                    break
            else:
                if seed < end:
                    how = "nothing heard for three minutes" if process.poll() is None else "died"
                    yield {"seed": seed, "failed": how, "seconds": HUNG_S}
                    seed += 1
            _end(process)


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    """Lines of output until it ends, or until nothing has come for long."""
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(HUNG_S):
            line = process.stdout.readline()
            if not line:
                process.wait(10)
                return
            yield line


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def smallest(given: Scenario) -> Scenario:
    """The smallest program found that fails in the same way."""

    def kind(one: Scenario) -> str:
        return str(attempt(one)["failed"]).partition(":")[0]

    wanted = kind(given)
    return shrink(given, lambda one: kind(one) == wanted)[0] if wanted else given


def main() -> None:
    """Run programs, print what failed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--executor", choices=("local", "mpi"), default="local")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the mpi executor")
    parser.add_argument(
        "--check", action="store_true", help="log each, and have the offline checker judge it"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.first, given.count, given.executor, given.check)
        return
    found = []
    for row in rows(given.first, given.count, given.executor, given.ranks, given.check):
        found.append(row)
        if row["failed"]:
            print(json.dumps(row), flush=True)
        if len(found) % 100 == 0:
            print(f"{len(found)} programs", flush=True)
    failed = [row for row in found if row["failed"]]
    if failed and given.executor == "local":
        print(smallest(scenario(failed[0]["seed"])))
    totals: Counter[str] = Counter()
    for row in found:
        totals.update({key: value for key, value in row.items() if isinstance(value, int | float)})
    processes = f" {given.ranks} ranks" if given.executor == "mpi" else ""
    judged = ", logs checked" if given.check else ""
    write(
        f"random_programs_{given.executor}{'_checked' * given.check}",
        f"Random task programs, {given.executor} executor{processes}{judged}",
        f"python benchmarks/random_programs.py --count {given.count} --executor {given.executor}"
        + " --check" * given.check,
        ["figure", "measured"],
        [
            {"figure": "programs", "measured": len(found)},
            {"figure": "programs that failed", "measured": len(failed)},
            {
                "figure": "programs with automatic traces",
                "measured": sum(bool(row.get("launches_traced")) for row in found),
            },
            *(
                {"figure": name.replace("_", " "), "measured": totals[name]}
                for name in ("launches", "points", "copies", "folds", "captures")
            ),
            {"figure": "steps replayed", "measured": totals["steps_replayed"]},
            {"figure": "launches traced automatically", "measured": totals["launches_traced"]},
            {"figure": "seconds", "measured": totals["seconds"]},
        ],
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
