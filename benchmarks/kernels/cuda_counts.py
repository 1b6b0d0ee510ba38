"""What CUDA kernels issue and move, counted without a GPU: their PTX is executed, some blocks each.

    python benchmarks/kernels/cuda_counts.py [OPERATOR ...] [--blocks 24] [--no-write]

Calls of usual sizes (`gpu_kernels.py`), in single precision and float16, on the driver of the tests
that executes kernels (tests/programs/libcuda_dry.c). Nothing is timed. Counted are, by launch and
summed over a call:

- slots / 128 B: of a scheduler, for 128 bytes of the launches' arrays; instructions of 64 bits and
  divisions take several, moves and parameters none (`slots` in libcuda_dry_ptx.h);
- sectors: of 32 bytes that loads and stores touch, relative to those that their bytes would fill;
  below 1 where lanes read the same, above where neighbouring lanes are apart;
- turns: of the banks of shared memory for an access, 1 where none waits for another.

"reach" is the share of a floor that the counts allow at most: the time that the call's bytes take
at 4.3 TB/s, or the operations of products at the peak of multiply-adds (67 TFLOP/s in single
precision, 990 on tensor cores), whichever is longer, over the sum of what bounds each launch. With
the numbers of an H200: 132 multiprocessors of four schedulers at 1.755 GHz. Latency is in none of
these.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parent))

from gpu_kernels import COLUMNS, SIZES, filled, specs
from harness import HERE, show, write

from soapstone.dtypes import learn
from soapstone.kernels.cuda.composites import LOWERED
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants

PROCESSORS, HZ = 132, 1.755e9
BYTES_PER_S = 4.3e12  # copied, measured on an H200
PEAKS = {"float32": 67e12, "float16": 990e12}
TURNED = 128  # bytes of shared memory a multiprocessor reads in one turn
COUNTED = ("blocks", "instructions", "slots", "requests", "sectors", "filled", "shared", "turns")
COUNTED += ("special",)
SPECIAL = 16  # lanes of special functions a multiprocessor computes at once
MULTIPLY = ("product", "staged", "fragments", "attention")  # kernels that are bound by operations
ALL = 1 << 40  # blocks
HEADS = (*COLUMNS[:4], "launches", "slots / 128 B", "sectors", "turns", "bound by", "reach")


def bounds(counts: dict[str, float], nbytes: float) -> dict[str, float]:
    """Return the seconds that each part of the GPU needs at least for what was counted."""
    at_once = PROCESSORS * HZ
    return {
        "issue": counts["slots"] / (4 * at_once),
        "memory": nbytes / BYTES_PER_S,
        "shared": counts["turns"] / at_once,
        "special": counts["special"] * 32 / SPECIAL / at_once,
    }


class Counter:
    """The driver's counts of kernels, of this process."""

    def __init__(self) -> None:
        from numba.cuda import dispatcher

        self._driver = ctypes.CDLL("libcuda.so.1")
        self._driver.dry_counted.restype = ctypes.POINTER(ctypes.c_double)
        self._launch, self._last = dispatcher.launch, 0
        dispatcher.launch = self._launched

    def _launched(self, stream: Any, configuration: Any, kernel: Any, *arguments: Any) -> None:
        self._last = int(kernel.handle)
        self._launch(stream, configuration, kernel, *arguments)

    def _counts(self) -> dict[str, float]:
        found = self._driver.dry_counted(ctypes.c_void_p(self._last))
        return dict.fromkeys(COUNTED, 0.0) | (
            {name: found[n] for n, name in enumerate(COUNTED)} if found else {}
        )

    def of(self, launch: Any, lane: Any) -> dict[str, float]:
        """Return what a launch counts, all its blocks, of which some are executed."""
        launch.enqueue(lane.stream)
        before = self._counts()
        lane.wait()
        after = self._counts()
        made = {name: after[name] - before[name] for name in COUNTED}
        times = math.prod(launch.grid) / max(made["blocks"], 1)
        return {name: value * times for name, value in made.items()}


