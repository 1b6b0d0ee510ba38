"""Data sets that are read sample by sample, by threads, while steps compute.

Which samples a batch has, and what is drawn for each, follow from (seed, epoch) and the sample's
number alone: a resumed run meets what the first one would have, however many threads there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice, starmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend import arguments
from soapstone.frontend.arguments import shown_value
from soapstone.frontend.data.batches import (
    Batch,
    Cut,
    Source,
    Specs,
    named_arrays,
    numeric,
    permutation,
    rows_of,
    specs_of,
)
from soapstone.ir.tensor import Array

Augment = Callable[[Any, np.random.Generator], Any]
_DRAWS = 1 << 33  # the stream of random numbers that augmenting draws from
_BALANCE = 1 << 34
_PARTS = {1: "x alone", 2: "x and y", 3: "x, y and a weight"}


class Dataset(Protocol):
    """What has samples by number, such as a data set of PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class Samples:
    """A data set for `fit`, `evaluate` and `predict`, read by threads ahead of the steps.

    Batch size, order and seed are those of the call that it is given to.

    Args:
        dataset: something with a length whose items are x, (x, y) or (x, y, weight), x an array or
            a dict of arrays by input; or a tuple of arrays (x, y), memory-mapped files too.
        augment: a function of such an item and a `numpy.random.Generator` of its own that returns
            what is trained on in its place.
        workers: threads that read; 0 for none: each batch is read when it is needed.
        ahead: batches that are read before they are needed.
        balance: the class of each sample, (samples,): all classes are then drawn equally often,
            samples of a small one several times in an epoch.

    Raises:
        DataError: no samples, what is no data set, or a balance that has not one class for each.

    Example:
        >>> train = Samples(ImageFolder("photos/train", (64, 64)), augment=random_flip)
        >>> model.fit(train, epochs=10, batch_size=32)
    """

    def __init__(
        self,
        dataset: Dataset | tuple[Any, ...],
        *,
        augment: Augment | None = None,
        workers: int = 2,
        ahead: int = 4,
        balance: Any = None,
    ) -> None:
        if isinstance(dataset, tuple):
            self._arrays: tuple[Any, ...] | None = tuple(_arrays(each) for each in dataset)
            self.rows = rows_of(named_arrays(*dataset, *(None,) * (2 - len(dataset)))[0])
        else:
            self._arrays, self.rows = None, _length(dataset)
        if not self.rows:
            raise DataError("samples: 0 found, 1 or more needed")
        self._dataset = dataset
        if augment is not None and not callable(augment):
            raise DataError(f"samples: augment: {shown_value(augment)} found, a function needed")
        self._augment = augment
        self.workers = arguments.count("samples: workers", workers, 0, DataError)
        self.ahead = arguments.count("samples: ahead", ahead, 1, DataError)
        self._classes = None if balance is None else np.asarray(balance)
        if self._classes is not None and self._classes.shape != (self.rows,):
            raise DataError(
                f"samples: balance of shape {self._classes.shape} found, ({self.rows},) needed: the"
                " class of each sample"
            )

    def __len__(self) -> int:
        return self.rows

    @property
    def balanced(self) -> bool:
        """Whether classes are drawn equally often."""
        return self._classes is not None

    def order(self, seed: int, epoch: int, shuffle: bool) -> Array:
        """Return the numbers of an epoch's samples, in order.

        seed, epoch: what the order follows from, with shuffle or where classes are balanced.
        """
        if self._classes is None:
            return permutation(seed, epoch, 0, self.rows) if shuffle else np.arange(self.rows)
        classes = np.unique(self._classes)
        drawn: list[Array] = []
        for place, each in enumerate(classes):
            rows = np.flatnonzero(self._classes == each)
            count = (self.rows + place) // len(classes)
            rounds = [
                rows[permutation(seed, epoch, _BALANCE + (place << 20) + number, len(rows))]
                for number in range(-(-count // len(rows)))
            ]
            drawn.append(np.concatenate(rounds)[:count] if rounds else rows[:0])
        together = np.concatenate(drawn)
        return together[permutation(seed, epoch, 0, len(together))]

    def batch(self, rows: Array, seed: int, epoch: int, first: int) -> Batch:
        """Return samples by their numbers.

        rows: the numbers; first: the place of the first of them in the epoch. seed, epoch: what is
        drawn follows from them and a sample's place.

        Raises:
            DataError: a sample that cannot be read, or of another shape; names it.
        """
        if self._arrays is not None and self._augment is None:
            return named_arrays(*(_rows(each, rows) for each in self._arrays), *self._missing)
        items = [self._item(int(row), seed, epoch, first + at) for at, row in enumerate(rows)]
        parts = [tuple(item) if _several(item) else (item,) for item in items]
        for row, part in zip(rows, parts):
            if len(part) != len(parts[0]) or not 1 <= len(part) <= 3:
                raise DataError(
                    f"sample {row}: {_PARTS.get(len(part), f'{len(part)} parts')} found,"
                    f" {_PARTS.get(len(parts[0]), 'x, y and a weight at most')} needed as of sample"
                    f" {rows[0]}"
                )
        joined = [_stacked(list(column), rows) for column in zip(*parts)]
        return named_arrays(*joined, *((None,) if len(joined) == 1 else ()))

    @property
    def _missing(self) -> tuple[None, ...]:
        return (None,) if self._arrays is not None and len(self._arrays) == 1 else ()

    def _item(self, row: int, seed: int, epoch: int, place: int) -> Any:
        try:
            if self._arrays is not None:
                item: Any = tuple(_rows(each, row) for each in self._arrays)
            else:
                item = self._dataset[row]
            if self._augment is not None:
                key = np.array([seed % 2**64, epoch], np.uint64)
                counter = np.array([0, 0, place, _DRAWS], np.uint64)
                item = self._augment(
                    item, np.random.Generator(np.random.Philox(key=key, counter=counter))
                )
        except DataError as error:
            raise DataError(f"sample {row}: {error}") from None
        except Exception as error:  # of the user's own
            error.add_note(f"while sample {row} was read")
            raise
        return item


def _arrays(value: Any) -> Any:
    """Return arrays of what was given as lists; files mapped into memory stay there."""
    if isinstance(value, Mapping):
        return {name: _arrays(each) for name, each in value.items()}
    return numeric("samples", value)


def _several(item: Any) -> bool:
    """Return whether an item is x and more: a tuple, or a list that begins with an array."""
    return isinstance(item, tuple) or (
        isinstance(item, list) and len(item) > 1 and bool(getattr(item[0], "shape", ()))
    )


def _rows(value: Any, rows: Any) -> Any:
    if isinstance(value, dict):
        return {name: each[rows] for name, each in value.items()}
    return value[rows]


def _length(dataset: Any) -> int:
    """Return how many samples a data set has."""
    whole = isinstance(dataset, str | Path | Mapping | type)
    if whole or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        shown = shown_value(dataset) if isinstance(dataset, str | type) else type(dataset).__name__
        raise DataError(
            f"samples: {shown} found; an object with a length and items by number, or a tuple of"
            " arrays (x, y), needed"
        )
    return len(dataset)


def _stacked(values: list[Any], rows: Array) -> Any:
    """Return one array of what samples have, or a dict of them."""
    kinds = [each.keys() if isinstance(each, dict) else None for each in values]
    for row, kind in zip(rows, kinds):
        if kind != kinds[0]:
            found, needed = (
                "an array" if names is None else f"a dict of {', '.join(map(repr, names))}"
                for names in (kind, kinds[0])
            )
            raise DataError(f"sample {row}: {found} found, {needed} needed as of sample {rows[0]}")
    if isinstance(values[0], dict):
        return {name: _stacked([each[name] for each in values], rows) for name in values[0]}
    arrays = [_array(each, row) for each, row in zip(values, rows)]
    for row, array in zip(rows, arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"sample {row}: shape {array.shape} found, {arrays[0].shape} needed as of sample"
                f" {rows[0]}"
            )
    return np.stack(arrays)


def _array(value: Any, row: int) -> Array:
    arguments.unmasked(f"sample {row}", value)
    try:
        return np.asarray(value)
    except ValueError:
        raise DataError(
            f"sample {row}: a {type(value).__name__} of unlike parts found; an array, or (x, y) or"
            " (x, y, weight) as a tuple, needed"
        ) from None


_Place = tuple[int, int]  # of a batch: its epoch, and its number there


class SampleSource(Source):
    """Batches of `Samples`, as training draws them.

    Threads read on into the next epoch while the last steps of one, and its validation, run.
    """

    def __init__(self, samples: Samples, cut: Cut) -> None:
        self._samples, self._cut = samples, cut
        self._pool: ThreadPoolExecutor | None = None
        self._following: Iterator[tuple[_Place, Array]] = iter(())
        self._reading: deque[tuple[_Place, Future[Batch]]] = deque()  # and read, in order

    @property
    def steps(self) -> int | None:
        return self._cut.steps(self._samples.rows)

    def specs(self) -> Specs | None:
        return specs_of(self._samples.batch(np.arange(1), self._cut.seed, 0, 0))

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if not self._samples.workers:
            yield from starmap(self._batch, self._places((epoch, start), epoch + 1))
            return
        try:
            for number in range(start, self._cut.steps(self._samples.rows)):
                yield self._next((epoch, number)).result()
        except BaseException:  # of a sample, or nobody takes what is left
            self.close()
            raise
        if epoch + 1 >= self._cut.epochs:
            self.close()

    def _next(self, wanted: _Place) -> Future[Batch]:
        """Return a batch that is being read, those ahead of it too."""
        if not self._reading or self._reading[0][0] != wanted:
            self._reading.clear()
            self._following = self._places(wanted, max(self._cut.epochs, wanted[0] + 1))
        self._pool = self._pool or ThreadPoolExecutor(self._samples.workers, "soapstone-samples")
        missing = self._samples.ahead + 1 - len(self._reading)
        for place, rows in islice(self._following, missing):
            self._reading.append((place, self._pool.submit(self._batch, place, rows)))
        return self._reading.popleft()[1]

    def close(self) -> None:
        """End the threads; what they have read ahead is dropped."""
        self._reading.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _places(self, first: _Place, epochs: int) -> Iterator[tuple[_Place, Array]]:
        """Yield the batches from one on: where each is, and the numbers of its samples."""
        cut, (begun, start) = self._cut, first
        for epoch in range(begun, epochs):
            order = self._samples.order(cut.seed, epoch, cut.shuffle)
            for number in range(start, cut.steps(self._samples.rows)):
                low = number * cut.batch_size
                yield (epoch, number), order[low : low + cut.batch_size]
            start = 0

    def _batch(self, place: _Place, rows: Array) -> Batch:
        epoch, number = place
        first = number * self._cut.batch_size
        return self._samples.batch(rows, self._cut.seed, epoch, first)


def random_flip(sample: Any, random: np.random.Generator) -> Any:
    """Return a sample whose image, (c, h, w), is mirrored left to right half of the time.

    random: the generator that says when.
    """
    image, *rest = sample if isinstance(sample, tuple) else (sample,)
    image = image[..., ::-1] if random.random() < 0.5 else image
    return (image, *rest) if isinstance(sample, tuple) else image


def random_crop(padding: int) -> Augment:
    """Return a function that moves a sample's image by up to `padding` pixels, with zeros outside.

    Raises:
        DataError: padding below 1.
    """
    most = arguments.count("random_crop: padding", padding, 1, DataError)

    def crop(sample: Any, random: np.random.Generator) -> Any:
        image, *rest = sample if isinstance(sample, tuple) else (sample,)
        border = [(0, 0)] * (image.ndim - 2) + [(most, most)] * 2
        top, left = random.integers(0, 2 * most + 1, 2)
        height, width = image.shape[-2:]
        moved = np.pad(image, border)[..., top : top + height, left : left + width]
        return (moved, *rest) if isinstance(sample, tuple) else moved

    return crop


def in_turn(*functions: Augment) -> Augment:
    """Return a function that augments by several functions, one after the other."""

    def augment(sample: Any, random: np.random.Generator) -> Any:
        for function in functions:
            sample = function(sample, random)
        return sample

    return augment
