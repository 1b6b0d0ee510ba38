"""Optimizers that are formulas: each is written with the layers that a loss is written with.

What updates a parameter is then element-wise operators, which are joined and split like all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from soapstone.frontend.arguments import named_arguments
from soapstone.frontend.training.optimizers import OPTIMIZERS, Optimizer
from soapstone.frontend.training.schedules import Schedule
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Role
from soapstone.ir.training.guard import LEARNING_RATE, STEP

if TYPE_CHECKING:
    from soapstone.frontend.recording import Tensor
    from soapstone.frontend.training.formula import Formula


@dataclass
class Update:
    """The values that an update is computed from.

    Attributes:
        m: whose methods are layers. w, g: the parameter and its gradient, after decay.
            rate: the learning rate.
    """

    m: Formula
    w: Tensor
    g: Tensor
    rate: Tensor
    _state: Callable[[str, float, tuple[int, ...]], Tensor]
    _set: Callable[[str, Tensor], None]
    _states: dict[str, Tensor] = field(default_factory=dict)

    def state(self, name: str, first: float = 0.0, *, scalar: bool = False) -> Tensor:
        """Return a state of the parameter's shape, or a number, which begins as `first`."""
        if name not in self._states:
            self._states[name] = self._state(name, first, () if scalar else self.w.shape)
        return self._states[name]

    def becomes(self, name: str, value: Tensor) -> Tensor:
        """Return the value that a state has from now on."""
        self._set(name, value)
        return value

    def mean(self, name: str, value: Tensor, kept: float) -> Tensor:
        """Return the running mean of values, of which a share is kept from step to step."""
        return self.becomes(name, self.state(name) * kept + value * (1 - kept))

    @property
    def step(self) -> Tensor:
        """The number of the step, from 1."""
        return self.m.cast(self.m.tensor(STEP), "float32")

    def power(self, base: float) -> Tensor:
        """Return a number from 0 to 1 to the power of the step."""
        return self.m.exp(self.step * math.log(max(base, 1e-38)))


@dataclass(frozen=True)
class Composed(Optimizer):
    """An optimizer by a formula for the next value of a parameter.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates: as of every optimizer.
        weight_decay: times the parameter, added to the gradient: an L2 penalty.
    """

    weight_decay: float = field(default=0.0, kw_only=True)
    decoupled: ClassVar[bool] = False  # whether parameters shrink by it, as of AdamW

    def next(self, of: Update) -> Tensor:
        """Return what the parameter becomes, of its shape; of: what it is made of."""
        raise TypeError(f"{type(self).__name__} is no optimizer; see soapstone.optimizers")

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        from soapstone.frontend.training.formula import Formula

        m, spec = Formula(builder, type(self).__name__), builder.spec(parameter)

        def state(name: str, first: float, shape: tuple[int, ...]) -> Tensor:
            initial = Initial("constant", first)
            return m.tensor(
                builder.input(f"{parameter}.{name}", shape, spec.dtype, Role.STATE, initial)
            )

        def put(name: str, value: Tensor) -> None:
            builder.update(f"{parameter}.{name}", value.name)

        w, g = m.tensor(parameter), m.tensor(grad)
        rate = m.tensor(*self._scalars(builder, parameter, (LEARNING_RATE,)))
        if self.weight_decay and self._decays(parameter):
            if self.decoupled:
                w = w - rate * self.weight_decay * w
            else:
                g = g + w * self.weight_decay
        made = self.next(Update(m, w, g, rate, state, put))
        if getattr(made, "spec", None) != spec:
            raise GraphError(
                f"{type(self).__name__}: next of {parameter!r}: {made!r} returned, {spec} needed"
            )
        builder.update(parameter, made.name)


@named_arguments
@dataclass(frozen=True)
class RMSprop(Composed):
    """RMSprop: the gradient over its running root mean square.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates, weight_decay: as of `Composed`.
        rho: how much of the running square stays from step to step. epsilon: added to its root.
        momentum: how much of a step is made again. centered: whether the square is of what differs
            from the running mean.

    Source: Tieleman and Hinton, COURSERA: Neural networks for machine learning, lecture 6.5, 2012;
    centered: Graves, Generating sequences with recurrent neural networks, 2013.
    """

    learning_rate: float | Schedule = 1e-2
    rho: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.0
    centered: bool = False

    def next(self, of: Update) -> Tensor:
        square = of.mean("square", of.g * of.g, self.rho)
        if self.centered:
            mean = of.mean("mean", of.g, self.rho)
            square = of.m.maximum(square - mean * mean, 0.0)
        moved = of.g / (of.m.sqrt(square) + self.epsilon)
        if self.momentum:
            moved = of.becomes("momentum", of.state("momentum") * self.momentum + moved)
        return of.w - of.rate * moved


