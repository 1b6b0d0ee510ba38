"""Random graphs of all operators: however one runs, its outputs are those of the NumPy run.

    python benchmarks/correctness/random_graphs.py --count 1000 --optimize-every 50
    python benchmarks/correctness/random_graphs.py --count 1000 --training

With --training they are training steps of random models (tests/helpers/random_training.py), trained
by strategies, in little memory, in parts, left and taken up, and so on, against the NumPy run too.

Graphs (tests/helpers/random_graphs.py) follow from their seeds. They run in a process of their own,
so that one that ends it, or says nothing for three minutes, is reported with its seed; a fresh
process goes on with the next. A graph that fails is made smaller and printed. Kernels are drawn,
not measured.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write
from helpers.graph_runs import failure, shrink, ways_of
from helpers.random_graphs import Sample, draw
from helpers.random_training import draw as draw_training
from helpers.training_ways import failure as training_failure
from random_programs import end, lines, until_interrupted

SHRINK_S = 60.0  # a graph is made smaller for so long
CRASHES_TRIED = 60  # a process each: what ends its process is made smaller outside of it


def attempt_training(seed: int) -> dict[str, Any]:
    """Train one model in the ways of its seed; what failed, if anything did."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"seed": seed, "failed": "", "operators": [], "type": "float32"}
    try:
        case = draw_training(seed)
        with case.compiled() as model:
            row["operators"] = [node.operator for node in model.training_graph.nodes]
        row["failed"] = training_failure(case)
        row["smallest"] = str(case)
    except Exception as error:
        row["failed"] = f"drawing: {type(error).__name__}: {error}"
    row["seconds"] = time.perf_counter() - begin
    return row


def attempt(seed: int, every: int) -> dict[str, Any]:
    """Run one graph in all ways; what failed, if anything did, and what it was made of."""
    begin = time.perf_counter()
    row: dict[str, Any] = {"seed": seed, "failed": "", "operators": []}
    try:
        sample = draw(seed)
        row["operators"] = [node.operator for node in sample.graph.nodes]
        row["type"] = max((s.dtype for s in sample.graph.tensors.values()), key=_reals)
        optimized = bool(every) and seed % every == 0
        row["optimized"] = int(optimized)
        row["failed"] = failure(sample, (*ways_of(seed), *["optimize"] * optimized))
    except Exception as error:
        row["failed"] = f"drawing: {type(error).__name__}: {error}"
    row["seconds"] = time.perf_counter() - begin
    if row["failed"]:
        row["smallest"] = smallest(seed, row["failed"])
    return row


def _reals(dtype: str) -> tuple[bool, str]:
    return dtype.startswith("float"), dtype


def smallest(seed: int, failed: str) -> str:
    """Return the smallest graph found that fails in the same way, printed."""
    way = failed.partition(":")[0]
    if way == "drawing":
        return ""
    end = time.perf_counter() + SHRINK_S

    def fails(sample: Sample) -> bool:
        return time.perf_counter() < end and failure(sample, (way,)).startswith(way)

    try:
        made = shrink(draw(seed), fails)
        return f"{made}\n{failure(made, (way,))}"
    except Exception as error:
        return f"could not be made smaller: {type(error).__name__}: {error}"


def smallest_crash(seed: int, every: int) -> str:
    """Return the smallest graph found that ends its process, printed."""
    tried = 0

    def crashes(sample: Sample) -> bool:
        nonlocal tried
        tried += 1
        if tried > CRASHES_TRIED:
            return False
        ways = (*ways_of(sample.seed), *["optimize"] * bool(every))
        alone = multiprocessing.get_context("fork").Process(target=failure, args=(sample, ways))
        alone.start()  # no graph has run in this process: there is no pool to be forked
        alone.join(180)
        alone.kill()
        alone.join()
        return alone.exitcode != 0

    return str(shrink(draw(seed), crashes))


def serve(seeds: Sequence[int], every: int, training: bool) -> None:
    """Run graphs and print a row for each."""
    for seed in seeds:
        row = attempt_training(seed) if training else attempt(seed, every)
        print(json.dumps(row), flush=True)


def rows(first: int, count: int, every: int, training: bool) -> Iterator[dict[str, Any]]:
    """The rows of all graphs; after one that ends its process or hangs, a fresh one goes on."""
    seed, last = first, first + count
    while seed < last:
        command = [sys.executable, __file__, "--serve", "--seed", str(seed)]
        command += ["--count", str(last - seed), "--optimize-every", str(every)]
        command += ["--training"] * training
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        ) as process:
            try:
                for line in lines(process):
                    if line.startswith("{"):
                        yield json.loads(line)
                        seed += 1
                how = "nothing heard for three minutes" if process.poll() is None else "died"
            finally:
                end(process)
        if seed < last:
            found = str(draw_training(seed)) if training else smallest_crash(seed, every)
            yield {"seed": seed, "failed": how, "smallest": found, "operators": []}
            seed += 1


def main() -> None:
    """Run graphs, print what failed, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument(
        "--optimize-every", type=int, default=0, metavar="K", help="optimise every K-th graph too"
    )
    parser.add_argument("--training", action="store_true", help="training of random models")
    parser.add_argument("--checked", action="store_true", help="native entries on fenced copies")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    every = given.optimize_every
    if given.checked:
        os.environ["SOAPSTONE_CHECKED"] = "1"
    if given.serve:
        serve(range(given.seed, given.seed + given.count), every, given.training)
        return
    totals: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for row in until_interrupted(rows(given.seed, given.count, every, given.training)):
        totals["graphs"] += 1
        totals["failed"] += bool(row["failed"])
        totals["optimized"] += row.get("optimized", 0)
        totals["seconds"] += row.get("seconds", 0.0)
        types[row.get("type", "none")] += 1
        operators.update(row["operators"])
        if row["failed"]:
            print(f"seed {row['seed']}: {row['failed']}\n{row.get('smallest', '')}\n", flush=True)
        if totals["graphs"] % 100 == 0:
            print(f"{totals['graphs']} graphs, {totals['failed']} failed", flush=True)
    table = {
        "graphs": totals["graphs"],
        "failed": totals["failed"],
        "optimized": totals["optimized"],
        **{f"of {name}": count for name, count in sorted(types.items())},
        "operators run": sum(operators.values()),
        "kinds of operators": len(operators),
        "seconds": totals["seconds"],
    }
    options = f"--count {totals['graphs']} --seed {given.seed} --optimize-every {every}"
    options += " --training" * given.training + " --checked" * given.checked
    write(
        "random_training" if given.training else "random_graphs",
        "Random models, every way of training them against the NumPy run"
        if given.training
        else "Random graphs of all operators, every way of running them against the NumPy run",
        f"python benchmarks/correctness/random_graphs.py {options}",
        list(table),
        [table],
    )
    sys.exit(bool(totals["failed"]))


if __name__ == "__main__":
    main()
