"""Metrics of arrays: those that see outputs and labels themselves, of a batch or of an epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.frontend.arguments import number
from soapstone.frontend.training import formula
from soapstone.frontend.training.metrics.metric import Metric, Values
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array


@dataclass(frozen=True)
class OfArrays(Metric):
    """What a function computes of the outputs and labels of all samples, as NumPy arrays.

    They are kept until the epoch ends. With `counts` they are not: it is called with those of each
    batch and returns numbers or arrays, whose sums over batches are what `function` takes.

    Attributes:
        function: `function(outputs, labels)`, a number, or `function(*sums)` with counts.
        called: the metric's name; the function's by default.
        better: "higher" or "lower", for early stopping.

    Raises:
        GraphError: something else than a function, or one that returns no number.
    """

    function: Callable[..., float]
    called: str | None = None
    counts: Callable[[Array, Array], Sequence[Any]] | None = None
    better: str = "higher"

    def __post_init__(self) -> None:
        for given in (self.function, self.counts or self.function):
            if not callable(given):
                raise GraphError(f"OfArrays: {given!r} found, a function of arrays needed")

    @property
    def name(self) -> str:
        return self.called or formula.name_of(self.function)

    @property
    def higher(self) -> bool:
        return self.better == "higher"

    @property
    def keeps(self) -> bool:
        return self.counts is None

    def emit(self, of: Values) -> tuple[str, ...]:
        return (of.output,)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        if self.counts is None:
            return [[values[0]], [np.array(labels)]]
        return [np.asarray(each) for each in self.counts(values[0], labels)]

    def result(self, sums: Sequence[Any]) -> float:
        if self.counts is None:
            sums = [np.concatenate(each) for each in sums]
        return number(f"metric {self.name!r}", self.function(*sums), finite=False)


def area(scores: Array, labels: Array) -> float:
    """Return the area under the curve of true over false positives; NaN where a class is absent.

    scores: (samples) numbers; labels: as many of 0 and 1. Ties count a half.

    Source: Hanley and McNeil, Radiology 143, 1982: the statistic of Mann and Whitney.
    """
    ones = labels > 0.5
    above, below = int(ones.sum()), int((~ones).sum())
    if not above or not below:
        return float("nan")
    _, place, ties = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(ties) - (ties - 1) / 2)[place]
    return float((ranks[ones].sum() - above * (above + 1) / 2) / (above * below))


@dataclass(frozen=True)
class AUC(Metric):
    """The exact area under the ROC curve (true over false positives) of two classes.

    Outputs are numbers with labels of 0 and 1, or logits of two classes; all are kept until the
    epoch ends.
    """

    keeps = True

    def emit(self, of: Values) -> tuple[str, ...]:
        if of.classes and of.builder.spec(of.output).shape[-1] != 2:
            raise of.refuse(self.name, "two classes needed")
        return (of.output,)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        scores = values[0]
        if scores.shape != np.shape(labels):
            scores = scores[..., 1] - scores[..., 0]
        there = np.asarray(labels) >= 0
        return [[scores[there]], [np.asarray(labels)[there]]]

    def result(self, sums: Sequence[Any]) -> float:
        return area(*(np.concatenate(each) for each in sums))


@dataclass(frozen=True)
class R2(Metric):
    """The share of the labels' variance that outputs explain, the mean over columns.

    Outputs and labels are numbers of one shape; all are kept until the epoch ends. It is 1 at best,
    0 for the labels' mean, and NaN where labels do not vary.
    """

    keeps = True

    def emit(self, of: Values) -> tuple[str, ...]:
        if of.loss.classes or of.loss.masked:
            raise of.refuse(self.name, "labels of the output's shape needed")
        return (of.output,)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        return [[values[0]], [np.array(labels)]]

    def result(self, sums: Sequence[Any]) -> float:
        found, labels = (np.concatenate(each).astype(np.float64) for each in sums[:2])
        off = ((found - labels) ** 2).sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.mean(1 - off / ((labels - labels.mean(0)) ** 2).sum(0)))
