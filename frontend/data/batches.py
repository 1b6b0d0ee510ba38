"""Batches of samples: from arrays, from folders of npz files, and from the user's own iterators.

The order of an epoch follows from (seed, epoch) alone, so a run resumed in the middle of an epoch
meets the batches that the first run had left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend import arguments
from soapstone.frontend.data.npz import LABELS, WEIGHTS, NpzFile, label_of
from soapstone.ir.tensor import Array

Inputs = dict[str, Array]
Labels = Array | dict[str, Array] | None  # by name where there are several, or weights of samples
Batch = tuple[Inputs, Labels]
Spec = tuple[tuple[int, ...], np.dtype[Any]]  # shape and element type of one sample
Specs = tuple[dict[str, Spec], dict[str, Spec] | None]
Convert = Callable[[Batch], Batch]
SINGLE = "x"  # the name of an input that was given without one
_AT_ONCE = 1 << 28  # bytes of integers that are checked and cast as a whole
KINDS = "biuf"  # bool, integers and floating point


def permutation(seed: int, epoch: int, stream: int, count: int) -> Array:
    """Return the order of `count` things in an epoch: counter based, the same on every machine."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter)).permutation(count)


def numeric(name: str, value: Any) -> Array:
    """Return the value as an array of numbers with one row a sample, copied only if it is no array.

    Data of Legate (cuPyNumeric arrays) stay what they are.

    Raises:
        DataError: ragged, not numeric, masked, or without a sample axis.
    """
    if value is None:
        raise DataError(f"{name}: None found, an array with one row a sample needed")
    arguments.unmasked(name, value)
    try:
        if getattr(value, "requires_grad", False):  # a tensor of PyTorch in a graph of gradients
            value = value.detach()
        array = value if hasattr(value, "__legate_data_interface__") else np.asarray(value)
    except ValueError:
        if isinstance(value, tuple):
            raise DataError(
                f"{name}: a tuple found, an array needed; x and y are two arguments, and arrays of"
                " several inputs or outputs are given as a dict by name"
            ) from None
        raise DataError(
            f"{name}: rows of different lengths found, equal ones needed"
            f"{_by_name(value) or '; pad them, or give a list of batches (x, y)'}"
        ) from None
    if array.dtype.kind not in KINDS:
        raise DataError(f"{name}: element type {array.dtype} found, numbers needed")
    if array.ndim == 0:
        raise DataError(f"{name}: a single number found, an array with one row a sample needed")
    return array


def _by_name(value: Any) -> str:
    """Return what to do with a list that may hold the arrays of several inputs or outputs."""
    listed = isinstance(value, list | tuple) and len(value) > 1
    if not listed or not all(getattr(each, "shape", ()) for each in value):
        return ""
    return "; arrays of several inputs or outputs are given as a dict by name"


def named_arrays(x: Any, y: Any, weights: Any = None) -> Batch:
    """Return inputs by name and labels, all with the same number of rows.

    y and weights: an array or a dict of arrays by output. Labels are an array, or a dict by the
    names of graphs' inputs where y is one or there are weights.

    Raises:
        DataError: no input, arrays that are not numeric, or row counts that differ.
    """
    if isinstance(x, Mapping):
        inputs = {str(name): numeric(f"input {name!r}", value) for name, value in x.items()}
    else:
        inputs = {SINGLE: numeric("x", x)}
    if not inputs:
        raise DataError("x: an empty dict found, one array or more needed")
    given = _by_output(LABELS, "y", y) | _by_output(WEIGHTS, WEIGHTS, weights)
    first, rows = next((name, len(array)) for name, array in inputs.items())
    plain = given.keys() == {LABELS}
    for name, array in [*inputs.items(), *([("y", given[LABELS])] if plain else given.items())]:
        if len(array) != rows:
            raise DataError(
                f"{name}: {len(array)} rows found, {rows} needed as in input {first!r}"
                f"{_by_name(y) or _by_name(x)}"
            )
    return inputs, given[LABELS] if plain else given or None


def _by_output(kind: str, argument: str, value: Any) -> dict[str, Array]:
    """Return what was given of labels or weights by the names of graphs' inputs."""
    if isinstance(value, Mapping):
        return {f"{kind}.{n}": numeric(f"{argument}[{n!r}]", each) for n, each in value.items()}
    return {} if value is None else {kind: numeric(argument, value)}


