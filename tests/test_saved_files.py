"""Files that earlier versions wrote still load and mean what they did.

tests/saved holds what 8e9c080 wrote; its `rules.json` is b990c5e's, the first whose rules have
domains.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone import Adam, Model
from soapstone.cli.main import app
from soapstone.frontend.onnx import from_onnx
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.files.graphs import load_graph
from soapstone.ir.plan import MemoryPlan
from soapstone.runtime import Machine
from soapstone.runtime.observe.profile import Profile

SAVED = Path(__file__).resolve().parents[0] / "saved"
# They were written before files carried checksums; loading one says so.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(has no checksum|does not say what it was made for)"
)


def command(*arguments: str) -> str:
    """Return what a command prints; it succeeds."""
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_a_checkpoint_predicts_what_it_did(suffix: str) -> None:
    model = Model("small", seed=0)
    x = model.conv2d(model.input("image", (8, 3, 6, 6)), 4, kernel=3, padding=1)
    x = model.max_pool2d(model.relu(model.batch_norm(x)), 2)
    model.output(model.dense(model.flatten(x), 5))
    expected = np.load(SAVED / "expected.npz")
    with model:
        model.compile(Adam(1e-2), loss="cross_entropy", metrics=["accuracy"], cpus=2)
        model.load_checkpoint(SAVED / f"checkpoint.{suffix}")
        np.testing.assert_allclose(
            model.predict(expected["x"]), expected["prediction"], rtol=1e-4, atol=1e-5
        )


def test_a_strategy_is_simulated_as_it_was() -> None:
    sizes = ["--machine", "p100", "--devices", "4", "--batch-size", "64", "--inference", "--json"]
    found = json.loads(
        command("strategy", "simulate", "mlp", *sizes, "-s", str(SAVED / "strategy.json"))
    )
    assert found["step_us"] == pytest.approx(57.482, abs=1e-3)


def test_a_graph_is_the_app_s_still() -> None:
    assert load_graph(SAVED / "graph.json")[0] == graph_of("mlp", 16)


def test_a_chain_of_substitutions_applies(tmp_path: Path) -> None:
    target = tmp_path / "optimized.onnx"
    options = ["--machine", "h100", "--chain", str(SAVED / "chain.json"), "-o", str(target)]
    command("optimize", str(SAVED / "branches.onnx"), *options)
    operators = [
        node.operator for node in from_onnx(target).graph_for({"x": np.zeros((8, 16))})[0].nodes
    ]
    assert operators == ["linear"], operators


def test_layouts_in_an_onnx_file_are_read() -> None:
    assert from_onnx(SAVED / "layouts.onnx").layouts == {"conv2d": (0, 2, 3, 1)}


def test_a_memory_plan_replays() -> None:
    assert MemoryPlan.load(SAVED / "plan.json").moved_bytes == 64


@pytest.mark.long
def test_every_proof_of_a_rule_file_replays() -> None:
    command("rules", "check", str(SAVED / "rules.json"))


def test_a_machine_a_timeline_and_a_log_are_read() -> None:
    assert len(Machine.load(SAVED / "machine.json").processors) == 2
    assert Profile.load(SAVED / "timeline.json").name == "two steps"
    assert command("profile", "check", str(SAVED / "run.log")).startswith("accepted: 4 launches")
