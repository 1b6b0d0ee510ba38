"""Learning-rate schedules: functions from the number of a step, counted from 0, to a rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

Schedule = Callable[[int], float]


def _positive(owner: object, **values: int) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{type(owner).__name__}: {name}: {value!r} found, an integer of 1 or more needed"
            )


def _between(owner: object, low: float, high: float, **values: float) -> None:
    for name, value in values.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not low <= value <= high or math.isinf(value):
            needed = (
                f"{low:g} to {high:g}" if math.isfinite(high) else f"a number of {low:g} or more"
            )
            raise ValueError(f"{type(owner).__name__}: {name}: {value!r} found, {needed} needed")


@dataclass(frozen=True)
class Constant:
    """The same rate at every step."""

    rate: float

    def __post_init__(self) -> None:
        _between(self, 0, math.inf, rate=self.rate)

    def __call__(self, step: int) -> float:
        return float(self.rate)


@dataclass(frozen=True)
class StepDecay:
    """rate times factor^(number of whole `every` steps done)."""

    rate: float
    every: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _between(self, 0, math.inf, rate=self.rate)
        _between(self, 0, 1, factor=self.factor)
        _positive(self, every=self.every)

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (step // self.every))


@dataclass(frozen=True)
class ExponentialDecay:
    """rate times factor^(step / steps): smoothly down by `factor` in every `steps` steps."""

    rate: float
    steps: int
    factor: float = 0.1

    def __post_init__(self) -> None:
        _between(self, 0, math.inf, rate=self.rate)
        _between(self, 0, 1, factor=self.factor)
        _positive(self, steps=self.steps)

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (step / self.steps))


@dataclass(frozen=True)
class LinearWarmup:
    """Up in a straight line in `steps` steps to where `after` begins, then `after` from step 0."""

    after: Schedule
    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "after", schedule(self.after))
        _positive(self, steps=self.steps)

    def __call__(self, step: int) -> float:
        if step < self.steps:
            return self.after(0) * (step + 1) / self.steps
        return self.after(step - self.steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from `rate` down to `final` in `steps` steps, then `final`.

    Source: Loshchilov and Hutter, SGDR, ICLR 2017, equation 5.
    """

    rate: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        _between(self, 0, math.inf, rate=self.rate)
        _between(self, 0, self.rate, final=self.final)
        _positive(self, steps=self.steps)

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * done)) / 2


def schedule(value: float | Schedule) -> Schedule:
    """Return a schedule from itself, or a constant one from a rate.

    Raises:
        ValueError: a negative or infinite rate, or neither a number nor a function.
    """
    return value if callable(value) else Constant(value)


def constant(rate: float) -> Schedule:
    """Return the schedule that is `rate` at every step."""
    return Constant(rate)


def step_decay(rate: float, every: int, factor: float = 0.1) -> Schedule:
    """Return the schedule that multiplies `rate` by `factor` after `every` so many steps."""
    return StepDecay(rate, every, factor)


def exponential_decay(rate: float, steps: int, factor: float = 0.1) -> Schedule:
    """Return the schedule that starts at `rate` and falls smoothly by `factor` in `steps` steps."""
    return ExponentialDecay(rate, steps, factor)


def linear_warmup(after: float | Schedule, steps: int) -> Schedule:
    """Return the schedule that rises in `steps` steps to where `after` begins, then follows it."""
    return LinearWarmup(schedule(after), steps)


def cosine(rate: float, steps: int, *, final: float = 0.0, warmup: int = 0) -> Schedule:
    """Return the schedule that falls as half a cosine and ends at step `steps`.

    Args:
        rate: the highest rate.
        steps: steps in all, the warm-up among them.
        final: the rate from then on.
        warmup: steps of a linear rise before; fewer than `steps`.

    Raises:
        ValueError: a rate, a final rate or a number of steps out of range.
    """
    if not warmup:
        return Cosine(rate, steps, final)
    if warmup >= steps:
        raise ValueError(f"cosine: warmup: {warmup} found, fewer than the {steps} steps needed")
    return LinearWarmup(Cosine(rate, steps - warmup, final), warmup)
