"""Losses and metrics: what they need of labels, and the operators they are.

A cross-entropy is over the output's last axis; the others, samples and the places of a sequence,
are joined into rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, Role, TensorSpec

LABELS = "labels"


@dataclass(frozen=True)
class Loss:
    """A loss: the labels' spec from the output's, and the operator that makes the scalar."""

    labels: Callable[[TensorSpec], TensorSpec]
    emit: Callable[[GraphBuilder, str, str], str]


def _rows(builder: GraphBuilder, value: str, rank: int) -> str:
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


def _operator(
    name: str, ranks: tuple[int, int] | None = None, **attributes: Any
) -> Callable[[GraphBuilder, str, str], str]:
    """Return what adds an operator, on rows of so many axes where it is told ranks."""

    def emit(builder: GraphBuilder, output: str, labels: str) -> str:
        operands = [output, labels]
        if ranks is not None:
            operands = [_rows(builder, *each) for each in zip(operands, ranks)]
        return builder.apply(name, *operands, name="loss", **attributes)[0]

    return emit


def _masked(builder: GraphBuilder, output: str, labels: str) -> str:
    """Add the mean cross-entropy of the rows whose label is not negative; 0 where there is none."""

    def add(operator: str, *operands: str, of: str = "", **attributes: Any) -> str:
        return builder.apply(operator, *operands, name=f"loss{of}", **attributes)[0]

    logits, labels = _rows(builder, output, 2), _rows(builder, labels, 1)
    shown = add("affine", labels, of=".shown", shift=1.0)
    mask = add("cast", add("clip", shown, of=".mask", low=0.0, high=1.0), of=".mask", to="float32")
    known = add("clip", labels, of=".labels", low=0.0)
    chosen = add("pick", add("log_softmax", logits, of=".log"), known, of=".chosen")
    total = add("reduce_sum", add("mul", chosen, mask, of=".rows"), of=".sum", axes=(0,))
    count = add("clip", add("reduce_sum", mask, of=".count", axes=(0,)), of=".count", low=1.0)
    return add("neg", add("div", total, count, of=".mean"))


def _adder(builder: GraphBuilder, of: str) -> Callable[..., str]:
    """Return what adds an operator under a name and a suffix of it."""

    def add(operator: str, *operands: str, suffix: str = "", **attributes: Any) -> str:
        return builder.apply(operator, *operands, name=f"{of}{suffix}", **attributes)[0]

    return add


def _total(add: Callable[..., str], value: str, suffix: str) -> str:
    return add("reduce_sum", value, suffix=suffix, axes=(0, 1))


def _known(add: Callable[..., str], labels: str) -> tuple[str, str]:
    """Return labels of 0 and 1 with 0 in place of -1, and 1 where they were not -1 or else 0."""
    mask = add("affine", labels, suffix=".shown", shift=1.0)
    mask = add("clip", mask, suffix=".mask", low=0.0, high=1.0)
    return add("clip", labels, suffix=".labels", low=0.0), mask


def _masked_bce(builder: GraphBuilder, output: str, labels: str) -> str:
    """Add the mean binary cross-entropy of logits over labels that are not -1."""
    add = _adder(builder, "loss")
    known, mask = _known(add, labels)
    chosen = add("mul", output, known, suffix=".chosen")
    each = add("sub", add("softplus", output, suffix=".softplus"), chosen, suffix=".each")
    total = _total(add, add("mul", each, mask, suffix=".rows"), ".sum")
    count = add("clip", _total(add, mask, ".count"), suffix=".count", low=1.0)
    return add("div", total, count)


def _micro_f1(builder: GraphBuilder, output: str) -> str:
    """Add F1 of all labels together, 2 hits / (guesses + ones), times how many there are."""
    add = _adder(builder, "micro_f1")
    known, mask = _known(add, LABELS)
    sign = add("sign", output, suffix=".sign")
    guess = add("mul", add("clip", sign, suffix=".ones", low=0.0), mask, suffix=".guess")
    hits = add("affine", _total(add, add("mul", guess, known), ".hits"), scale=2.0)
    every = add("add", _total(add, guess, ".guesses"), _total(add, known, ".known"))
    share = add("div", hits, add("clip", every, suffix=".every", low=1.0))
    return add("mul", share, _total(add, mask, ".count"))


LOSSES = {
    "cross_entropy": Loss(
        lambda spec: TensorSpec(spec.shape[:-1], "int32"), _operator("cross_entropy", (2, 1))
    ),
    "masked_cross_entropy": Loss(lambda spec: TensorSpec(spec.shape[:-1], "int32"), _masked),
    "cross_entropy_dense": Loss(lambda spec: spec, _operator("cross_entropy_dense", (2, 2))),
    "masked_bce": Loss(lambda spec: spec, _masked_bce),
    "mse": Loss(lambda spec: spec, _operator("mse")),
    "bce": Loss(lambda spec: spec, _operator("bce", from_logits=False)),
    "bce_with_logits": Loss(lambda spec: spec, _operator("bce", from_logits=True)),
}
METRICS = ("accuracy", "micro_f1")
MASKED = "masked_cross_entropy"  # samples whose label is -1 do not count
MASKED_ROWS = "masked_bce"  # nor samples all of whose labels are -1


def labelled(loss: str, labels: Array) -> tuple[int, int]:
    """Return how many samples of a batch count in a loss, and how many labels they have."""
    if loss == MASKED_ROWS:
        shown = np.asarray(labels) >= 0
        return int(shown.any(axis=tuple(range(1, shown.ndim))).sum()), int(shown.sum())
    if loss != MASKED:
        return len(labels), np.size(labels)
    known = int(np.count_nonzero(np.asarray(labels) >= 0))
    return known, known


def add_loss(builder: GraphBuilder, output: str, loss: str) -> str:
    """Declare the labels, add the loss of the output, and return the loss's name.

    Raises:
        GraphError: an unknown loss.
        ShapeError: the output does not fit it.
    """
    kind = LOSSES.get(loss)
    if kind is None:
        raise GraphError(f"loss {loss!r} found, one of {', '.join(LOSSES)} needed")
    spec = kind.labels(builder.spec(output))
    builder.input(LABELS, spec.shape, spec.dtype, Role.INPUT)
    return kind.emit(builder, output, LABELS)


def add_metrics(builder: GraphBuilder, output: str, metrics: tuple[str, ...]) -> dict[str, str]:
    """Add the metrics of the output and return their values' names; accuracy counts right labels.

    Raises:
        GraphError: an unknown metric, accuracy of labels that are no class numbers, or micro_f1 of
            labels that are.
    """
    made = {}
    for metric in metrics:
        if metric not in METRICS:
            raise GraphError(f"metric {metric!r} found, one of {', '.join(METRICS)} needed")
        if metric == "micro_f1":
            if builder.spec(LABELS).dtype == "int32" or len(builder.spec(LABELS).shape) != 2:
                raise GraphError(
                    "metric 'micro_f1' needs several labels of a sample (loss masked_bce)"
                )
            made[metric] = _micro_f1(builder, output)
            continue
        if builder.spec(LABELS).dtype != "int32":
            raise GraphError("metric 'accuracy' needs class numbers as labels (loss cross_entropy)")
        operands = (_rows(builder, output, 2), _rows(builder, LABELS, 1))
        made[metric] = builder.apply("correct", *operands, name="correct")[0]
    return made
