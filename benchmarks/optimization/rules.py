"""The rules of the graph optimiser: time and memory to generate, prove, lift and verify them.

python benchmarks/optimization/rules.py [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write

PUBLISHED = ["--space", "published", "--max-operators", "3"]
PAPER = ["--space", "matrices", "--space", "images", "--max-operators", "4"]
LARGE = ["--space", "large", "--max-operators", "5"]


def command(*arguments: str) -> tuple[dict[str, Any], float]:
    """Return what a command reports, and how long its process took."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "soapstone.cli.main", "rules", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout), time.perf_counter() - start


def row(what: str, seconds: float, target: str, **found: Any) -> dict[str, Any]:
    peak = found.pop("peak_bytes", None)
    counts = ", ".join(f"{value:,} {name}" for name, value in found.items())
    return {
        "what": what,
        "seconds": seconds,
        "target": target,
        "peak MB": "" if peak is None else peak / 2**20,
        "counts": counts,
    }


def generated(name: str, options: list[str], target: str, folder: Path) -> list[dict[str, Any]]:
    """Return rows of one generation: the whole, and its stages."""
    report, wall = command("generate", *options, "-o", str(folder / "rules.json"))
    counts = ("graphs", "candidates", "after_renaming", "after_common_subgraph", "rules")
    rows = [
        row(
            name,
            wall,
            target,
            peak_bytes=report["peak_bytes"],
            **{key.replace("_", " "): report[key] for key in (*counts, "unknown", "refuted")},
        )
    ]
    rows += [row(f"{name}: {stage}", s, "") for stage, s in report["stages"].items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", action="append", help="published, paper, shipped, large, check, verify or laws"
    )
    options = parser.parse_args()
    wanted = options.only or ["published", "paper", "check", "verify", "laws"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "published" in wanted:
            rows += generated("published inputs, 3 operators", PUBLISHED, "60 s", folder)
        if "paper" in wanted:
            rows += generated("Table 2.1, 4 operators", PAPER, "60+60+120+300 s", folder)
        if "shipped" in wanted:
            rows += generated("the shipped file", [], "", folder)
        if "large" in wanted:
            rows += generated("5 operators", LARGE, "1 h, 8 GB", folder)
    for what in ("check", "verify"):
        if what in wanted:
            report, wall = command(what)
            found = {k: v for k, v in report.items() if isinstance(v, int) and v is not True}
            rows.append(row(f"{what} the shipped file", wall, "120 s", **found))
    if "laws" in wanted:
        report, wall = command("laws", "--validate")
        found = {"laws": len(report["laws"]), "valid": report["validated"]}
        rows.append(row("validate the laws up to 4x4x4x4", wall, "300 s", **found))
    write(
        "rules",
        "Generating and verifying rules",
        "python benchmarks/optimization/rules.py",
        list(rows[0]),
        rows,
    )


if __name__ == "__main__":
    main()
