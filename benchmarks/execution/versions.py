"""This version of soapstone against another, in turns: inference, training steps, task overhead.

    python benchmarks/execution/versions.py OTHER_PYTHON [--rounds 7] [--only inference,training]

OTHER_PYTHON is the interpreter of an environment that holds the other version, installed from a
checkout (`pip install -e`), whose own benchmarks it runs. Ratios are this version's time over the
other's: above 1 is slower.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import inference
import training_step
from arguments import common
from harness import HERE, in_turns, median, ratio, tabulate

INFERENCE = ("squeezenet", "resnet50", "nasrnn", "nmt_step", "bert_12")
TRAINING = ("mlp", "lenet", "resnet18", "transformer_block", "dlrm")
OVERHEAD = ("traced 1 worker", "traced 2 workers", "untraced 1 worker", "untraced 2 workers")
PARTS = ("inference", "training", "overhead")


def peer(benchmarks: Path, part: str, name: str, folder: Path) -> list[str]:
    """Return the command, without the interpreter, that measures one thing in rounds."""
    script, options = {
        "inference": ("inference", ["soapstone", "--models", name, "--folder", str(folder)]),
        "training": ("training_step", ["soapstone", name, str(os.cpu_count() or 1), "1"]),
        "overhead": ("runtime_overhead", [name, "--steps", "500"]),
    }[part]
    found = next(benchmarks.rglob(f"{script}.py"))  # an earlier version has it elsewhere
    return [str(found), "--peer", *options]


def rows(
    parts: Mapping[str, tuple[str, ...]], other: str, benchmarks: Path, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each thing measured."""
    folder = Path(tempfile.gettempdir()) / "soapstone"
    for part, names in parts.items():
        for name in names:
            if part == "inference":
                inference.export(name, folder)
            pair = {
                "this": [sys.executable, *peer(HERE, part, name, folder)],
                "other": [other, *peer(benchmarks, part, name, folder)],
            }
            measured = in_turns(pair, rounds)
            yield {
                "part": part,
                "what": name,
                "this ms": median(measured["this"], "ms"),
                "other ms": median(measured["other"], "ms"),
                "ratio": ratio(measured["this"], measured["other"]),
            }


def main() -> None:
    """Measure, and write the table."""
    parser = common(__doc__, rounds=7)
    parser.add_argument("other", help="the interpreter that has the other version")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--all", action="store_true", help="every model of the benchmarks")
    options = parser.parse_args()
    names = {
        "inference": tuple(inference.MODELS) if options.all else INFERENCE,
        "training": tuple(training_step.MODELS) if options.all else TRAINING,
        "overhead": OVERHEAD,
    }
    parts = {part: names[part] for part in options.only.split(",")}
    where = "import soapstone.runtime as r; print(r.__path__[0])"
    package = subprocess.check_output([options.other, "-c", where], cwd=HERE, text=True).strip()
    place = Path(package).parent
    commit = subprocess.check_output(
        ["git", "-C", str(place), "rev-parse", "--short", "HEAD"], text=True
    ).strip()
    tabulate(
        "versions",
        f"Against commit {commit}: time over its time",
        f"python benchmarks/execution/versions.py OTHER_PYTHON --rounds {options.rounds}",
        rows(parts, options.other, place / "benchmarks", options.rounds),
        ("ratio",),
        save=not options.no_write,
    )


if __name__ == "__main__":
    main()
