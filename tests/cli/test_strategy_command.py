"""`soapstone strategy` from end to end: searches, and serving under what they find."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import error_of, invoke
from helpers.optimizing import symbolic

from soapstone.engine.mapper import strategy_of
from soapstone.frontend.strategies import finding
from soapstone.mappers import load
from soapstone.runtime import Machine
from soapstone.system import usable_cores


def test_a_search_says_what_it_found_and_kept(tiny: Path, tmp_path: Path) -> None:
    result = invoke("train", tiny, "--cpus", "1", "--optimize")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"optimize: +\d+ graphs searched in .* (not )?kept", result.stdout)
    onnx, faster = tmp_path / "tiny.onnx", tmp_path / "faster.onnx"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    result = invoke("optimize", onnx, "-o", faster, "--budget", "2")
    assert result.exit_code == 0 and f"wrote {faster}" in result.stdout


def test_what_a_search_is_given_is_read_before_tasks_are_measured(tmp_path: Path) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("tasks were measured")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "measure_tasks", refused)
        for command, option, value, message in (
            ("simulate", "--strategy", tmp_path / "absent.json", "or a file needed"),
            ("search", "--from", tmp_path / "absent.json", "absent.json"),
            ("search", "--method", "none", "method 'none' found"),
            ("search", "--simulation", "none", "simulation"),
        ):
            found = error_of("strategy", command, "lenet", "-m", "p100", option, value)
            assert message in found


@pytest.mark.parametrize(("command", "option"), [("search", "--picture"), ("frontier", "--plot")])
def test_a_picture_that_is_no_svg_is_refused_before_the_work(
    tmp_path: Path, command: str, option: str
) -> None:
    found = error_of("strategy", command, "lenet", option, tmp_path / "x.png")
    assert "x.png': suffix '.png' found, .svg needed" in found
    assert not any(tmp_path.iterdir())


def test_a_profile_writes_no_strategy(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, "graph_of", None)  # nothing is begun
        file = tmp_path / "s.json"
        options = ("-m", "p100", "--option", "profiling", "-o", file)
        assert "--output found with profiling" in error_of(
            "strategy", "frontier", "lenet", *options
        )


@pytest.mark.long
def test_an_interrupt_while_tasks_are_measured_keeps_the_best_that_is_known(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(finding, "measure", interrupted)
    for command, more in (("search", ()), ("frontier", ("--option", "mini-time"))):
        path = tmp_path / f"{command}.json"
        result = invoke("strategy", command, tiny, "--devices", "2", "-o", path, "--json", *more)
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["output"] == str(path)
        assert invoke("train", tiny, "--strategy", path, "--epochs", "1").exit_code == 0


@pytest.mark.long
def test_strategies_are_for_extents_of_symbolic_dims(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    symbolic(path, ("b", "t"))
    common = ("strategy", "simulate", path, "-s", "data", "-m", "p100", "--devices", "2")
    assert "axis 1 is t; a number needed, from dims (--dim t=N)" in error_of(*common)
    assert "dims: 's' found; symbolic dims are b, t" in error_of(*common, "--dim", "s=3")
    assert invoke(*common, "--dim", "b=4", "--dim", "t=7").exit_code == 0
    found = invoke(*common, "--dim", "t=7", "--batch-size", "4", "--json")
    assert json.loads(found.stdout)["step_us"] > 0
    for more in (("--dim", "t=7"), ("--size", "depth=3")):
        text = error_of("strategy", "search", "lenet.json", *more)
        assert text.endswith(" needed\n") and "found for 'lenet.json'" in text


def test_a_model_is_served_under_a_strategy(tmp_path: Path) -> None:
    path, file = str(tmp_path / "lenet.onnx"), str(tmp_path / "two.json")
    assert invoke("onnx", "export", "lenet", path, "--batch-size", "3").exit_code == 0
    graph = finding.graph_of(path)
    strategy_of(load("data_parallel"), graph, Machine.local(cpus=2)).save(file)
    given = np.random.default_rng(0).standard_normal((3, 1, 28, 28), np.float32)
    np.savez(tmp_path / "x.npz", given)
    found = []
    for options in ((), ("--strategy", file)):
        out = tmp_path / f"{len(options)}.npz"
        done = invoke("predict", path, "-i", tmp_path / "x.npz", "-o", out, *options)
        assert done.exit_code == 0, done.stderr
        found.append(dict(np.load(out)))
    for name in found[0]:
        np.testing.assert_allclose(found[0][name], found[1][name], atol=1e-6)
    done = invoke("predict", path, "--benchmark", "--runs", "4", "--requests", "2", "--json")
    told = json.loads(done.stdout)
    assert (told["requests"], told["cpus"], told["runs"]) == (2, 1, 4)
    done = invoke("predict", path, "--benchmark", "--runs", "1", "--strategy", file, "--json")
    assert (json.loads(done.stdout)["cpus"], json.loads(done.stdout)["threads"]) == (2, 1)
    text = error_of("predict", path, "-i", tmp_path / "x.npz", "--requests", "2")
    assert "--requests 2 found without --benchmark" in text
    text = error_of("predict", path, "--benchmark", "--strategy", file, "--cpus", "1")
    assert "with 2 processors; 1 found" in text
    text = error_of("strategy", "search", path, "--objective", "latency")
    assert "objective: found without --inference" in text


@pytest.mark.long
def test_cores_are_shared_out_for_an_objective(tmp_path: Path) -> None:
    common = ("strategy", "search", "lenet", "--inference", "--batch-size", "2", "--budget", "6")
    done = invoke(*common, "--objective", "throughput", "-o", tmp_path / "s.json", "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert all(row["latency_ms"] > 0 and row["simulated_ms"] > 0 for row in told["divisions"])
    best = max(told["divisions"], key=lambda row: row["requests_per_s"])
    assert told["best"] == best
    done = invoke("strategy", "simulate", *common[2:6], "-s", tmp_path / "s.json", "--json")
    if best["cpus"] == usable_cores():  # the machine of `local`
        assert done.exit_code == 0, done.stderr
