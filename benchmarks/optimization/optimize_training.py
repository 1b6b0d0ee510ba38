"""Training throughput of original and optimised steps (MetaFlow, Figure 9).

    python benchmarks/optimization/optimize_training.py [--models nasrnn,bert] [--rounds 3]

A step is optimised in a process of its own and written to a file; then the original and the
optimised step train in processes of their own, in turns, on one batch of SGD.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import Peer, alternate, median, serve, tabulate

from soapstone.system import usable_cores

RATE = 1e-3
ROUND_S = 0.6
SMALL_BERT = {"layers": 1, "hidden": 512, "heads": 8, "vocabulary": None, "classes": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # an app's builder, and what it is given
    "mlp": ("mlp.build", {"batch_size": 128}),
    "lenet": ("lenet.build", {"batch_size": 64}),
    "alexnet": ("alexnet.build", {"batch_size": 16}),
    "squeezenet": ("squeezenet.build", {"batch_size": 8, "image_size": 64}),
    "resnet18": ("resnet.build", {"batch_size": 16, "image_size": 64, "depth": 18}),
    "resnext50_branches": ("resnext.build", {"batch_size": 4, "image_size": 64, "branches": True}),
    "inception_module": ("inception.module", {"batch_size": 4, "channels": 1280}),
    "lstm": ("rnntc.build", {"batch_size": 16, "layers": 2, "hidden": 512, "length": 20}),
    "nasrnn": ("nasrnn.build", {"batch_size": 16}),
    "nasrnn_shared": ("nasrnn.build", {"batch_size": 16, "shared": True}),
    "transformer": ("transformer.build", {"layers": 1, "vocabulary": 1000, "dropout": 0.0}),
    "bert": ("bert.build", {"batch_size": 16, "length": 64, "dropout": 0.0, **SMALL_BERT}),
}


STATES = ("inception_module", "nasrnn", "nasrnn_shared", "bert")  # models without classes


def build(name: str) -> Any:
    """Return the model of a name."""
    from soapstone.frontend.app import app_module

    path, options = MODELS[name]
    module, function = path.split(".")
    return getattr(app_module(module), function)(**options)


def compiled(name: str, threads: int, step: Path | None = None) -> Any:
    """Return the model of a name, ready to train."""
    from soapstone import SGD

    model = build(name)
    loss = "mse" if name in STATES else "cross_entropy"
    model.compile(SGD(RATE, momentum=0.9), loss=loss, cpus=threads, step=step)
    return model


def batch(model: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return one seeded batch: inputs by name, and labels; whole numbers are 0 or 1."""
    graph = model.training_graph
    random = np.random.default_rng(0)
    given = {}
    for name, role in graph.roles.items():
        if role == "input":
            spec = graph.tensors[name]
            drawn = random.standard_normal(spec.shape)
            given[name] = (drawn if spec.is_float else drawn > 0).astype(spec.dtype)
    return given, given.pop("labels")


def peer(name: str, threads: int, step: Path | None) -> None:
    """Train with the original step, or with that of a file."""
    from soapstone.frontend.training.state import TrainingState

    model = compiled(name, threads, step)
    inputs, labels = batch(model)
    state = TrainingState(model=model)

    def train() -> None:
        model.trainer.step(inputs, labels, state)

    serve(rounds_of(train, len(labels), lambda: float(state.loss)))


def rounds_of(
    train: Callable[[], None], samples: int, loss: Callable[[], float]
) -> Callable[[], dict[str, float]]:
    """Return what does a round: the median throughput of the steps that fill it, and the loss."""
    for _ in range(3):
        train()

    def do_round() -> dict[str, float]:
        times: list[float] = []
        while len(times) < 3 or sum(times) < ROUND_S:
            start = time.perf_counter()
            train()
            times.append(time.perf_counter() - start)
        return {"samples_per_s": samples / statistics.median(times), "loss": loss()}

    return do_round


def optimize(name: str, threads: int, path: Path, seconds: float) -> None:
    """Write what the optimiser makes of a step, and print its report."""
    import soapstone
    from soapstone.frontend.optimization.training import Ground

    model = compiled(name, threads)
    ground = Ground(model.trainer.machine, model.trainer.mapper)
    result = soapstone.optimize(model.training_graph, ground=ground, seconds=seconds)
    result.save(path)
    print(json.dumps(result.as_dict()))


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model: optimised first, then both steps in turns."""
    path = options.folder / f"{name}.step.json"
    command = [sys.executable, __file__, "--models", name, "--threads", str(options.threads)]
    search = [*command, "--optimize", str(path), "--seconds", str(options.seconds)]
    done = subprocess.run(search, stdout=subprocess.PIPE, text=True, check=True)
    report = json.loads(done.stdout.strip().splitlines()[-1])
    peers = {
        "original": Peer([*command, "--peer"]),
        "optimized": Peer([*command, "--peer", "--step", str(path)]),
    }
    try:
        measured = alternate(peers, options.rounds)
    finally:
        for each in peers.values():
            each.close()
    rate = {kind: median(found, "samples_per_s") for kind, found in measured.items()}
    rules = (f"{rule[:6]} x{n}" for rule, n in report["substitutions"].items())
    return {
        "model": name,
        **{f"{kind} samples/s": rate[kind] for kind in rate},
        "speedup": rate["optimized"] / rate["original"],
        "predicted ms": f"{report['cost_before_us'] / 1e3:.3g} -> "
        f"{report['cost_after_us'] / 1e3:.3g}",
        "launches": f"{report['launches_before']} -> {report['launches_after']}",
        "kept": report["kept"],
        "search s": report["seconds"],
        "rules": ", ".join(rules),
    }


def main() -> None:
    parser = common(__doc__, models=MODELS, rounds=3, threads=usable_cores(), folder=FOLDER)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the search for a model")
    parser.add_argument("--peer", action="store_true", help="be one way to train the one model")
    parser.add_argument("--step", type=Path, help="the step that a peer trains with")
    parser.add_argument("--optimize", type=Path, help="write the optimised step of the one model")
    options = parser.parse_args()
    names = options.models.split(",")
    if options.peer:
        peer(names[0], options.threads, options.step)
        return
    if options.optimize:
        optimize(names[0], options.threads, options.optimize, options.seconds)
        return
    options.folder.mkdir(parents=True, exist_ok=True)
    tabulate(
        "optimize_training",
        "Training with optimised steps",
        f"python benchmarks/optimization/optimize_training.py --rounds {options.rounds}",
        (row_of(name, options) for name in names),
        ["speedup"],
        not options.no_write,
    )


if __name__ == "__main__":
    main()
