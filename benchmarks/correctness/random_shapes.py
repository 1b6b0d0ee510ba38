"""Random ONNX models that compute shapes: answers for many shapes are ONNX Runtime's.

    python benchmarks/correctness/random_shapes.py --models 1000

Models (tests/helpers/random_shapes.py) follow from their seeds. A session's graphs for further
shapes are derived from those for earlier ones; wrong ones would mostly be seen at odd extents.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from harness import write
from helpers.random_shapes import differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    given = parser.parse_args()
    command = f"--models {given.models} --seed {given.seed}"
    began, wrong, answers = time.perf_counter(), 0, 0
    for done, seed in enumerate(range(given.seed, given.seed + given.models), 1):
        compared, found = differences(seed)
        for text in found:
            print(text, flush=True)
        wrong, answers = wrong + len(found), answers + compared
        print(f"{done} of {given.models} models, {wrong} differences", flush=True)
        row = {
            "answers": answers,
            "models": done,
            "differences": wrong,
            "seconds": time.perf_counter() - began,
        }
        write(  # after each model: a run that is ended leaves what it did
            "random_shapes",
            "Random models that compute shapes, for many shapes, against ONNX Runtime",
            f"python benchmarks/correctness/random_shapes.py {command}",
            list(row),
            [row],
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
