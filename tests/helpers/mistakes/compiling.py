"""Optimizers, schedules, and where a model is to run.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

from helpers.mistakes.models import X, Y, net

from soapstone import SGD, Adam
from soapstone.optimizers import Composed
from soapstone.schedules import OneCycle, cosine


class Forgetful(Composed):
    def next(self, of: Any) -> Any:
        of.w - of.g


COMPILING: list[tuple[Any, ...]] = [
    (lambda: net(optimizer="adm"), "optimizer 'adm'", "did you mean 'adam'?"),
    (
        lambda: net(optimizer=Adam),
        "optimizer class Adam in place of an instance, Adam(…), found, one of",
    ),
    (lambda: net(optimizer=0.1), "optimizer 0.1 found, one of sgd, adam, adamw, rmsprop,"),
    (lambda: net(optimizer="RMSProp"), "optimizer 'RMSProp'", "did you mean 'rmsprop'?"),
    (lambda: net(cpus=0), "Machine.local: field 'cpus' is 0, an integer >= 1 needed"),
    (lambda: net(cpus="2"), "compile: cpus: str '2' found, an integer needed"),
    (lambda: net(threads=1.5), "compile: threads: float 1.5 found, an integer needed"),
    (lambda: net(executor="cuda"), "executor 'cuda' found; one of local, mpi, legate needed"),
    (lambda: net(executor="gpu"), "executor 'gpu' found; one of local, mpi, legate needed"),
    (lambda: net(mapper="data-paralel"), "mapper 'data-paralel'", "did you mean 'data_parallel'?"),
    (
        lambda: net(learning_rate=0.1),
        "compile: unknown argument 'learning_rate'; compile(optimizer, loss,",
    ),
    (lambda: net(micro_batches=0), "micro_batches: 0 found, an integer of 1 or more needed"),
    (lambda: net(seed="a"), "compile: seed: str 'a' found, an integer needed"),
    (lambda: net(compiled=False).Linear, "Model has no 'Linear'", "did you mean 'dense'?"),
    (lambda: SGD(cosine), "SGD: learning_rate function 'cosine' found, a number or a function of"),
    (lambda: SGD(lambda: 0.1), "SGD: learning_rate function '<lambda>' found, a number or a"),
    (
        lambda: net(optimizer=SGD(lambda step: "a")).fit(X, Y, progress=False),
        "SGD: learning_rate of step 0: 'a' found, a number needed",
    ),
    (
        lambda: net(optimizer=SGD(lambda step: -1.0)).fit(X, Y, progress=False),
        "SGD: learning_rate of step 0: -1.0 found, a number of 0 or more needed",
    ),
    (lambda: SGD(0.1, momentum=90), "SGD: momentum 90 found, 0 to 1 needed"),
    (lambda: Adam(beta1=2), "Adam: beta1 2 found, 0 to below 1 needed"),
    (lambda: Adam(beta2=1.0), "Adam: beta2 1.0 found, 0 to below 1 needed"),
    (lambda: SGD(0.1, rates=["h"]), "SGD: rates ['h'] found, factors by layer needed"),
    (lambda: SGD(0.1, clipnorm=1), "SGD: unknown argument 'clipnorm'", "did you mean 'clip_norm'?"),
    (
        lambda: net(optimizer=SGD(0.1, rates={"q": 2})),
        "SGD: rates: no parameter 'q'; there are h, o",
    ),
    (
        lambda: net(optimizer=Adam(0.1, weight_decay=0.1, decayed=("q",))),
        "Adam: decayed: no parameter 'q'; there are h, o",
    ),
    (
        lambda: OneCycle(0.1),
        "OneCycle: missing a required argument: 'steps'; OneCycle(rate, steps,",
    ),
    (
        lambda: net(optimizer=Forgetful()),
        "Forgetful: next of 'o.bias': None returned, float32[4] needed",
    ),
    (lambda: cosine(0.1, steps=0), "Cosine: steps: 0 found, an integer of 1 or more needed"),
    (lambda: cosine("a", steps=10), "Cosine: rate: 'a' found, a number of 0 or more needed"),
]
