"""docs/mappers.md: every question is in its table, and its plugin is built, found and used."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone import Model
from soapstone.cli.main import app
from soapstone.ir.errors import StrategyError
from soapstone.mappers import load, names
from soapstone.runtime import DefaultMapper, Machine, Mapper, MapperError, Runtime

DOC = Path(__file__).resolve().parents[2] / "docs" / "mappers.md"
APP = """
from soapstone import SGD, Model
from soapstone.frontend.data.sets import synthetic_images

OPTIONS = {"optimizer": SGD(0.1), "epochs": 2, "batch_size": 8}

def build(batch_size):
    model = Model("tiny")
    x = model.input("sample", (batch_size, 6))
    model.output(model.dense(model.dense(x, 7, activation="relu"), 3))
    return model

def data():
    return synthetic_images(70, (6,), 3)
"""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)


def test_the_table_has_every_question_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)\(", DOC.read_text(), re.MULTILINE)
    questions = {name for name in vars(Mapper) if not name.startswith("_")}
    assert set(rows) == questions
    assert len(rows) == len(questions)
    assert isinstance(DefaultMapper(), Mapper)


def test_the_listed_mappers_are_the_installed_ones() -> None:
    listed = re.findall(r"^\| `(\w+)` \|", DOC.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(names()) - {"spare"})


@pytest.fixture
def spare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the documented package as an installer leaves it: a module and its metadata."""
    project = tomllib.loads(_blocks("toml")[0])["project"]
    (module,) = [block for block in _blocks("python") if "SpareProcessor" in block]
    (tmp_path / "soapstone_spare.py").write_text(module)
    info = tmp_path / f"soapstone_spare-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata)
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "soapstone_spare", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def _loss(script: Path, mapper: str) -> float:
    arguments = ["train", str(script), "--mapper", mapper, "--cpus", "2", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["mapper"] == mapper
    return float(found["loss"])


def test_the_documented_plugin_is_swapped_in_by_the_flag(spare: Path) -> None:
    (spare / "tiny.py").write_text(APP)
    losses = [_loss(spare / "tiny.py", mapper) for mapper in ("spare", "data_parallel")]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


def test_the_documented_plugin_maps_as_it_says(spare: Path) -> None:
    assert "spare" in names()
    with Runtime(Machine.local(cpus=2), "spare") as runtime:
        assert type(runtime.mapper) is type(load("spare"))
    with Model("tiny") as model:
        x = model.input("x", (8, 6))
        model.output(model.dense(x, 3))
        model.compile("sgd", machine=Machine.local(cpus=3), mapper="spare")
        operations = model.trainer.bound("train", 8).trace.operations
    placed: dict[bool, set[int]] = {False: set(), True: set()}
    for operation in operations:
        if operation.kind == "task":
            updates = bool(operation.launch.tag.node.spec.updates)
            placed[updates].add(operation.processor)
            assert operation.priority == -updates
    assert placed == {True: {2}, False: {0, 1}}


def test_a_plugin_that_cannot_be_imported_is_named(spare: Path) -> None:
    (spare / "soapstone_spare.py").unlink()
    with pytest.raises(MapperError, match=r"mapper 'spare' \(soapstone_spare:SpareProcessor\): No"):
        Runtime(Machine.local(cpus=1), "spare")
    with pytest.raises(StrategyError, match="mapper 'spare'"):
        load("spare")
