"""Losses: what they need of labels, and the operators they are.

A cross-entropy is over the output's last axis; the others, samples and the places of a sequence,
are joined into rows. Where elements have weights, a loss is their weighted mean: the sum of weight
times loss over the sum of weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from soapstone.frontend.arguments import meant, number, shown_value
from soapstone.frontend.data.npz import LABELS
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, TensorSpec

Add = Callable[..., str]


def adder(builder: GraphBuilder, of: str) -> Add:
    """Return what adds an operator under a name and a suffix, and returns its first output."""

    def add(operator: str, *operands: str, suffix: str = "", **attributes: Any) -> str:
        return builder.apply(operator, *operands, name=f"{of}{suffix}", **attributes)[0]

    return add


def as_rows(builder: GraphBuilder, value: str, rank: int) -> str:
    """Return a value whose leading axes are joined, so that it has `rank` axes."""
    shape = builder.spec(value).shape
    if len(shape) <= rank:
        return value
    lead = len(shape) - rank + 1
    joined = (math.prod(shape[:lead]), *shape[lead:])
    for node in reversed(builder.nodes):  # loss and metrics share one
        same = node.operator == "reshape" and node.inputs == (value,)
        if same and builder.spec(node.outputs[0]).shape == joined:
            return node.outputs[0]
    return builder.apply("reshape", value, name=f"{value}.rows", shape=joined)[0]


def total(builder: GraphBuilder, add: Add, value: str, suffix: str) -> str:
    """Return the sum of all elements of a value."""
    return add("reduce_sum", value, suffix=suffix, axes=tuple(range(builder.spec(value).rank)))


def shown(add: Add, labels: str) -> tuple[str, str]:
    """Return labels with 0 in place of -1, and 1 where they were not -1 or else 0."""
    mask = add("affine", labels, suffix=".shown", shift=1.0)
    mask = add("clip", mask, suffix=".mask", low=0.0, high=1.0)
    return add("clip", labels, suffix=".labels", low=0.0), mask


@dataclass(frozen=True)
class Loss:
    """A loss of one output.

    Raises:
        GraphError: a setting that is no number of 0 or more.
    """

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            where = f"{type(self).__name__}: {item.name}"
            if isinstance(item.default, float) and not 0 <= number(where, value) <= _MOST.get(
                item.name, math.inf
            ):
                most = f" to {_MOST[item.name]}" if item.name in _MOST else " or more"
                raise GraphError(f"{where} {value!r} found, 0{most} needed")

    @property
    def classes(self) -> bool:
        """Whether labels are class numbers, without the output's last axis."""
        return False

    @property
    def masked(self) -> bool:
        """Whether a label may be -1, which does not count."""
        return False

    @property
    def takes(self) -> str:
        """What outputs are to it: "logits", "probabilities", or nothing of the kind."""
        return "logits" if self.classes else ""

    @property
    def limits(self) -> tuple[float, float] | None:
        """The least and the largest label that is no class number; None where any will do."""
        return None

    def labels(self, output: TensorSpec) -> TensorSpec:
        """Return what the labels of an output are."""
        return TensorSpec(output.shape[:-1], "int32") if self.classes else output

    def weights(self, output: TensorSpec) -> TensorSpec:
        """Return what has a weight, by the output: an element of the labels, or a row of them."""
        return TensorSpec(self.labels(output).shape)

    def weigh(self, labels: Array, weights: Array | None) -> Array | None:
        """Return the weights of labels, given those of samples or none."""
        return weights

    @property
    def places(self) -> bool:
        """Whether labels have places of their own, not one for each step of the output."""
        return False

    def fitted(self, labels: Array, places: int) -> Array:
        """Return labels as the graph has them. places: what it has along their second axis."""
        return labels

    @property
    def weighted(self) -> bool:
        """Whether labels have weights of their own."""
        return False

    def known(self, labels: Array) -> tuple[int, int]:
        """Return how many samples of a batch count, and how many labels they have."""
        if not self.masked:
            return len(labels), np.size(labels)
        there = np.asarray(labels) >= 0
        if self.classes:
            return int(np.count_nonzero(there)), int(np.count_nonzero(there))
        return int(there.any(axis=tuple(range(1, there.ndim))).sum()), int(there.sum())

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        """Add the operators of the loss, called `name`, and return the scalar that it is.

        builder: of the graph; output, labels, weights: values, weights None where all count alike.

        Raises:
            GraphError, ShapeError: an output that it does not fit.
        """
        raise TypeError(f"{type(self).__name__} is no loss; see soapstone.losses")

    def _mean(self, builder: GraphBuilder, add: Add, each: str, weights: str | None) -> str:
        """Return the mean of the losses of elements."""
        if weights is None:
            summed = total(builder, add, each, ".sum")
            return add("affine", summed, scale=1 / max(builder.spec(each).size, 1))
        weights = add("reshape", weights, suffix=".weights", shape=builder.spec(each).shape)
        summed = total(builder, add, add("mul", each, weights, suffix=".rows"), ".sum")
        every = total(builder, add, weights, ".count")
        return add("div", summed, add("clip", every, suffix=".count", low=_LEAST))


