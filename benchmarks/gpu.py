"""All that only a GPU shows, in one command: tests, kernels, links, steps. It can be stopped.

    python benchmarks/gpu.py [--folder FOLDER] [--minutes 25] [--machine h100] [--only tests]

The parts, the most telling first: `about` (what is there), `quick` (a product, a chain, a fold and
attention against their references), `links`, `kernels` (each timed, beside its price), `training`
(steps beside torch's), `optimize` (graphs optimised and not), `fidelity` (simulated steps and
measured ones), `streams` (models in a third of the memory they take), `tests` (those marked gpu),
`steps` (training and inference of apps, by precision), `operators` (every kernel's every case
against its reference). What a part says is in FOLDER/PART.log. A part that has ended is not run
again; one that time has ended goes on where it stopped when the command is given again with the
same folder, also on another day. Tables are in benchmarks/RESULTS.md, with a copy in FOLDER.
`--tiny` tries the parts of models at sizes that mean nothing, and writes no tables.
The exit code is 1 where a part failed, 2 where some are left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PYTHON = sys.executable
MODEL_S = 420.0  # for a row of `GOALS`
GRACE_S = 20.0  # for a part that is told to end
QUICK = ("matmul", "relu", "reduce_sum", "attention", "conv2d")
HALVES = ("resnet:mixed_float16", "bert:mixed_float16")
STEPPED = ("lenet", "bert", "transformer", "resnet", "dlrm", "rnntc")
GOALS = {  # a row a model, by a script whose name is its table's
    "execution/gpu_training.py": ("resnet", "bert", "gcn", "dlrm", *HALVES),
    "optimization/gpu_optimize.py": ("nasrnn", "resnext", "nasnet"),
    "strategies/gpu_fidelity.py": ("resnet", "bert", "dlrm"),
    "memory/gpu_streams.py": ("bert", "resnet"),
}
TABLES = ("gpu_kernels", "gpu_steps", *(Path(script).stem for script in GOALS))
SIMULATOR = str(ROOT / "tests" / "programs" / "cuda_simulator.py")
ENDED, FAILED, STOPPED = "ended", "failed", "stopped"


@dataclass(frozen=True)
class Part:
    """A command that is given at most so many seconds.

    Attributes:
        each: names for which it is run, a process each; none: it is run once.
    """

    name: str
    command: tuple[str, ...]
    most_s: float
    each: tuple[str, ...] = ()


def parts(folder: Path, machine: str, tiny: bool = False) -> list[Part]:
    """Return the parts in order, with the files that they go on from in a folder."""

    def goal(script: str) -> Part:
        name, rows = Path(script).stem, ("--rows", str(folder / f"{Path(script).stem}.jsonl"))
        command = (PYTHON, str(HERE / script), *rows, *["--tiny"] * tiny, "--models")
        return Part(name.removeprefix("gpu_"), command, MODEL_S, GOALS[script])

    kernels = (PYTHON, str(HERE / "kernels" / "gpu_kernels.py"), "--machine", machine)
    steps = (PYTHON, str(HERE / "execution" / "gpu_steps.py"), "--machine", machine)
    pytest = (PYTHON, "-m", "pytest", "-o", "addopts=", "-q", "-p", "no:cacheprovider", "-m", "gpu")
    links = (PYTHON, "-m", "soapstone", "machine", "measure", "--gpus", "1")
    return [
        Part("about", (PYTHON, "-m", "soapstone", "doctor"), 120),
        Part("quick", (PYTHON, SIMULATOR, "--device"), 120, QUICK),
        Part("links", (*links, "-o", str(folder / "here.json")), 180),
        Part("kernels", (*kernels, "--rows", str(folder / "kernels.jsonl")), 420),
        *map(goal, GOALS),
        Part("tests", pytest, 300, gpu_tests()),
        Part("steps", (*steps, "--rows", str(folder / "steps.jsonl"), "--models"), 420, STEPPED),
        Part("operators", (PYTHON, SIMULATOR, "--device"), 120, operators()),
    ]


def gpu_tests() -> tuple[str, ...]:
    """Return the files of tests that need a GPU, but for that of the part `operators`."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(
        str(each.relative_to(ROOT))
        for each in files
        if "mark.gpu" in each.read_text(encoding="utf-8") and each.name != "test_simulated.py"
    )


