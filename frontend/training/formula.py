"""Losses and metrics that users write as functions of tensors: layers recorded into a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from soapstone.frontend.arguments import takes
from soapstone.frontend.recording import Recording, Tensor
from soapstone.frontend.training.losses.loss import Loss
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Role, TensorSpec

Function = Callable[..., Tensor]


class Formula(Recording):
    """The `model` that a function of tensors is given: its layers are added to a graph.

    Args:
        label: what errors call the function.
    """

    def __init__(self, builder: GraphBuilder, label: str) -> None:
        self._given, self._label = builder, label
        super().__init__(builder.name, 0)

    def _new_builder(self) -> GraphBuilder:
        return self._given

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        *,
        varying: bool = False,
    ) -> Tensor:
        """Refuse: a loss takes the output and its labels.

        Raises:
            GraphError: always.
        """
        raise GraphError(f"{self._label}: input {name!r} found; output and labels are all it takes")

    def tensor(self, value: str) -> Tensor:
        """Return a value of the graph as a tensor."""
        made = Tensor(self, len(self._tensors), value, self._given.spec(value))
        self._tensors.append(made)
        return made


def applied(function: Function, label: str, builder: GraphBuilder, values: Sequence[str]) -> str:
    """Add what a function computes of values, and return the scalar that it is.

    Raises:
        GraphError: it takes other arguments, returns no scalar tensor, or has parameters or
            constants of its own.
    """
    if not takes(function, builder, *values):
        needed = ", ".join(("model", "output", "labels", "weights")[: len(values) + 1])
        raise GraphError(f"{label}: a function of ({needed}) needed")
    formula, before = Formula(builder, label), set(builder.build().roles)
    made = function(formula, *map(formula.tensor, values))
    if not isinstance(made, Tensor) or made.model is not formula:
        raise GraphError(f"{label}: {made!r} returned; a tensor made of the output needed")
    if made.shape != () or not made.spec.is_float:
        raise GraphError(
            f"{label}: {made.spec} returned; one float32 number needed, such as"
            " model.reduce_mean(…)"
        )
    roles = builder.build().roles
    own = [name for name in roles if name not in before and roles[name] is not Role.SCALAR]
    if own:
        raise GraphError(
            f"{label}: {roles[own[0]]} {own[0]!r} found; what is trained or given belongs to the"
            " model"
        )
    return made.name


def name_of(function: Callable[..., Any]) -> str:
    """Return what a function is called."""
    return str(getattr(function, "__name__", type(function).__name__))


@dataclass(frozen=True)
class FunctionLoss(Loss):
    """A loss that a function computes: `function(model, output, labels)`, a scalar tensor.

    With weights of samples it is called with their tensor too, of the labels' shape.

    Attributes:
        function: of a recording, whose methods are layers, and of tensors.
        of_classes: whether labels are class numbers, without the output's last axis; else they have
            the output's shape, or `shape`.
        shape: of the labels of a sample, and dtype: their element type.
    """

    function: Function
    of_classes: bool = False
    shape: tuple[int, ...] | None = None
    dtype: str = "float32"

    @property
    def classes(self) -> bool:
        return self.of_classes

    def labels(self, output: TensorSpec) -> TensorSpec:
        if self.shape is None or self.of_classes:
            return super().labels(output)
        return TensorSpec((output.shape[0], *self.shape), self.dtype)

    def emit(
        self, builder: GraphBuilder, name: str, output: str, labels: str, weights: str | None
    ) -> str:
        label = f"loss {name_of(self.function)!r}"
        values = [output, labels] if weights is None else [output, labels, weights]
        return applied(self.function, label, builder, values)
