"""How long a training step waits for input: photos that threads decode and augment, and an array.

    python benchmarks/execution/input_wait.py [--workers 0,1,2] [--rounds 3] [--side 256]

A folder of made-up JPEG photos is decoded, resized, mirrored and cropped by `Samples`, or by
torch's DataLoader, whose workers are processes, with the same functions. The step is that of
ResNet-18; it has all cores but one, so that loading fits the cores where a batch takes one worker
less time than the step. "waits %" is the part of two epochs that is between the end of a step and
the begin of the next; what the first step of all waits for, "first ms", is beside it. The same step
is fed from an array too.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import in_turns, median, ratio, serve, show, write
from training_step import MODELS, RATE

from soapstone.callbacks import Callback
from soapstone.data import ImageFolder, Samples, in_turn, random_crop, random_flip

MODEL, BATCH, SIZE = "resnet18", 16, 64
EPOCHS = 2  # of a round
ARRAY = -1  # of workers: the samples are an array in memory
AUGMENT = in_turn(random_flip, random_crop(4))


def photos(folder: Path, count: int, side: int, classes: int = 4) -> None:
    """Write so many photos of side x side pixels: noise of all scales, as JPEG of quality 90."""
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        coarse, fine = (
            Image.fromarray(random.integers(0, 256, (part, part, 3), np.uint8)).resize(
                (side, side), Image.Resampling.BICUBIC
            )
            for part in (8, side // 2)
        )
        kind = folder / str(number % classes)
        kind.mkdir(parents=True, exist_ok=True)
        Image.blend(coarse, fine, 0.2).save(kind / f"{number}.jpg", quality=90)


class Waits(Callback):
    """Times of steps, and of what is between them, in seconds."""

    def __init__(self) -> None:
        self.steps = list[float]()
        self.waits = list[float]()

    def on_epoch_begin(self, state: Any) -> None:
        self._ended = time.perf_counter()

    def on_step_end(self, state: Any) -> None:
        now = time.perf_counter()
        self.steps.append(state.step_us / 1e6)
        self.waits.append(now - self._ended - self.steps[-1])
        self._ended = now


def found(steps: list[float], waits: list[float]) -> dict[str, float]:
    """Return what a round measured."""
    first, *others = waits
    return {
        "step ms": statistics.median(steps) * 1e3,
        "first ms": first * 1e3,
        "longest ms": max(others) * 1e3,
        "waits %": sum(others) / (sum(steps) + sum(others)) * 1e2,
        "ms": (sum(steps) + sum(waits)) / EPOCHS * 1e3,
    }


def cores() -> int:
    """Return how many cores the step has."""
    return max(1, (os.cpu_count() or 1) - 1)


def in_memory(folder: ImageFolder) -> tuple[np.ndarray, np.ndarray]:
    """Return all photos as an array, and their classes."""
    return np.stack([folder[number][0] for number in range(len(folder))]), folder.labels


def soapstone_peer(folder: ImageFolder, workers: int) -> None:
    """Serve rounds of `fit`."""
    from soapstone import SGD

    model = MODELS[MODEL].ours()
    model.compile(SGD(RATE), cpus=cores())
    given: tuple[Any, ...] = (Samples(folder, augment=AUGMENT, workers=max(workers, 0)),)
    if workers == ARRAY:
        given = in_memory(folder)

    def do_round(epochs: int = EPOCHS) -> Mapping[str, Any]:
        waits = Waits()
        model.fit(*given, batch_size=BATCH, epochs=epochs, callbacks=[waits], progress=False)
        return found(waits.steps, waits.waits)

    do_round(1)
    serve(do_round)


def torch_peer(folder: ImageFolder, workers: int) -> None:
    """Serve rounds of the same by torch."""
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader

    torch.set_num_threads(cores())
    net = MODELS[MODEL].theirs()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    class Photos:
        def __len__(self) -> int:
            return len(folder)

        def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
            image, kind = AUGMENT(folder[number], np.random.default_rng(number))
            return np.ascontiguousarray(image), int(kind)

    if workers == ARRAY:
        x, y = (torch.from_numpy(each) for each in in_memory(folder))

        def batches() -> Iterator[Any]:
            order = torch.randperm(len(x))
            for low in range(0, len(x), BATCH):
                rows = order[low : low + BATCH]
                yield x[rows], y[rows]
    else:
        data: Any = DataLoader(
            Photos(),  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        batches = data.__iter__

    def step(x: Any, y: Any) -> None:
        optimizer.zero_grad()
        functional.cross_entropy(net(x), y.long()).backward()
        optimizer.step()

    def do_round(epochs: int = EPOCHS) -> Mapping[str, Any]:
        steps, waits = list[float](), list[float]()
        for _ in range(epochs):
            ended = time.perf_counter()
            for x, y in batches():
                began = time.perf_counter()
                waits.append(began - ended)
                step(x, y)
                ended = time.perf_counter()
                steps.append(ended - began)
        return found(steps, waits)

    do_round(1)
    serve(do_round)


PEERS: dict[str, Callable[[ImageFolder, int], None]] = {
    "soapstone": soapstone_peer,
    "torch": torch_peer,
}


def main() -> None:
    """Measure all in turns, and write the table."""
    parser = common(__doc__, rounds=3)
    parser.add_argument("--workers", default="0,1,2")
    parser.add_argument("--photos", type=int, default=128)
    parser.add_argument("--side", type=int, default=256, help="pixels of a photo")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--only", choices=[*PEERS], help="one library alone")
    parser.add_argument("--peer", nargs=3, metavar=("LIBRARY", "FOLDER", "WORKERS"))
    options = parser.parse_args()
    if options.peer:
        library, folder, workers = options.peer
        PEERS[library](ImageFolder(folder, (SIZE, SIZE)), int(workers))
        return
    pythons = {"soapstone": sys.executable, "torch": options.torch_python}
    if options.torch_python == sys.executable and find_spec("torch") is None:
        print("torch is not installed: soapstone alone", flush=True)
        del pythons["torch"]
    counts = [ARRAY, *map(int, options.workers.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        photos(Path(folder), options.photos, options.side)
        images = ImageFolder(folder, (SIZE, SIZE))
        begin = time.perf_counter()
        Samples(images, augment=AUGMENT).batch(np.arange(BATCH), 0, 0, 0)
        print(f"a batch is loaded in {(time.perf_counter() - begin) * 1e3:.0f} ms", flush=True)
        measured = in_turns(
            {
                (library, count): [python, __file__, "--peer", library, folder, str(count)]
                for library, python in pythons.items()
                if options.only in (None, library)
                for count in counts
            },
            options.rounds,
        )
    rows = []
    for (library, count), rounds in measured.items():
        row: dict[str, Any] = {"library": library, "workers": "array" if count == ARRAY else count}
        row |= {
            key: median(rounds, key) for key in ("step ms", "waits %", "longest ms", "first ms")
        }
        row["epoch ms"] = median(rounds, "ms")
        row["over array"] = ratio(rounds, measured[library, ARRAY])
        rows.append(row)
        show(row)
    if not options.no_write:
        write(
            "input_wait",
            "What a training step waits for photos that are decoded and augmented meanwhile",
            f"python benchmarks/execution/input_wait.py --rounds {options.rounds}",
            list(rows[0]),
            rows,
        )


if __name__ == "__main__":
    main()
