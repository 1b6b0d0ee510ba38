"""What the first run for a new shape of inputs takes beyond a later one: soapstone, ONNX Runtime.

    python benchmarks/execution/new_shapes.py [--models resnet50,bert_12] [--rounds 3]

A process opens a model whose batch is symbolic, and the length of tokens too, answers for batch 1,
then for other shapes, each several times: of a shape the time of the first run less that of the
fastest later one, on the clock and of the processor, which a busy machine changes less; and of the
slowest later one, since a number of samples is first answered in steps, and bound later by a
thread, whose time is that of runs beside it. A row has the medians of all shapes and rounds.
Kernels are those that earlier processes have left compiled.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from models import OF_TOKENS, arrays, export

MODELS = ("resnet50", "squeezenet", "bert_12", "nasrnn")
PEERS = ("soapstone", "onnxruntime")
BATCHES, LENGTHS = (2, 3, 5), (64, 37)
LATER = 8  # runs of a shape after its first, in which it is bound


def opened(library: str, path: Path, threads: int) -> Callable[[Mapping[str, Any]], object]:
    """Return what runs a model on inputs."""
    if library == "soapstone":
        from soapstone import InferenceSession

        return InferenceSession(path, threads=threads).run
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda given: session.run(None, given)


def shapes(name: str) -> Iterator[dict[str, Any]]:
    """Yield inputs of batch 1, then of the other shapes."""
    given = arrays(name)
    yield given
    for batch in BATCHES:
        yield {key: np.concatenate([array] * batch) for key, array in given.items()}
    for length in LENGTHS if name in OF_TOKENS else ():
        yield {key: array[:, :length] for key, array in given.items()}


def measure(library: str, name: str, path: Path, threads: int) -> list[dict[str, float]]:
    """Return what each new shape takes, in milliseconds."""
    run, found = opened(library, path, threads), []
    for given in shapes(name):
        times = []
        for _ in range(1 + LATER):
            start, used = time.perf_counter(), time.process_time()
            run(given)
            times.append((time.perf_counter() - start, time.process_time() - used))
        first, later = times[0], [min(each) for each in zip(*times[1:])]
        slowest = max(used for _, used in times[1:])
        found.append(
            {
                "ms": 1e3 * (first[0] - later[0]),
                "cpu ms": 1e3 * (first[1] - later[1]),
                "later cpu ms": 1e3 * (slowest - later[1]),
            }
        )
    return found[1:]


def by_peers(script: str, options: argparse.Namespace, name: str) -> dict[str, list[Any]]:
    """Return what processes of a script print of a model, by library; they take turns."""
    export(name, options.folder, symbolic=True)
    command = [sys.executable, script, "--models", name, "--folder", str(options.folder)]
    command += ["--threads", str(options.threads), "--peer"]
    found: dict[str, list[Any]] = {peer: [] for peer in PEERS}
    subprocess.run([*command, "soapstone"], check=True, capture_output=True)  # compiles
    for _ in range(options.rounds):
        for peer in PEERS:
            done = subprocess.run([*command, peer], check=True, capture_output=True, text=True)
            found[peer].append(json.loads(done.stdout))
    return found


def row_of(name: str, found: Mapping[str, list[Any]], figures: Sequence[str]) -> dict[str, Any]:
    """Return the row of a model: the medians of some figures, of each library."""
    from harness import median

    row: dict[str, Any] = {"model": name}
    for figure in figures:
        row |= {f"{peer} {figure}": median(found[peer], figure) for peer in PEERS}
    return row


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what new shapes of each model take."""
    for name in options.models.split(","):
        found = by_peers(__file__, options, name)
        shapes = {peer: [each for made in found[peer] for each in made] for peer in PEERS}
        yield row_of(name, shapes, ("cpu ms", "ms", "later cpu ms"))


def run(
    about: str,
    models: Sequence[str],
    measure: Callable[[str, str, Path, int], object],
    rows: Callable[[argparse.Namespace], Iterator[dict[str, Any]]],
    title: str,
    ratios: Sequence[str] = (),
) -> None:
    """Measure, and write the table; or, told `--peer`, print what one library takes.

    about: the script's docstring. measure: returns what a library takes for a model.
    """
    parser = common(about, models=models, rounds=3, threads=None, folder=FOLDER)
    parser.add_argument("--peer", choices=PEERS, help="be this process on the one model")
    options = parser.parse_args()
    if options.peer:
        path = export(options.models, options.folder, symbolic=True)
        print(json.dumps(measure(options.peer, options.models, path, options.threads)))
        return
    from harness import tabulate

    from soapstone.system import usable_cores

    options.threads = options.threads or usable_cores()
    script = Path(sys.argv[0])
    command = f"python benchmarks/execution/{script.name}"
    tabulate(script.stem, title, command, rows(options), ratios, save=not options.no_write)


if __name__ == "__main__":
    title = "The first run for a new shape of inputs, beyond a later one"
    run(__doc__, MODELS, measure, rows, title)
