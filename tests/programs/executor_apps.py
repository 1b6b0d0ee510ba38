"""Every app at a small size, trained a few steps by an executor: what comes of it, and how fast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from soapstone import SGD, Model
from soapstone.frontend.app import app_module
from soapstone.ir.tensor import Array

_TABLES = (3, 50, 700)
_WORDS = {"vocabulary": 60, "length": 7}
_RECURRENT = {"layers": 2, "hidden": 16, **_WORDS}


@dataclass(frozen=True)
class Small:
    """Options of an app's builder; those its data share, and more of the data alone."""

    options: Mapping[str, Any] = field(default_factory=dict)
    shared: tuple[str, ...] = ()
    image: int = 0  # the images' size, where the data are images


APPS: dict[str, Small] = {
    "alexnet": Small({"width": 8, "hidden": 32, "classes": 4, "image_size": 64}, image=64),
    "bert": Small(
        {"layers": 2, "hidden": 32, "heads": 4, "length": 10, "vocabulary": 60, "positions": 20},
        ("length", "vocabulary"),
    ),
    "candle_uno": Small(
        {"inputs": {"cells": 9, "drug": 20}, "bottom": (16, 16), "top": (16, 1)}, ("inputs",)
    ),
    "densenet": Small({"blocks": (2, 2, 2), "growth": 8, "classes": 4, "image_size": 32}, image=32),
    "digits": Small(image=8),
    "dlrm": Small(
        {"vocabularies": _TABLES, "width": 8, "bottom": (16, 16, 8), "top": (32, 16, 1)},
        ("vocabularies",),
    ),
    "inception": Small({"narrow": 8, "classes": 4, "image_size": 107}, image=107),
    "lenet": Small(image=28),
    "mlp": Small(image=-1),
    "nasnet": Small(
        {"cells": 1, "channels": 96, "stem": 8, "classes": 4, "image_size": 32}, image=32
    ),
    "nasrnn": Small({"hidden": 16, "length": 3}, ("hidden", "length")),
    "nmt": Small(_RECURRENT, ("length", "vocabulary")),
    "resnet": Small({"depth": 18, "width": 8, "classes": 4, "image_size": 32}, image=32),
    "resnext": Small(
        {"depth": 50, "width": 16, "groups": 4, "group_width": 4, "classes": 4, "image_size": 32},
        image=32,
    ),
    "rnnlm": Small(_RECURRENT, ("length", "vocabulary")),
    "rnntc": Small(_RECURRENT, ("length", "vocabulary")),
    "squeezenet": Small({"narrow": 4, "classes": 4, "image_size": 64}, image=64),
    "transformer": Small(
        {"layers": 2, "hidden": 32, "heads": 4, "inner": 48, "length": 7, "vocabulary": 40},
        ("length", "vocabulary"),
    ),
    "vgg": Small({"depth": 11, "width": 4, "hidden": 32, "classes": 4, "image_size": 32}, image=32),
    "wide_resnet": Small(
        {"blocks": (1, 1, 1), "width": 8, "group_width": 128, "classes": 4, "image_size": 32},
        image=32,
    ),
    "xdl": Small(
        {"vocabularies": _TABLES, "bag": 3, "width": 8, "top": (16, 1)}, ("vocabularies", "bag")
    ),
}


@dataclass(frozen=True)
class Trained:
    """The parameters and states after some steps, the mean loss, and a step's median time."""

    weights: Mapping[str, Array]
    loss: float
    step_us: float
    launches: int  # of Legate in a step; 0 on other executors
    moved_bytes: tuple[int, int] | None = None  # in a step by a memory plan, and counted


def samples(name: str, count: int) -> tuple[Any, Array]:
    """Seeded inputs and labels of an app at its small size."""
    module, small = app_module(name), APPS[name]
    rng = np.random.default_rng(3)
    if small.image:
        model: Model = module.build(1, **small.options)
        graph = model.graph
        shapes = [graph.tensors[n].shape[1:] for n, role in graph.roles.items() if role == "input"]
        labels = rng.integers(0, small.options.get("classes", 10), count)
        return rng.normal(size=(count, *shapes[0])).astype(np.float32), labels.astype(np.int32)
    given = {option: small.options[option] for option in small.shared}
    splits = module.data(count=2 * count, **given)
    x = splits.train_x
    assert isinstance(x, Mapping)
    return {name: array[:count] for name, array in x.items()}, splits.train_y[:count]


def train(
    name: str,
    executor: str,
    cpus: int,
    steps: int = 2,
    batch: int = 4,
    noise: float = 0.0,
    **options: Any,
) -> Trained:
    """Train an app from its initial weights.

    noise: by how much inputs are disturbed, of each number. options: as of `Model.compile`.
    """
    module = app_module(name)
    x, y = samples(name, steps * batch)
    if noise:
        by = np.random.default_rng(1).uniform(-noise, noise, x.shape)
        x = (x * (1 + by)).astype(x.dtype)
    with module.build(batch, **APPS[name].options) as model:
        model.compile(
            SGD(0.01, momentum=0.9),
            loss=module.OPTIONS["loss"],
            executor=executor,
            cpus=cpus,
            seed=0,
            **options,
        )
        result = model.fit(x, y, batch_size=batch, epochs=1, shuffle=False, progress=False)
        trace = model.trainer.bound("train", batch).trace
        return Trained(
            model.trainer.state(),
            float(result.last("loss") or 0.0),
            result.step_us,
            len(trace.describe().get("tasks", ())),
            model.trainer.moved_bytes,
        )


def difference(one: Trained, other: Trained) -> float:
    """The largest difference of two trainings' weights, relative to the largest of each tensor."""
    found = 0.0
    for name, array in one.weights.items():
        if array.size and array.dtype.kind == "f":
            scale = max(float(np.abs(array).max()), 1e-30)
            found = max(found, float(np.abs(array - other.weights[name]).max()) / scale)
    return found
