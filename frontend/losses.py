"""Losses and metrics: what they need of labels, and the operators they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from soapstone.ir.errors import GraphError
from soapstone.ir.graph import GraphBuilder
from soapstone.ir.tensor import Role, TensorSpec

LABELS = "labels"


@dataclass(frozen=True)
class Loss:
    """A loss: the labels' spec from the output's, and the operator that makes the scalar."""

    labels: Callable[[TensorSpec], TensorSpec]
    emit: Callable[[GraphBuilder, str, str], str]


def _operator(name: str, **attributes: Any) -> Callable[[GraphBuilder, str, str], str]:
    def emit(builder: GraphBuilder, output: str, labels: str) -> str:
        return builder.apply(name, output, labels, name="loss", **attributes)[0]

    return emit


LOSSES = {
    "cross_entropy": Loss(
        lambda spec: TensorSpec(spec.shape[:1], "int32"), _operator("cross_entropy")
    ),
    "cross_entropy_dense": Loss(lambda spec: spec, _operator("cross_entropy_dense")),
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
    """Add the metrics of the output and return their values' names; accuracy counts correct rows.

    Raises:
        GraphError: an unknown metric, or accuracy of labels that are no class numbers.
    """
    made = {}
    for metric in metrics:
        if metric not in METRICS:
            raise GraphError(f"metric {metric!r} found, one of {', '.join(METRICS)} needed")
        if builder.spec(LABELS).dtype != "int32":
            raise GraphError("metric 'accuracy' needs class numbers as labels (loss cross_entropy)")
        made[metric] = builder.apply("correct", output, LABELS, name="correct")[0]
    return made