def named_labels(labels: Labels) -> dict[str, Array]:
    """Return labels by the names of graphs' inputs; none for None."""
    if isinstance(labels, dict):
        return labels
    return {} if labels is None else {LABELS: labels}


def _taken(labels: Labels, rows: Any) -> Labels:
    """Return the rows of labels."""
    if isinstance(labels, dict):
        return {name: array[rows] for name, array in labels.items()}
    return None if labels is None else labels[rows]


class Source(Protocol):
    """Where batches come from; sources derive from it."""

    @property
    def steps(self) -> int | None:
        """Batches in an epoch; None when only the end of the epoch tells."""

    def specs(self) -> Specs | None:
        """Return shape and type of a sample by input, and of a label; None before any is drawn."""

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of an epoch from number `start` on."""

    def close(self) -> None:
        """End threads that read ahead, of a source that has some."""
        return


@dataclass(frozen=True)
class Cut:
    """How rows become batches.

    epochs: how many will be drawn, where that is known; each of them begins to be read before the
    one before it has ended.
    """

    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    epochs: int = 0

    def steps(self, rows: int) -> int:
        """Return the number of batches of so many rows."""
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)


@dataclass(frozen=True, eq=False)
class ArraySource(Source):
    """Rows of arrays in memory: views when in order, one gather a batch when shuffled."""

    inputs: Inputs
    labels: Labels
    cut: Cut

    @property
    def rows(self) -> int:
        return rows_of(self.inputs)

    @property
    def steps(self) -> int | None:
        return self.cut.steps(self.rows)

    def specs(self) -> Specs | None:
        return specs_of((self.inputs, self.labels))

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        size = self.cut.batch_size
        order = permutation(self.cut.seed, epoch, 0, self.rows) if self.cut.shuffle else None
        for step in range(start, self.cut.steps(self.rows)):
            lo, hi = step * size, min((step + 1) * size, self.rows)
            rows = slice(lo, hi) if order is None else order[lo:hi]
            inputs = {name: array[rows] for name, array in self.inputs.items()}
            yield inputs, _taken(self.labels, rows)


class FolderSource(Source):
    """Rows of npz files, one file in memory at a time.

    Shuffling permutes the files, then the rows of each file; batches run on across files.
    """

    def __init__(self, path: Path, cut: Cut) -> None:
        self.cut = cut
        self.files = npz_files(path)
        first = self.files[0]
        for file in self.files[1:]:
            file.check_like(first)

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def steps(self) -> int | None:
        return self.cut.steps(self.rows)

    def specs(self) -> Specs | None:
        found = {n: (shape[1:], dtype) for n, (shape, dtype) in self.files[0].fields.items()}
        labels = {label_of(name): spec for name, spec in found.items() if label_of(name)}
        return {n: spec for n, spec in found.items() if not label_of(n)}, labels or None

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        cut = self.cut
        skip = start * cut.batch_size
        remaining = cut.steps(self.rows) - start
        kept: list[dict[str, Array]] = []  # pieces of the next batch, fewer rows than a batch
        for number in self._order(epoch):
            file = self.files[number]
            if skip >= file.rows:
                skip -= file.rows
                continue
            for piece in self._pieces(file, number, epoch, skip, sum(rows_of(k) for k in kept)):
                kept.append(piece)
                if sum(rows_of(k) for k in kept) == cut.batch_size and remaining > 0:
                    remaining -= 1
                    yield _joined(kept)
                    kept = []
            skip = 0
        if kept and remaining > 0:
            yield _joined(kept)

    def _order(self, epoch: int) -> Iterable[int]:
        count = len(self.files)
        if not self.cut.shuffle:
            return range(count)
        return (int(n) for n in permutation(self.cut.seed, epoch, 0, count))

    def _pieces(
        self, file: NpzFile, number: int, epoch: int, skip: int, held: int
    ) -> Iterator[dict[str, Array]]:
        """Cut a file where batches end, given the rows already held for the first of them."""
        arrays = file.read()
        order = permutation(self.cut.seed, epoch, number + 1, file.rows)
        size = self.cut.batch_size
        lo, hi = skip, min(skip + size - held, file.rows)
        while lo < hi:
            rows = order[lo:hi] if self.cut.shuffle else slice(lo, hi)
            yield {name: array[rows] for name, array in arrays.items()}
            lo, hi = hi, min(hi + size, file.rows)


def npz_files(path: Path) -> list[NpzFile]:
    """Return a single npz file, or those of a folder by name, with what their headers say.

    Raises:
        DataError: nothing there, no npz file in the folder, or a bad file.
    """
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if not files:
            raise DataError(f"folder {str(path)!r}: no npz file found, one or more needed")
        return [NpzFile.open(file) for file in files]
    if not path.is_file():
        raise DataError(f"{str(path)!r}: no such file or folder; npz files needed")
    return [NpzFile.open(path)]


def specs_of(batch: Batch) -> Specs:
    """Return shape and type of a sample of a batch by input, and of a label."""
    labels = {name: _spec(array) for name, array in named_labels(batch[1]).items()}
    return {name: _spec(array) for name, array in batch[0].items()}, labels or None


def _spec(array: Array) -> Spec:
    return array.shape[1:], array.dtype


def rows_of(arrays: Mapping[str, Array]) -> int:
    """Return how many samples arrays have: they have a shape, and other libraries' no length."""
    return int(next(iter(arrays.values())).shape[0])


