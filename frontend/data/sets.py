"""Data sets: the digits of the package, a folder of the user, synthetic images."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.batches import (
    named_arrays,
    named_labels,
    npz_files,
    permutation,
    rows_of,
)
from soapstone.frontend.data.npz import LABELS, NpzFile
from soapstone.ir.tensor import Array

P = ParamSpec("P")

VARIABLE = "SOAPSTONE_DATA"
_HELD_OUT = 5  # one sample in five is kept for the test
_SPLIT_SEED = 0

Samples = Array | Mapping[str, Array] | Path  # a path: npz files, which hold their labels


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set in two parts: one to train on, one held out.

    `train_x`, `test_x`: (samples, …) arrays, dicts of arrays by input name, or paths of npz files;
    `train_y`, `test_y`: (samples,) labels, None when the files hold them. `synthetic` tells that
    the samples were made up.

    Raises:
        DataError: row counts that differ, arrays that are not numeric, or parts whose samples have
            another shape.
    """

    train_x: Samples
    train_y: Array | None
    test_x: Samples
    test_y: Array | None
    name: str
    synthetic: bool = False

    def __post_init__(self) -> None:
        label = f"data set {self.name!r}"
        shapes = []
        for part, x, y in (
            ("train", self.train_x, self.train_y),
            ("test", self.test_x, self.test_y),
        ):
            try:
                shapes.append(_sample_shapes(x, y))
            except DataError as error:
                raise DataError(f"{label}, {part}: {error}") from None
        train, test = shapes
        for name in train.keys() | test.keys():
            if train.get(name) != test.get(name):
                raise DataError(
                    f"{label}, test: field {name!r}: samples of shape {test.get(name)} found,"
                    f" {train.get(name)} needed as in the training part"
                )

    def __str__(self) -> str:
        sizes = [
            f"files of {part.name!r}" if isinstance(part, Path) else f"{_rows(part):,}"
            for part in (self.train_x, self.test_x)
        ]
        kind = "synthetic data" if self.synthetic else "data"
        return f"{kind} {self.name!r}: {sizes[0]} to train on, {sizes[1]} held out"


def _rows(x: Array | Mapping[str, Array]) -> int:
    return rows_of(named_arrays(x, None)[0])


