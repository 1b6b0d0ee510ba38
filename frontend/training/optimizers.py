"""Optimizers: each emits the operator that updates a parameter in place, given its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

from soapstone.frontend.arguments import number
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import GraphBuilder, Initial
from soapstone.ir.guard import LEARNING_RATE, STEP
from soapstone.ir.tensor import Role

Schedule = Callable[[int], float]


def _slot(builder: GraphBuilder, parameter: str, name: str) -> str:
    """Declare an optimizer state of the parameter's shape, beginning at zero."""
    spec = builder.spec(parameter)
    return builder.input(
        f"{parameter}.{name}", spec.shape, spec.dtype, Role.STATE, Initial("constant", 0.0)
    )


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have: a learning rate, or a schedule from step to learning rate."""

    learning_rate: float | Schedule = 0.01

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(item.default, bool) or callable(value):
                continue
            if number(f"{type(self).__name__}: {item.name}", value) < 0:
                raise GraphError(
                    f"{type(self).__name__}: {item.name} {value!r} found, a number of 0 or more"
                    " needed"
                )

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rate = self.learning_rate
        return float(rate(step) if callable(rate) else rate)

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        """Add the operator that updates `parameter` when `finite` holds, and its states."""
        raise TypeError(f"{type(self).__name__} is no optimizer; use SGD, Adam or AdamW")


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant and weight decay.

    v' = momentum v + (g + weight_decay w); w' = w - rate v' (Nesterov: g + momentum v').
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        slots = [_slot(builder, parameter, "momentum")] if self.momentum else []
        results = builder.apply(
            "sgd",
            parameter,
            grad,
            *slots,
            LEARNING_RATE,
            finite,
            name=f"{parameter}.update",
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
        )
        for name, value in zip([parameter, *slots], results):
            builder.update(name, value)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015); `weight_decay` is added to the gradient, as an L2 penalty."""

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        slots = [_slot(builder, parameter, name) for name in ("mean", "variance")]
        results = builder.apply(
            "adam",
            parameter,
            grad,
            *slots,
            LEARNING_RATE,
            STEP,
            finite,
            name=f"{parameter}.update",
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=self.epsilon,
            weight_decay=self.weight_decay,
            decoupled=isinstance(self, AdamW),
        )
        for name, value in zip([parameter, *slots], results):
            builder.update(name, value)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    weight_decay: float = 0.01


def optimizer(value: Optimizer | str) -> Optimizer:
    """Return an optimizer from itself or from its name: sgd, adam, adamw.

    Raises:
        GraphError: an unknown name.
    """
    if isinstance(value, Optimizer):
        return value
    known: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    if not isinstance(value, str) or value not in known:
        raise GraphError(f"optimizer {value!r} found, one of {', '.join(known)} needed")
    return known[value]()
