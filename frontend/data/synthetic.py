"""Made-up token and feature data that can be learned, for models of sequences and recommenders.

Each function returns data set `name` of the folder SOAPSTONE_DATA if that has one, as `images`
does, else `count` samples that follow from the seed, a fifth of them held out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.sets import Splits, stored_first
from soapstone.ir.tensor import Array

_HELD_OUT = 5  # one sample in five is kept for the test
_SKEW = 3.0  # ids are drawn as rows * uniform ** skew, so that low ones are frequent


def generator(seed: int) -> np.random.Generator:
    """Return random numbers that follow from a seed."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, 0]))


def need(what: str, **sizes: float) -> None:
    """Raise a DataError that names the first size below 1; what: whose they are."""
    for name, value in sizes.items():
        if value < 1:
            raise DataError(f"{what}: {name}: {value!r} found, 1 or more needed")


def _splits(name: str, x: Mapping[str, Array], y: Array) -> Splits:
    held = len(y) // _HELD_OUT
    train = {key: value[held:] for key, value in x.items()}
    test = {key: value[:held] for key, value in x.items()}
    return Splits(train, y[held:], test, y[:held], name, synthetic=True)


def _skewed(random: np.random.Generator, rows: int, shape: tuple[int, ...]) -> Array:
    """Return ids below `rows`, the low ones frequent, as words and categories are."""
    drawn: Array = (random.random(shape) ** _SKEW * rows).astype(np.int32)
    return np.minimum(drawn, np.int32(rows - 1))


@stored_first
def texts(
    name: str,
    count: int,
    length: int,
    vocabulary: int,
    classes: int = 2,
    pairs: bool = False,
    seed: int = 0,
) -> Splits:
    """Return texts to classify: `ids`, (count, length) int32, and labels (count,) int32.

    Half of a text's words are drawn from all, half from those whose number is the label modulo the
    number of classes. Texts that are `pairs` have `types` too, 0 in the first half, 1 in the other.

    Raises:
        DataError: a size below 1, or fewer words than classes.
    """
    need("texts", count=count, length=length, classes=classes, vocabulary=vocabulary // classes)
    random = generator(seed)
    y = random.integers(0, classes, count).astype(np.int32)
    ids = _skewed(random, vocabulary // classes * classes, (count, length))
    own = ids // classes * classes + y[:, None]
    x = {"ids": np.where(random.random(ids.shape) < 0.5, own, ids).astype(np.int32)}
    if pairs:
        second: Array = np.arange(length) >= length // 2
        x["types"] = np.broadcast_to(second, ids.shape).astype(np.int32)
    return _splits(name, x, y)


@stored_first
def sentences(name: str, count: int, length: int, vocabulary: int, seed: int = 0) -> Splits:
    """Return sentences to continue: `ids` and labels, (count, length) int32; labels are one ahead.

    Three words in four follow from the word before them, the others are drawn anew.

    Raises:
        DataError: a size below 1.
    """
    need("sentences", count=count, length=length, vocabulary=vocabulary)
    random = generator(seed)
    follower = random.permutation(vocabulary).astype(np.int32)
    words = _skewed(random, vocabulary, (count, length + 1))
    follows: Array = np.less(random.random(words.shape), 0.75)
    for place in range(1, length + 1):
        words[:, place] = np.where(
            follows[:, place], follower[words[:, place - 1]], words[:, place]
        )
    return _splits(name, {"ids": words[:, :-1].copy()}, words[:, 1:].copy())


@stored_first
def translations(name: str, count: int, length: int, vocabulary: int, seed: int = 0) -> Splits:
    """Return sentence pairs: `source`, `target` and labels, (count, length) int32.

    Each word of a sentence has one translation, and word order is kept. `target` is the translation
    moved one place on, behind word 0, as a decoder is fed in training; labels are the translation.

    Raises:
        DataError: a size below 1.
    """
    need("translations", count=count, length=length, vocabulary=vocabulary)
    random = generator(seed)
    meaning = random.permutation(vocabulary).astype(np.int32)
    source = _skewed(random, vocabulary, (count, length))
    labels = meaning[source]
    target = np.concatenate([np.zeros((count, 1), np.int32), labels[:, :-1]], axis=1)
    return _splits(name, {"source": source, "target": target}, labels)


@stored_first
def clicks(
    name: str, count: int, vocabularies: Sequence[int], dense: int = 0, bag: int = 1, seed: int = 0
) -> Splits:
    """Return events that were clicked on or not: labels (count, 1) float32, 0 or 1.

    `ids` is (count, tables * bag) int32, `bag` ids below its vocabulary for each table in turn;
    `dense` is (count, dense) float32, absent if there are none. A click follows, by a logistic
    model, from the dense features and from a hidden weight of each id.

    Raises:
        DataError: a size below 1.
    """
    need(
        "clicks", count=count, bag=bag, tables=len(vocabularies), rows=min(vocabularies, default=0)
    )
    random = generator(seed)
    columns, logit = [], np.zeros(count)
    for rows in vocabularies:
        ids = _skewed(random, rows, (count, bag))
        columns.append(ids)
        logit += np.sin(2.4 * ids + len(columns)).sum(1)  # a weight for each id, without a table
    x = {"ids": np.concatenate(columns, axis=1)}
    if dense:
        x["dense"] = random.standard_normal((count, dense), dtype=np.float32)
        logit += x["dense"] @ random.standard_normal(dense)
    y: Array = np.less(random.random(count), 1 / (1 + np.exp(-logit)))
    return _splits(name, x, y.astype(np.float32)[:, None])


@stored_first
def responses(name: str, count: int, widths: Mapping[str, int], seed: int = 0) -> Splits:
    """Return inputs of real features and a response in [0, 1] to all: labels (count, 1) float32.

    Each input, named as in `widths`, is (count, width) float32; the response is a logistic function
    of a few hidden directions in each.

    Raises:
        DataError: a size below 1.
    """
    need("responses", count=count, inputs=len(widths), width=min(widths.values(), default=0))
    random = generator(seed)
    x, total = {}, np.zeros(count)
    for key, width in widths.items():
        x[key] = random.standard_normal((count, width), dtype=np.float32)
        total += x[key] @ (random.standard_normal(width) / np.sqrt(width))
    return _splits(name, x, (1 / (1 + np.exp(-total))).astype(np.float32)[:, None])


@stored_first
def signals(name: str, count: int, length: int, width: int, seed: int = 0) -> Splits:
    """Return signals to sum up: `x`, (count, length, width), and labels (count, width), float32.

    The label is the hyperbolic tangent of the steps' mean, in which later steps weigh more.

    Raises:
        DataError: a size below 1.
    """
    need("signals", count=count, length=length, width=width)
    x = generator(seed).standard_normal((count, length, width), dtype=np.float32)
    weight = 2.0 ** np.arange(length)
    y = np.tanh(np.tensordot(x, weight / weight.sum(), axes=((1,), (0,))))
    return _splits(name, {"x": x}, y.astype(np.float32))
