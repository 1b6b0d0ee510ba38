"""What a metric is: values that a step counts, and the number that the counts of many make.

A metric is values of the step's graph, summed over the batches of an epoch, and a function of the
sums; so it is of all samples, however they were cut into batches, and on all executors and ranks
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.frontend.training.losses.loss import BCE, Loss, MaskedBCE, adder, as_rows, shown
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array

_LOGITS = (BCE(from_logits=True), MaskedBCE())


@dataclass(frozen=True)
class Values:
    """What a metric is emitted from.

    Attributes:
        builder: of the graph. output, labels: values. loss: of the output.
        mean: the loss' value there; None where elements have weights.
    """

    builder: GraphBuilder
    output: str
    labels: str
    loss: Loss
    mean: str | None

    @property
    def classes(self) -> bool:
        """Whether labels are class numbers, one for each row of the output."""
        return self.loss.classes and not self.loss.places

    def refuse(self, metric: str, needed: str) -> GraphError:
        """Return the error of a metric that does not fit."""
        output, labels = self.builder.spec(self.output), self.builder.spec(self.labels)
        return GraphError(f"metric {metric!r}: output {output}, labels {labels}; {needed}")

    def binary(self, metric: str, threshold: float) -> tuple[str, str]:
        """Return guesses and labels of 0 or 1, by elements.

        Labels of 1 are those of the class that is looked for; of class numbers of two classes, 1.

        Raises:
            GraphError: more classes than two.
        """
        builder, add = self.builder, adder(self.builder, metric)
        if self.loss.masked and not self.classes:
            raise self.refuse(metric, "labels that all count needed; 'micro_f1' leaves -1 out")
        if not self.classes:
            logits = self.loss in _LOGITS
            edge = float(np.log(threshold / (1 - threshold))) if logits else threshold
            cut = add("full", suffix=".cut", shape=(), value=edge)
            guess = add("cast", add("greater", self.output, cut), suffix=".guess", to="float32")
            half = add("full", suffix=".half", shape=(), value=0.5)
            ones = add("cast", add("greater", self.labels, half), suffix=".ones", to="float32")
            return guess, ones
        if builder.spec(self.output).shape[-1] != 2:
            raise self.refuse(metric, "two classes needed, or an average over classes")
        guess, ones = self.by_class(metric)
        return self._second(add, guess), self._second(add, ones)

    def _second(self, add: Callable[..., str], value: str) -> str:
        rows = self.builder.spec(value).shape[0]
        return add("slice", value, suffix=".second", starts=(0, 1), stops=(rows, 2), steps=(1, 1))

    def by_class(self, metric: str) -> tuple[str, str]:
        """Return guesses and labels, (rows, classes), of 0 and 1; labels of -1 have no 1."""
        builder, add = self.builder, adder(self.builder, metric)
        if not self.classes:
            raise self.refuse(metric, "class numbers needed as labels")
        rows, labels = as_rows(builder, self.output, 2), as_rows(builder, self.labels, 1)
        guess = add("hardmax", rows, suffix=".guess", axis=-1)
        classes = builder.spec(rows).shape[1]
        if not self.loss.masked:
            return guess, add("one_hot", labels, suffix=".ones", classes=classes)
        known, mask = shown(add, labels)
        ones = add("one_hot", known, suffix=".ones", classes=classes)
        mask = add("cast", mask, suffix=".mask", to="float32")
        mask = add("reshape", mask, suffix=".mask", shape=(*builder.spec(mask).shape, 1))
        return add("mul", guess, mask), add("mul", ones, mask)


@dataclass(frozen=True)
class Metric:
    """A number that says how good outputs are; see the classes of `soapstone.metrics`."""

    @property
    def name(self) -> str:
        """What it is called in results."""
        return _snake(type(self).__name__)

    @property
    def higher(self) -> bool:
        """Whether more of it is better."""
        return True

    def emit(self, of: Values) -> tuple[str, ...]:
        """Add its values to a graph and return them; of: what it is emitted from.

        Raises:
            GraphError: outputs, labels or loss that it does not fit.
        """
        raise TypeError(f"{self.name} is no metric; see soapstone.metrics")

    @property
    def arity(self) -> int:
        """How many values it has."""
        return 1

    @property
    def keeps(self) -> bool:
        """Whether its sums are all that there was: known at the end of an epoch, in no file."""
        return False

    def counted(self, values: Sequence[Array], labels: Array, known: int) -> list[Any]:
        """Return what is summed over batches, from the values and labels of one; known: those."""
        return [*(np.array(each, np.float64) for each in values), known]

    def result(self, sums: Sequence[Any]) -> float:
        """Return the number, from the sums; by default the first over the number of labels."""
        return float(sums[0]) / max(float(sums[-1]), 1)


def _snake(name: str) -> str:
    return {"AUC": "auc", "IoU": "iou", "F1": "f1", "MAE": "mae", "MSE": "mse", "RMSE": "rmse"}.get(
        name, "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    )