def _sample_shapes(x: Samples, y: Array | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of one sample, by field."""
    if isinstance(x, Path):
        return {name: shape[1:] for name, (shape, _) in npz_files(x)[0].fields.items()}
    inputs, labels = named_arrays(x, y)
    fields = {f"y{n.removeprefix(LABELS)}": each for n, each in named_labels(labels).items()}
    arrays = inputs | fields
    return {name: array.shape[1:] for name, array in arrays.items()}


def data_folder() -> Path | None:
    """Return the folder that the environment variable SOAPSTONE_DATA names, if any.

    Raises:
        DataError: the variable names no folder.
    """
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir():
        raise DataError(f"{VARIABLE}: {value!r} found, an existing folder needed")
    return folder


def array_module() -> Any:
    """Return cuPyNumeric where Legate runs in this process and it is installed, else NumPy.

    Samples prepared with it are Legate's own, and are not copied when a model under Legate is fed.
    """
    if "legate.core" not in sys.modules or find_spec("cupynumeric") is None:
        return np
    return import_module("cupynumeric")


def digits(data_dir: str | Path | None = None) -> Splits:
    """Return the 1,797 handwritten digits of UCI, a stratified fifth of them held out.

    Images are (n, 1, 8, 8) float32 in [0, 1] (of `array_module`), labels (n,) int32 in 0..9.

    Args:
        data_dir: a folder with a `digits.npz` to use in place of the one in the package; fields
            `images`, (n, 8, 8) with values 0..16, and `labels`, (n,).

    Raises:
        DataError: the file is absent or is no such file.

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine
    Learning Repository, CC BY 4.0 (see digits.LICENSE.txt).
    """
    if data_dir is None:
        with as_file(files("soapstone.frontend.data") / "digits.npz") as path:
            images, labels = _read_digits(path)
    else:
        images, labels = _read_digits(Path(data_dir) / "digits.npz")
    x = array_module().asarray(images[:, None].astype(np.float32)) / np.float32(16)
    y = labels.astype(np.int32)
    held = np.zeros(len(y), bool)
    for number in range(10):
        rows = np.flatnonzero(y == number)
        order = permutation(_SPLIT_SEED, 0, number, len(rows))
        held[rows[order[: round(len(rows) / _HELD_OUT)]]] = True
    return Splits(x[~held], y[~held], x[held], y[held], "digits")


def _read_digits(path: Path) -> tuple[Array, Array]:
    arrays = NpzFile.open(path).read()
    label = f"file {str(path)!r}"
    for name, shape in (("images", (8, 8)), ("labels", ())):
        if name not in arrays:
            raise DataError(f"{label}: field {name!r} is missing")
        array = arrays[name]
        if array.shape[1:] != shape:
            raise DataError(
                f"{label}: field {name!r}: samples of shape {array.shape[1:]} found, {shape} needed"
            )
        limit = 16 if name == "images" else 9
        if array.size and not 0 <= array.min() <= array.max() <= limit:
            raise DataError(f"{label}: field {name!r}: values outside 0..{limit} found")
    return arrays["images"], arrays["labels"]


def read_splits(folder: str | Path) -> Splits:
    """Return the data set of a folder: `train` and `test`, each an npz file or a folder of them.

    Files hold arrays `x` and `y`, or named inputs and `y`. A single file is read into memory; the
    files of a folder are read one at a time, as they are needed.

    Raises:
        DataError: a part is absent, or a file is bad.
    """
    folder = Path(folder)
    if not folder.is_dir():
        found = "a file found" if folder.exists() else "it does not exist"
        raise DataError(
            f"data folder {str(folder)!r}: {found}; a folder with train and test, each an npz file"
            " of x and y or a folder, needed"
        )
    parts: list[tuple[Samples, Array | None]] = []
    for name in ("train", "test"):
        file, inside = folder / f"{name}.npz", folder / name
        if file.is_file():
            arrays = NpzFile.open(file).read()
            labels = arrays.pop("y", None)
            if labels is None:
                raise DataError(f"file {str(file)!r}: field 'y' is missing; labels needed")
            parts.append((arrays, labels))
        elif inside.is_dir():
            parts.append((inside, None))
        else:
            raise DataError(
                f"data folder {str(folder)!r}: neither {name}.npz nor a folder {name!r} found"
            )
    (train_x, train_y), (test_x, test_y) = parts
    return Splits(train_x, train_y, test_x, test_y, folder.name)


def synthetic_images(
    count: int, shape: tuple[int, ...], classes: int, seed: int = 0, noise: float = 1.0
) -> Splits:
    """Return made-up samples that can be learned: a pattern for each class, plus normal noise.

    `count` samples of `shape` float32, labels int32 in 0..classes-1; a fifth is held out. Patterns
    of images (c, h, w) are constant over blocks, 4 by 4 of them, so that convolution and pooling
    keep them.

    Raises:
        DataError: a count, shape or number of classes below 1, or negative noise.
    """
    for name, value in (("count", count), ("classes", classes), ("shape", min(shape, default=1))):
        if value < 1:
            raise DataError(f"synthetic_images: {name}: {value!r} found, 1 or more needed")
    if noise < 0:
        raise DataError(f"synthetic_images: noise: {noise!r} found, 0 or more needed")
    random = np.random.Generator(np.random.Philox(key=[seed % 2**64, 0]))
    image = len(shape) == 3
    coarse = (shape[0], *(min(extent, 4) for extent in shape[1:])) if image else shape
    patterns = random.standard_normal((classes, *coarse), dtype=np.float32)
    for axis, extent in enumerate(shape[1:], 2) if image else ():
        patterns = patterns.take(np.arange(extent) * coarse[axis - 1] // extent, axis)
    y = random.integers(0, classes, count).astype(np.int32)
    x = random.standard_normal((count, *shape), dtype=np.float32)
    x *= np.float32(noise)
    x += patterns[y]
    held = count // _HELD_OUT
    name = "x".join(map(str, shape))
    return Splits(x[held:], y[held:], x[:held], y[:held], name, synthetic=True)


def stored_first(make: Callable[P, Splits]) -> Callable[P, Splits]:
    """Return a maker of data set `name`, which is read where the folder SOAPSTONE_DATA has it."""

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Splits:
        folder, name = data_folder(), str(args[0] if args else kwargs.get("name"))
        if folder is not None and (folder / name).is_dir():
            return read_splits(folder / name)
        return make(*args, **kwargs)

    return made


@stored_first
def images(name: str, shape: tuple[int, ...], classes: int, count: int, seed: int = 0) -> Splits:
    """Return data set `name` of the folder SOAPSTONE_DATA, or synthetic images of that shape."""
    return synthetic_images(count, shape, classes, seed)
