"""Training step of soapstone and of torch eager: time, and peak memory above the import baseline.

    python benchmarks/training_step.py [--models mlp,lenet,alexnet] [--rounds 7]

Needs `pip install -e ".[bench]"`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from harness import Peer, alternate, median, serve, status_bytes, write

MODELS = {"mlp": 128, "lenet": 64, "alexnet": 64}
STEPS = {"mlp": 60, "lenet": 40, "alexnet": 3}
RATE = 0.01


def batch(model: str) -> tuple[np.ndarray, np.ndarray]:
    """Return one seeded batch."""
    shape = {"mlp": (784,), "lenet": (1, 28, 28), "alexnet": (3, 64, 64)}[model]
    generator = np.random.default_rng(0)
    x = generator.standard_normal((MODELS[model], *shape)).astype(np.float32)
    return x, generator.integers(0, 10, MODELS[model]).astype(np.int32)


def timed(step: Any, count: int) -> float:
    """Return the median milliseconds of a step."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        step()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def soapstone_peer(model: str, cpus: int, threads: int) -> None:
    import importlib

    from soapstone import SGD
    from soapstone.frontend.callbacks import TrainingState

    app = importlib.import_module(f"soapstone.apps.{model}")
    import soapstone.frontend.training
    import soapstone.kernels.cpu  # noqa: F401  (the baseline holds the libraries)

    baseline = status_bytes("VmRSS")
    built = app.build(MODELS[model])
    built.compile(SGD(RATE), loss="cross_entropy", cpus=cpus, threads=threads)
    x, y = batch(model)
    state = TrainingState(model=built)
    inputs = {built.build().inputs()[0]: x}
    trainer = built.trainer

    def step() -> None:
        trainer.step(inputs, y, state)

    for _ in range(3):
        step()

    def do_round() -> Mapping[str, Any]:
        ms = timed(step, STEPS[model])
        peak = status_bytes("VmHWM") - baseline
        return {"ms": ms, "peak_mb": peak / 2**20, "loss": state.loss}

    serve(do_round)


def torch_peer(model: str, cpus: int, threads: int) -> None:
    import torch
    from torch import nn

    torch.set_num_threads(cpus * threads)
    baseline = status_bytes("VmRSS")
    layers: dict[str, list[nn.Module]] = {
        "mlp": [nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10)],
        "lenet": [
            nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
        ],
    } if model != "alexnet" else {
        "alexnet": [
            nn.Conv2d(3, 64, 11, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
            nn.LazyLinear(4096), nn.ReLU(),
            nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
        ],
    }  # fmt: skip
    net = nn.Sequential(*layers[model])
    x, y = (torch.from_numpy(array) for array in batch(model))
    net(x[:1])
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    loss_of = nn.CrossEntropyLoss()
    target = y.long()
    last = [0.0]

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(net(x), target)
        loss.backward()
        optimizer.step()
        last[0] = float(loss.detach())

    for _ in range(3):
        step()

    def do_round() -> Mapping[str, Any]:
        ms = timed(step, STEPS[model])
        return {"ms": ms, "peak_mb": (status_bytes("VmHWM") - baseline) / 2**20, "loss": last[0]}

    serve(do_round)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peer", nargs=4, metavar=("LIBRARY", "MODEL", "CPUS", "THREADS"))
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    options = parser.parse_args()
    if options.peer:
        library, model, cpus, threads = options.peer
        run = soapstone_peer if library == "soapstone" else torch_peer
        run(model, int(cpus), int(threads))
        return
    rows = []
    cores = os.cpu_count() or 1
    for model in options.models.split(","):
        forms = {
            "torch": (options.torch_python, "torch", 1, cores),
            "workers": (sys.executable, "soapstone", cores, 1),
            "threads": (sys.executable, "soapstone", 1, cores),
            "one": (sys.executable, "soapstone", 1, 1),
        }
        peers = {
            name: Peer([python, __file__, "--peer", library, model, str(cpus), str(threads)])
            for name, (python, library, cpus, threads) in forms.items()
        }
        measured = alternate(peers, options.rounds)
        for peer in peers.values():
            peer.close()
        ms = {name: median(measured[name], "ms") for name in forms}
        peak = {name: median(measured[name], "peak_mb") for name in forms}
        rows.append(
            {
                "model": f"{model} b{MODELS[model]}",
                "torch ms": ms["torch"],
                f"{cores} workers ms": ms["workers"],
                "ratio": ms["workers"] / ms["torch"],
                f"1 worker x {cores} threads ms": ms["threads"],
                "ratio (threads)": ms["threads"] / ms["torch"],
                "speedup of workers over one": ms["one"] / ms["workers"],
                "torch peak MB": peak["torch"],
                "soapstone peak MB": peak["workers"],
                "peak ratio": peak["workers"] / peak["torch"],
            }
        )
        print(rows[-1], flush=True)
    write(
        "training_step",
        "Training step against torch eager",
        f"python benchmarks/training_step.py --rounds {options.rounds}",
        list(rows[0]),
        rows,
    )


if __name__ == "__main__":
    main()
