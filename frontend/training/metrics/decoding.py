"""What labels logits of connectionist temporal classification stand for, and how wrong they are.

Labels stand for all ways to spread them over the steps, each over one step or more, with blanks
between. The best path takes each step's best class; the search of prefixes sums over the ways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.errors import DataError
from soapstone.frontend.arguments import count
from soapstone.frontend.layers.sequences import lengths_of, steps_of
from soapstone.frontend.training.losses.loss import adder
from soapstone.frontend.training.losses.sequences import CTC
from soapstone.frontend.training.metrics.counted import METRICS
from soapstone.frontend.training.metrics.metric import Metric, Values
from soapstone.ir.tensor import Array


@dataclass(frozen=True)
class Decoded:
    """Labels of a sample, and how probable they are.

    Attributes:
        labels: class numbers in order, without blanks.
        log_probability: the logarithm of the sum over all ways to spread them over the steps.
    """

    labels: tuple[int, ...]
    log_probability: float


def ctc_greedy(logits: Any, lengths: Any = None, *, blank: int = 0) -> list[list[int]]:
    """Return the labels of each sample's best path: repeats are one, blanks are left out.

    Args:
        logits: (samples, steps, classes) numbers, such as `predict` returns; probabilities or their
            logarithms serve as well.
        lengths: how many steps each sample has, (samples,) integers; all where None.
        blank: the class that stands for no label.

    Raises:
        DataError: another shape, or lengths or a blank that do not fit it.
    """
    logits, lengths = _checked("ctc_greedy", logits, lengths, blank)
    return [collapsed(each[:last].argmax(-1), blank) for each, last in zip(logits, lengths)]


def collapsed(path: Array, blank: int) -> list[int]:
    """Return the labels of a path, (steps,) class numbers."""
    ends = np.append(path[1:] != path[:-1], True)[: len(path)]
    return [int(label) for label in path[ends & (path != blank)]]


def ctc_beam_search(
    logits: Any, lengths: Any = None, *, blank: int = 0, width: int = 16, best: int = 1
) -> list[list[Decoded]]:
    """Return the most probable labels of each sample, the best first, by prefix beam search.

    After each step the `width` most probable prefixes are kept. Labels that are found are as
    probable as it says, or more where ways to spread them were dropped on the way.

    Args:
        logits: (samples, steps, classes) numbers before the softmax, such as `predict` returns.
        lengths: how many steps each sample has, (samples,) integers; all where None.
        blank: the class that stands for no label. width: how many prefixes are kept.
        best: how many labellings are returned, at most `width`.

    Raises:
        DataError: another shape, or lengths, a blank or numbers that do not fit it.

    Source: Hannun et al., First-pass large vocabulary continuous speech recognition using
    bi-directional recurrent DNNs, 2014, algorithm 1, without a language model.
    """
    logits, lengths = _checked("ctc_beam_search", logits, lengths, blank)
    count("ctc_beam_search: width", width, error=DataError)
    if count("ctc_beam_search: best", best, error=DataError) > width:
        raise DataError(f"ctc_beam_search: best: {best} found, at most width, {width}, needed")
    return [
        _searched(each[:last].astype(np.float64), blank, width)[:best]
        for each, last in zip(logits, lengths)
    ]


_NONE = -np.inf


def _searched(logits: Array, blank: int, width: int) -> list[Decoded]:
    """Return the best labellings of a sample, (steps, classes)."""
    logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    prefixes: list[tuple[int, ...]] = [()]
    after_blank, after_label = np.zeros(1), np.full(1, _NONE)  # by what the last step was
    for step in logs:
        every = np.logaddexp(after_blank, after_label)
        lasts = np.array([prefix[-1] if prefix else blank for prefix in prefixes])
        # Of each prefix: it stays, by a blank or its last label again, or a label is added.
        stays_blank = every + step[blank]
        stays_label = after_label + step[lasts]
        added = every[:, None] + step
        added[np.arange(len(prefixes)), lasts] = after_blank + step[lasts]
        added[:, blank] = _NONE
        places = {prefix: place for place, prefix in enumerate(prefixes)}
        for place, prefix in enumerate(prefixes):  # one that is another with a label more
            before = places.get(prefix[:-1]) if prefix else None
            if before is not None:
                stays_label[place] = np.logaddexp(stays_label[place], added[before, prefix[-1]])
                added[before, prefix[-1]] = _NONE
        stays = np.logaddexp(stays_blank, stays_label)
        scores = np.concatenate([stays, added.ravel()])
        kept = np.argsort(-scores, kind="stable")[:width]
        kept = kept[scores[kept] > _NONE]
        rows, labels = np.divmod(kept - len(prefixes), len(step))
        old = kept < len(prefixes)
        after_label = np.where(old, stays_label[kept * old], scores[kept])
        after_blank = np.where(old, stays_blank[kept * old], _NONE)
        prefixes = [
            prefixes[place] if stayed else (*prefixes[row], int(label))
            for place, stayed, row, label in zip(kept, old, rows, labels)
        ]
    found = np.logaddexp(after_blank, after_label)
    return [Decoded(prefixes[n], float(found[n])) for n in np.argsort(-found, kind="stable")]


def _checked(label: str, logits: Any, lengths: Any, blank: int) -> tuple[Array, Array]:
    array = np.asarray(logits)
    if array.ndim != 3 or kind_of(array.dtype) != "f":
        raise DataError(
            f"{label}: {array.dtype} of shape {array.shape} found, logits of shape (samples, steps,"
            " classes) needed"
        )
    samples, steps, classes = array.shape
    if count(f"{label}: blank", blank, 0, DataError) >= classes:
        raise DataError(f"{label}: blank {blank} found, one of {classes} classes needed")
    found = np.full(samples, steps) if lengths is None else np.asarray(lengths)
    if found.shape != (samples,) or kind_of(found.dtype) not in "iu":
        raise DataError(
            f"{label}: lengths: {found.dtype} of shape {found.shape} found, integers ({samples},)"
            " needed"
        )
    if np.isnan(array).any():
        raise DataError(f"{label}: nan at sample {np.argwhere(np.isnan(array))[0][0]}")
    return array, np.clip(found, 0, steps)


def edit_distance(found: Sequence[Any], wanted: Sequence[Any]) -> int:
    """Return how many elements to replace, insert or delete to turn one sequence into the other.

    found, wanted: lists of labels or of words, or strings.

    Source: Wagner and Fischer, The string-to-string correction problem, 1974.
    """
    numbers: dict[Any, int] = {}
    one, two = (
        np.array([numbers.setdefault(each, len(numbers)) for each in sequence], np.int64)
        for sequence in (found, wanted)
    )
    ordinals = np.arange(len(two) + 1)
    row = ordinals
    for place, each in enumerate(one, 1):
        replaced = np.append(place, np.minimum(row[:-1] + (two != each), row[1:] + 1))
        row = np.minimum.accumulate(replaced - ordinals) + ordinals  # what is added from the left
    return int(row[-1])


@dataclass(frozen=True)
class ErrorRate(Metric):
    """The edit distance from the labels of the best path to the right ones, over their number.

    Of loss `CTC`. Of characters it is the character error rate. It may be more than 1.

    Attributes:
        separator: the class between words: then words are counted, the word error rate; None: each
            label counts.

    Raises:
        GraphError: another loss, or a separator below 0.
    """

    separator: int | None = None
    higher = False

    def __post_init__(self) -> None:
        if self.separator is not None:
            count("ErrorRate: separator", self.separator, 0)

    @property
    def name(self) -> str:
        return "error_rate" if self.separator is None else "word_error_rate"

    def emit(self, of: Values) -> tuple[str, ...]:
        if not isinstance(of.loss, CTC):
            raise of.refuse(self.name, "the loss CTC needed")
        builder, add = of.builder, adder(of.builder, self.name)
        path = add("argmax", of.output, suffix=".path", axis=2, keepdims=False)
        path = add("cast", path, suffix=".classes", to="float32")
        # Blanks are -1, and so is what stands behind a sample's last step.
        none = add("full", suffix=".none", shape=(), value=-1.0)
        blank = add("full", suffix=".blank", shape=(), value=float(of.loss.blank))
        path = add(
            "where", add("equal", path, blank, suffix=".blanks"), none, path, suffix=".known"
        )
        if of.loss.lengths is None:
            return (path,)
        steps = builder.spec(path).shape[1]
        lengths = lengths_of(builder, of.loss.lengths, self.name)
        return (add("where", steps_of(builder, lengths, steps, f"{self.name}.steps"), path, none),)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        edits = every = 0
        for path, own in zip(values[0].astype(np.int64), np.asarray(labels)):
            wanted = self._counted(own[own >= 0].tolist())
            edits += edit_distance(self._counted(collapsed(path, -1)), wanted)
            every += len(wanted)
        return [np.array(edits, np.float64), every]

    def _counted(self, labels: Iterable[int]) -> Sequence[Any]:
        """Return what is counted: labels, or words."""
        if self.separator is None:
            return list(labels)
        words: list[tuple[int, ...]] = [()]
        for label in labels:
            if label == self.separator:
                words.append(())
            else:
                words[-1] = (*words[-1], label)
        return [word for word in words if word]


METRICS["error_rate"] = ErrorRate()