_LEAST = 1e-30  # what sums of weights are divided by at least
_MOST = {"label_smoothing": 1}


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy of logits (samples, …, classes) and class numbers (samples, …).

    Attributes:
        label_smoothing: which part of a label's probability all classes share.
        class_weights: one of each class, as a sequence or a dict by class number, where 1 is left
            out: what samples of the class count. The mean is by weights, as PyTorch's; smoothing
            and weights together are the smoothed loss times the weight of the label, as Keras'.
        focus: the exponent gamma of a focal loss: a row counts (1 - p)^gamma, p what its label is
            given; 0 for none.

    Raises:
        GraphError: a setting out of range.

    Source: Szegedy et al., Rethinking the Inception architecture, CVPR 2016, section 7; Lin et al.,
    Focal loss for dense object detection, ICCV 2017, equation 4.
    """

    label_smoothing: float = 0.0
    class_weights: Sequence[float] | Mapping[int, float] | None = field(default=None, hash=False)
    focus: float = 0.0
    classes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights is None:
            return
        given, where = self.class_weights, "CrossEntropy: class_weights"
        if not isinstance(given, Mapping | Iterable):
            raise GraphError(f"{where} {given!r} found, a weight of each class needed")
        if not isinstance(given, Mapping):
            given = dict(enumerate(given))
        if not given or not all(isinstance(k, int | np.integer) and k >= 0 for k in given):
            raise GraphError(f"{where} {self.class_weights!r} found, a weight of each class needed")
        full = [1.0] * (max(given) + 1)
        for k, value in given.items():
            full[k] = number(f"{where}: that of class {k}", value)
            if full[k] < 0:
                raise GraphError(f"{where}: that of class {k} is {value!r}; 0 or more needed")
        object.__setattr__(self, "class_weights", tuple(full))

    @property
    def weighted(self) -> bool:
        return self.class_weights is not None

    def weigh(self, labels: Array, weights: Array | None) -> Array | None:
        if self.class_weights is None:
            return weights
        known = np.asarray(self.class_weights, np.float32)
        own = np.where(labels < len(known), known[np.minimum(labels, len(known) - 1)], 1.0)
        return own if weights is None else own * weights

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        logits, labels = as_rows(builder, output, 2), as_rows(builder, labels, 1)
        if weights is None and not self.label_smoothing and not self.focus:
            return add("cross_entropy", logits, labels)
        if self.weighted and len(tuple(self.class_weights or ())) > builder.spec(logits).shape[1]:
            classes = builder.spec(logits).shape[1]
            raise GraphError(
                f"CrossEntropy: {len(tuple(self.class_weights or ()))} class weights found, at most"
                f" {classes} needed, the classes of output {output!r}"
            )
        logs = add("log_softmax", logits, suffix=".log")
        chosen = add("pick", logs, labels, suffix=".chosen")
        each = add("neg", chosen, suffix=".each")
        if self.focus:
            rest = add("affine", add("exp", chosen, suffix=".p"), suffix=".rest", scale=-1, shift=1)
            rest = add("power", rest, suffix=".focus", exponent=self.focus)
            each = add("mul", rest, each, suffix=".focused")
        if self.label_smoothing:
            share, classes = self.label_smoothing, builder.spec(logits).shape[1]
            spread = add("reduce_sum", logs, suffix=".spread", axes=(1,))
            spread = add("affine", spread, suffix=".spread", scale=-share / classes)
            each = add("add", add("affine", each, suffix=".kept", scale=1 - share), spread)
        return self._mean(builder, add, each, weights)


@dataclass(frozen=True)
class Focal(CrossEntropy):
    """Focal loss: cross-entropy whose rows count (1 - p)^focus, p the probability of the label.

    Attributes:
        label_smoothing, class_weights, focus: those of `CrossEntropy`.
    """

    focus: float = 2.0


@dataclass(frozen=True)
class MaskedCrossEntropy(Loss):
    """Cross-entropy over the rows whose label is not -1; 0 where there is none."""

    classes = True
    masked = True

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        logits, labels = as_rows(builder, output, 2), as_rows(builder, labels, 1)
        there = add("affine", labels, suffix=".shown", shift=1.0)
        there = add("clip", there, suffix=".mask", low=0.0, high=1.0)
        mask = add("cast", there, suffix=".mask", to="float32")
        known = add("clip", labels, suffix=".labels", low=0.0)
        chosen = add("pick", add("log_softmax", logits, suffix=".log"), known, suffix=".chosen")
        if weights is not None:
            weights = add("mul", mask, as_rows(builder, weights, 1), suffix=".weights")
            return self._mean(builder, add, add("neg", chosen, suffix=".each"), weights)
        every = add(
            "reduce_sum", add("mul", chosen, mask, suffix=".rows"), suffix=".sum", axes=(0,)
        )
        count = add("reduce_sum", mask, suffix=".count", axes=(0,))
        count = add("clip", count, suffix=".count", low=1.0)
        return add("neg", add("div", every, count, suffix=".mean"))


@dataclass(frozen=True)
class DenseCrossEntropy(Loss):
    """Cross-entropy of logits (samples, …, classes) and probabilities of that shape."""

    takes = "logits"
    limits = (0.0, 1.0)

    def weights(self, output: TensorSpec) -> TensorSpec:
        return TensorSpec(output.shape[:-1])

    def known(self, labels: Array) -> tuple[int, int]:
        return len(labels), int(np.prod(labels.shape[:-1]))

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        logits, labels = (as_rows(builder, value, 2) for value in (output, labels))
        if weights is None:
            return add("cross_entropy_dense", logits, labels)
        logs = add("log_softmax", logits, suffix=".log")
        each = add("reduce_sum", add("mul", labels, logs, suffix=".parts"), suffix=".p", axes=(1,))
        return self._mean(builder, add, add("neg", each, suffix=".each"), weights)


@dataclass(frozen=True)
class MSE(Loss):
    """The mean of squared differences; labels have the output's shape."""

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        if weights is None:
            return add("mse", output, labels)
        off = add("sub", output, labels, suffix=".off")
        return self._mean(builder, add, add("mul", off, off, suffix=".each"), weights)