def rows(name: str, case: Any, reals: str, counter: Counter) -> Iterator[dict[str, Any]]:
    """Yield a row for each variant that serves a call."""
    from soapstone.native.cuda.arrays import launchable, uploaded
    from soapstone.native.cuda.device import Device, Lane

    found = specs(name, case, reals)
    if found is None:
        return
    attributes, ins, outs, flops = found
    lane, served = Lane(Device(0)), 0
    with lane.device:
        given = tuple(launchable(uploaded(filled(x, t))) for x, t in zip(ins, case.inputs))
        made = tuple(launchable(uploaded(np.zeros(x.shape, learn(x.dtype)))) for x in outs)
        for each in variants(name, "cuda"):
            if each.name == LOWERED and served:
                continue
            entry = each.bind(Call(name, attributes, given, made))
            if entry is None:
                continue
            served += 1
            total, worst, seconds, moved = dict.fromkeys(COUNTED, 0.0), "", 0.0, 0.0
            longest = 0.0
            for launch in entry.launches:
                counts = counter.of(launch, lane)
                total = {key: total[key] + value for key, value in counts.items()}
                arrays = {
                    x.__cuda_array_interface__["data"][0]: x.nbytes
                    for x in launch.arguments
                    if hasattr(x, "nbytes")
                }
                nbytes = launch.nbytes or sum(arrays.values())
                needs, moved = bounds(counts, nbytes), moved + nbytes
                most = max(needs, key=lambda key: needs[key])
                seconds += needs[most]
                if needs[most] > longest:
                    longest, worst = needs[most], f"{most} of {launch.kernel.name}"
            floor = sum(x.nbytes for x in (*ins, *outs)) / BYTES_PER_S
            if any(launch.kernel.name.startswith(MULTIPLY) for launch in entry.launches):
                floor = max(floor, flops / PEAKS[reals])
            yield {
                "operator": name,
                "operands": ", ".join(case.inputs),
                "type": reals,
                "variant": each.name,
                "launches": len(entry.launches),
                "slots / 128 B": round(total["slots"] / max(moved / 128, 1), 1),
                "sectors": round(total["sectors"] / max(total["filled"], 1), 2),
                "turns": round(total["turns"] / max(total["shared"], 1), 2),
                "bound by": worst,
                "reach": round(floor / seconds, 2),
            }


def count(names: list[str]) -> None:
    """Print the rows of operators, a line of JSON each, in a process that executes kernels."""
    counter = Counter()
    for name in names:
        for case in SIZES[name]:
            for reals in PEAKS:
                for row in rows(name, case, reals, counter):
                    print(json.dumps(row), flush=True)


def counted(name: str, blocks: int, environment: dict[str, str]) -> list[dict[str, Any]] | None:
    """Return the rows of an operator, or None where not enough blocks were executed: what a launch
    leaves may be places that the next one reads."""
    done = subprocess.run(
        [sys.executable, "-m", "programs.cuda_executed", Path(__file__).stem, name],
        env={**environment, "DRY_COUNT": str(blocks)},
        cwd=HERE.parent / "tests",
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return None if done.returncode else [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Count in processes on the driver that executes, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operators", nargs="*", help="by default all that have usual sizes")
    parser.add_argument("--blocks", type=int, default=24, help="of each launch that are executed")
    parser.add_argument("--no-write", action="store_true", help="leave results and tables alone")
    taken = parser.parse_args()
    from helpers.driver_stub import with_driver

    kept = []
    with tempfile.TemporaryDirectory() as folder:
        environment = with_driver(Path(folder), HERE.parent / "tests/programs/libcuda_dry.c")
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for name in taken.operators or SIZES:
            found = counted(name, taken.blocks, environment)
            if found is None:
                found = counted(name, ALL, environment)
            if found is None:
                sys.exit(f"{name}: counting failed, of all blocks too")
            for row in found:
                show({key: row[key] for key in HEADS})
            kept += found
    if not taken.no_write:
        title = "CUDA kernels: what they issue and move, counted without a GPU"
        chosen = " ".join(["python benchmarks/kernels/cuda_counts.py", *taken.operators])
        write("cuda_counts", title, f"{chosen} --blocks {taken.blocks}", HEADS, kept)


if __name__ == "__main__":
    count(sys.argv[1:]) if os.environ.get("DRY_COUNT") else main()
