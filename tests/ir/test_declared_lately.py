"""Operators are declared when they are asked for, as if all of them had been from the start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_ASKS = """
import sys
from soapstone.ir.spec import define, having, operator, operator_of_onnx, operators
from soapstone.ir.errors import GraphError

def modules():
    return sum(name.startswith("soapstone.ir.ops.") for name in sys.modules)

print(operator("lstm").name, operator_of_onnx("Conv").name, modules() < 40)
fields = dict(vars(operator("relu")))
try:
    define(**fields | {"name": "nas_cell"})
except GraphError as error:
    print(error)
define(**fields | {"name": "mine", "onnx": None})
print("mine" in having("formula"), "sigmoid" in having("formula"), modules() < 50)
few = {each.name for each in operators()}
print({"mine", "lstm", "spmm"} <= few, modules() > 60)
"""
_ANSWERS = """lstm conv1d True
operator 'nas_cell' is declared twice
True True True
True True
"""


def test_operators_are_declared_when_they_are_asked_for(tmp_path: Path) -> None:
    """The second process knows from the first where they are declared."""
    for count, answers in enumerate((None, _ANSWERS)):
        done = subprocess.run(
            [sys.executable, "-c", _ASKS],
            env={**os.environ, "SOAPSTONE_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, (count, done.stderr)
        assert answers in (None, done.stdout)
