"""The metrics that a step counts, and all metrics by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.frontend.arguments import count, meant, number, shown_value
from soapstone.frontend.training import formula
from soapstone.frontend.training.losses.loss import (
    BCE,
    LOSSES,
    CrossEntropy,
    DenseCrossEntropy,
    Loss,
    MaskedBCE,
    MaskedCrossEntropy,
    adder,
    as_rows,
    shown,
    total,
)
from soapstone.frontend.training.metrics.arrays import AUC, R2
from soapstone.frontend.training.metrics.metric import Metric, Values
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array


def _share(where: str, value: float) -> None:
    if not 0 < number(where, value) < 1:
        raise GraphError(f"{where} {value!r} found, a number between 0 and 1 needed")


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of the labels that are predicted.

    Of class numbers, the largest output is the guess; of probabilities of classes, their largest
    is the label; else both are 0 or 1, cut at a half.
    """

    def emit(self, of: Values) -> tuple[str, ...]:
        builder = of.builder
        if isinstance(of.loss, BCE):
            return BinaryAccuracy().emit(of)
        dense = isinstance(of.loss, DenseCrossEntropy)
        if not of.classes and not dense:
            raise GraphError(
                "metric 'accuracy' needs class numbers as labels (loss cross_entropy), or labels of"
                " 0 and 1 (loss bce); of loss ctc there is 'error_rate'"
            )
        rows = as_rows(builder, of.output, 2)
        labels = as_rows(builder, of.labels, 2 if dense else 1)
        if dense:
            labels = builder.apply("argmax", labels, name="correct.labels", axis=1, keepdims=False)[
                0
            ]
        return (builder.apply("correct", rows, labels, name="correct")[0],)


@dataclass(frozen=True)
class BinaryAccuracy(Metric):
    """The share of the elements on the right side of a threshold.

    Attributes:
        threshold: a probability; outputs that are logits (loss bce_with_logits) are cut at its
            logit.
    """

    threshold: float = 0.5

    def __post_init__(self) -> None:
        _share("BinaryAccuracy: threshold", self.threshold)

    def emit(self, of: Values) -> tuple[str, ...]:
        if of.loss.masked:
            raise of.refuse(self.name, "labels that all count needed")
        guess, ones = of.binary(self.name, self.threshold)
        add = adder(of.builder, self.name)
        same = add("cast", add("equal", guess, ones, suffix=".same"), suffix=".hits", to="float32")
        return (total(of.builder, add, same, ""),)


@dataclass(frozen=True)
class TopK(Metric):
    """The share of the rows whose label is among the k largest outputs.

    Attributes:
        k: how many.
    """

    k: int = 5

    def __post_init__(self) -> None:
        count("TopK: k", self.k)

    @property
    def name(self) -> str:
        return f"top_{self.k}_accuracy"

    def emit(self, of: Values) -> tuple[str, ...]:
        if not of.classes:
            raise of.refuse(self.name, "class numbers needed as labels")
        classes = of.builder.spec(of.output).shape[-1]
        if self.k >= classes:
            raise of.refuse(self.name, f"{classes} classes found, more than {self.k} needed")
        builder, add = of.builder, adder(of.builder, self.name)
        rows, labels = as_rows(builder, of.output, 2), as_rows(builder, of.labels, 1)
        known, mask = shown(add, labels) if of.loss.masked else (labels, None)
        chosen = add("pick", rows, known, suffix=".chosen")
        chosen = add("reshape", chosen, suffix=".chosen", shape=(*builder.spec(chosen).shape, 1))
        above = add("cast", add("greater", rows, chosen), suffix=".above", to="float32")
        above = add("reduce_sum", above, suffix=".above", axes=(1,))
        least = add("full", suffix=".k", shape=(), value=float(self.k))
        hits = add("cast", add("less", above, least), suffix=".hits", to="float32")
        if mask is not None:
            hits = add("mul", hits, add("cast", mask, suffix=".mask", to="float32"))
        return (total(builder, add, hits, ""),)