@named_arguments
@dataclass(frozen=True)
class Adagrad(Composed):
    """Adagrad: the gradient over the root of the sum of its squares so far.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates, weight_decay: as of `Composed`.
        initial: what the sum begins as. epsilon: added to its root.

    Source: Duchi, Hazan and Singer, Adaptive subgradient methods, JMLR 12, 2011.
    """

    learning_rate: float | Schedule = 1e-2
    initial: float = 0.0
    epsilon: float = 1e-10

    def next(self, of: Update) -> Tensor:
        total = of.becomes("total", of.state("total", self.initial) + of.g * of.g)
        return of.w - of.rate * of.g / (of.m.sqrt(total) + self.epsilon)


@named_arguments
@dataclass(frozen=True)
class Adadelta(Composed):
    """Adadelta: the gradient times the running root mean square of steps over that of gradients.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates, weight_decay: as of `Composed`.
        rho: how much of both running squares stays. epsilon: added under the roots.

    Source: Zeiler, ADADELTA: an adaptive learning rate method, 2012, algorithm 1.
    """

    learning_rate: float | Schedule = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6

    def next(self, of: Update) -> Tensor:
        square = of.mean("square", of.g * of.g, self.rho)
        steps = of.state("steps")
        root = of.m.sqrt((steps + self.epsilon) / (square + self.epsilon))
        moved = root * of.g
        of.becomes("steps", steps * self.rho + moved * moved * (1 - self.rho))
        return of.w - of.rate * moved


@named_arguments
@dataclass(frozen=True)
class Adamax(Composed):
    """Adamax: Adam with the largest gradient, which decays, in place of the root mean square.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates, weight_decay: as of `Composed`.
        beta1, beta2: how much of the running mean and of the largest gradient stays.
        epsilon: added to the gradient's size.

    Source: Kingma and Ba, Adam, ICLR 2015, algorithm 2.
    """

    learning_rate: float | Schedule = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def next(self, of: Update) -> Tensor:
        mean = of.mean("mean", of.g, self.beta1)
        size = of.m.maximum(of.state("largest") * self.beta2, abs(of.g) + self.epsilon)
        largest = of.becomes("largest", size)
        return of.w - of.rate / (1 - of.power(self.beta1)) * (mean / largest)


@named_arguments
@dataclass(frozen=True)
class NAdam(Composed):
    """NAdam: Adam that looks one step ahead, as Nesterov's momentum does.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates, weight_decay: as of `Composed`.
        beta1, beta2: how much of the running mean and of the running square of the gradient stays.
        epsilon: added to the root of the square. momentum_decay: how fast beta1 gets to its value.

    Source: Dozat, Incorporating Nesterov momentum into Adam, ICLR workshop 2016.
    """

    learning_rate: float | Schedule = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    momentum_decay: float = 4e-3

    def next(self, of: Update) -> Tensor:
        slow = math.log(0.96) * self.momentum_decay
        now, ahead = (
            self.beta1 * (1 - 0.5 * of.m.exp((of.step + each) * slow)) for each in (0.0, 1.0)
        )
        product = of.becomes("product", of.state("product", 1.0, scalar=True) * now)
        mean = of.mean("mean", of.g, self.beta1)
        square = of.mean("square", of.g * of.g, self.beta2)
        root = of.m.sqrt(square / (1 - of.power(self.beta2))) + self.epsilon
        own = of.g * (of.rate * (1 - now) / (1 - product))
        rest = mean * (of.rate * ahead / (1 - product * ahead))
        return of.w - (own + rest) / root


@named_arguments
@dataclass(frozen=True)
class Lion(Composed):
    """Lion: steps of one size, by the sign of the running mean; decay is decoupled, as of AdamW.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates: as of every optimizer.
        weight_decay: parameters shrink by rate times it. beta1: how much of the running mean is in
            a step. beta2: how much of it stays.

    Source: Chen et al., Symbolic discovery of optimization algorithms, NeurIPS 2023, algorithm 2.
    """

    learning_rate: float | Schedule = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    decoupled: ClassVar[bool] = True

    def next(self, of: Update) -> Tensor:
        way = of.m.sign(of.state("mean") * self.beta1 + of.g * (1 - self.beta1))
        of.mean("mean", of.g, self.beta2)
        return of.w - of.rate * way


OPTIMIZERS.update(
    {
        "rmsprop": RMSprop,
        "adagrad": Adagrad,
        "adadelta": Adadelta,
        "adamax": Adamax,
        "nadam": NAdam,
        "lion": Lion,
    }
)