def _joined(pieces: list[dict[str, Array]]) -> Batch:
    arrays = pieces[0]
    if len(pieces) > 1:
        arrays = {name: np.concatenate([piece[name] for piece in pieces]) for name in arrays}
    labels = {label_of(name): array for name, array in arrays.items() if label_of(name)}
    plain = labels.keys() == {LABELS}
    inputs = {name: array for name, array in arrays.items() if not label_of(name)}
    return inputs, labels[LABELS] if plain else labels or None


def _several(item: Any) -> bool:
    """Return whether a batch is (x, y) or (x, y, weights): a tuple, or a list of arrays."""
    if not isinstance(item, tuple | list) or len(item) not in (2, 3):
        return False
    return isinstance(item, tuple) or all(
        isinstance(each, Mapping) or getattr(each, "shape", ()) for each in item
    )


class StreamSource(Source):
    """Batches that the user makes: (x, y) or (x, y, weights), or x alone, of any size and order.

    A function is called once an epoch. A one-shot iterator, such as a generator, has one epoch.
    """

    def __init__(self, stream: Callable[[], Iterable[Any]] | Iterable[Any]) -> None:
        self._stream = stream
        self._spent = False

    @property
    def steps(self) -> int | None:
        return len(self._stream) if isinstance(self._stream, Sequence) else None

    def specs(self) -> Specs | None:
        return None

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        stream = self._stream() if callable(self._stream) else self._stream
        if isinstance(stream, Iterator) and not callable(self._stream):
            if self._spent:
                raise DataError(
                    f"epoch {epoch}: x is an iterator that an earlier epoch used up; give a list,"
                    " or a function that returns a new iterator"
                )
            self._spent = True
        for number, item in enumerate(stream):
            if number < start:
                continue
            try:
                batch = named_arrays(*item) if _several(item) else named_arrays(item, None)
            except DataError as error:
                raise DataError(f"batch {number}: {error}") from None
            yield batch


def source(x: Any, y: Any, cut: Cut, weights: Any = None) -> Source:
    """Return the source that fits what the user gave; see `Batches`."""
    from soapstone.frontend.data.buckets import Buckets, BucketSource
    from soapstone.frontend.data.samples import Samples, SampleSource

    make: Callable[[], Source]
    if isinstance(x, str | Path):
        make, come = partial(FolderSource, Path(x), cut), f"of {str(x)!r} are read from its files"
    elif isinstance(x, Samples):
        make, come = partial(SampleSource, x, cut), "come with the samples of x"
    elif isinstance(x, Buckets):
        make, come = partial(BucketSource, x, cut), "come with the buckets of x"
    elif is_stream(x):
        make, come = partial(StreamSource, x), "come with the batches of x"
    else:
        return ArraySource(*named_arrays(x, y, weights), cut)
    for what, value in (("y: labels", y), (f"{WEIGHTS}: they", weights)):
        if value is not None:
            raise DataError(f"{what} {come}; None needed")
    return make()


