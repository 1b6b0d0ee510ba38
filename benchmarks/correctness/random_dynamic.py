"""Random programs of dynamic sessions: batched, by cells, by operators, all as one by one.

    python benchmarks/correctness/random_dynamic.py --models 100 --programs 100

Models and programs (tests/helpers/dynamic_programs.py) follow from their seeds. Each program is a
step of training; its loss, and what parameters become, are compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from harness import write
from helpers.dynamic_programs import differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--programs", type=int, default=100, help="of each model")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    given = parser.parse_args()
    command = f"--models {given.models} --programs {given.programs} --seed {given.seed}"
    began, wrong = time.perf_counter(), 0
    for done, seed in enumerate(range(given.seed, given.seed + given.models), 1):
        found = differences(seed, given.programs)
        for text in found:
            print(text, flush=True)
        wrong += len(found)
        print(f"{done} of {given.models} models, {wrong} differences", flush=True)
        row = {
            "programs": done * given.programs,
            "models": done,
            "differences": wrong,
            "seconds": time.perf_counter() - began,
        }
        write(  # after each model: a run that is ended leaves what it did
            "random_dynamic",
            "Random programs of dynamic sessions, four ways of running them",
            f"python benchmarks/correctness/random_dynamic.py {command}",
            list(row),
            [row],
        )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