@dataclass(frozen=True)
class Precision(Metric):
    """Of what is predicted as a class, the share that is of it.

    Attributes:
        average: over what: "binary", of labels of 0 and 1 or two classes, of the ones; "macro", the
            mean over classes; "micro", of all classes together.
        threshold: of "binary".
        called: the metric's name; that of its kind by default, such as "f1".

    Raises:
        GraphError: another average, or a threshold beyond 0 to 1.
    """

    average: str = "binary"
    threshold: float = 0.5
    called: str | None = None
    arity = 3

    def __post_init__(self) -> None:
        if self.average not in ("binary", "macro", "micro"):
            where = f"{type(self).__name__}: average"
            raise GraphError(f"{where} {self.average!r} found; binary, macro or micro needed")
        _share(f"{type(self).__name__}: threshold", self.threshold)

    @property
    def name(self) -> str:
        return self.called or super().name

    def emit(self, of: Values) -> tuple[str, ...]:
        builder, add = of.builder, adder(of.builder, self.name)
        if self.average == "binary":
            guess, ones = of.binary(self.name, self.threshold)
            axes = tuple(range(builder.spec(guess).rank))
        else:
            (guess, ones), axes = of.by_class(self.name), (0,)
        hits = add("mul", guess, ones, suffix=".hits")
        return tuple(
            add("reduce_sum", value, suffix=suffix, axes=axes)
            for value, suffix in ((hits, ".found"), (guess, ".guesses"), (ones, ".labels"))
        )

    def of(self, hits: Array, guesses: Array, labels: Array) -> Array:
        """Return the number of each class, from hits, guesses and labels; 0 where there is none."""
        return np.asarray(hits / np.maximum(guesses, 1))

    def result(self, sums: Sequence[Any]) -> float:
        counts = [np.asarray(each, np.float64) for each in sums[:3]]
        if self.average == "micro":
            counts = [each.sum() for each in counts]
        return float(np.mean(self.of(*counts)))


class Recall(Precision):
    """Of what is of a class, the share that is predicted as it.

    Attributes:
        average, threshold, called: those of `Precision`.
    """

    def of(self, hits: Array, guesses: Array, labels: Array) -> Array:
        return np.asarray(hits / np.maximum(labels, 1))


class F1(Precision):
    """The harmonic mean of precision and recall.

    Attributes:
        average, threshold, called: those of `Precision`.
    """

    def of(self, hits: Array, guesses: Array, labels: Array) -> Array:
        return np.asarray(2 * hits / np.maximum(guesses + labels, 1))


class IoU(Precision):
    """Intersection over union: of what is of a class or predicted as it, the share that is both.

    Attributes:
        average, threshold, called: those of `Precision`; "macro" is the mean IoU of segmentation.
    """

    def of(self, hits: Array, guesses: Array, labels: Array) -> Array:
        return np.asarray(hits / np.maximum(guesses + labels - hits, 1))


@dataclass(frozen=True)
class MicroF1(Metric):
    """F1 of all labels together, of loss masked_bce: a mean over batches."""

    name = "micro_f1"

    def emit(self, of: Values) -> tuple[str, ...]:
        builder = of.builder
        if not isinstance(of.loss, MaskedBCE) or builder.spec(of.labels).rank != 2:
            raise GraphError("metric 'micro_f1' needs several labels of a sample (loss masked_bce)")
        add = adder(builder, "micro_f1")
        known, mask = shown(add, of.labels)
        sign = add("sign", of.output, suffix=".sign")
        guess = add("mul", add("clip", sign, suffix=".ones", low=0.0), mask, suffix=".guess")
        hits = total(builder, add, add("mul", guess, known), ".hits")
        hits = add("affine", hits, scale=2.0)
        guesses, ones = (
            total(builder, add, guess, ".guesses"),
            total(builder, add, known, ".known"),
        )
        every = add("add", guesses, ones)
        share = add("div", hits, add("clip", every, suffix=".every", low=1.0))
        return (add("mul", share, total(builder, add, mask, ".count")),)


