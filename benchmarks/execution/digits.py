"""The main job: accuracy on the held-out fifth of the digits and wall time, over several seeds.

python benchmarks/execution/digits.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import write


def run(seed: int) -> dict[str, Any]:
    """Train once in a process of its own and return what the command line reports."""
    command = [sys.executable, "-m", "soapstone.cli.main", "train", "digits", "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [*command, "--seed", str(seed)], capture_output=True, text=True, check=True
    )
    report = json.loads(done.stdout)
    return {
        "seed": seed,
        "test accuracy": report["test_accuracy"],
        "wall s": time.perf_counter() - start,
        "step us": report["step_us"],
        "peak MB": report["peak_bytes"] / 2**20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    rows = [run(seed) for seed in range(options.seeds)]
    command = f"python benchmarks/execution/digits.py --seeds {options.seeds}"
    write("digits", "The digits, from the command line", command, list(rows[0]), rows)


if __name__ == "__main__":
    main()
