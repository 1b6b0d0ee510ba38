"""Losses and metrics: what they need of labels, and the operators they are.

A cross-entropy is over the output's last axis; the others, samples and the places of a sequence,
are joined into rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Role, TensorSpec

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


LOSSES = {
    "cross_entropy": Loss(
        lambda spec: TensorSpec(spec.shape[:-1], "int32"), _operator("cross_entropy", (2, 1))
    ),
    "cross_entropy_dense": Loss(lambda spec: spec, _operator("cross_entropy_dense", (2, 2))),
    "mse": Loss(lambda spec: spec, _operator("mse")),
    "bce": Loss(lambda spec: spec, _operator("bce", from_logits=False)),
    "bce_with_logits": Loss(lambda spec: spec, _operator("bce", from_logits=True)),
}
METRICS = ("accuracy",)


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
        GraphError: an unknown metric, or accuracy of labels that are no class numbers.
    """
    made = {}
    for metric in metrics:
        if metric not in METRICS:
            raise GraphError(f"metric {metric!r} found, one of {', '.join(METRICS)} needed")
        if builder.spec(LABELS).dtype != "int32":
            raise GraphError("metric 'accuracy' needs class numbers as labels (loss cross_entropy)")
        operands = (_rows(builder, output, 2), _rows(builder, LABELS, 1))
        made[metric] = builder.apply("correct", *operands, name="correct")[0]
    return made
