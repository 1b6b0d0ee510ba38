"""Sequences of different lengths: padded to one, or in batches of like lengths.

A batch of a bucket is padded to the bucket's length, and each length is another graph of the same
model (`Model.input(…, varying=True)`). So that their number is bounded, what a bucket has left over
from its last full batch goes to the next longer one: an epoch has one batch that is not full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend import arguments
from soapstone.frontend.data.batches import (
    SINGLE,
    Batch,
    Cut,
    Source,
    Specs,
    named_arrays,
    permutation,
    specs_of,
)
from soapstone.ir.tensor import Array

_CUTS = 512  # lengths that may end a bucket
_ORDER = 1 << 35  # the stream of random numbers that the order of batches draws from
NONE = -1  # the label of a step that there is not


def padded(
    sequences: Sequence[Any], length: int | None = None, *, value: float = 0
) -> tuple[Array, Array]:
    """Return sequences as one array (samples, length, …), and how long each is, (samples,) int32.

    Args:
        sequences: of each sample an array (steps, …), or a list of numbers.
        length: to which they are padded, that of the longest by default.
        value: what stands behind the last step.

    Raises:
        DataError: none, steps of different shapes, or a sequence that is longer.
    """
    rows = [np.asarray(each) for each in sequences]
    if not rows:
        raise DataError("padded: 0 sequences found, 1 or more needed")
    lengths = np.array([len(row) if row.ndim else -1 for row in rows], np.int32)
    most = int(lengths.max()) if length is None else length
    like = next((row for row in rows if row.size), rows[0])
    made = np.full((len(rows), most, *like.shape[1:]), value, _type(rows, value))
    for number, row in enumerate(rows):
        if len(row.shape) != like.ndim or (row.size and row.shape[1:] != like.shape[1:]):
            raise DataError(
                f"sequence {number}: shape {row.shape} found, (steps, *{like.shape[1:]}) needed"
            )
        if len(row) > most:
            raise DataError(f"sequence {number}: {len(row)} steps found, at most {most} needed")
        made[number, : len(row)] = row
    return made, lengths


def _type(rows: Sequence[Array], value: float) -> np.dtype[Any]:
    """Return the element type of an array that holds all rows and a value; none is float64."""
    found = np.result_type(*{row.dtype for row in rows if row.size} or {np.dtype(np.float32)})
    with np.errstate(invalid="ignore"):
        held = found.kind not in "biu" or np.array(value).astype(found) == value
    if not held:
        whole = float(value).is_integer()
        found = np.promote_types(found, np.min_scalar_type(int(value) if whole else np.float32(0)))
        if whole and found.kind == "f":  # what unsigned and signed numbers have in common
            found = np.dtype(np.int64)
    return np.dtype(np.float32) if found == np.float64 else found


class Buckets:
    """Sequences for `fit` and `evaluate`, in batches whose samples are of like lengths.

    The model's inputs of sequences vary (`model.input("ids", (32, 200), "int32", varying=True)`);
    the first batch of each length compiles the step for it.

    Args:
        x: of each sample a sequence, (steps, …) or a list of numbers; or a dict by input of lists
            of sequences, and of arrays with one row a sample. Sequences of a sample are equally
            long.
        y: labels: an array with one row a sample, or a list of sequences, as long as those of x; a
            dict by output.
        buckets: how many lengths there are at most, cut so that the least is padded; or these
            lengths, in order, the last of which is that of the longest sequence or more.
        lengths: the input that is given the samples' lengths; None for none.
        padding: what stands behind the last step of x; of labels it is -1.

    Raises:
        DataError: no samples, sequences of a sample that are not equally long, no bucket for the
            longest, or arrays of other samples.

    Example:
        >>> train = Buckets(texts, kinds, buckets=4)
        >>> model.fit(train, epochs=5, batch_size=32)
    """

    def __init__(
        self,
        x: Sequence[Any] | Mapping[str, Any],
        y: Any = None,
        buckets: int | Sequence[int] = 4,
        *,
        lengths: str | None = "lengths",
        padding: float = 0,
    ) -> None:
        self._inputs = {k: _given(f"input {k!r}", v) for k, v in _named(x, SINGLE).items()}
        self._labels = (
            {k: _given("y", v) for k, v in _named(y, "").items()} if y is not None else {}
        )
        self._single = not isinstance(y, Mapping)
        self._padding, self._lengths_of = padding, lengths
        found = [v for v in self._inputs.values() if isinstance(v, list)]
        if not found or not found[0]:
            raise DataError("buckets: a list of sequences needed, one or more")
        self.lengths = np.array([len(each) for each in found[0]], np.int32)
        for name, values in (*self._inputs.items(), *(("y", v) for v in self._labels.values())):
            if len(values) != len(self):
                raise DataError(f"buckets: {name!r}: {len(values)} rows found, {len(self)} needed")
            if isinstance(values, list):
                for row, (value, length) in enumerate(zip(values, self.lengths)):
                    if len(value) != length:
                        raise DataError(
                            f"buckets: {name!r}: {len(value)} steps found in sample {row}, {length}"
                            " needed as in its other sequences"
                        )
        self.bounds = self._bounds(buckets)

    def _bounds(self, buckets: int | Sequence[int]) -> tuple[int, ...]:
        longest = max(int(self.lengths.max()), 1)
        if isinstance(buckets, int):
            return _cut(self.lengths, arguments.count("buckets", buckets, error=DataError))
        bounds = tuple(arguments.count("buckets", each, error=DataError) for each in buckets)
        if not bounds or list(bounds) != sorted(set(bounds)) or bounds[-1] < longest:
            raise DataError(
                f"buckets: {bounds} found; ascending lengths needed, the last one {longest} or more"
            )
        return bounds

    def __len__(self) -> int:
        return len(self.lengths)

    def arrays(self, length: int | None = None) -> tuple[dict[str, Array], Any]:
        """Return all samples in order, padded to one length: inputs by name, and labels.

        length: that of the longest bucket by default; `predict` takes the inputs.
        """
        batch = self.batch(np.arange(len(self)), self.bounds[-1] if length is None else length)
        inputs, labels = batch
        if isinstance(labels, dict):
            labels = {name.partition(".")[2]: value for name, value in labels.items()}
        return inputs, labels

    def plan(self, cut: Cut, epoch: int) -> list[tuple[Array, int]]:
        """Return the samples of each batch of an epoch, and the length to which they are padded.

        cut: batch size, and whether and by which seed the order is drawn.
        """
        order = np.arange(len(self))
        if cut.shuffle:
            order = permutation(cut.seed, epoch, 0, len(self))
        own = np.searchsorted(self.bounds, self.lengths)[order]
        rest, made = order[:0], list[tuple[Array, int]]()
        for bucket, length in enumerate(self.bounds):
            rows = np.concatenate([rest, order[own == bucket]])
            full = len(rows) // cut.batch_size * cut.batch_size
            made += [(part, length) for part in np.split(rows[:full], full // cut.batch_size or 1)]
            rest = rows[full:]
        made.append((rest, self.bounds[-1]))
        made = [batch for batch in made if len(batch[0])]
        if cut.drop_last and len(rest):
            made.pop()
        if not cut.shuffle:
            return made
        return [made[number] for number in permutation(cut.seed, epoch, _ORDER, len(made))]

    def batch(self, rows: Array, length: int) -> Batch:
        """Return samples, padded to a length. rows: their numbers."""

        def taken(values: Any, value: float) -> Array:
            if not isinstance(values, list):
                return np.asarray(values[rows])
            return padded([values[row] for row in rows], length, value=value)[0]

        inputs = {name: taken(values, self._padding) for name, values in self._inputs.items()}
        if self._lengths_of is not None:
            inputs[self._lengths_of] = self.lengths[rows]
        labels: Any = {name: taken(values, NONE) for name, values in self._labels.items()}
        return named_arrays(inputs, labels.get("") if self._single else labels)


def _cut(lengths: Array, buckets: int) -> tuple[int, ...]:
    """Return at most so many lengths, for which samples are padded by the fewest steps in all."""
    known, counts = np.unique(np.maximum(lengths, 1), return_counts=True)
    every = -(-len(known) // _CUTS)
    ends = np.arange(len(known))[::-1][::every][::-1]  # the longest is one of them
    known, upto = known[ends], np.concatenate([[0], counts.cumsum()[ends]])
    # cost[i, j]: steps of a bucket whose longest samples are those of j, and shortest those of i.
    cost = (known * (upto[1:] - upto[:-1, None])).astype(np.float64)
    cost[np.tril_indices(len(known), -1)] = np.inf
    best, before = cost[0], list[Array]()
    for _ in range(min(buckets, len(known)) - 1):
        totals = np.vstack([np.full(len(known), np.inf), best[:-1, None] + cost[1:]])
        before.append(totals.argmin(axis=0))
        best = totals.min(axis=0)
    made, last = [int(known[-1])], len(known) - 1
    for starts in reversed(before):
        last = int(starts[last]) - 1
        made.append(int(known[last]))
    return tuple(reversed(made))


def _named(value: Any, name: str) -> dict[str, Any]:
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {name: value}


def _given(what: str, value: Any) -> Any:
    """Return an array with one row a sample, or a list of sequences.

    Raises:
        DataError: it is neither, or a sequence is no array; names it.
    """
    if isinstance(value, np.ndarray):
        return value
    try:
        rows = [np.asarray(each) for each in value]
    except (TypeError, ValueError) as error:
        raise DataError(
            f"buckets: {what}: {error}; an array, or a list of sequences, needed"
        ) from None
    return rows if any(row.ndim for row in rows) else np.asarray(value)


class BucketSource(Source):
    """Batches of `Buckets`, as training draws them."""

    def __init__(self, buckets: Buckets, cut: Cut) -> None:
        self._buckets, self._cut = buckets, cut

    @property
    def steps(self) -> int | None:
        return self._cut.steps(len(self._buckets))

    def specs(self) -> Specs | None:
        return specs_of(self._buckets.batch(np.arange(1), self._buckets.bounds[-1]))

    def batches(self, epoch: int, start: int) -> Iterator[Batch]:
        for rows, length in self._buckets.plan(self._cut, epoch)[start:]:
            yield self._buckets.batch(rows, length)
