"""The walks of CONTRIBUTING.md: their code, taken from the page, is an operator like any other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BOTH_WAYS = """
import numpy as np
import {modules}
from soapstone import Model, from_onnx, to_onnx
from soapstone.ir.interpret import interpret

model = Model("net")
model.output(model.{layer})
to_onnx(model, None, {path!r})
graph = from_onnx({path!r}).graph()
assert graph.structural_hash == model.graph.structural_hash
assert [node.operator for node in graph.nodes] == [{operator!r}]
from soapstone.ir.spec import operator
from soapstone.rules.laws.validate import validate
for law in operator({operator!r}).laws:
    assert validate(law, 2).holds, law
"""


def walk(folder: Path, heading: str) -> list[str]:
    """Write the files that a section of CONTRIBUTING.md gives, and return their modules' names."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.split(r"^##+ ", page.split(f"# {heading}\n")[1], flags=re.M)[0]
    modules = []
    for code in re.findall(r"```python\n(.*?)```", section, re.S):
        name = Path(code.splitlines()[0].removeprefix("# ")).name
        (folder / name).write_text(code)
        modules.append(name.removesuffix(".py"))
    return modules


def run(folder: Path, *command: str) -> str:
    """Run Python in a process of its own, so that nothing stays registered in this one."""
    path = os.pathsep.join(map(str, (folder, ROOT / "tests")))
    made = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stdout[-4000:] + made.stderr[-4000:]
    return made.stdout


@pytest.mark.parametrize(
    ("heading", "operator", "layer", "kernel"),
    [
        (
            "A pointwise operator",
            "softsign2",
            "softsign2(model.input('x', (2, 3, 8, 8)), alpha=0.5)",
            True,
        ),
        (
            "A windowed operator with a kernel",
            "l4_pool2d",
            "l4_pool2d(model.input('x', (2, 3, 8, 8)), kernel=(3, 3), stride=(2, 2))",
            True,
        ),
    ],
)
def test_the_walk_adds_an_operator(
    tmp_path: Path, heading: str, operator: str, layer: str, kernel: bool
) -> None:
    modules = walk(tmp_path, heading)
    checks = str(ROOT / "tests" / "ir" / "test_operators.py")
    plugins = [word for module in modules for word in ("-p", module)]
    known = run(tmp_path, "-m", "pytest", "-n", "0", "-rA", *plugins, checks, "-k", operator)
    for check in ("split", "gradients", "kernels_equal", "misfits", "shapes"):
        assert re.search(rf"PASSED .*{check}\w*\[{operator}", known), check
    assert "FAILED" not in known and "SKIPPED" not in known
    names, path = ", ".join(modules), str(tmp_path / "net.onnx")
    run(
        tmp_path,
        "-c",
        BOTH_WAYS.format(modules=names, layer=layer, path=path, operator=operator)
        + (
            "from soapstone.kernels.registry import variants\n"
            f"assert bool(variants({operator!r})) == {kernel}\n"
        ),
    )
