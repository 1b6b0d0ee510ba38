"""Schedules: values at the steps that define them, and arguments out of range."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from soapstone import SGD
from soapstone.frontend.training.schedules import (
    CosineRestarts,
    InverseRoot,
    OneCycle,
    Piecewise,
    Polynomial,
    Schedule,
    constant,
    cosine,
    exponential_decay,
    linear_warmup,
    schedule,
    step_decay,
)


@pytest.mark.parametrize(
    ("rates", "values"),
    [
        (constant(0.1), {0: 0.1, 10**9: 0.1}),
        (step_decay(1.0, 10, 0.5), {0: 1.0, 9: 1.0, 10: 0.5, 19: 0.5, 20: 0.25}),
        (exponential_decay(1.0, 10, 0.25), {0: 1.0, 5: 0.5, 10: 0.25, 20: 0.0625}),
        (cosine(1.0, 10), {0: 1.0, 5: 0.5, 10: 0.0, 11: 0.0, 100: 0.0}),
        (cosine(1.0, 10, final=0.2), {0: 1.0, 5: 0.6, 10: 0.2, 99: 0.2}),
        (cosine(1.0, 14, warmup=4), {0: 0.25, 3: 1.0, 4: 1.0, 9: 0.5, 14: 0.0, 50: 0.0}),
        (linear_warmup(2.0, 4), {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 100: 2.0}),
        (linear_warmup(step_decay(1.0, 2, 0.5), 2), {0: 0.5, 1: 1.0, 3: 1.0, 4: 0.5}),
        (CosineRestarts(1.0, 4, 2.0), {0: 1.0, 2: 0.5, 4: 1.0, 8: 0.5, 12: 1.0}),
        (Polynomial(1.0, 10, 0.2), {0: 1.0, 5: 0.6, 10: 0.2, 30: 0.2}),
        (Polynomial(1.0, 10, power=2.0), {0: 1.0, 5: 0.25, 10: 0.0}),
        (InverseRoot(1.0, 4), {0: 0.25, 3: 1.0, 15: 0.5}),
        (Piecewise([3, 5], [1.0, 0.5, 0.1]), {0: 1.0, 2: 1.0, 3: 0.5, 4: 0.5, 5: 0.1, 99: 0.1}),
        (schedule(0.3), {0: 0.3, 7: 0.3}),
        (schedule(lambda step: 1 / (step + 1)), {0: 1.0, 3: 0.25}),
    ],
)
def test_values(rates: Schedule, values: dict[int, float]) -> None:
    for step, value in values.items():
        assert math.isclose(rates(step), value, abs_tol=1e-12), step
        assert isinstance(rates(step), float)


def test_restarts_and_cycles_are_torchs() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    lrs = torch.optim.lr_scheduler
    for rates, make in (
        (CosineRestarts(0.1, 5, 2), lambda o: lrs.CosineAnnealingWarmRestarts(o, 5, 2)),
        (OneCycle(0.1, 20), lambda o: lrs.OneCycleLR(o, 0.1, 20)),
        (Polynomial(0.1, 7, power=3), lambda o: lrs.PolynomialLR(o, 7, 3)),
    ):
        optimizer = torch.optim.SGD([parameter], 0.1)
        theirs = make(optimizer)
        for step in range(20):
            assert math.isclose(rates(step), theirs.get_last_lr()[0], rel_tol=1e-6, abs_tol=1e-9)
            optimizer.step()
            if step < 19:
                theirs.step()


def test_cosine_never_rises_after_the_warm_up() -> None:
    rates = cosine(0.1, 200, warmup=20)
    values = [rates(step) for step in range(220)]
    assert max(values) == values[19] == values[20] == 0.1
    assert values[:20] == sorted(values[:20]) and values[20:] == sorted(values[20:], reverse=True)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (constant, (-1,), "rate: -1 found, a number of 0 or more needed"),
        (constant, (math.nan,), "rate: nan found"),
        (constant, (math.inf,), "rate: inf found"),
        (constant, ("fast",), "rate: 'fast' found"),
        (schedule, (True,), "rate: True found"),
        (Piecewise, ([3, 2], [1, 1, 1]), "Piecewise: bounds [3, 2] and rates [1, 1, 1] found"),
        (OneCycle, (1.0, 10, 1.5), "OneCycle: rise: 1.5 found, between 0 and 1 needed"),
        (CosineRestarts, (1.0, 10, 0.5), "CosineRestarts: growth: 0.5 found, 1 or more needed"),
        (step_decay, (1, 0), "StepDecay: every: 0 found, an integer of 1 or more needed"),
        (step_decay, (1, 2.5), "every: 2.5 found"),
        (step_decay, (1, 2, 1.5), "factor: 1.5 found, 0 to 1 needed"),
        (exponential_decay, (1, -3), "ExponentialDecay: steps: -3 found"),
        (linear_warmup, (1, 0), "LinearWarmup: steps: 0 found"),
        (cosine, (1, 0), "Cosine: steps: 0 found"),
        (partial(cosine, final=2), (1, 10), "final: 2 found, 0 to 1 needed"),
        (partial(cosine, warmup=10), (1, 10), "warmup: 10 found, fewer than the 10 steps needed"),
        (partial(cosine, warmup=-1), (1, 10), "steps: -1 found"),
    ],
)
def test_bad_arguments(make: Callable[..., Any], arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make(*arguments)
    assert message in str(caught.value)


def test_an_optimizer_follows_a_schedule() -> None:
    assert [SGD(step_decay(1.0, 2, 0.5)).rate(step) for step in range(4)] == [1, 1, 0.5, 0.5]
    assert SGD(0.25).rate(100) == 0.25


def test_schedules_are_values_worth_printing() -> None:
    assert cosine(0.1, 10) == cosine(0.1, 10)
    assert "rate=0.1" in repr(cosine(0.1, 10))
