"""Commands run in this process, and a tiny script that they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from soapstone.cli.main import app

TINY = '''"""A tiny network.

More about it.
"""
from soapstone import SGD, Model, run_app
from soapstone.frontend.data.sets import synthetic_images

OPTIONS = {"optimizer": SGD(0.1), "epochs": 2, "batch_size": 8}

def build(batch_size):
    model = Model("tiny")
    x = model.input("sample", (batch_size, 6))
    x = model.dropout(model.dense(x, 7, activation="relu", name="fc1"), 0.2)
    model.output(model.dense(x, 3, name="fc2"))
    return model

def data():
    return synthetic_images(70, (6,), 3)

if __name__ == "__main__":
    run_app(__file__)
'''


KEYS = [
    "loss",
    "train_accuracy",
    "test_accuracy",
    "epochs",
    "step_us",
    "samples_per_s",
    "peak_bytes",
    "executor",
    "mapper",
    "strategy",
    "seed",
    "cuts",
    "train_micro_f1",
    "test_micro_f1",
]


MEASURED = ("step_us", "samples_per_s")  # the only fields that two equal runs may differ in


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def trained(*arguments: str | Path) -> dict[str, Any]:
    """Train with --json and return the object, less what depends on the clock."""
    result = invoke("train", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1 and list(found) == KEYS
    assert all(found[name] >= 0 for name in MEASURED) and found["peak_bytes"] > 0
    return {name: value for name, value in found.items() if name not in MEASURED}


def error_of(*arguments: str | Path) -> str:
    """Run a command that fails and return its one line."""
    result = invoke(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
    return result.stderr
