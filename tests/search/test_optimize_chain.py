"""Chains of substitutions in files: what a search found is made again, without a search."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.optimizing import parts_of
from typer.testing import CliRunner

import soapstone
from soapstone.cli.main import app
from soapstone.frontend.optimization.check import inputs_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.files.graphs import graph_to_json
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role
from soapstone.search.optimize.chain import Chain


def model() -> tuple[Graph, dict[str, Array]]:
    """Three blocks of four branches each, with additions whose operands commute."""
    random = np.random.default_rng(3)
    builder = GraphBuilder("blocks")
    value = builder.input("x", (1, 16, 8, 8))
    weights = {}
    for block in range(3):
        parts = parts_of(builder, value, (4, 4, 4, 4))
        made = []
        for branch, part in enumerate(parts):
            name = f"w{block}{branch}"
            weights[name] = random.standard_normal((4, 4, 3, 3)).astype(np.float32) / 6
            builder.input(name, (4, 4, 3, 3), role=Role.PARAMETER)
            made += builder.apply("conv2d", part, name, padding=(1, 1, 1, 1), bias=False)
        (joined,) = builder.apply("concat", *made, axis=1)
        (total,) = builder.apply("add", joined, value)
        (value,) = builder.apply("relu", total)
    builder.output(value)
    return builder.build(), weights


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[soapstone.OptimizeResult, Path]:
    graph, weights = model()
    result = soapstone.optimize(graph, weights, machine="v100", candidates=40, seconds=60)
    assert result.kept and sum(result.substitutions.values()) >= 9
    path = tmp_path_factory.mktemp("chain") / "chain.json"
    result.save_chain(path)
    return result, path


def test_the_same_graph_is_made_without_a_search(
    found: tuple[soapstone.OptimizeResult, Path],
) -> None:
    result, path = found
    graph, weights = model()
    again = soapstone.optimize(graph, weights, machine="v100", chain=path)
    assert graph_to_json(again.graph) == graph_to_json(result.graph)
    assert again.substitutions == result.substitutions
    assert again.candidates < result.candidates
    given = inputs_of(graph)
    (one,) = (interpret(graph, {**given, **weights})[name] for name in graph.outputs)
    (other,) = (interpret(again.graph, {**given, **again.weights})[n] for n in again.graph.outputs)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_another_process_makes_the_same_graph(
    found: tuple[soapstone.OptimizeResult, Path], tmp_path: Path
) -> None:
    result, path = found
    graph, weights = model()
    soapstone.save_graph(graph, tmp_path / "model.json", weights)
    command = [sys.executable, "-m", "soapstone.cli.main", "optimize", str(tmp_path / "model.json")]
    command += ["--machine", "v100", "--chain", str(path), "-o", str(tmp_path / "out.json")]
    subprocess.run(command, check=True, capture_output=True)
    made, _ = soapstone.load_graph(tmp_path / "out.json")
    assert made.structural_hash == result.graph.structural_hash


def test_saved_by_the_command_line(tmp_path: Path) -> None:
    graph, weights = model()
    soapstone.save_graph(graph, tmp_path / "model.json", weights)
    arguments = ["optimize", str(tmp_path / "model.json"), "--machine", "v100"]
    arguments += ["--candidates", "5", "--save-chain", str(tmp_path / "chain.json")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert Chain.load(tmp_path / "chain.json").graph == graph.structural_hash


def test_of_another_graph_or_target(found: tuple[soapstone.OptimizeResult, Path]) -> None:
    _, path = found
    graph, weights = model()
    with pytest.raises(GraphError, match="field 'target': 'v100' found, 'p100' needed"):
        soapstone.optimize(graph, weights, machine="p100", chain=path)
    builder = GraphBuilder("other")
    builder.output(*builder.apply("relu", builder.input("x", (2, 3))))
    with pytest.raises(GraphError, match="chain: field 'graph'"):
        soapstone.optimize(builder.build(), machine="v100", chain=path)
    with pytest.raises(GraphError, match="chain found; inference without layouts"):
        soapstone.optimize(graph, weights, method="exhaustive", machine="v100", chain=path)


def _set(*place: Any, value: Any) -> Callable[[Any], None]:
    def edit(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_set("format", value="other"), "field 'format'"),
        (_set("version", value=2), "field 'version'"),
        (_set("more", value=1), "unknown field 'more'"),
        (_set("passes", 0, "shift", value=2), "pass 0: field 'shift'"),
        (_set("passes", 0, "shift", value=True), "pass 0: field 'shift'"),
        (_set("passes", 0, "parts", 0, value=[["r", -1, 1]]), "pass 0: field 'parts'"),
        (_set("passes", 0, "parts", 0, value=[["r", 0]]), "pass 0: field 'parts'"),
        (_set("passes", value={}), "field 'passes'"),
    ],
)
def test_bad_files_name_the_field(
    edit: Callable[[Any], None],
    message: str,
    found: tuple[soapstone.OptimizeResult, Path],
    tmp_path: Path,
) -> None:
    data = json.loads(found[1].read_text())
    del data["checksum"]
    edit(data)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    with pytest.raises(GraphError, match=message):
        Chain.load(path)


def test_a_step_that_does_not_match_is_named(
    found: tuple[soapstone.OptimizeResult, Path], tmp_path: Path
) -> None:
    data = json.loads(found[1].read_text())
    del data["checksum"]
    for each in data["passes"]:
        for part in each["parts"]:
            for step in part:
                step[1:] = [10_000, 1]
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(data))
    graph, weights = model()
    with pytest.raises(GraphError, match="no longer matches"):
        soapstone.optimize(graph, weights, machine="v100", chain=path)