def operators() -> tuple[str, ...]:
    """Return the names of all operators."""
    from soapstone.ir.ops import declared

    return tuple(sorted(declared()))


class Run:
    """Parts that are run until time is up; what has ended is noted in the folder.

    folder: for logs and notes. until: the time at which all has to have ended.
    """

    def __init__(self, folder: Path, until: float) -> None:
        self.folder, self.until = folder, until
        folder.mkdir(parents=True, exist_ok=True)
        self._notes = folder / "parts.json"
        text = self._notes.read_text() if self._notes.exists() else "{}"
        self.done: dict[str, str] = json.loads(text)

    def part(self, part: Part) -> None:
        """Run what is left of a part, with as many processes at once as there are cores."""
        wanted = {f"{part.name} {name}": [name] for name in part.each} or {part.name: []}
        left = {key: more for key, more in wanted.items() if self.done.get(key) in (None, STOPPED)}
        end = min(self.until, time.monotonic() + part.most_s * (len(left) if part.each else 1))
        at_once = max(1, (os.cpu_count() or 2) // 2) if part.name == "operators" else 1
        running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        waiting = list(left.items())
        with (self.folder / f"{part.name}.log").open("ab") as log:
            while running or (waiting and time.monotonic() < end - GRACE_S):
                while waiting and len(running) < at_once and time.monotonic() < end - GRACE_S:
                    key, more = waiting.pop(0)
                    begun = self._start([*part.command, *more], log)
                    running[key] = begun, min(end, time.monotonic() + part.most_s)
                for key, (process, last) in list(running.items()):
                    if process.poll() is None and time.monotonic() > last - GRACE_S / 2:
                        ended(process)
                        self._note(key, STOPPED)
                    elif process.poll() is not None:
                        self._note(key, FAILED if process.returncode else ENDED)
                    else:
                        continue
                    del running[key]
                time.sleep(0.05)

    def _start(self, command: Sequence[str], log: object) -> subprocess.Popen[bytes]:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        variables.pop("NUMBA_ENABLE_CUDASIM", None)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=variables,
            stdout=log,  # type: ignore[arg-type]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _note(self, key: str, what: str) -> None:
        self.done[key] = what
        self._notes.write_text(json.dumps(self.done, indent=1) + "\n")
        print(f"{key}: {what}", flush=True)


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S / 4)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wrong(log: Path) -> list[str]:
    """Return the operators of a log of `cuda_simulator.py` of which a call was wrong."""
    found: dict[str, Mapping[str, object]] = {}
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if line.startswith('{"operator"'):
            said = json.loads(line)
            found[said["operator"]] = said
    return [f"{name}: {said['wrong']}"[:400] for name, said in found.items() if said["wrong"]]


def main() -> int:
    """Run what is left, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--minutes", type=float, default=25.0, help="that all of it may take")
    parser.add_argument("--machine", default="h100", help="whose prices stand beside")
    parser.add_argument("--only", default="", help="parts, with commas between them")
    parser.add_argument("--tiny", action="store_true", help="models of sizes that mean nothing")
    taken = parser.parse_args()
    run = Run(taken.folder.resolve(), time.monotonic() + 60 * taken.minutes)
    named = taken.only.split(",") if taken.only else []
    known = parts(run.folder, taken.machine, taken.tiny)
    chosen = [each for each in known if each.name in named or not named]
    for each in chosen:
        run.part(each)
    keys = [k for p in chosen for k in ([f"{p.name} {n}" for n in p.each] or [p.name])]
    failed = [key for key in keys if run.done.get(key) == FAILED]
    left = [key for key in keys if run.done.get(key) in (None, STOPPED)]
    mistakes = [
        line for name in ("quick", "operators") for line in wrong(run.folder / f"{name}.log")
    ]
    for name in TABLES:
        table = HERE / "results" / f"{name}.json"
        if table.exists():
            shutil.copy(table, run.folder)
    for title, lines in (("failed", failed), ("left", left), ("wrong", mistakes)):
        print(f"{title}: {len(lines)}", *lines[:40], sep="\n  ")
    return 1 if failed or mistakes else 2 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
