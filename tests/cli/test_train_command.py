"""`soapstone train` from end to end: what it prints, writes, follows and resumes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import typer
from helpers.commands import TINY, error_of, invoke, trained
from onnx import helper
from typer.testing import CliRunner

from soapstone.cli.common import command
from soapstone.frontend.app import AppError, load_app, train_app


def test_training_prints_a_few_lines_progress_and_accuracy(tiny: Path) -> None:
    result = invoke("train", tiny, "--cpus", "2")
    assert result.exit_code == 0, result.stderr
    said, _, rest = result.stdout.partition("\n\n")
    assert 4 <= said.count("\n") + 1 <= 10 and rest.startswith("trained 2 epochs")
    assert "73 parameters" in said and "56 to train on, 14 held out" in said
    quiet = invoke("train", tiny, "--cpus", "2", "--quiet")
    assert quiet.stderr == "" and quiet.stdout.startswith("trained 2 epochs")


def test_verbose_training_prints_program_strategy_progress_and_accuracy(tiny: Path) -> None:
    result = invoke("train", tiny, "--cpus", "2", "--verbose")
    assert result.exit_code == 0, result.stderr
    for text in ("graph tiny {", "fc1 = linear(", "strategy for", "56 to train on, 14 held out"):
        assert text in result.stdout
    assert "synthetic data" in result.stdout and "test accuracy:" in result.stdout
    assert "epoch 2/2" in result.stderr and "epoch" not in result.stdout.split("strategy")[0]


def test_json_is_alone_on_standard_output_and_repeats(tiny: Path) -> None:
    first = trained(tiny, "--seed", "3", "--cpus", "2")
    assert first["epochs"] == 2 and first["seed"] == 3 and first["executor"] == "local"
    assert first["mapper"] == "data_parallel" and first["strategy"] is None
    assert trained(tiny, "--seed", "3", "--cpus", "2") == first
    assert trained(tiny, "--seed", "4", "--cpus", "2")["loss"] != first["loss"]
    assert trained(tiny, "--seed", "3", "--learning-rate", "0.01")["loss"] != first["loss"]


def test_mappers_agree(tiny: Path) -> None:
    losses = [
        trained(tiny, "--mapper", mapper, "--cpus", "2")["loss"]
        for mapper in ("data_parallel", "sequential", "round_robin", "locality", "work_stealing")
    ]
    losses.append(
        trained(tiny, "--mapper", "bounded_memory", "--memory-bytes", "20kB", "--cpus", "2")["loss"]
    )
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


def test_a_memory_that_is_too_small_is_told_of_streaming(tiny: Path) -> None:
    result = invoke("train", str(tiny), "--memory-bytes", "2000", "--cpus", "2")
    assert result.exit_code == 1
    assert "'bounded_memory' streams through it" in result.output


def test_a_plan_is_written_and_followed(tiny: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    made = invoke(
        *("memory", "plan", tiny, "--capacity", "20kB", "--cpus", "2", "-o", plan, "--json")
    )
    assert made.exit_code == 0, made.output
    planned = json.loads(made.stdout)["transfer_bytes"]
    result = invoke("train", tiny, "--plan", plan, "--cpus", "2")
    assert result.exit_code == 0, result.output
    for label in ("planned copies", "counted copies"):
        assert re.search(rf"{label}: +{planned:,} bytes a step", result.output)
    other = invoke("train", "lenet", "--plan", plan, "--cpus", "2", "--epochs", "1")
    assert other.exit_code == 1 and "is not what the plan is of" in other.stderr
    assert "200MB, 1.5GiB or 4096 needed" in error_of("train", tiny, "--fast-memory", "2 potatoes")
    beside = ("train", tiny, "--fast-memory", "20kB", "--cpus", "1", "--overlap")
    assert json.loads(invoke(*beside, "--json").stdout)["planned_bytes"] > 0
    assert "overlap: found without a fast" in error_of("train", tiny, "--overlap")
    small = error_of("train", tiny, "--fast-memory", "100")
    assert re.search(r"'\w.*': uses \d+ bytes at once, 100 found in the memory: \d+ more", small)
    both = ("--memory-bytes", "9000", "--fast-memory", "20KiB")
    assert "one of them needed" in error_of("train", tiny, *both)


@pytest.mark.usefixtures("own_measurements")
def test_the_budget_of_a_plan_is_of_measuring_too(tiny: Path) -> None:
    plan = ("memory", "plan", tiny, "--capacity", "20kB", "--cpus", "1", "--json")
    timed = (*plan, "--minimize", "time")
    assert "budget ended before the times of nodes" in error_of(*timed, "--budget", "0")
    assert json.loads(invoke(*plan, "--budget", "0").stdout)["step_us"] is None
    assert json.loads(invoke(*timed).stdout)["step_us"] > 0
    for more in ((), ("--recompute",)):  # what is known needs no time
        assert json.loads(invoke(*timed, "--budget", "0", *more).stdout)["step_us"] > 0


def test_a_plan_that_recomputes_is_written_and_followed(tiny: Path, tmp_path: Path) -> None:
    plan, chart = tmp_path / "plan.json", tmp_path / "plan.svg"
    made = ("memory", "plan", tiny, "--capacity", "9kB", "--cpus", "1", "--recompute", "--json")
    found = json.loads(invoke(*made, "-o", plan, "--plot", chart).stdout)
    assert found["all_sets"] and found["transfer_bytes"] <= found["without_bytes"]
    assert chart.read_text().startswith("<svg")
    wanted = trained(tiny, "--cpus", "1")
    result = json.loads(invoke("train", tiny, "--cpus", "1", "--plan", plan, "--json").stdout)
    assert result["planned_bytes"] == result["copied_bytes"] == found["transfer_bytes"]
    assert result["loss"] == pytest.approx(wanted["loss"])
    timed = json.loads(invoke(*made, "--minimize", "time", "--overlap").stdout)
    assert timed["minimize"] == "time" and timed["least_us"] <= timed["step_us"]
    assert "minimize 'speed' found" in error_of(*made, "--minimize", "speed")


HALVES = """
from soapstone.ir.strategy import Configuration
from soapstone.engine.mapper import GraphMapper

