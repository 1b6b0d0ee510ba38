"""Random programs of dynamic sessions: batched, by cells, by operators, all as one by one.

    python benchmarks/correctness/random_dynamic.py --models 100 --programs 100

Models and programs (tests/helpers/dynamic_programs.py) follow from their seeds. Each program is a
step of training; its loss, and what parameters become, are compared.
"""

from __future__ import annotations

import argparse

from by_seed import campaign
from helpers.dynamic_programs import differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--programs", type=int, default=100, help="of each model")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    given = parser.parse_args()
    campaign(
        "random_dynamic",
        "Random programs of dynamic sessions, four ways of running them",
        f"--models {given.models} --programs {given.programs} --seed {given.seed}",
        "programs",
        range(given.seed, given.seed + given.models),
        lambda seed: (given.programs, differences(seed, given.programs)),
    )


if __name__ == "__main__":
    main()
