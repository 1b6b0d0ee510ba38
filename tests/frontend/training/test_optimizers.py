"""Optimizers that are formulas, against torch's, step by step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from soapstone import Model
from soapstone.optimizers import (
    Adadelta,
    Adagrad,
    Adamax,
    Composed,
    Lion,
    NAdam,
    Optimizer,
    RMSprop,
    Update,
)

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((8, 6)).astype(np.float32)
Y = RANDOM.integers(0, 4, 8)


class TorchLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], decay: float):
        super().__init__(parameters, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                way = torch.sign(mean * one + p.grad * (1 - one))
                p.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * way)
                mean.mul_(two).add_(p.grad * (1 - two))


OPTIM = torch.optim
CASES: dict[str, tuple[Optimizer, Any]] = {
    "rmsprop": (RMSprop(0.01), lambda p: OPTIM.RMSprop(p, 0.01)),
    "rmsprop centered": (
        RMSprop(0.02, rho=0.9, momentum=0.5, centered=True, weight_decay=0.1),
        lambda p: OPTIM.RMSprop(p, 0.02, alpha=0.9, momentum=0.5, centered=True, weight_decay=0.1),
    ),
    "adagrad": (
        Adagrad(0.1, initial=0.2, weight_decay=0.01),
        lambda p: OPTIM.Adagrad(p, 0.1, initial_accumulator_value=0.2, weight_decay=0.01),
    ),
    "adadelta": (Adadelta(0.7, rho=0.8), lambda p: OPTIM.Adadelta(p, 0.7, rho=0.8)),
    "adamax": (
        Adamax(0.02, beta1=0.8, weight_decay=0.1),
        lambda p: OPTIM.Adamax(p, 0.02, betas=(0.8, 0.999), weight_decay=0.1),
    ),
    "nadam": (
        NAdam(0.02, beta2=0.9, weight_decay=0.1),
        lambda p: OPTIM.NAdam(p, 0.02, betas=(0.9, 0.9), weight_decay=0.1),
    ),
    "lion": (
        Lion(0.01, weight_decay=0.5, rates={"h": 0.5}),
        lambda p: TorchLion(
            [{"params": p[:2], "lr": 0.005}, {"params": p[2:]}], 0.01, (0.9, 0.99), 0.5
        ),
    ),
}


def net(optimizer: Optimizer | str, **settings: Any) -> Model:
    model = Model("net", seed=3)
    model.output(
        model.dense(model.dense(model.input("x", (8, 6)), 5, "tanh", name="h"), 4, name="o")
    )
    model.compile(optimizer, **settings)
    return model


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_torch(name: str, clip: float | None) -> None:
    ours, theirs = CASES[name]
    with net(replace(ours, clip_norm=clip), cpus=2) as model:
        w = {n: torch.tensor(v, requires_grad=True) for n, v in model.weights().items()}
        w = {n: v for n, v in w.items() if n.count(".") == 1}
        optimizer = theirs([*w.values()])
        for _ in range(5):
            optimizer.zero_grad()
            h = torch.tanh(torch.tensor(X) @ w["h.weight"] + w["h.bias"])
            y = h @ w["o.weight"] + w["o.bias"]
            torch.nn.functional.cross_entropy(y, torch.tensor(Y)).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(w.values(), clip)
            optimizer.step()
            model.train_on_batch(X, Y)
        for each, value in w.items():
            np.testing.assert_allclose(
                model.weights()[each], value.detach().numpy(), rtol=2e-4, atol=2e-5
            )


@pytest.mark.parametrize("name", ["rmsprop", "nadam", "lion"])
def test_states_are_saved_and_a_refused_step_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    with net(name) as model, net(name) as again:
        model.train_on_batch(X, Y)
        before = model.weights()
        with pytest.raises(RuntimeError, match="loss is nan"):
            model.train_on_batch(X * np.nan, Y)
        for each, value in model.weights().items():
            np.testing.assert_array_equal(value, before[each])
        model.save_checkpoint(path)
        again.load_checkpoint(path)
        for one in (model, again):
            one.train_on_batch(X, Y)
        for each, value in model.weights().items():
            np.testing.assert_array_equal(value, again.weights()[each])


def test_an_optimizer_of_ones_own() -> None:
    class Signed(Composed):
        def next(self, of: Update):  # type: ignore[no-untyped-def]
            return of.w - of.rate * of.m.sign(of.g)

    with net(Signed(0.5)) as model:
        before, slopes = model.weights(), model.gradients(X, Y)
        model.train_on_batch(X, Y)
        for name, slope in slopes.items():
            wanted = before[name] - 0.5 * np.sign(slope)
            np.testing.assert_allclose(model.weights()[name], wanted, atol=1e-6)
