"""How cores are best shared out among requests: each division, simulated and measured.

    python benchmarks/execution/serving.py [--models nasnet_a,nasrnn] [--seconds 10]

Strategies are searched for as `soapstone strategy search MODEL --inference --objective` does it,
with times of tasks measured here. "pool" is one session of as many requests as there are cores, and
"apart" as many sessions of one thread, in turns with it.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import geometric_means, show, write
from models import arrays, export

from soapstone import InferenceSession
from soapstone.frontend.strategies.serving import find_serving
from soapstone.search.parallel import Options
from soapstone.system import usable_cores

MODELS = "squeezenet,nasnet_a,inception_v3,resnext50,nasrnn,resnet50"
ROUNDS, ROUND_S = 7, 0.6


def rate(sessions: Sequence[InferenceSession], given: Mapping[str, np.ndarray]) -> float:
    """Return how many runs end in a second, with a thread that asks each session."""
    counts, began = [0] * len(sessions), time.perf_counter()

    def ask(number: int) -> None:
        while time.perf_counter() - began < ROUND_S:
            sessions[number].run(given)
            counts[number] += 1

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(sessions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def pooled(path: Path, given: Mapping[str, np.ndarray], cores: int) -> dict[str, float]:
    """Return requests a second of one session of several requests, and of several sessions."""
    with ExitStack() as stack:
        pool = stack.enter_context(InferenceSession(path, threads=1, requests=cores))
        apart = [stack.enter_context(InferenceSession(path, threads=1)) for _ in range(cores)]
        found: dict[str, list[float]] = {"pool": [], "apart": []}
        for _ in range(1 + ROUNDS):
            for name, sessions in (("pool", [pool] * cores), ("apart", apart)):
                found[name].append(rate(sessions, given))
    one, other = (statistics.median(rates[1:]) for rates in found.values())
    return {"pool requests/s": one, "apart requests/s": other, "pool / apart": one / other}


def main() -> None:
    parser = common(__doc__, models=MODELS, folder=FOLDER)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each search")
    options = parser.parse_args()
    cores = usable_cores()
    rows: list[dict[str, Any]] = []
    for name in options.models.split(","):
        path = export(name, options.folder)
        found = find_serving(path, options=Options(seconds=options.seconds))
        whole = next(d for d in found.divisions if (d.requests, d.cpus) == (1, 1))
        for division in found.divisions:
            label = f"{division.requests} x {division.cpus} x {division.threads}"
            row: dict[str, Any] = {
                "model": name,
                "requests x processors x threads": label,
                "ms": division.latency_ms,
                "simulated / measured": division.simulated_ms / division.latency_ms,
                "/ ms of 1 x 1 x all": division.latency_ms / whole.latency_ms,
                "requests/s": division.requests_per_s,
                "/ requests/s of 1 x 1 x all": division.requests_per_s / whole.requests_per_s,
                "best trade-off": division in found.frontier,
            }
            if division.requests == cores:
                row |= pooled(path, arrays(name), cores)
            rows.append(row)
            show(row)
    ratios = ("simulated / measured", "pool / apart")
    rows.append({"model": "geometric mean", **geometric_means(rows, ratios)})
    show(rows[-1])
    if not options.no_write:
        command = "python benchmarks/execution/serving.py"
        columns = list(dict.fromkeys(key for row in rows for key in row))
        write("serving", "Cores shared out among requests, batch 1", command, columns, rows)


if __name__ == "__main__":
    main()
