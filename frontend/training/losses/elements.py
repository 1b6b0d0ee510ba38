"""Losses that are formulas: what each element, or each row, adds is written with layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from soapstone.frontend.recording import Tensor
from soapstone.frontend.training.formula import Formula
from soapstone.frontend.training.losses.loss import LOSSES, Loss, adder
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, TensorSpec


@dataclass(frozen=True)
class Formulated(Loss):
    """A loss by a formula for each element, or each row of the last axis: the mean of these."""

    rows: ClassVar[bool] = False

    def weights(self, output: TensorSpec) -> TensorSpec:
        return TensorSpec(output.shape[:-1]) if self.rows else super().weights(output)

    def known(self, labels: Array) -> tuple[int, int]:
        return len(labels), int(np.prod(labels.shape[:-1])) if self.rows else labels.size

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        """Return the losses of elements, or of rows.

        m: whose methods are layers. y, labels: tensors of one shape.
        """
        raise TypeError(f"{type(self).__name__} is no loss; see soapstone.losses")

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        m = Formula(builder, f"loss {type(self).__name__}")
        if self.rows and builder.spec(output).rank < 2:
            raise GraphError(
                f"loss {type(self).__name__}: output {builder.spec(output)} has no rows"
            )
        made = self.each(m, m.tensor(output), m.tensor(labels))
        return self._mean(builder, adder(builder, name), made.name, weights)


class LogCosh(Formulated):
    """The mean of log cosh of differences: half a square where small, absolute where large."""

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        off = abs(y - labels)
        return off + m.softplus(off * -2.0) - float(np.log(2))


@dataclass(frozen=True)
class Quantile(Formulated):
    """Quantile (pinball) loss, which is least at a quantile of the labels, not at their mean.

    Attributes:
        quantile: from 0 to 1; 0.5 is the median, and half the mean of absolute differences.

    Source: Koenker and Bassett, Regression quantiles, Econometrica 46, 1978.
    """

    quantile: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile > 1:
            raise GraphError(f"Quantile: quantile {self.quantile!r} found, 0 to 1 needed")

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        off = labels - y
        return m.maximum(off * self.quantile, off * (self.quantile - 1))


@dataclass(frozen=True)
class SmoothL1(Formulated):
    """Half a square over beta where differences are below beta, absolute less beta / 2 above.

    It is the loss `Huber` over its delta.

    Attributes:
        beta: above 0.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.beta:
            raise GraphError(f"SmoothL1: beta {self.beta!r} found, a number above 0 needed")

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        off = abs(y - labels)
        near = m.minimum(off, self.beta)
        return near * (off - near * 0.5) / self.beta


class MSLE(Formulated):
    """The mean of squared differences of log(1 + x), of outputs and labels of 0 or more."""

    limits = (0.0, float("inf"))

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        off = m.log(m.maximum(y, 0.0) + 1) - m.log(labels + 1)
        return off * off


class MAPE(Formulated):
    """The mean of absolute differences over the labels' size, in percent; labels are not 0."""

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        return abs(y - labels) / m.maximum(abs(labels), 1e-7) * 100.0


@dataclass(frozen=True)
class Poisson(Formulated):
    """Poisson's negative log-likelihood of counts, without the term of the labels alone.

    Attributes:
        log_rates: whether outputs are logarithms of the rates of counts; else rates, above 0.
    """

    log_rates: bool = True

    limits = (0.0, float("inf"))

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        if self.log_rates:
            return m.exp(y) - labels * y
        return y - labels * m.log(y + 1e-8)


@dataclass(frozen=True)
class Hinge(Formulated):
    """Hinge loss: the mean of max(0, 1 - label * output); labels are -1 or 1.

    Attributes:
        squared: whether it is squared.
    """

    squared: bool = False

    limits = (-1.0, 1.0)

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        lack = m.relu(1 - y * labels)
        return lack * lack if self.squared else lack


class KLDivergence(Formulated):
    """Kullback-Leibler divergence of labels (probabilities) from logits (samples, …, classes).

    It is `DenseCrossEntropy` less what the labels alone say, so it is 0 at best.
    """

    rows: ClassVar[bool] = True

    takes = "logits"
    limits = (0.0, 1.0)

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        own = m.log(m.maximum(labels, 1e-30))
        return m.reduce_sum(labels * (own - m.log_softmax(y)), axes=-1, keepdims=False)


class CosineSimilarity(Formulated):
    """1 less the cosine between rows of outputs and labels, along their last axis."""

    rows: ClassVar[bool] = True

    def each(self, m: Formula, y: Tensor, labels: Tensor) -> Tensor:
        def dot(a: Tensor, b: Tensor) -> Tensor:
            return m.reduce_sum(a * b, axes=-1, keepdims=False)

        sizes = m.maximum(dot(y, y) * dot(labels, labels), 1e-24)
        return 1 - dot(y, labels) / m.sqrt(sizes)


LOSSES.update(
    {
        "log_cosh": LogCosh(),
        "quantile": Quantile(),
        "smooth_l1": SmoothL1(),
        "msle": MSLE(),
        "mape": MAPE(),
        "poisson": Poisson(),
        "hinge": Hinge(),
        "squared_hinge": Hinge(squared=True),
        "kl_divergence": KLDivergence(),
        "cosine_similarity": CosineSimilarity(),
    }
)
