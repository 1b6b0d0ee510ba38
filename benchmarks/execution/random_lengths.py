"""Requests of tokens whose lengths are drawn at random, one after another: soapstone, ONNX Runtime.

    python benchmarks/execution/random_lengths.py [--models bert_12,gpt2] [--rounds 3]

A process opens a model whose batch and length are symbolic and answers requests of one row, their
lengths drawn evenly from 8 to 128: what an embedding or ranking service sees. A row has the mean
and the 95th percentile of the later half of the requests, medians of the rounds, and the memory
that the process has at its end. Kernels are those that earlier processes have left compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from models import OF_TOKENS, arrays, export
from new_shapes import PEERS, opened

REQUESTS, SHORTEST = 256, 8


def measure(library: str, name: str, path: Path, threads: int) -> dict[str, float]:
    """Return what later requests take, in milliseconds, and the process's memory, in MB."""
    import psutil

    run, whole = opened(library, path, threads), arrays(name)
    longest = max(array.shape[1] for array in whole.values())
    times = []
    for length in np.random.default_rng(0).integers(SHORTEST, longest + 1, REQUESTS):
        given = {key: array[:, :length] for key, array in whole.items()}
        start = time.perf_counter()
        run(given)
        times.append(1e3 * (time.perf_counter() - start))
    later = times[REQUESTS // 2 :]
    resident = psutil.Process().memory_info().rss / 2**20
    return {"ms": np.mean(later), "p95 ms": np.percentile(later, 95), "MB": resident}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what requests of each model take."""
    from harness import median

    for name in options.models.split(","):
        export(name, options.folder, symbolic=True)
        command = [sys.executable, __file__, "--models", name, "--folder", str(options.folder)]
        command += ["--threads", str(options.threads), "--peer"]
        found: dict[str, list[dict[str, float]]] = {peer: [] for peer in PEERS}
        subprocess.run([*command, "soapstone"], check=True, capture_output=True)  # compiles
        for _ in range(options.rounds):
            for peer in PEERS:
                done = subprocess.run([*command, peer], check=True, capture_output=True, text=True)
                found[peer].append(json.loads(done.stdout))
        row: dict[str, Any] = {"model": name}
        for figure in ("ms", "p95 ms", "MB"):
            row |= {f"{peer} {figure}": median(found[peer], figure) for peer in PEERS}
        yield row | {"ratio": row["soapstone ms"] / row["onnxruntime ms"]}


def main() -> None:
    """Measure, and write the table."""
    parser = common(__doc__, models=OF_TOKENS, rounds=3, threads=None, folder=FOLDER)
    parser.add_argument("--peer", choices=PEERS, help="be this process on the one model")
    options = parser.parse_args()
    if options.peer:
        path = export(options.models, options.folder, symbolic=True)
        print(json.dumps(measure(options.peer, options.models, path, options.threads)))
        return
    from harness import tabulate

    from soapstone.system import usable_cores

    options.threads = options.threads or usable_cores()
    command = "python benchmarks/execution/random_lengths.py"
    title = "Requests of random lengths, one row each"
    tabulate("random_lengths", title, command, rows(options), ["ratio"], save=not options.no_write)


if __name__ == "__main__":
    main()
