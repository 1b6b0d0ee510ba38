"""Every block of code in README.md and docs/ runs, in its page's order and one folder per page.

Python blocks of a page are one program; console lines run where they stand between them. What a
page does not make itself is in `GIVEN`, what is run smaller than it is written in `SMALLER`, and
what is not run in `LEFT_OUT`, with why. A line that several pages have runs on one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers import legate_environment
from helpers.processes import mpiexec
from typer.testing import CliRunner

from soapstone.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
PRINTED = ("runtime.md",)  # whose blocks print what is said in comments, and nothing else
ALONE = ("layers.md",)  # declares an operator, which the process keeps

LEFT_OUT = {
    r"^(python -m venv|pip install)": "the set-up, of .ci/run",
    r"\bpytest\b": "the tests themselves",
    r"--gpus [1-9]": "a GPU: tests marked gpu",
    r"^(gcc|export) ": "done by helpers/legate_environment.py",
    r"import cupynumeric|cupynumeric\.": "cuPyNumeric, which the tests do not install",
    r"--partitioner metis": "METIS, which the tests do not install",
    r"^SOAPSTONE_CHECKED=1": "most of a minute: checked mode is a step of .ci/run",
    r"^soapstone strategy (frontier|search)|find_strategy\(": "half a minute: tests/search",
    r"^soapstone optimize .*-|step\.json": "half a minute: test_optimize.py",
    r"--plan plan.json$": "a plan of the app as it is: tests/engine/test_memory_plans_run.py",
    r"measure_tasks|search\(graph": "half a minute: tests/search/test_measured_strategies.py",
    r"^legate .*--fast-memory": "plans: tests/runtime/executors/test_legate.py",
    r"^soapstone doctor": "what is not installed here is its answer: tests/cli/test_doctor.py",
    r"train \w+ .*--optimize|optimize=True": "a search: test_optimize_training.py",
    r"rules (check|verify|generate|laws)": "minutes: tests/rules",
    r"^python benchmarks/gpu.py": "a GPU, for half an hour: tests/test_gpu_run.py",
    r"--mapper spare": "a package that is installed: tests/engine/test_mappers_docs.py",
    r"machine measure|two\.json|mpiexec.*lenet\.json": "half a minute: tests over ranks",
}
SMALLER = (
    (r"samples, \"small.onnx\"\)", r'samples, "small.onnx", seconds=0)'),
    ("-o small.onnx", "-o small.onnx --seconds 0"),
    (r"\btrain (lenet|inception)\b", "train digits"),
    (r"\b(simulate|frontier|search) (alexnet|nmt --size unrolled=true|rnnlm)\b", r"\1 lenet"),
    (r"\b(optimize|plan|train|export) (resnet|inception)\b( --training)?", r"\1 lenet\3"),
    (r" --size depth=18", ""),
    (r'graph_of\("alexnet"', 'graph_of("lenet"'),
    (r'"rnnlm"', '"lenet"'),
    (r"1, 3, 224, 224", "1, 1, 28, 28"),
    (r"reddit-like:0.01", "reddit-like:0.002"),
    (r"--parts 8", "--parts 2"),
    (r"--devices (8|16)", "--devices 2"),
    (r"devices=4", "devices=2"),
    (r"frontiers\[4\]", "frontiers[2]"),
    (r"machine_of\(\"k80\", 16\)", 'machine_of("k80", 2)'),
    (r"^(soapstone bench tasks.*)$", r"\1 --no-metg --steps 20 --repeats 1"),
    (r"^(soapstone optimize (?!.*--chain).*)$", r"\1 --budget 1"),
    (r"^((?:mpiexec -n 2 )?soapstone train (?!.*--epochs).*)$", r"\1 --epochs 1"),
    (r"--epochs [3-9]", "--epochs 2"),
    (r"epochs=50", "epochs=5"),
    (r"--budget \d+", "--budget 1"),
    (r"seconds=\d+", "seconds=1"),
    (r"apps/images/lenet.py", str(ROOT / "apps/images/lenet.py")),
)


class Block(NamedTuple):
    """A block of a page: its language, the line on which it begins, and its text."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text("utf-8")
    for found in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        yield Block(page, text.count("\n", 0, found.start()) + 2, found[1], found[2])


def lines(block: Block) -> Iterator[str]:
    """Yield the commands of a console block, without comments."""
    for line in block.text.splitlines():
        if words := shlex.split(line, comments=True):
            yield shlex.join(words)


