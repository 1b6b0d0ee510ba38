"""Every app on another executor beside the local one: the same numbers, and what a step costs.

    python benchmarks/executors.py --executor legate [--apps mlp,lenet] [--cpus 1,2] [--steps 12]

Apps are at the small sizes of the tests (tests/executor_apps.py): a step's work is little, so that
the difference is the executor's overhead. Weights after the steps are compared, relative to each
tensor's largest; for a measure of that, so are those of the local executor on one and two
processors (batch norms over a few elements magnify the last bits).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from harness import show, write

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

COLUMNS = [
    "app", "cpus", "local us", "us", "overhead us", "ratio", "tasks a step", "difference",
    "local, one and two",
]  # fmt: skip


def row(app: str, executor: str, cpus: int, steps: int) -> dict[str, Any]:
    """One app on one number of processors."""
    from executor_apps import difference, train

    local, found = (train(app, name, cpus, steps) for name in ("local", executor))
    other = train(app, "local", 3 - cpus, steps) if cpus in (1, 2) else local
    return {
        "app": app,
        "cpus": cpus,
        "local us": round(local.step_us),
        "us": round(found.step_us),
        "overhead us": round(found.step_us - local.step_us),
        "ratio": found.step_us / local.step_us,
        "tasks a step": found.launches,
        "difference": f"{difference(local, found):.1e}",
        "local, one and two": f"{difference(local, other):.1e}",
    }


def main() -> None:
    from executor_apps import APPS

    parser = argparse.ArgumentParser()
    parser.add_argument("--executor", default="legate")
    parser.add_argument("--apps", default=",".join(sorted(APPS)))
    parser.add_argument("--cpus", default="1,2")
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    counts = sorted((int(count) for count in options.cpus.split(",")), reverse=True)
    rows = []
    for app in options.apps.split(","):
        for cpus in counts:  # the most first: Legate starts with as many
            rows.append(row(app, options.executor, cpus, options.steps))
            show(rows[-1])
    write(
        f"executors_{options.executor}",
        f"Apps on executor {options.executor} and on local: small sizes, batch 4, medians",
        f"python benchmarks/executors.py --executor {options.executor}",
        COLUMNS,
        rows,
    )


if __name__ == "__main__":
    main()
