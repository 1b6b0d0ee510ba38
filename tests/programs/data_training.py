"""Training on the same samples from every source, on an executor, with a strategy and without.

data_training.py EXECUTOR FOLDER: prints each difference from one processor, and how many runs
there were. FOLDER is what `write` has made. See test_sources.py.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.processes import say
from PIL import Image

from soapstone import SGD, Model
from soapstone.data import (
    Buckets,
    ImageFolder,
    Samples,
    in_turn,
    random_crop,
    random_flip,
    read_table,
)
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array

SHAPE, ROWS, SIZE, CLASSES = (3, 4, 4), 23, 8, 3  # the last batch has fewer samples
History = dict[str, list[float]]


def pixels() -> tuple[Array, Array]:
    """Return images, (rows, h, w, c) of bytes, and their classes, in order as in folders."""
    random = np.random.default_rng(0)
    return random.integers(0, 256, (ROWS, 4, 4, 3), np.uint8), np.arange(ROWS) * CLASSES // ROWS


def samples() -> tuple[Array, Array]:
    """Return images as a model takes them, and their classes."""
    images, kinds = pixels()
    return np.ascontiguousarray((images / np.float32(255)).transpose(0, 3, 1, 2)), kinds


def write(folder: Path) -> None:
    """Write the samples as images, as a table, as files of arrays and as one to be mapped."""
    (images, kinds), (x, _) = pixels(), samples()
    for row, (image, kind) in enumerate(zip(images, kinds)):
        (folder / "images" / str(kind)).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "images" / str(kind) / f"{row:02}.png")
    with (folder / "table.csv").open("w", newline="") as stream:
        lines = csv.writer(stream)
        lines.writerow([*map("p{}".format, range(x[0].size)), "kind"])
        lines.writerows([*map(float, each.ravel()), kind] for each, kind in zip(x, kinds))
    (folder / "arrays").mkdir()
    for part, rows in enumerate(np.split(np.arange(ROWS), [5, 16])):
        np.savez(folder / "arrays" / f"{part}.npz", x=x[rows], y=kinds[rows])
    np.save(folder / "x.npy", x)


def _batches() -> Iterator[tuple[Array, Array]]:
    x, y = samples()
    for low in range(0, ROWS, SIZE):
        yield x[low : low + SIZE], y[low : low + SIZE]


class Loader:
    """Batches as PyTorch's loaders have them."""

    def __iter__(self) -> Iterator[list[Array]]:
        return map(list, _batches())


def _table(folder: Path) -> tuple[Array, Array | None]:
    table = read_table(folder / "table.csv", label="kind")
    return table.x.reshape(-1, *SHAPE), table.y


def _texts() -> Buckets:
    random = np.random.default_rng(1)
    texts = [random.integers(1, 9, length) for length in random.integers(1, 13, ROWS)]
    return Buckets(texts, [text % 3 for text in texts], buckets=2)


_AUGMENT = in_turn(random_flip, random_crop(1))
# What is trained on, by source: x, and y where that does not come with it.
SOURCES: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "arrays": lambda folder: samples(),
    "dict": lambda folder: ({"image": samples()[0]}, {"kind": samples()[1]}),
    "list": lambda folder: ([*_batches()],),
    "function": lambda folder: (_batches,),
    "loader": lambda folder: (Loader(),),
    "iterator": lambda folder: (_batches(),),
    "mapped array": lambda folder: (np.load(folder / "x.npy", mmap_mode="r"), samples()[1]),
    "files of arrays": lambda folder: (folder / "arrays",),
    "table": _table,
    "samples": lambda folder: (Samples(ImageFolder(folder / "images")),),
    "samples of arrays": lambda folder: (Samples(samples(), workers=0),),
}
DRAWN: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "augmented": lambda folder: (
        Samples(ImageFolder(folder / "images"), augment=_AUGMENT, workers=3, ahead=2),
    ),
    "balanced": lambda folder: (Samples(samples(), balance=samples()[1]),),
}


def of_images(**settings: Any) -> Model:
    """Return a small network, compiled."""
    model = Model("images", seed=1)
    x = model.input("image", (SIZE, *SHAPE))
    x = model.flatten(model.conv2d(x, 8, 3, padding=1, activation="relu", name="conv"))
    model.output(model.dense(x, CLASSES, name="kind"))
    model.compile(SGD(0.1), metrics="accuracy", **settings)
    return model


def of_texts(**settings: Any) -> Model:
    """Return a small network of sequences that vary, compiled."""
    model = Model("texts", seed=1)
    ids = model.input("ids", (SIZE, 12), "int32", varying=True)
    n = model.input("lengths", (SIZE,), "int32")
    x, _ = model.gru(model.embedding(ids, 9, 8), 6, lengths=n)
    model.output(model.dense(x, 3, name="tag"))
    model.compile(SGD(0.1), loss="masked_cross_entropy", metrics="accuracy", **settings)
    return model


MODELS: dict[Callable[..., Model], dict[str, Any]] = {
    of_images: SOURCES | DRAWN,
    of_texts: {"buckets": lambda folder: (_texts(),)},
}


def histories(
    folder: Path,
    strategies: dict[str, Strategy] | None = None,
    shuffle: bool = True,
    **settings: Any,
) -> dict[str, History]:
    """Return losses and accuracies of two epochs by source; each begins with the same weights.

    strategies: of a model, by its name. An iterator has one epoch.
    """
    found = {}
    for build, sources in MODELS.items():
        with build(strategy=(strategies or {}).get(build.__name__), **settings) as model:
            weights = model.weights()
            for name, make in sources.items():
                model.set_weights(weights)
                options: dict[str, Any] = {"epochs": 1 if name == "iterator" else 2}
                if name != "iterator":
                    given = make(folder)
                    options["validation_data"] = given if len(given) == 2 else given[0]
                result = model.fit(*make(folder), shuffle=shuffle, progress=False, **options)
                found[name] = result.history
    return found


def data_parallel() -> dict[str, Strategy]:
    """Return what splits samples over two processors, as a strategy of each model."""
    found = {}
    for build in MODELS:
        with build(cpus=2) as model:
            found[build.__name__] = replace(model.strategy, machine={})
    return found


def differences(found: dict[str, History], wanted: dict[str, History], what: str) -> Iterator[str]:
    """Yield where losses differ by more than the order of sums makes them."""
    for source, history in wanted.items():
        for name, values in history.items():
            if not np.allclose(found[source][name], values, rtol=1e-4, atol=1e-6):
                yield f"{source}, {what}: {name} is {found[source][name]}, {values} wanted"


def compare(executor: str, folder: Path) -> None:
    """Say where an executor gives other losses than one processor does, and what was compared."""
    wanted = histories(folder, cpus=1)
    settings = {"executor": executor, "cpus": 1 if executor == "mpi" else 2}
    for what, strategies in (("no strategy", None), ("a strategy", data_parallel())):
        found = histories(folder, strategies, **settings)
        for difference in differences(found, wanted, what):
            say(difference)
        say(f"{len(found)} sources, {what}")


def main() -> None:
    compare(sys.argv[1], Path(sys.argv[2]))


if __name__ == "__main__":
    main()