# What there is before a page begins: programs, and commands.
SCRIPT = """
from soapstone import Model

def build(batch_size):
    model = Model("net")
    model.output(model.dense(model.input("x", (batch_size, 8)), 3))
    return model

model = build(4)
"""
FOLDER = """
import numpy as np
from pathlib import Path
for part in ("train", "test"):
    Path("folder", part).mkdir(parents=True)
    np.savez(f"folder/{part}/0.npz", x=np.ones((70, 8), "float32"), y=np.zeros(70, "int64"))
"""
IMAGE = """
import numpy as np
image = np.zeros((1, 1, 28, 28), "float32")
np.savez("image.npz", image=image)
import soapstone
"""
STRATEGY = """
from soapstone.engine.mapper import strategy_of
from soapstone.frontend.strategies.finding import graph_of
from soapstone.mappers import load
from soapstone.runtime import Machine
machine = Machine.local(cpus=4)
strategy_of(load("data_parallel"), graph_of("alexnet", None), machine).save("alexnet.json")
"""
SERVED = """
from soapstone.engine.mapper import strategy_of
from soapstone.frontend.strategies.finding import graph_of
from soapstone.mappers import load
from soapstone.runtime import Machine
machine = Machine.local(cpus=2)
strategy_of(load("data_parallel"), graph_of("model.onnx"), machine).save("fast.json")
"""
FORWARD = """
from soapstone.frontend.strategies.finding import forward_of
graph, weights = forward_of("model.onnx")
"""
DECODER = """
import onnx
from helpers.decoders import SMALL
onnx.save(SMALL.model(), "decoder.onnx")
"""
LOGGED = """
from soapstone.runtime import Machine, Runtime
machine, mapper = Machine.local(cpus=1), "sequential"
"""


def file(name: str, text: str) -> str:
    """Return a program that writes a file."""
    return f"open({name!r}, 'w').write({text!r})"


FOREIGN = next(b.text for b in blocks(ROOT / "docs" / "rules.md") if b.language == "json")
MAPPER = "from soapstone.mappers.plugins import SequentialMapper as MyMapper"
GIVEN: dict[str, tuple[str, ...]] = {
    "README.md": (FOLDER, file("net.py", SCRIPT), file("foreign.json", FOREIGN)),
    "graphs.md": (
        *(f"soapstone graph generate blocks {name}.npz --vertices 200" for name in ("cora", "a")),
        file("edges.txt", "0 1\n1 2\n"),
    ),
    "cuda.md": ("soapstone onnx export lenet model.onnx", FORWARD),
    "inference.md": ("soapstone onnx export lenet model.onnx", SERVED, DECODER),
    "lowering.md": (STRATEGY, "soapstone onnx export lenet model.onnx"),
    "mappers.md": (file("mymodule.py", MAPPER),),
    "memory.md": (SCRIPT, IMAGE, "soapstone onnx export lenet resnet50.onnx"),
    "onnx.md": ("soapstone onnx export lenet resnet50.onnx",),
    "optimize.md": (SCRIPT, "soapstone onnx export lenet model.onnx"),
    "profiles.md": (LOGGED,),
}


HOME = {  # of each console line, the page on which it runs
    line: page
    for page in reversed(PAGES)
    for block in blocks(page)
    if block.language == "sh"
    for line in lines(block)
}


def left_out(text: str) -> bool:
    return any(re.search(pattern, text, re.M) for pattern in LEFT_OUT)


def smaller(text: str) -> str:
    for pattern, replacement in SMALLER:
        text = re.sub(pattern, replacement, text)
    return text


def console(line: str, folder: Path) -> None:
    """Run a command: in this process, but for launchers and what starts Legate."""
    first, *arguments = shlex.split(smaller(line))
    environment = dict(os.environ)
    if "legate" in line:
        try:
            environment = legate_environment.environment(folder)
        except ImportError:
            return
    if first == "mpiexec" and (mpiexec() is None or importlib.util.find_spec("mpi4py") is None):
        return
    if first == "soapstone" and "legate" not in line:
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (line, done.stdout, done.stderr, done.exception)
        return
    beside = str(Path(sys.executable).parent)
    environment |= {"PATH": os.pathsep.join([beside, environment["PATH"]]), "SOAPSTONE_SAFE": "1"}
    ran = subprocess.run(
        [first, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, (line, ran.stdout, ran.stderr)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOAPSTONE_DATA", str(tmp_path))
    names: dict[str, Any] = {"__name__": "page"}
    for given in GIVEN.get(page.name, ()):
        if given.startswith("soapstone "):
            console(given, tmp_path)
        else:
            exec(given, names)
    found = list(blocks(page))
    if page.name in ALONE:
        code = "\n".join(block.text for block in found if block.language == "python")
        subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
        return
    for block in found:
        capsys.readouterr()
        if block.language == "python" and not left_out(block.text):
            text = "\n" * (block.line - 1) + smaller(block.text)
            exec(compile(text, str(page), "exec"), names)
        elif block.language == "sh":
            for line in lines(block):
                if HOME[line] == page and not left_out(line):
                    console(line, tmp_path)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            Path("block.json").write_text(block.text, "utf-8")
            json.loads(block.text if block.text.startswith("{") else f"{{{block.text}}}")
        else:
            assert block.language in ("python", "text"), f"{page.name}:{block.line}"
        if page.name in PRINTED:
            wanted = re.findall(r"^\s*print\(.*\)  # (.*)$", block.text, flags=re.M)
            printed = capsys.readouterr().out.splitlines()
            assert [" ".join(line.split()) for line in printed] == [
                " ".join(line.split()) for line in wanted
            ]


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_what_is_left_out_is_there(pattern: str) -> None:
    every = "\n".join(block.text for page in PAGES for block in blocks(page))
    assert re.search(pattern, every, re.M), pattern
