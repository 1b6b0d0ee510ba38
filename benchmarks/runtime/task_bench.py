"""METG(50 %) of stencil_1d, here and on other systems, in turns, each in a process of its own.

Two workers, one task a worker and step, the compute kernel, 16 bytes a dependence. A round of a
peer is one sweep of task sizes; the table has the median METG over rounds, and the time of a task
of almost no work, which is the system's overhead. A peer that is absent, or that does not run
here, is in the table with the reason. Peers need their packages in the interpreter that runs this
(`--python` takes another one); Legate also needs the CUDA driver's library, or a stand-in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import harness
import task_bench_peers as peers

from soapstone.frontend.taskbench import TaskGraph, metg
from soapstone.frontend.taskbench.kernels import COMPUTE_FLOPS


@dataclass(frozen=True)
class System:
    """A system: how it is made, and the steps and the largest tasks of its sweep."""

    make: Callable[[TaskGraph], peers.Run]
    bodies: str
    steps: int
    largest: int
    target_us: float | None = None


WORKERS = 2
SYSTEMS: dict[str, System] = {
    "soapstone, traced": System(
        lambda g: peers.soapstone_run(g, "native", True, WORKERS), "native", 1000, 1 << 13, 1.0
    ),
    "OpenMP tasks": System(lambda g: peers.openmp_run(g, WORKERS), "native", 1000, 1 << 13),
    "soapstone, traced, Python": System(
        lambda g: peers.soapstone_run(g, "python", True, WORKERS), "Python", 500, 1 << 15, 25.0
    ),
    "soapstone, untraced": System(
        lambda g: peers.soapstone_run(g, "python", False, WORKERS), "Python", 200, 1 << 17
    ),
    "mpi4py, two ranks": System(lambda g: peers.mpi_run(g, WORKERS), "Python", 1000, 1 << 14),
    "concurrent.futures, threads": System(
        lambda g: peers.futures_run(g, False, WORKERS), "Python", 200, 1 << 17
    ),
    "concurrent.futures, processes": System(
        lambda g: peers.futures_run(g, True, WORKERS), "Python", 100, 1 << 18
    ),
    "Legate": System(lambda g: peers.legate_run(g, WORKERS), "Python", 200, 1 << 17),
    "Dask": System(lambda g: peers.dask_run(g, WORKERS), "Python", 40, 1 << 20),
    "Ray": System(lambda g: peers.ray_run(g, WORKERS), "Python", 40, 1 << 20),
}


def serve(name: str, repeats: int) -> None:
    """Be a peer: each round is a sweep."""
    sys.stdout = os.fdopen(os.dup(1), "w")  # answers alone; what libraries print goes elsewhere
    os.dup2(2, 1)
    system = SYSTEMS[name]
    graph = TaskGraph("stencil_1d", WORKERS, system.steps)
    try:
        run = system.make(graph)
        run(1)
    except (ImportError, OSError) as error:
        reason = f"absent: {error}"
        harness.serve(lambda: {"absent": reason})
        return

    def work(iterations: int) -> float:
        return float(iterations * graph.tasks * COMPUTE_FLOPS)

    def sweep() -> dict[str, Any]:
        found = metg(run, work, graph.tasks, WORKERS, largest=system.largest, repeats=repeats)
        empty = min(run(1) for _ in range(repeats)) * WORKERS / graph.tasks
        return {
            "metg_us": found.metg_us,
            "empty_us": empty * 1e6,
            "gflops": found.peak_rate / 1e9,
            "bound": found.bound,
        }

    if name.startswith("mpi4py"):
        _serve_ranks(sweep)
    else:
        harness.serve(sweep)


def _serve_ranks(sweep: Callable[[], dict[str, Any]]) -> None:
    """Be a peer of several ranks, which take part in each round; the first one speaks."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    others = range(1, world.size)

    def together() -> dict[str, Any]:
        for other in others:
            world.send(True, other)
        return sweep()

    if world.rank == 0:
        harness.serve(together)
        for other in others:
            world.send(False, other)
        return
    while True:
        while not world.iprobe(0):
            time.sleep(0.001)  # a receive would keep a core busy while other peers are measured
        if not world.recv(source=0):
            return
        sweep()


def command(name: str, python: str, repeats: int) -> list[str]:
    """The command of a peer."""
    here = [python, str(Path(__file__).resolve()), "--peer", name, "--repeats", str(repeats)]
    if name.startswith("mpi4py"):
        beside = Path(python).parent / "mpiexec"
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec") or "mpiexec"
        return [mpiexec, "-n", str(WORKERS), *here]
    return here


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", help="be this peer (used by the harness)")
    parser.add_argument("--python", default=sys.executable, help="the peers' interpreter")
    parser.add_argument("--only", action="append", help="systems whose names contain this")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="runs of a size; the fastest counts")
    parser.add_argument("--no-save", action="store_true", help="leave results and table alone")
    options = parser.parse_args()
    if options.peer:
        serve(options.peer, options.repeats)
        return
    names = [n for n in SYSTEMS if not options.only or any(part in n for part in options.only)]
    running: dict[str, harness.Peer] = {}
    absent: dict[str, str] = {}
    for name in names:
        try:
            running[name] = harness.Peer(command(name, options.python, options.repeats))
        except OSError as error:
            absent[name] = f"absent: {error}"
    try:
        measured = harness.alternate(running, options.rounds)
    finally:
        for peer in running.values():
            peer.close()
    rows = []
    for name in names:
        system = SYSTEMS[name]
        row: dict[str, Any] = {"system": name, "bodies": system.bodies}
        found = measured.get(name, [])
        reasons = (
            [absent[name]] if name in absent else [i["absent"] for i in found if "absent" in i]
        )
        if reasons:
            rows.append({**row, "note": reasons[0]})
            continue
        row["METG(50 %) us"] = harness.median(found, "metg_us")
        row["least us"] = min(item["metg_us"] for item in found)
        row["empty task us"] = harness.median(found, "empty_us")
        if system.target_us is not None:
            row["target us"] = system.target_us
        rows.append(row)
    figures = ["METG(50 %) us", "least us", "empty task us", "target us"]
    columns = ["system", "bodies", *figures, "note"]
    title = "Task Bench: METG(50 %) of stencil_1d, two workers"
    if options.no_save:
        for row in rows:
            harness.show(row)
    else:
        harness.write("task_bench", title, "python benchmarks/runtime/task_bench.py", columns, rows)


if __name__ == "__main__":
    main()
