"""Random ONNX models that compute shapes: answers for many shapes are ONNX Runtime's.

    python benchmarks/correctness/random_shapes.py --models 1000

Models (tests/helpers/random_shapes.py) follow from their seeds. A session's graphs for further
shapes are derived from those for earlier ones; wrong ones would mostly be seen at odd extents.
"""

from __future__ import annotations

import argparse

from by_seed import campaign
from helpers.random_shapes import differences


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    given = parser.parse_args()
    campaign(
        "random_shapes",
        "Random models that compute shapes, for many shapes, against ONNX Runtime",
        f"--models {given.models} --seed {given.seed}",
        "answers",
        range(given.seed, given.seed + given.models),
        differences,
    )


if __name__ == "__main__":
    main()
