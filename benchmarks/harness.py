"""What all benchmarks share: peers in processes of their own, run in turns, medians and ratios.

Every peer is a long-lived process that waits for a line, does one round and prints one JSON object;
only one works at a time. Results go to a JSON file, and a table of them to RESULTS.md.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import llvmlite.binding

from soapstone.frontend.optimization import peer_process
from soapstone.frontend.optimization.peer_process import Peer
from soapstone.system import processor_name

BUDGET_S = 0.6  # of a round
REST_S = 0.2  # before a round: threads of the peer before may still spin
HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))  # programs and twins that benchmarks share with tests
LIBRARIES = (  # whose versions a figure depends on: our own, and the peers
    *("numpy", "numba", "llvmlite", "onednn-cpu-gomp", "onnx", "z3-solver", "mpi4py", "mpich"),
    *("legate", "onnxruntime", "openvino", "torch", "dask", "ray"),
)


def machine() -> str:
    """Return the machine as the tables name it."""
    level = llvmlite.binding.get_host_cpu_name()  # models that are sold under one name differ
    cores, python = os.cpu_count(), platform.python_version()
    return f"{processor_name()} ({level}), {cores} cores, Python {python}"


def serve(do_round: Callable[[], Mapping[str, Any]]) -> None:
    """Be a peer: do one round for each line on standard input."""
    peer_process.serve(lambda line: do_round())


def best(function: Callable[[], Any], repeats: int) -> float:
    """The shortest of several runs, in seconds."""
    found = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        found = min(found, time.perf_counter() - start)
    return found


def rounds_of(run: Callable[[], object]) -> Callable[[], dict[str, Any]]:
    """Return a round: the median and best time of runs that fill the budget."""
    for _ in range(3):
        run()

    def one() -> dict[str, Any]:
        times: list[float] = []
        while len(times) < 5 or sum(times) < BUDGET_S:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return {"ms": statistics.median(times) * 1e3, "best_ms": min(times) * 1e3}

    return one


def alternate(peers: Mapping[str, Peer], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what every peer measured, in rounds taken in turns."""
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in peers}
    for index in range(rounds):
        names = list(peers) if index % 2 == 0 else list(peers)[::-1]
        for name in names:
            time.sleep(REST_S)
            measured[name].append(peers[name].ask())
    return measured


def in_turns(commands: Mapping[str, Sequence[str]], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Return what peers started by these commands measured, in rounds taken in turns."""
    peers: dict[str, Peer] = {}
    try:
        for name, command in commands.items():
            peers[name] = Peer(command)
        return alternate(peers, rounds)
    finally:
        for peer in peers.values():
            peer.close()


def geometric_means(rows: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> dict[str, float]:
    """Return the geometric mean of each ratio over the rows that have it."""
    found = {key: [float(row[key]) for row in rows if key in row] for key in keys}
    return {key: statistics.geometric_mean(ratios) for key, ratios in found.items() if ratios}


def show(row: Mapping[str, Any]) -> None:
    """Print a row as soon as it is there."""
    print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)


def ratio(
    one: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], key: str = "ms"
) -> float:
    """Return how many times longer one took than the other: the median over rounds.

    Both of a round ran within seconds, in which a shared machine changes less than between rounds.
    """
    return float(statistics.median(a[key] / b[key] for a, b in zip(one, other, strict=True)))


def median(measured: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the median of a figure over rounds."""
    return float(statistics.median(float(item[key]) for item in measured))


def write(
    name: str, title: str, command: str, columns: Sequence[str], rows: list[dict[str, Any]]
) -> None:
    """Write results as JSON and to RESULTS.md, and print the table."""
    print(save_section(name, title, command, columns, rows))


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True)
    return found.stdout.strip()


@cache
def provenance() -> dict[str, Any]:
    """Return what made the figures of this run: machine, commit, day and versions of libraries.

    A commit ends in "+" where files other than results differ from it.
    """
    changed = _git("status", "--porcelain", "--", ":/", f":!{HERE}/results", f":!{HERE}/RESULTS.md")
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "machine": machine(),
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else ""),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": versions,
    }


def described(record: Mapping[str, Any]) -> str:
    """Return the lines under a table's title: command, machine, commit, day, versions."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return (
        f"`{record['command']}` on {record['machine']}\n"
        f"commit {record['commit']}, {record['date']}; {versions or 'versions were not recorded'}"
    )


def _processor(described: str) -> str:
    """Return what a text says of processor and cores, without what it says beside."""
    return described.split(" on ", 1)[-1].split(", Python")[0]


def _others(path: Path, made: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records in a file that other processors made, the newest first."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    records = [kept, *kept.pop("others", [])] if kept else []
    return [each for each in records if _processor(each["machine"]) != _processor(made["machine"])]


def save_section(
    name: str, title: str, command: str, columns: Sequence[str], rows: list[dict[str, Any]]
) -> str:
    """Write results as JSON, replace this benchmark's section in RESULTS.md, and return it.

    All rows are of this run: they replace those of this processor as a whole. What other processors
    made stays below.
    """
    record = {"benchmark": name, "command": command, **provenance(), "rows": rows}
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    others = _others(path, record)
    path.write_text(json.dumps({**record, "others": others}, indent=1) + "\n")

    def cell(value: object) -> str:
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = [described(record), "", "| " + " | ".join(columns) + " |"]
    lines.append("|" + " --- |" * len(columns))
    lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    path = HERE / "RESULTS.md"
    text = path.read_text() if path.exists() else "# Results\n"
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    head, found, rest = text.partition(begin)
    before, _, rest = rest.partition(end)
    tables = ["\n".join(lines)]  # each begins with its command, in backquotes
    for table in before.rstrip("\n").split("\n\n`")[1:]:
        if _processor(table.split("\n", 1)[0]) != _processor(record["machine"]):
            tables.append("`" + table)
    section = "\n\n".join([f"## {title}", *tables]) + "\n"
    path.write_text((head if found else head.rstrip("\n") + "\n\n") + begin + section + end + rest)
    return section


def tabulate(
    name: str,
    title: str,
    command: str,
    rows: Iterable[dict[str, Any]],
    ratios: Sequence[str] = (),
    save: bool = True,
) -> None:
    """Show rows as they come, and write the table after each: an interrupt loses none of them.

    The last row has the geometric means of `ratios`.
    """
    found: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        show(row)
        found.append(row)
        if save:
            columns = list(dict.fromkeys(key for each in found for key in each))
            save_section(name, title, command, columns, found)

    for row in rows:
        add(row)
    if ratios:
        add({next(iter(found[0])): "geometric mean", **geometric_means(found, ratios)})