@dataclass(frozen=True)
class MAE(Loss):
    """The mean of absolute differences; labels have the output's shape."""

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        off = add("sub", output, labels, suffix=".off")
        return self._mean(builder, add, add("abs", off, suffix=".each"), weights)


@dataclass(frozen=True)
class Huber(Loss):
    """The mean of d^2 / 2 where |d| is at most delta, else delta (|d| - delta / 2), d = y - label.

    Attributes:
        delta: where squares end, above 0.

    Source: Huber, Robust estimation of a location parameter, 1964.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delta == 0:
            raise GraphError("Huber: delta 0 found, a number above 0 needed")

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        off = add("abs", add("sub", output, labels, suffix=".off"), suffix=".abs")
        near = add("clip", off, suffix=".near", low=0.0, high=self.delta)
        rest = add("sub", off, add("affine", near, suffix=".half", scale=0.5), suffix=".rest")
        return self._mean(builder, add, add("mul", near, rest, suffix=".each"), weights)


@dataclass(frozen=True)
class BCE(Loss):
    """Binary cross-entropy; labels from 0 to 1 have the output's shape.

    Attributes:
        from_logits: whether outputs are logits, not probabilities.
    """

    from_logits: bool = False
    limits = (0.0, 1.0)

    @property
    def takes(self) -> str:
        return "logits" if self.from_logits else "probabilities"

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        if weights is None:
            return add("bce", output, labels, from_logits=self.from_logits)
        if self.from_logits:
            part = add("mul", output, labels, suffix=".chosen")
            each = add("sub", add("softplus", output, suffix=".softplus"), part, suffix=".each")
            return self._mean(builder, add, each, weights)
        p = add("clip", output, suffix=".p", low=1e-7, high=1 - 1e-7)
        one = add("mul", labels, add("log", p, suffix=".log"), suffix=".one")
        other = add("log", add("affine", p, suffix=".rest", scale=-1, shift=1), suffix=".log")
        left = add("affine", labels, suffix=".zeros", scale=-1, shift=1)
        each = add("add", one, add("mul", left, other, suffix=".other"), suffix=".sum")
        return self._mean(builder, add, add("neg", each, suffix=".each"), weights)


@dataclass(frozen=True)
class MaskedBCE(Loss):
    """Binary cross-entropy of logits over the labels that are not -1."""

    takes = "logits"
    limits = (-1.0, 1.0)
    masked = True

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        add = adder(builder, name)
        known, mask = shown(add, labels)
        chosen = add("mul", output, known, suffix=".chosen")
        each = add("sub", add("softplus", output, suffix=".softplus"), chosen, suffix=".each")
        if weights is not None:
            mask = add("mul", mask, weights, suffix=".weights")
            return self._mean(builder, add, each, mask)
        every = total(builder, add, add("mul", each, mask, suffix=".rows"), ".sum")
        count = add("clip", total(builder, add, mask, ".count"), suffix=".count", low=1.0)
        return add("div", every, count)


LOSSES: dict[str, Loss] = {
    "cross_entropy": CrossEntropy(),
    "masked_cross_entropy": MaskedCrossEntropy(),
    "cross_entropy_dense": DenseCrossEntropy(),
    "masked_bce": MaskedBCE(),
    "mse": MSE(),
    "bce": BCE(),
    "bce_with_logits": BCE(from_logits=True),
    "mae": MAE(),
    "huber": Huber(),
    "focal": Focal(),
}


def add_loss(builder: GraphBuilder, output: str, loss: str) -> str:
    """Declare the labels, add the loss of the output, and return the loss's name.

    Raises:
        GraphError: an unknown loss.
        ShapeError: the output does not fit it.
    """
    kind = loss_of(loss)
    spec = kind.labels(builder.spec(output))
    builder.input(LABELS, spec.shape, spec.dtype)
    return kind.emit(builder, "loss", output, LABELS, None)


def loss_of(value: Loss | str) -> Loss:
    """Return a loss from itself or its name.

    Raises:
        GraphError: an unknown name.
    """
    if isinstance(value, Loss):
        return value
    if not isinstance(value, str) or value not in LOSSES:
        raise GraphError(
            f"loss {shown_value(value)} found, one of {', '.join(LOSSES)} needed"
            f"{meant(value, LOSSES)}"
        )
    return LOSSES[value]
