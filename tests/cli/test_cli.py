"""The command line: what it prints where, its exit codes, and training an app from end to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.optimizing import symbolic
from typer.testing import CliRunner, Result

import soapstone
from soapstone.cli.main import app
from soapstone.engine.mapper import strategy_of
from soapstone.frontend.app import AppError, app_names, load_app, train_app
from soapstone.frontend.data.batches import Batches
from soapstone.frontend.strategies import finding
from soapstone.ir.spec import operators
from soapstone.mappers import load
from soapstone.runtime import Machine
from soapstone.system import usable_cores

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


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path


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


def test_version() -> None:
    assert invoke("version").stdout == f"soapstone {soapstone.__version__}\n"
    assert json.loads(invoke("version", "--json").stdout) == {"version": soapstone.__version__}
    assert invoke("--version").stdout == invoke("version").stdout
    assert invoke("-h").stdout == invoke("--help").stdout


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    script = (
        "import sys, soapstone, soapstone.cli.main\n"
        "heavy = 'numpy', 'numba', 'onnx', 'z3', 'rich'\n"
        "print([name for name in heavy if name in sys.modules])\n"
        "import soapstone.frontend.app\n"  # that trains
        "print([name for name in ('soapstone.search', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout.split() == [b"[]", b"[]"]


def test_apps_are_listed_with_one_line_each() -> None:
    assert {"alexnet", "bert", "digits", "resnet"} <= set(app_names())
    lines = invoke("apps").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(app_names())
    assert all(line.endswith(".") for line in lines)
    assert list(json.loads(invoke("apps", "--json").stdout)["apps"]) == list(app_names())


def test_operators_are_listed() -> None:
    rows = json.loads(invoke("ops", "--json").stdout)["operators"]
    assert [row["name"] for row in rows] == [spec.name for spec in operators()]
    by_name = {row["name"]: row for row in rows}
    assert by_name["matmul"]["dims"] == {"m": "free", "k": "sum", "n": "free"}
    assert by_name["matmul"]["onnx"] == "MatMul" and by_name["matmul"]["laws"]
    assert all(row["variants"][-1] == "reference" for row in rows)
    table = invoke("ops").stdout.splitlines()
    assert len(table) == len(rows) + 1 and table[0].split()[0] == "operator"


@pytest.mark.parametrize("name", ["alexnet", "digits", "lenet", "mlp"])
def test_apps_build_for_any_batch_size_and_fit_their_data(name: str) -> None:
    found = load_app(name)
    assert found.data is not None and found.summary
    for batch_size in (1, 5):
        graph = found.build(batch_size).graph
        splits = found.data()
        (inputs, labels), *_ = Batches(splits.train_x, splits.train_y, batch_size).epoch(0)
        (shape,) = (graph.tensors[value].shape for value in graph.inputs() if "." not in value)
        assert inputs["x"].shape == shape and labels.shape == (batch_size,)
        assert graph.tensors[graph.outputs[0]].shape[0] == batch_size


def test_alexnet_has_the_published_shape() -> None:
    parameters = load_app("alexnet").build(2).parameters()
    assert parameters["conv1.weight"] == (64, 3, 11, 11)
    assert parameters["fc1.weight"] == (256 * 2 * 2, 4096)
    from soapstone.apps.images.alexnet import build

    full = build(1, image_size=224)
    assert full.parameters()["fc1.weight"] == (256 * 6 * 6, 4096)
    assert sum(int(np.prod(s)) for s in full.parameters().values()) == 61_100_840  # as published


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
        trained(tiny, "--mapper", "bounded_memory", "--memory-bytes", "20000", "--cpus", "2")[
            "loss"
        ]
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


def test_words_that_are_nearly_right_are_named(tiny: Path) -> None:
    assert "did you mean 'digits'?" in error_of("train", "digts")
    assert "did you mean 'data_parallel'?" in error_of("train", tiny, "--mapper", "dataparallel")
    assert "did you mean 'expert'?" in error_of(
        "strategy", "simulate", "lenet", "--strategy", "exprt"
    )
    assert "Did you mean 'train'?" in invoke("trian").stderr


def test_a_search_says_what_it_found_and_kept(tiny: Path, tmp_path: Path) -> None:
    result = invoke("train", tiny, "--cpus", "1", "--optimize")
    assert result.exit_code == 0, result.stderr
    assert re.search(r"optimize: +\d+ graphs searched in .* (not )?kept", result.stdout)
    onnx, faster = tmp_path / "tiny.onnx", tmp_path / "faster.onnx"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    result = invoke("optimize", onnx, "-o", faster, "--budget", "2")
    assert result.exit_code == 0 and f"wrote {faster}" in result.stdout


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
    np.savez(tmp_path / "named.npz", other=np.zeros((1, 6), np.float32))
    given = ("predict", onnx, "--input", tmp_path / "named.npz")
    assert "unknown input 'other'; inputs are sample" in error_of(*given)
    assert "--dim found with --input" in error_of(*given, "--dim", "batch=3")


def test_errors_are_one_line(tiny: Path, tmp_path: Path) -> None:
    assert "app 'nothing' found; one of alexnet, bert" in error_of("train", "nothing")
    assert "no such file" in error_of("train", tmp_path / "absent.py")
    assert "mapper 'none' found" in error_of("train", tiny, "--mapper", "none")
    assert "suffix '.pt' found" in error_of("train", tiny, "--checkpoint", "a.pt")
    assert "no such file" in error_of("train", tiny, "--resume", tmp_path / "absent.npz")
    assert "absent.json" in error_of("train", tiny, "--strategy", tmp_path / "absent.json")
    assert "neither train.npz nor" in error_of("train", tiny, "--data", tmp_path)
    assert "is no file" in error_of("predict", tiny, "--input", tmp_path)
    for option in ("--cpus", "--threads"):
        assert "8,192 threads in all needed at most" in error_of("train", tiny, option, "100000")
    assert "8,192 threads" in error_of("optimize", "absent.onnx", "--threads", "100000")
    result = invoke("train", "nothing", "--debug")
    assert result.exit_code == 1 and isinstance(result.exception, AppError)


def test_results_that_cannot_be_written_are_refused_before_the_work(
    tiny: Path, tmp_path: Path
) -> None:
    onnx = tmp_path / "tiny.onnx"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    for command in (
        ["train", tiny, "--choices"],
        ["train", tiny, "--profile"],
        ["optimize", onnx, "--output"],
        ["optimize", onnx, "--report"],
        ["strategy", "search", "lenet", "--output"],
        ["strategy", "simulate", "lenet", "--strategy", "data", "--timeline"],
        ["machine", "measure", "--output"],
        ["predict", onnx, "--input", tmp_path / "absent.npz", "--output"],
    ):
        assert f"folder '{tmp_path}/no' does not exist" in error_of(*command, tmp_path / "no" / "f")
        if command[0] != "train":  # where nothing has been said by then
            assert "a folder found, a file needed" in error_of(*command, tmp_path)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "build: None found, a function of the batch size needed"),
        ("def build(", "was never closed"),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
        (TINY.replace('"epochs"', '"epoch"'), "OPTIONS: 'epoch' found, some of optimizer"),
        (TINY.replace("def data", "def date"), "--data FOLDER needed"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        (TINY.replace("Model(", "Modell("), "NameError: name 'Modell' is not defined"),
        (TINY.replace("synthetic_images(70, (6,), 3)", "5"), "data: int returned, Splits needed"),
    ],
)
def test_scripts_that_are_no_apps(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(text)
    assert message in error_of("train", path)


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "digits", "--epochs", "-1"],
        ["train", "digits", "--epochs", "many"],
        ["train", "digits", "--batch-size", "0"],
        ["train", "digits", "--unknown"],
        ["nothing"],
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


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


@pytest.mark.long
def test_strategies_are_for_extents_of_symbolic_dims(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    symbolic(path, ("b", "t"))
    common = ("strategy", "simulate", path, "-s", "data", "-m", "p100", "--devices", "2")
    assert "axis 1 is t; a number needed, from dims" in error_of(*common)
    assert "dims: 's' found; symbolic dims are b, t" in error_of(*common, "--dim", "s=3")
    assert invoke(*common, "--dim", "b=4", "--dim", "t=7").exit_code == 0
    found = invoke(*common, "--dim", "t=7", "--batch-size", "4", "--json")
    assert json.loads(found.stdout)["step_us"] > 0
    for more in (("--dim", "t=7"), ("--size", "depth=3")):
        text = error_of("strategy", "search", "lenet.json", *more)
        assert text.endswith(" needed\n") and "found for 'lenet.json'" in text


def test_an_interrupt_while_python_imports_the_command_is_one_line(tmp_path: Path) -> None:
    """The signal comes while `typer` is imported, the first import of the command line."""
    (tmp_path / "typer.py").write_text(
        "import signal\nsignal.raise_signal(signal.SIGINT)\nimport time\ntime.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "soapstone", "version"],
        capture_output=True,
        check=False,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert "soapstone = soapstone.__main__:main\n" in setup


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
