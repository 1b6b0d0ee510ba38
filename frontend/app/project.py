"""A small project to begin with: a model, its data, and the script that trains it."""

from __future__ import annotations

import shutil
from pathlib import Path

from soapstone.files import write
from soapstone.frontend.app.load import AppError

_MODEL = '''"""The model."""

from soapstone import Model


def build(batch_size):
    """Return the model for a batch size; no weights are made here."""
    model = Model("{name}", seed=0)
    x = model.input("x", (batch_size, 2))
    x = model.dense(x, 32, "relu", name="hidden1")
    x = model.dense(x, 32, "relu", name="hidden2")
    model.output(model.dense(x, 2, name="classes"))
    return model
'''

_DATA = '''"""The data: two half-moons of points that are made up, until yours take their place."""

import numpy as np
from soapstone.frontend.data.sets import Splits


def data():
    """Return arrays to train on and to test with, or the paths of npz files."""
    random = np.random.default_rng(0)
    y = random.integers(0, 2, 1000)
    angle = random.uniform(0, np.pi, len(y))
    x = np.stack([np.cos(angle) + y, np.sin(angle) * (1 - 2 * y) + y / 2], axis=1)
    x = (x + random.normal(0, 0.1, x.shape)).astype("float32")
    return Splits(x[200:], y[200:], x[:200], y[:200], "moons", synthetic=True)
'''

_TRAIN = '''"""Trains the model: `python train.py`, or `soapstone train train.py`."""

from data import data  # noqa: F401  soapstone looks for it here
from model import build  # noqa: F401
from soapstone import Adam, run_app

OPTIONS = {{
    "optimizer": Adam(1e-2),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 10,
    "batch_size": 32,
}}

if __name__ == "__main__":
    run_app(__file__)
'''

FILES = {"model.py": _MODEL, "data.py": _DATA, "train.py": _TRAIN}


def new_project(folder: str | Path) -> list[Path]:
    """Write the files of a project into a new folder, and return their paths.

    Raises:
        AppError: something is there already, or the folder's name is none of a model.
    """
    folder = Path(folder)
    if folder.exists():
        raise AppError(f"project {str(folder)!r}: it is there already; another name needed")
    if not folder.name.replace("-", "_").isidentifier():
        raise AppError(f"project {folder.name!r}: letters, digits, - and _ needed, a letter first")
    folder.mkdir(parents=True)
    try:
        for name, text in FILES.items():
            write(folder / name, text.format(name=folder.name).encode())
    except BaseException:  # half a project would be in the way of the next try
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return [folder / name for name in FILES]
