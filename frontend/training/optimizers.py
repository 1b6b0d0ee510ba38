"""Optimizers: each emits the operator that updates a parameter in place, given its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from soapstone.frontend.arguments import number
from soapstone.frontend.training.schedules import Schedule
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.guard import LEARNING_RATE, STEP
from soapstone.ir.tensor import Role


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have: a learning rate.

    Attributes:
        learning_rate: a number, or a schedule: a function from the step, counted from 0, to it.
        decayed: the parameters, by name, to which `weight_decay` applies; None for all.

    Raises:
        GraphError: a setting that is no number of 0 or more.
    """

    learning_rate: float | Schedule = 0.01
    decayed: tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "decayed":
                texts = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
                if value is not None and not texts:
                    raise GraphError(
                        f"{type(self).__name__}: decayed {value!r} found, a tuple of names needed"
                    )
                continue
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
        """Add the operator that updates `parameter` when `finite` holds, and its states.

        Args:
            builder: of the training graph. grad: the value of the parameter's gradient.
            finite: the value of the flag: whether the loss is finite.
        """
        raise TypeError(f"{type(self).__name__} is no optimizer; use SGD, Adam or AdamW")

    def _update(
        self,
        builder: GraphBuilder,
        operator: str,
        values: tuple[str, str, str],
        states: Sequence[str],
        scalars: tuple[str, ...],
        **more: bool,
    ) -> None:
        """Add an operator of this one's settings, for a parameter, its gradient and the flag.

        states: of the parameter's shape; they begin at zero.
        """
        parameter, grad, finite = values
        spec, zero = builder.spec(parameter), Initial("constant", 0.0)
        slots = [
            builder.input(f"{parameter}.{name}", spec.shape, spec.dtype, Role.STATE, zero)
            for name in states
        ]
        names = {item.name for item in fields(self)} - {"learning_rate", "decayed"}
        settings = {name: getattr(self, name) for name in names} | more
        if self.decayed is not None and parameter not in self.decayed:
            settings["weight_decay"] = 0.0
        operands = (parameter, grad, *slots, *scalars, finite)
        results = builder.apply(operator, *operands, name=f"{parameter}.update", **settings)
        for name, value in zip([parameter, *slots], results):
            builder.update(name, value)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant and weight decay.

    v' = momentum v + (g + weight_decay w); w' = w - rate v' (Nesterov: g + momentum v').

    Attributes:
        learning_rate, decayed: as of every optimizer. momentum: 0 keeps no v.
        nesterov: whether the step looks ahead. weight_decay: an L2 penalty.

    Source: Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        states = ["momentum"] if self.momentum else []
        self._update(builder, "sgd", (parameter, grad, finite), states, (LEARNING_RATE,))


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; `weight_decay` is added to the gradient, as an L2 penalty.

    Attributes:
        learning_rate, decayed: as of every optimizer.
        beta1, beta2: how much of the running mean and of the running square of the gradient stays
            from step to step.
        epsilon: added to the root of the square.

    Source: Kingma and Ba, Adam, ICLR 2015, algorithm 1.
    """

    learning_rate: float | Schedule = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        states, scalars = ("mean", "variance"), (LEARNING_RATE, STEP)
        decoupled = isinstance(self, AdamW)
        values = (parameter, grad, finite)
        self._update(builder, "adam", values, states, scalars, decoupled=decoupled)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: parameters first shrink by rate times `weight_decay`.

    Attributes:
        learning_rate, decayed, beta1, beta2, epsilon: those of Adam.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    weight_decay: float = 0.01


def optimizer(value: Optimizer | str) -> Optimizer:
    """Return an optimizer from itself, or with its defaults from its name: sgd, adam, adamw.

    value: an optimizer or a name.

    Raises:
        GraphError: an unknown name.
    """
    if isinstance(value, Optimizer):
        return value
    known: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    if not isinstance(value, str) or value not in known:
        raise GraphError(f"optimizer {value!r} found, one of {', '.join(known)} needed")
    return known[value]()
