"""Training step of soapstone and of torch eager: time, and peak memory above the import baseline.

    python benchmarks/execution/training_step.py [--models mlp,lenet,alexnet] [--rounds 7]

Needs `pip install -e ".[bench]"`. Both sides take a step of SGD on one batch, forward, backward and
update; torch's models are the twins that the tests compare with.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import in_turns, median, serve, show, write

from soapstone.system import peak_bytes, resident_bytes

RATE = 0.01
BUDGET_S = 0.8  # of a round
TABLES = (10_000,) * 6 + (1_000,) * 10 + (100,) * 10


@dataclass(frozen=True)
class Benchmarked:
    """A model on both sides, its inputs (shape, integers below this or 0: floats) and labels."""

    ours: Callable[[], Any]
    theirs: Callable[[], Any]
    inputs: Mapping[str, tuple[tuple[int, ...], int]]
    labels: tuple[tuple[int, ...], int]
    loss: str = "cross_entropy"


def app(name: str, function: str = "build", **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        from soapstone.frontend.app import app_module

        return getattr(app_module(name), function)(**options)

    return build


def twin(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import importlib

        return getattr(importlib.import_module(f"torch_twins.{module}"), name)(
            *arguments, **options
        )

    return build


def _mlp() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 10))


def _lenet() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def _lstm() -> Any:
    from soapstone import Model

    model = Model("lstm")
    x = model.input("x", (64, 40, 1024))
    model.output(model.lstm(x, 1024)[0])
    return model


def _torch_lstm() -> Any:
    from torch import nn

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(1024, 1024, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.lstm(x)[0]

    return Outputs()


def _image(batch: int, channels: int, size: int) -> dict[str, tuple[tuple[int, ...], int]]:
    return {"image": ((batch, channels, size, size), 0)}


_BLOCK = {"layers": 1, "hidden": 512, "heads": 8, "vocabulary": None, "classes": None}
MODELS = {
    "mlp": Benchmarked(app("mlp", batch_size=128), _mlp, {"image": ((128, 784), 0)}, ((128,), 10)),
    "lenet": Benchmarked(app("lenet", batch_size=64), _lenet, _image(64, 1, 28), ((64,), 10)),
    "alexnet": Benchmarked(
        app("alexnet", batch_size=64),
        twin("cnn", "alexnet", 4, 64, 4096, 1000),
        _image(64, 3, 64),
        ((64,), 10),
    ),
    "resnet18": Benchmarked(
        app("resnet", batch_size=32, image_size=64, depth=18),
        twin("cnn", "resnet", (2, 2, 2, 2), 64, 1000, basic=True),
        _image(32, 3, 64),
        ((32,), 1000),
    ),
    "inception_module": Benchmarked(
        app("inception", "module", batch_size=4, channels=1280, image_size=8),
        twin("inception", "module", 1280, 1),
        _image(4, 1280, 8),
        ((4, 2048, 8, 8), 0),
        "mse",
    ),
    "lstm": Benchmarked(_lstm, _torch_lstm, {"x": ((64, 40, 1024), 0)}, ((64, 40, 1024), 0), "mse"),
    "transformer_block": Benchmarked(
        app("bert", batch_size=16, length=64, dropout=0.0, **_BLOCK),
        twin("sequence", "Bert", **_BLOCK),
        {"x": ((16, 64, 512), 0)},
        ((16, 64, 512), 0),
        "mse",
    ),
    "dlrm": Benchmarked(
        app("dlrm", batch_size=256, vocabularies=TABLES),
        twin("recommend", "Dlrm", TABLES),
        {"dense": ((256, 13), 0), "ids": ((256, len(TABLES)), 100)},
        ((256, 1), 2),
        "bce_with_logits",
    ),
}


def batch(case: Benchmarked) -> tuple[list[np.ndarray], np.ndarray]:
    """Return one seeded batch: inputs in order, and labels."""
    random = np.random.default_rng(0)

    def draw(shape: tuple[int, ...], below: int) -> np.ndarray:
        if below:
            return random.integers(0, below, shape).astype(np.int32)
        return random.standard_normal(shape).astype(np.float32)

    inputs = [draw(*field) for field in case.inputs.values()]
    labels = draw(*case.labels)
    return inputs, labels.astype(np.float32) if case.loss.startswith("bce") else labels


def rounds_of(step: Callable[[], None], loss: Callable[[], float], baseline: int) -> None:
    """Serve rounds: the median step of those that fill the budget."""
    for _ in range(3):
        step()

    def do_round() -> Mapping[str, Any]:
        times: list[float] = []
        while len(times) < 3 or sum(times) < BUDGET_S:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        peak = (peak_bytes() - baseline) / 1e6
        return {"ms": statistics.median(times) * 1e3, "peak_mb": peak, "loss": loss()}

    serve(do_round)


def soapstone_peer(case: Benchmarked, **how: Any) -> None:
    """Be soapstone. how: options of `Model.compile`."""
    import soapstone.frontend.training.trainer
    import soapstone.kernels.cpu  # noqa: F401  (the baseline holds the libraries)
    from soapstone import SGD
    from soapstone.frontend.training.state import TrainingState

    built = case.ours()
    baseline = resident_bytes()
    built.compile(SGD(RATE), loss=case.loss, **how)
    inputs, labels = batch(case)
    named = dict(zip(built.build().inputs(), inputs))
    state = TrainingState(model=built)
    trainer = built.trainer
    rounds_of(lambda: trainer.step(named, labels, state), lambda: float(state.loss), baseline)


def torch_peer(
    case: Benchmarked,
    threads: int | None = None,
    device: str = "cpu",
    compiled: bool = False,
    precision: str = "float32",
) -> None:
    """Be torch. A batch is copied to another device in each step, from page-locked memory."""
    import torch
    from torch.nn import functional

    if threads is not None:
        torch.set_num_threads(threads)
    tf32, mixed = precision == "tf32", precision == "mixed_float16"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    baseline = resident_bytes()
    net = case.theirs().to(device)
    run = torch.compile(net) if compiled else net
    arrays, labels = batch(case)
    inputs = [torch.from_numpy(array) for array in arrays]
    target = torch.from_numpy(labels)
    losses = {
        "cross_entropy": functional.cross_entropy,
        "mse": functional.mse_loss,
        "bce_with_logits": functional.binary_cross_entropy_with_logits,
    }
    loss_of = losses[case.loss]
    target = target.long() if case.loss == "cross_entropy" else target
    if device != "cpu":
        inputs, target = [each.pin_memory() for each in inputs], target.pin_memory()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler(device, enabled=mixed)
    last = [0.0]

    def step() -> None:
        given = [each.to(device, non_blocking=True) for each in inputs]
        wanted = target.to(device, non_blocking=True)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16, enabled=mixed):
            loss = loss_of(run(*given), wanted)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        last[0] = float(loss.detach())

    rounds_of(step, lambda: last[0], baseline)


def main() -> None:
    parser = common(__doc__, models=MODELS, rounds=7)
    parser.add_argument("--peer", nargs=4, metavar=("LIBRARY", "MODEL", "CPUS", "THREADS"))
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    options = parser.parse_args()
    if options.peer:
        library, model, cpus, threads = options.peer
        if library == "soapstone":
            soapstone_peer(MODELS[model], cpus=int(cpus), threads=int(threads))
        else:
            torch_peer(MODELS[model], int(cpus) * int(threads))
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
        commands = {
            name: [python, __file__, "--peer", library, model, str(cpus), str(threads)]
            for name, (python, library, cpus, threads) in forms.items()
        }
        measured = in_turns(commands, options.rounds)
        ms = {name: median(measured[name], "ms") for name in forms}
        peak = {name: median(measured[name], "peak_mb") for name in forms}
        rows.append(
            {
                "model": model,
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
        show(rows[-1])
    if not options.no_write:
        write(
            "training_step",
            "Training step against torch eager",
            f"python benchmarks/execution/training_step.py --rounds {options.rounds}",
            list(rows[0]),
            rows,
        )


if __name__ == "__main__":
    main()
