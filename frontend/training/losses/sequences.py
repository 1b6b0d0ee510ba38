"""Losses of sequences whose labels are not aligned with steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.arguments import count
from soapstone.frontend.layers.sequences import lengths_of
from soapstone.frontend.training.losses.loss import LOSSES, Loss, adder
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, TensorSpec


@dataclass(frozen=True)
class CTC(Loss):
    """Connectionist temporal classification of logits (samples, steps, classes).

    Labels are class numbers (samples, places) without blanks, padded with -1 behind each sample's
    last; there may be fewer places than steps. The loss is the mean over samples of minus the
    logarithm of their labels' probability, as TensorFlow's, and PyTorch's sum over the batch size.

    Attributes:
        blank: the class that stands for no label.
        lengths: the model's input that says how many steps each sample has, (samples,) integers or
            a mask (samples, steps); None where all have all.
        zero_infinity: whether a sample whose labels do not fit its steps counts 0, with no
            gradient; else its loss is infinite, which stops training.

    Raises:
        GraphError: a blank below 0, or an input that the model does not have.
        DataError: when fed, a label that is the blank, or more labels than steps.

    Source: Graves et al., Connectionist temporal classification, ICML 2006.
    """

    blank: int = 0
    lengths: str | None = None
    zero_infinity: bool = False
    classes = True
    masked = True
    places = True

    def __post_init__(self) -> None:
        count("CTC: blank", self.blank, 0, GraphError)

    def weights(self, output: TensorSpec) -> TensorSpec:
        return TensorSpec(output.shape[:1])

    def known(self, labels: Array) -> tuple[int, int]:
        return len(labels), int(np.count_nonzero(np.asarray(labels) >= 0))

    def fitted(self, labels: Array, places: int) -> Array:
        if (labels == self.blank).any():
            row = np.argwhere(labels == self.blank)[0][0]
            raise DataError(f"y: {self.blank} at row {row}, which is the blank of CTC")
        if labels.ndim != 2 or labels.shape[1] == places:
            return labels
        if (labels[:, places:] >= 0).any():
            row = np.argwhere(labels[:, places:] >= 0)[0][0]
            raise DataError(f"y: more labels than the {places} steps at row {row}")
        made = np.full((len(labels), places), -1, labels.dtype)
        made[:, : labels.shape[1]] = labels[:, :places]
        return made

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        operands = [output, labels]
        if self.lengths is not None:
            if not builder.has(self.lengths):
                raise GraphError(f"CTC: lengths: the model has no input {self.lengths!r}")
            operands.append(lengths_of(builder, self.lengths, name))
        add = adder(builder, name)
        settings = {"blank": self.blank, "zero_infinity": self.zero_infinity}
        each = add("ctc", *operands, suffix=".each", **settings)
        return self._mean(builder, add, each, weights)


LOSSES["ctc"] = CTC()