class Halves(GraphMapper):
    name = "halves"

    def configure(self, graph, machine):
        return {
            node.name: Configuration({"n": 2}) for node in graph.nodes if node.operator == "linear"
        }
"""


def test_a_mapper_of_the_current_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "halves.py").write_text(HALVES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    loss = trained(tiny, "--mapper", "halves:Halves", "--cpus", "2")["loss"]
    np.testing.assert_allclose(loss, trained(tiny, "--cpus", "2")["loss"], rtol=1e-5)


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_a_resumed_run_ends_where_an_unbroken_one_does(
    suffix: str, tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / f"saved{suffix}"
    whole = trained(tiny, "--epochs", "4", "--cpus", "2")
    trained(tiny, "--epochs", "2", "--cpus", "2", "--checkpoint", file)
    resumed = trained(tiny, "--epochs", "4", "--cpus", "2", "--resume", file)
    assert resumed == whole


def test_files_that_cannot_be_used_are_one_line(tiny: Path, tmp_path: Path) -> None:
    done = invoke("train", tiny, "--resume", tmp_path / "absent.npz")
    assert done.exit_code == 1 and "no such file" in done.stderr and not done.stdout
    assert len(done.stderr.splitlines()) == 1
    done = invoke("train", tiny, "--checkpoint", tmp_path / "folder" / "c.npz", "--epochs", "1")
    assert done.exit_code == 1 and "Errno" not in done.stderr


def test_a_strategy_file_is_followed(tiny: Path, tmp_path: Path) -> None:
    with load_app(tiny).build(8) as model:
        model.compile("sgd", metrics=["accuracy"], cpus=2)
        model.strategy.save(tmp_path / "strategy.json")
    found = trained(tiny, "--strategy", tmp_path / "strategy.json", "--cpus", "2")
    assert found["mapper"] == "strategy" and found["strategy"].endswith("strategy.json")
    np.testing.assert_allclose(found["loss"], trained(tiny, "--cpus", "2")["loss"], rtol=1e-5)


def test_a_timeline_is_written(tiny: Path, tmp_path: Path) -> None:
    trained(tiny, "--profile", tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    assert any("fc1" in event.get("name", "") for event in events)


def test_data_of_a_folder(tiny: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    (tmp_path / "set" / "train").mkdir(parents=True)
    for name, rows in (("train/a", 20), ("train/b", 11), ("test", 9)):
        np.savez(
            tmp_path / "set" / f"{name}.npz",
            x=random.standard_normal((rows, 6)).astype(np.float32),
            y=random.integers(0, 3, rows),
        )
    result = invoke("train", tiny, "--data", tmp_path / "set", "--epochs", "1")
    assert result.exit_code == 0, result.stderr
    np.savez(tmp_path / "set" / "test.npz", x=np.zeros((4, 5), np.float32), y=np.zeros(4, int))
    assert "samples of shape (5,) found" in error_of("train", tiny, "--data", tmp_path / "set")


def test_a_new_project_trains(tmp_path: Path) -> None:
    made = invoke("new", tmp_path / "moons")
    assert made.exit_code == 0, made.stderr
    script = tmp_path / "moons" / "train.py"
    assert str(script) in made.stdout
    done = subprocess.run([sys.executable, script, "--json", "-q"], capture_output=True, check=True)
    assert json.loads(done.stdout)["test_accuracy"] > 0.9
    assert "there already" in error_of("new", tmp_path / "moons")
    assert "letters, digits" in error_of("new", tmp_path / "2 moons")


def test_runs_are_measured(tiny: Path, tmp_path: Path) -> None:
    onnx = tmp_path / "tiny.onnx"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    for model, more in ((tiny, ["--dim", "batch=3"]), (onnx, ["--threads", "1"])):
        result = invoke("predict", model, "--benchmark", "--runs", "7", "--json", *more)
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert told["runs"] == 7 and told["threads"] >= 1
        assert 0 < told["p50_ms"] <= told["p90_ms"] <= told["p99_ms"]
        assert told["samples_per_s"] == pytest.approx(
            told["runs_per_s"] * (3 if model is tiny else 1)
        )
        assert any("float32[3, " in shape for shape in told["inputs"].values()) is (model is tiny)
        assert "p99" in result.stderr and "samples/s" in result.stderr
    wrong = error_of("predict", tiny, "--benchmark", "--dim", "bacth=3")
    assert "dim 'bacth' found; did you mean 'batch'?" in wrong
    assert "-o found with --benchmark" in error_of("predict", onnx, "--benchmark", "-o", "x.npz")
    assert "no --input found" in error_of("predict", onnx)
    said = error_of("predict", "x.npz", "--input", "x.npz")
    assert "model 'x.npz' found; an .onnx file, a .py script or an app" in said
    assert "arrays are what --input takes" in said
    assert "model 'x.npz' found" in error_of("predict", "x.npz")
    assert "model 'net.pt' found" in error_of("predict", "net.pt", "--benchmark")
    np.savez(tmp_path / "named.npz", other=np.zeros((1, 6), np.float32))
    given = ("predict", onnx, "--input", tmp_path / "named.npz")
    assert "unknown input 'other'; inputs are sample" in error_of(*given)
    assert "--dim found with --input" in error_of(*given, "--dim", "batch=3")


def test_dims_that_no_run_can_have_by_default_are_named(tmp_path: Path) -> None:
    """An image of one row has no window of three: the error says which option gives more."""
    path = tmp_path / "rows.onnx"
    x, y = (helper.make_tensor_value_info(n, 1, ["n", 1, h, 8]) for n, h in (("x", "h"), ("y", "")))
    node = helper.make_node("Conv", ["x", "w"], ["y"])
    weights = [onnx.numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "w")]
    graph = helper.make_graph([node], "rows", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    benchmark = ("predict", path, "--benchmark", "--runs", "1")
    assert "dims h, n are 1, the default: --dim gives others" in error_of(*benchmark)
    assert "default" not in error_of(*benchmark, "--dim", "h=2", "--dim", "n=1")
    assert invoke(*benchmark, "--dim", "h=5").exit_code == 0


def test_an_interrupt_that_a_library_loses_is_still_an_interrupt() -> None:
    """LLVM calls Python back, where an interrupt is printed, and the compilation fails after it."""
    app = typer.Typer()

    @command(app)
    def lost() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RuntimeError("no compiled object yet")

    done = CliRunner().invoke(app, [])
    assert done.exit_code == 130
    assert done.stderr == "interrupted; error: no compiled object yet\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_executor_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is none')\n")
    command = [sys.executable, "-m", "soapstone.cli.main", "train", "digits", "--executor", "mpi"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: executor 'mpi' needs mpi4py")


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "saved.npz"
    trained(tiny, "--checkpoint", file)
    other = tmp_path / "other.py"
    other.write_text(TINY.replace("dense(x, 7,", "dense(x, 8,"))
    assert "fc1" in error_of("train", other, "--resume", file)
    file.write_bytes(file.read_bytes()[:-40])
    assert "truncated" in error_of("train", tiny, "--resume", file)


def test_a_script_run_by_itself_takes_the_same_options(tiny: Path) -> None:
    command = [sys.executable, str(tiny), "--epochs", "1", "--json"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert json.loads(done.stdout)["epochs"] == 1
    done = subprocess.run(
        [sys.executable, str(tiny), "--nothing"], capture_output=True, check=False
    )
    assert done.returncode == 2


def test_an_interrupt_names_the_last_checkpoint_and_training_goes_on(
    tiny: Path, tmp_path: Path
) -> None:
    file = tmp_path / "saved.npz"
    command = [sys.executable, "-m", "soapstone.cli.main", "train", str(tiny)]
    command += ["--epochs", "1000000"]
    command += ["--checkpoint", str(file), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        while not file.exists() and running.poll() is None:
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        try:
            stdout, stderr = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 130, stderr.decode()
    assert stdout == b"" and b"Traceback" not in stderr
    assert stderr.decode().splitlines()[-1] == f"interrupted; go on with --resume {file}"
    assert trained(tiny, "--epochs", "0", "--resume", file)["test_accuracy"] is not None


@pytest.mark.parametrize("arguments", [("mlp", "--epochs", "1"), ("lenet", "--epochs", "2")])
def test_the_small_apps_learn(arguments: tuple[str, ...]) -> None:
    found = trained(*arguments)
    assert found["test_accuracy"] >= 0.9


@pytest.mark.long
def test_digits_reach_98_percent_or_nearly() -> None:
    """On 360 samples; how kernels round, which depends on the processor, is worth one or two."""
    assert trained("digits")["test_accuracy"] >= 0.97


def test_training_from_python(tiny: Path) -> None:
    said: list[str] = []
    quiet = {"progress": False, "say": said.append}
    result = train_app(load_app(tiny), epochs=1, verbose=True, **quiet)  # type: ignore[arg-type]
    assert result.epochs == 1 and result.loss is not None and "test accuracy:" in str(result)
    assert said[0].startswith("graph tiny {") and said[1].startswith("strategy for")
    assert said[2].startswith("model: ")
    with pytest.raises(AppError, match="app 'tiny': batch size: 0 found, an integer of 1"):
        train_app(tiny, batch_size=0)


def test_files_that_cannot_be_written_are_known_before_training(tiny: Path, tmp_path: Path) -> None:
    for option, name in (("--checkpoint", "c.npz"), ("--profile", "t.json"), ("--choices", "c")):
        found = error_of("train", tiny, option, tmp_path / "absent" / name)
        assert "does not exist" in found and "epoch" not in found