@dataclass(frozen=True)
class MAE(Metric):
    """The mean of absolute differences between outputs and labels of that shape."""

    higher = False

    def emit(self, of: Values) -> tuple[str, ...]:
        if of.classes or of.loss.masked:
            raise of.refuse(self.name, "labels of the output's shape needed")
        add = adder(of.builder, self.name)
        off = add("sub", of.output, of.labels, suffix=".off")
        return (total(of.builder, add, self.of(add, off), ""),)

    def of(self, add: Callable[..., str], off: str) -> str:
        """Return what is summed of differences: off, a value; add: what adds an operator."""
        return add("abs", off, suffix=".each")


class MSE(MAE):
    """The mean of squared differences."""

    def of(self, add: Callable[..., str], off: str) -> str:
        return add("mul", off, off, suffix=".each")


class RMSE(MSE):
    """The root of the mean of squared differences."""

    def result(self, sums: Sequence[Any]) -> float:
        return float(np.sqrt(super().result(sums)))


@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean cross-entropy."""

    higher = False

    def emit(self, of: Values) -> tuple[str, ...]:
        if not of.classes:
            raise of.refuse(self.name, "class numbers needed as labels")
        plain: Loss = MaskedCrossEntropy() if of.loss.masked else CrossEntropy()
        if of.loss == plain and of.mean is not None:
            return (of.mean,)
        return (plain.emit(of.builder, self.name, of.output, of.labels, None),)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        return [float(values[0]) * known, known]

    def result(self, sums: Sequence[Any]) -> float:
        return float(np.exp(super().result(sums)))


@dataclass(frozen=True)
class OfLoss(Metric):
    """The mean of a loss that the model is not trained for.

    Attributes:
        loss: of the same outputs and labels.
    """

    loss: Loss
    higher = False

    @property
    def name(self) -> str:
        named = (name for name, each in LOSSES.items() if each == self.loss)
        return next(named, type(self.loss).__name__.lower())

    def emit(self, of: Values) -> tuple[str, ...]:
        needed = self.loss.labels(of.builder.spec(of.output))
        if of.builder.spec(of.labels) != needed or of.loss.masked != self.loss.masked:
            raise of.refuse(self.name, f"labels {needed}, as the loss has them, needed")
        return (self.loss.emit(of.builder, self.name, of.output, of.labels, None),)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        count = self.loss.known(labels)[1]
        return [float(values[0]) * count, count]


@dataclass(frozen=True)
class OfFunction(Metric):
    """The mean over batches of what a function of tensors computes.

    Attributes:
        function: `function(model, output, labels)`, whose result is a scalar tensor; its name is
            the metric's.
        better: "higher" or "lower", for early stopping.
    """

    function: formula.Function
    better: str = "higher"

    @property
    def name(self) -> str:
        return formula.name_of(self.function)

    @property
    def higher(self) -> bool:
        return self.better == "higher"

    def emit(self, of: Values) -> tuple[str, ...]:
        label, values = f"metric {self.name!r}", (of.output, of.labels)
        return (formula.applied(self.function, label, of.builder, values),)

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        return [float(values[0]) * known, known]


METRICS: dict[str, Metric] = {
    "accuracy": Accuracy(),
    "micro_f1": MicroF1(),
    "binary_accuracy": BinaryAccuracy(),
    "top_5_accuracy": TopK(5),
    "precision": Precision(),
    "recall": Recall(),
    "f1": F1(),
    "iou": IoU(),
    "auc": AUC(),
    "r2": R2(),
    "mae": MAE(),
    "mse": MSE(),
    "rmse": RMSE(),
    "perplexity": Perplexity(),
}


def metric_of(value: object) -> Metric:
    """Return a metric from itself, its name, a loss or its name, or a function of tensors.

    Raises:
        GraphError: an unknown name, or something else.
    """
    if isinstance(value, Metric):
        return value
    if isinstance(value, Loss):
        return OfLoss(value)
    if callable(value) and not isinstance(value, type):
        return OfFunction(value)
    if isinstance(value, str) and value in LOSSES and value not in METRICS:
        return OfLoss(LOSSES[value])
    if not isinstance(value, str) or value not in METRICS:
        raise GraphError(
            f"metric {shown_value(value)} found, one of {', '.join(METRICS)} needed"
            f"{meant(value, METRICS)}"
        )
    return METRICS[value]
