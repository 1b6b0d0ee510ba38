"""Learning-rate schedules: functions from the number of a step, counted from 0, to a rate."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from soapstone.frontend.arguments import count, named_arguments

Schedule = Callable[[int], float]


class _Checked:
    """A schedule whose settings are checked by what they are called.

    Raises:
        ValueError: a setting out of range; names it.
    """

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # of dataclasses
            value, where = getattr(self, each.name), f"{type(self).__name__}: {each.name}"
            if each.name in ("every", "steps"):
                count(where, value, error=ValueError)
            elif not callable(value):
                high = {"factor": 1, "final": getattr(self, "rate", 0)}.get(each.name, math.inf)
                number = isinstance(value, int | float) and not isinstance(value, bool)
                if not number or not 0 <= value <= high or math.isinf(value):
                    needed = f"0 to {high:g}" if high < math.inf else "a number of 0 or more"
                    raise ValueError(f"{where}: {value!r} found, {needed} needed")


@named_arguments
@dataclass(frozen=True)
class Constant(_Checked):
    """The schedule that is `rate` at every step."""

    rate: float

    def __call__(self, step: int) -> float:
        return float(self.rate)


@named_arguments
@dataclass(frozen=True)
class StepDecay(_Checked):
    """The schedule that multiplies `rate` by `factor` after `every` so many steps."""

    rate: float
    every: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (step // self.every))


@named_arguments
@dataclass(frozen=True)
class ExponentialDecay(_Checked):
    """The schedule that starts at `rate` and falls smoothly by `factor` in `steps` steps."""

    rate: float
    steps: int
    factor: float = 0.1

    def __call__(self, step: int) -> float:
        return float(self.rate * self.factor ** (step / self.steps))


@named_arguments
@dataclass(frozen=True)
class LinearWarmup(_Checked):
    """The schedule that rises in `steps` steps to where `after`, a schedule or a rate, begins.

    Then it follows `after` from step 0.
    """

    after: float | Schedule
    steps: int

    def __call__(self, step: int) -> float:
        after = schedule(self.after)
        if step < self.steps:
            return after(0) * (step + 1) / self.steps
        return after(step - self.steps)


@named_arguments
@dataclass(frozen=True)
class Cosine(_Checked):
    """Half a cosine from `rate` down to `final` in `steps` steps, then `final`.

    Source: Loshchilov and Hutter, SGDR, ICLR 2017, equation 5.
    """

    rate: float
    steps: int
    final: float = 0.0

    def __call__(self, step: int) -> float:
        done = min(step / self.steps, 1.0)
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * done)) / 2


@named_arguments
@dataclass(frozen=True)
class CosineRestarts(_Checked):
    """Half a cosine from `rate` to `final` in `steps` steps, again and again.

    Each is `growth` times as long as the one before.

    Source: Loshchilov and Hutter, SGDR, ICLR 2017.
    """

    rate: float
    steps: int
    growth: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.growth < 1:
            raise ValueError(f"CosineRestarts: growth: {self.growth!r} found, 1 or more needed")

    def __call__(self, step: int) -> float:
        length, at = float(self.steps), float(step)
        while at >= length:
            at -= length
            length *= self.growth
        return self.final + (self.rate - self.final) * (1 + math.cos(math.pi * at / length)) / 2


@named_arguments
@dataclass(frozen=True)
class Polynomial(_Checked):
    """The schedule that falls from `rate` to `final` in `steps` steps: in a line for `power` 1.

    What is left of the way is (1 - step / steps) to the power.
    """

    rate: float
    steps: int
    final: float = 0.0
    power: float = 1.0

    def __call__(self, step: int) -> float:
        left = 1 - min(step / self.steps, 1.0)
        return float(self.final + (self.rate - self.final) * left**self.power)


@named_arguments
@dataclass(frozen=True)
class InverseRoot(_Checked):
    """The schedule that rises to `rate` in `steps` steps, then falls as 1 / sqrt(step).

    Source: Vaswani et al., Attention is all you need, NeurIPS 2017, equation 3.
    """

    rate: float
    steps: int

    def __call__(self, step: int) -> float:
        done = (step + 1) / self.steps
        return float(self.rate * min(done, done**-0.5))


@named_arguments
@dataclass(frozen=True)
class OneCycle(_Checked):
    """Half a cosine up from `rate` / `start` to `rate`, and one down to `rate` / `end`.

    It rises for a share `rise` of the `steps` steps.

    Source: Smith and Topin, Super-convergence, 2017.
    """

    rate: float
    steps: int
    rise: float = 0.3
    start: float = 25.0
    end: float = 250000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("start", "end"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"OneCycle: {name}: {value!r} found, 1 or more needed")
        if not 0 < self.rise < 1:
            raise ValueError(f"OneCycle: rise: {self.rise!r} found, between 0 and 1 needed")

    def __call__(self, step: int) -> float:
        top, at = self.rise * self.steps - 1, min(step, self.steps - 1)
        if at <= top:
            low, share = self.rate / self.start, at / top if top > 0 else 1.0
            return low + (self.rate - low) * (1 - math.cos(math.pi * share)) / 2
        low, share = self.rate / self.end, (at - top) / (self.steps - 1 - top)
        return low + (self.rate - low) * (1 + math.cos(math.pi * share)) / 2


@named_arguments
@dataclass(frozen=True)
class Piecewise:
    """The schedule of one rate after another: `rates[0]` before step `bounds[0]`, and so on.

    Raises:
        ValueError: bounds that do not rise, not one rate more than bounds, or a negative rate.
    """

    bounds: Sequence[int]
    rates: Sequence[float]

    def __post_init__(self) -> None:
        bounds, rates = list(self.bounds), list(self.rates)
        if bounds != sorted(set(bounds)) or len(rates) != len(bounds) + 1:
            raise ValueError(
                f"Piecewise: bounds {bounds} and rates {rates} found; bounds that rise, and one"
                " rate more, needed"
            )
        for rate in rates:
            Constant(rate)

    def __call__(self, step: int) -> float:
        return float(self.rates[bisect_right(list(self.bounds), step)])


constant = Constant
step_decay = StepDecay
exponential_decay = ExponentialDecay
linear_warmup = LinearWarmup


def schedule(value: float | Schedule) -> Schedule:
    """Return a schedule from itself, or a constant one from a rate.

    value: a function from the step to a rate, or a rate.

    Raises:
        ValueError: a negative or infinite rate, or neither a number nor a function.
    """
    return value if callable(value) else Constant(value)


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
