"""Requests of tokens whose lengths are drawn at random, one after another: soapstone, ONNX Runtime.

    python benchmarks/execution/random_lengths.py [--models bert_12,gpt2] [--rounds 3]

A process opens a model whose batch and length are symbolic and answers requests of one row, their
lengths drawn evenly from 8 to 128: what an embedding or ranking service sees. A row has the mean
and the 95th percentile of the later half of the requests, medians of the rounds, and the memory
that the process has at its end. Kernels are those that earlier processes have left compiled.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from models import OF_TOKENS, arrays
from new_shapes import by_peers, opened, row_of, run

REQUESTS, SHORTEST = 256, 8


def measure(library: str, name: str, path: Path, threads: int) -> dict[str, float]:
    """Return what later requests take, in milliseconds, and the process's memory, in MB."""
    import psutil

    answer, whole = opened(library, path, threads), arrays(name)
    longest = max(array.shape[1] for array in whole.values())
    times = []
    for length in np.random.default_rng(0).integers(SHORTEST, longest + 1, REQUESTS):
        given = {key: array[:, :length] for key, array in whole.items()}
        start = time.perf_counter()
        answer(given)
        times.append(1e3 * (time.perf_counter() - start))
    later = times[REQUESTS // 2 :]
    resident = psutil.Process().memory_info().rss / 2**20
    return {"ms": np.mean(later), "p95 ms": np.percentile(later, 95), "MB": resident}


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what requests of each model take."""
    for name in options.models.split(","):
        found = by_peers(__file__, options, name)
        row = row_of(name, found, ("ms", "p95 ms", "MB"))
        yield row | {"ratio": row["soapstone ms"] / row["onnxruntime ms"]}


if __name__ == "__main__":
    run(__doc__, OF_TOKENS, measure, rows, "Requests of random lengths, one row each", ["ratio"])
