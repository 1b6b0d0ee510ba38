"""Optimizers: each emits the operator that updates a parameter in place, given its gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from soapstone.frontend.arguments import meant, named_arguments, number, shown_value, takes
from soapstone.frontend.training.names import matches
from soapstone.frontend.training.schedules import Schedule
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.guard import LEARNING_RATE, STEP

_SHARES = ("momentum", "rho")  # settings from 0 to 1
_BETAS = ("beta1", "beta2")  # of running means, that nothing would come to with 1
_TINY = 1e-6  # added to a norm that is divided by


@dataclass(frozen=True)
class Optimizer:
    """What all optimizers have: a learning rate.

    Attributes:
        learning_rate: a number, or a schedule: a function from the step, counted from 0, to it.
        decayed: the layers or parameters, as of `rates`, to which `weight_decay` applies; None for
            all.
        clip_norm: what the norm of all gradients together is scaled down to where it is larger;
            clip_value: what each of their elements is cut to, on both sides. After that come decay
            and momentum, as in PyTorch.
        rates: factors of the learning rate, by layer or parameter (`fc1`, `fc1.bias`, `conv*`), of
            which the last that fits a parameter holds; None for 1.

    Raises:
        GraphError: a setting that is no number of 0 or more.
    """

    learning_rate: float | Schedule = 0.01
    decayed: tuple[str, ...] | None = field(default=None, kw_only=True)
    clip_norm: float | None = field(default=None, kw_only=True)
    clip_value: float | None = field(default=None, kw_only=True)
    rates: Mapping[str, float] | None = field(default=None, kw_only=True, hash=False)

    def __post_init__(self) -> None:
        for item in fields(self):
            value, where = getattr(self, item.name), f"{type(self).__name__}: {item.name}"
            needed = ""  # what is, where it is not what was found
            if item.name == "decayed":
                texts = isinstance(value, tuple) and all(isinstance(name, str) for name in value)
                needed = "" if value is None or texts else "a tuple of names"
            elif item.name == "rates":
                if value is not None and not isinstance(value, Mapping):
                    raise GraphError(f"{where} {value!r} found, factors by layer needed")
                for name, factor in dict(value or {}).items():
                    if number(f"{where}[{name!r}]", factor) < 0:
                        raise GraphError(f"{where}[{name!r}] {factor!r} found, 0 or more needed")
            elif item.name == "learning_rate" and callable(value):
                if isinstance(value, type) or not takes(value, 0):
                    needed = "a number or a function of the step needed"
                    raise GraphError(f"{where} {shown_value(value)} found, {needed}")
            elif item.name in ("clip_norm", "clip_value"):
                if value is not None and number(where, value) <= 0:
                    needed = "a number above 0 or None"
            elif not isinstance(item.default, bool):
                found, most = number(where, value), 1.0 if item.name in _SHARES else math.inf
                if item.name in _BETAS:
                    needed = "" if 0 <= found < 1 else "0 to below 1"
                elif not 0 <= found <= most:
                    needed = "0 to 1" if most == 1 else "a number of 0 or more"
            if needed:
                raise GraphError(f"{where} {value!r} found, {needed} needed")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        Raises:
            GraphError: a schedule that returns something else than a number of 0 or more.
        """
        rate = self.learning_rate
        if not callable(rate):
            return float(rate)
        where = f"{type(self).__name__}: learning_rate of step {step}"
        found = number(where, rate(step))
        if found < 0:
            raise GraphError(f"{where}: {found!r} found, a number of 0 or more needed")
        return found

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        """Add the operator that updates `parameter` when `finite` holds, and its states.

        Args:
            builder: of the training graph. grad: the value of the parameter's gradient.
            finite: the value of the flag: whether the loss is finite.
        """
        raise TypeError(f"{type(self).__name__} is no optimizer; see soapstone.optimizers")

    def clipped(self, builder: GraphBuilder, grads: Mapping[str, str]) -> dict[str, str]:
        """Return the gradients of parameters, by name, as this optimizer clips them.

        builder: of the training graph; grads: the values of the gradients.
        """
        found = dict(grads)
        if self.clip_value is not None:
            most = self.clip_value
            for name, grad in found.items():
                made = builder.apply("clip", grad, name=f"clip.{name}", low=-most, high=most)
                found[name] = made[0]
        if self.clip_norm is not None and found:
            squares: list[str] = []
            for name, grad in found.items():
                axes = tuple(range(builder.spec(grad).rank))
                squares += builder.apply(
                    "reduce_sum_square", grad, name=f"clip.{name}.square", axes=axes
                )
            if len(squares) > 1:
                squares = list(builder.apply("accumulate", *squares, name="clip.squares"))
            norm = builder.apply("sqrt", *squares, name="clip.norm")
            most = self.clip_norm
            over = builder.apply(
                "affine", *norm, name="clip.over", scale=1 / most, shift=_TINY / most
            )
            inverse = builder.apply("reciprocal", *over, name="clip.scale")
            (scale,) = builder.apply("clip", *inverse, name="clip.scale", high=1.0)
            for name, grad in found.items():
                (found[name],) = builder.apply("mul", grad, scale, name=f"clip.{name}")
        return found

    def clip(self, grads: Sequence[Array]) -> None:
        """Clip gradients in place, as `clipped` does in a graph.

        grads: arrays, those of all that is trained.
        """
        if self.clip_value is not None:
            for grad in grads:
                np.clip(grad, -self.clip_value, self.clip_value, out=grad)
        if self.clip_norm is not None:
            norm = math.sqrt(sum(float(np.vdot(grad, grad)) for grad in grads))
            scale = self.clip_norm / (norm + _TINY)
            if scale < 1:
                for grad in grads:
                    grad *= scale

    def _decays(self, parameter: str) -> bool:
        """Return whether `weight_decay` applies to a parameter."""
        return self.decayed is None or any(matches(each, parameter) for each in self.decayed)

    def _scalars(
        self, builder: GraphBuilder, parameter: str, scalars: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Return an operator's scalars, with the parameter's own learning rate in its place."""
        factor = 1.0
        for pattern, value in dict(self.rates or {}).items():
            factor = value if matches(pattern, parameter) else factor
        if factor == 1:
            return scalars
        name = f"{LEARNING_RATE}.{factor!r}"
        if not builder.has(name):
            builder.apply("affine", LEARNING_RATE, name=name, scale=factor)
        return tuple(name if each == LEARNING_RATE else each for each in scalars)

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
        names = {item.name for item in fields(self)} - {item.name for item in fields(Optimizer)}
        settings = {name: getattr(self, name) for name in names} | more
        if not self._decays(parameter):
            settings["weight_decay"] = 0.0
        operands = (parameter, grad, *slots, *self._scalars(builder, parameter, scalars), finite)
        results = builder.apply(operator, *operands, name=f"{parameter}.update", **settings)
        for name, value in zip([parameter, *slots], results):
            builder.update(name, value)


@named_arguments
@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum, Nesterov's variant and weight decay.

    v' = momentum v + (g + weight_decay w); w' = w - rate v' (Nesterov: g + momentum v').

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates: as of every optimizer.
        momentum: 0 keeps no v.
        nesterov: whether the step looks ahead. weight_decay: an L2 penalty.

    Source: Sutskever et al., On the importance of initialization and momentum, ICML 2013.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def emit(self, builder: GraphBuilder, parameter: str, grad: str, finite: str) -> None:
        states = ["momentum"] if self.momentum else []
        self._update(builder, "sgd", (parameter, grad, finite), states, (LEARNING_RATE,))


@named_arguments
@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam; `weight_decay` is added to the gradient, as an L2 penalty.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates: as of every optimizer.
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


@named_arguments
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay: parameters first shrink by rate times `weight_decay`.

    Attributes:
        learning_rate, decayed, clip_norm, clip_value, rates: as of every optimizer.
        beta1, beta2, epsilon: those of Adam.

    Source: Loshchilov and Hutter, Decoupled weight decay regularization, ICLR 2019.
    """

    weight_decay: float = 0.01


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def optimizer(value: Optimizer | str) -> Optimizer:
    """Return an optimizer from itself, or with its defaults from its name, such as sgd or adam.

    value: an optimizer or a name.

    Raises:
        GraphError: an unknown name.
    """
    from soapstone.frontend.training import composed  # noqa: F401  (optimizers by name)

    if isinstance(value, Optimizer):
        return value
    if not isinstance(value, str) or value not in OPTIMIZERS:
        raise GraphError(
            f"optimizer {shown_value(value)} found, one of {', '.join(OPTIMIZERS)} needed"
            f"{meant(value, OPTIMIZERS)}"
        )
    return OPTIMIZERS[value]()