def is_stream(x: object) -> bool:
    """Return whether x is batches that the user makes: a list of pairs, an iterable, a function."""
    if isinstance(x, list | tuple):
        return len(x) > 0 and _several(x[0])
    return callable(x) or (isinstance(x, Iterable) and not _is_array(x))


def _nbytes(held: ArraySource) -> int:
    """Return the bytes of integers, which may have to be cast."""
    arrays = [*held.inputs.values(), *named_labels(held.labels).values()]
    return sum(array.nbytes for array in arrays if array.dtype.kind in "iu")


def _is_array(x: object) -> bool:
    return isinstance(x, Mapping) or hasattr(x, "__array__")


class Batches:
    """The batches of a data set, epoch by epoch.

    Args:
        x: (samples, …) array; a dict of arrays by input name; `Samples` or `Buckets` of
            `soapstone.data`; the path of an npz file or of a folder of them, each with arrays `x`
            and `y`, or named inputs and `y`; a list, iterator or function returning an iterator of
            (x, y) or (x, y, weights) batches.
        y: (samples, …) labels of arrays, or a dict by output; None for other sources, and for data
            without labels. Files have `y.NAME` for the labels of an output.
        weights: (samples,) or of the labels' shape, by output too; files have `sample_weights`.
        batch_size: samples in a batch; the last one of an epoch may have fewer.
        shuffle: draw a new order each epoch; batches that the user makes keep theirs.
        seed: with the epoch's number, what the order follows from.
        drop_last: leave out a last batch that is not full.
        epochs: how many will be drawn, where that is known; what reads ahead then reads on from one
            into the next, until `close`.

    Raises:
        DataError: arrays or files that cannot be batches; names the field and what was needed.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        batch_size: int = 64,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        weights: Any = None,
        epochs: int = 0,
    ) -> None:
        batch_size = arguments.count("batch_size", batch_size, error=DataError)
        self._source = source(x, y, Cut(batch_size, shuffle, seed, drop_last, epochs), weights)
        self._convert: Convert | None = None

    @property
    def steps(self) -> int | None:
        """Batches in an epoch; None when only the end of the epoch tells."""
        return self._source.steps

    @property
    def last(self) -> int | None:
        """Samples in the last batch of an epoch; None when only the epoch tells."""
        held = self._source
        if not isinstance(held, ArraySource | FolderSource) or not held.rows or held.cut.drop_last:
            return None
        return held.rows % held.cut.batch_size or held.cut.batch_size

    @property
    def whole(self) -> Inputs:
        """The inputs of the only batch of an epoch, where that is arrays as they were given."""
        held = self._source
        plain = isinstance(held, ArraySource) and not held.cut.shuffle and held.steps == 1
        return held.inputs if isinstance(held, ArraySource) and plain else {}

    def __len__(self) -> int:
        steps = self.steps
        if steps is None:
            raise TypeError("batches of an iterator have no length before they are drawn")
        return steps

    def specs(self) -> Specs | None:
        """Return shape and type of a sample by input, and of a label; None before any is drawn."""
        return self._source.specs()

    def convert(self, function: Convert) -> None:
        """Pass all that is drawn through a function: arrays in memory at once, others by batch."""
        held = self._source
        if isinstance(held, ArraySource) and _nbytes(held) <= _AT_ONCE:
            self._source = ArraySource(*function((held.inputs, held.labels)), held.cut)
        else:
            self._convert = function

    def close(self) -> None:
        """End threads that read ahead."""
        self._source.close()

    def epoch(self, number: int, start_batch: int = 0) -> Iterator[tuple[Inputs, Any]]:
        """Yield (inputs by name, labels) of an epoch, from batch `start_batch` on.

        Labels are None for data without labels, and a dict by the names of graphs' inputs where
        there are several, or weights. An input given without a name is called `x`.
        """
        batches = self._source.batches(number, start_batch)
        return batches if self._convert is None else _each(self._convert, batches, start_batch)


def _each(convert: Convert, batches: Iterator[Batch], start: int) -> Iterator[Batch]:
    """Yield batches that a function was applied to; its errors name the batch."""
    for number, batch in enumerate(batches, start):
        try:
            made = convert(batch)
        except DataError as error:
            raise DataError(f"batch {number}: {error}") from None
        yield made
