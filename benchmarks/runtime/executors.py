"""Every app on another executor beside the local one: the same numbers, and what a step costs.

    python benchmarks/runtime/executors.py --executor legate [--apps mlp,lenet] [--cpus 1,2]

Apps are at the small sizes of the tests (tests/programs/executor_apps.py), batch 4: a step's work
is little, so that the difference is the executor's overhead. Weights after the steps are compared,
relative to each tensor's largest. Every row is written when it is there; where one app fails, or
its weights differ, the others are still run and the command fails at the end.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import save_section, show

from soapstone.runtime import RuntimeCoreError

COLUMNS = [
    "app", "cpus", "local us", "us", "overhead us", "launches", "overhead a launch us", "difference"
]  # fmt: skip


def row(app: str, executor: str, cpus: int, steps: int) -> dict[str, Any]:
    """One app on one number of processors."""
    from programs.executor_apps import difference, train

    found: dict[str, Any] = {"app": app, "cpus": cpus}
    try:
        local, other = (train(app, name, cpus, steps) for name in ("local", executor))
    except RuntimeCoreError as error:
        return {**found, "difference": f"{type(error).__name__}: {error}"}
    overhead = other.step_us - local.step_us
    return {
        **found,
        "local us": round(local.step_us),
        "us": round(other.step_us),
        "overhead us": round(overhead),
        "launches": other.launches,
        "overhead a launch us": round(overhead / other.launches) if other.launches else "",
        "difference": difference(local, other),
    }


def main() -> None:
    from programs.executor_apps import APPS

    parser = argparse.ArgumentParser()
    parser.add_argument("--executor", default="legate")
    parser.add_argument("--apps", default=",".join(sorted(APPS)))
    parser.add_argument("--cpus", default="1,2")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    counts = sorted((int(count) for count in options.cpus.split(",")), reverse=True)
    rows: list[dict[str, Any]] = []
    table = ""
    for app in options.apps.split(","):
        for cpus in counts:  # the most first: Legate starts with as many
            rows.append(row(app, options.executor, cpus, options.steps))
            show(rows[-1])
            table = save_section(
                f"executors_{options.executor}",
                f"Apps on executor {options.executor} and on local: small sizes, batch 4, medians",
                f"python benchmarks/runtime/executors.py --executor {options.executor}",
                COLUMNS,
                rows,
            )
    print(table)
    other = [f"{row['app']} on {row['cpus']}" for row in rows if row["difference"] != 0.0]
    if other:
        sys.exit(f"not the local executor's numbers: {', '.join(other)}")


if __name__ == "__main__":
    main()
