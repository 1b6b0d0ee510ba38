"""The command line: what it prints where, its exit codes and errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import TINY, error_of, invoke

import soapstone
from soapstone.frontend.app import AppError, app_names, load_app
from soapstone.frontend.data.batches import Batches
from soapstone.ir.spec import operators


def test_version() -> None:
    assert invoke("version").stdout == f"soapstone {soapstone.__version__}\n"
    assert json.loads(invoke("version", "--json").stdout) == {"version": soapstone.__version__}
    assert invoke("--version").stdout == invoke("version").stdout
    assert invoke("-h").stdout == invoke("--help").stdout


def test_a_warning_is_one_line_unless_a_line_of_a_users_script_is_to_blame(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import warnings\n"
        "import typer.main\n"
        "import soapstone.cli.common as common\n"
        "with common._warned():\n"
        "    warnings.warn('high\\ntide')\n"
        "    warnings.warn_explicit('low\\ntide', UserWarning, typer.main.__file__, 1)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"{script}:5: UserWarning: high\ntide" in done.stderr
    assert done.stderr.endswith("\nwarning: low tide\n")


def test_a_warning_in_a_thread_of_ours_is_one_line_and_names_no_library(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import contextlib, threading\n"
        "import soapstone.cli.common as common\n"
        "from soapstone.errors import warn\n"
        "@contextlib.contextmanager\n"
        "def ours():\n"
        "    yield warn('low\\ntide')\n"
        "ours.__wrapped__.__globals__['__name__'] = 'soapstone.example'\n"
        "with common._warned():\n"
        "    thread = threading.Thread(target=lambda: ours().__enter__())\n"
        "    thread.start()\n"
        "    thread.join()\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert done.stderr == "warning: low tide\n"


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


def test_words_that_are_nearly_right_are_named(tiny: Path) -> None:
    assert "did you mean 'digits'?" in error_of("train", "digts")
    assert "did you mean 'data_parallel'?" in error_of("train", tiny, "--mapper", "dataparallel")
    assert "did you mean 'expert'?" in error_of(
        "strategy", "simulate", "lenet", "--strategy", "exprt"
    )
    assert "Did you mean 'train'?" in invoke("trian").stderr


def test_errors_are_one_line(tiny: Path, tmp_path: Path) -> None:
    assert "app 'nothing' found; a .py script or an app" in error_of("train", "nothing")
    assert "no such file" in error_of("train", tmp_path / "absent.py")
    assert "mapper 'none' found" in error_of("train", tiny, "--mapper", "none")
    assert "suffix '.pt' found" in error_of("train", tiny, "--checkpoint", "a.pt")
    assert "suffix '.onx' found" in error_of("optimize", tiny, "-o", "a.onx")
    assert "no such file" in error_of("train", tiny, "--resume", tmp_path / "absent.npz")
    assert "absent.json" in error_of("train", tiny, "--strategy", tmp_path / "absent.json")
    assert "neither train.npz nor" in error_of("train", tiny, "--data", tmp_path)
    assert "it does not exist; a folder" in error_of("train", tiny, "--data", tmp_path / "absent")
    assert "a file found; a folder" in error_of("train", tiny, "--data", tiny)
    for option in ("--cpus", "--threads"):
        assert "8,192 threads in all needed at most" in error_of("train", tiny, option, "100000")
    assert "8,192 threads" in error_of("optimize", "absent.onnx", "--threads", "100000")
    result = invoke("train", "nothing", "--debug")
    assert result.exit_code == 1 and isinstance(result.exception, AppError)


def test_a_folder_is_no_file_and_is_told_in_the_same_words(tiny: Path, tmp_path: Path) -> None:
    for suffix, *command in (
        ("", "predict", tiny, "--input"),
        (".npz", "train", tiny, "--resume"),
        ("", "train", tiny, "--strategy"),
        ("", "train", tiny, "--step"),
        ("", "show", tiny, "--strategy"),
        ("", "show", tiny, "--machine"),
        ("", "strategy", "show"),
        ("", "profile", "show"),
        ("", "onnx", "check"),
        (".npz", "graph", "info"),
        ("", "rules", "check"),
        (".py", "train"),
    ):
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir(exist_ok=True)
        assert f"{folder}': a folder found, a file needed" in error_of(*command, folder)


def test_names_of_results_say_what_is_written(tiny: Path, tmp_path: Path) -> None:
    onnx = tmp_path / "tiny.onnx"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    for needed, *command in (
        (".onnx", "onnx", "export", tiny),
        (".json", "onnx", "import", onnx),
        (".npz", "predict", onnx, "--input", tmp_path / "absent.npz", "-o"),
        (".onnx or .json", "optimize", onnx, "-o"),
        (".html", "optimize", onnx, "--report"),
        (".onnx", "quantize", onnx, "--calibration", tmp_path / "absent.npz", "-o"),
        (".json", "strategy", "search", "lenet", "-o"),
        (".json", "strategy", "frontier", "lenet", "-o"),
        (".json", "strategy", "simulate", "lenet", "--strategy", "data", "--timeline"),
        (".json", "memory", "plan", "lenet", "--capacity", "1MB", "-o"),
        (".svg", "memory", "plan", "lenet", "--capacity", "1MB", "--plot"),
        (".json", "machine", "measure", "-o"),
        (".json", "train", tiny, "--profile"),
        (".json", "rules", "generate", "-o"),
    ):
        found = f"'{tmp_path / 'x.txt'}': suffix '.txt' found, {needed} needed"
        assert found in error_of(*command, tmp_path / "x.txt")
    assert invoke("onnx", "export", tiny, tmp_path / "X.ONNX").exit_code == 0


def test_what_would_have_no_effect_or_no_end_is_refused(tiny: Path, tmp_path: Path) -> None:
    onnx, vast = tmp_path / "tiny.onnx", str(10**21)
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    assert "batch size 8 found; the model has inputs 'sample' of shape (1, 6)" in error_of(
        *("optimize", onnx, "--batch-size", "8")
    )
    assert "batch size 8 found" in error_of("show", onnx, "--batch-size", "8")
    for command in (["train", tiny], ["show", tiny], ["strategy", "search", tiny, "-m", "p100"]):
        said = error_of(*command, "--batch-size", vast)
        assert f"{vast}, 6) found; extents of at most 9,223,372,036,854,775,807 needed" in said
    search = ("strategy", "search", tiny, "-m", "p100", "--proposals", "5")
    assert "1 to 1,024 needed" in error_of(*search, "--chains", "100000000000")
    serving = ("strategy", "search", onnx, "--inference", "--objective", "latency")
    for option in (("--chains", "2"), ("--method", "optcnn"), ("--memory", "5"), ("--from", tiny)):
        assert f"objective: found with {option[0]}" in error_of(*serving, *option)
    generate = ("graph", "generate", "blocks", tmp_path / "g.npz", "--classes")
    assert "classes: 100,000,000,000 found" in error_of(*generate, "100000000000")


def test_sizes_are_said_alike_wherever_they_are_asked_for(tiny: Path) -> None:
    described = ("-m", "p100", "--devices", "2")
    for command in (
        ("train", tiny, "--memory-bytes"),
        ("train", tiny, "--fast-memory"),
        ("memory", "plan", tiny, "--capacity"),
        ("strategy", "search", tiny, *described, "--memory"),
        ("strategy", "simulate", tiny, "-s", "data", *described, "--memory"),
        ("strategy", "frontier", tiny, *described, "--memory"),
    ):
        for size in ("2 potatoes", "-4", "0MB", "9" * 30):
            said = error_of(*command, size)
            assert f"{command[-1]} '{size}' found; bytes such as 200MB, 1.5GiB or 4096 ne" in said
    simulated = ("strategy", "simulate", tiny, "-s", "data", *described, "--memory")
    assert invoke(*simulated, "1.5MiB").output == invoke(*simulated, str(3 << 19)).output


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


def test_a_folder_that_takes_no_files_is_found_before_the_work(tiny: Path) -> None:
    target = Path("/proc/soapstone.npz")
    if not target.parent.is_dir():
        pytest.skip("/proc needed")
    said = error_of("train", tiny, "--checkpoint", target)
    assert str(target) in said and "epoch" not in said


def test_no_result_takes_the_place_of_what_is_read(tiny: Path, tmp_path: Path) -> None:
    onnx, arrays = tmp_path / "tiny.onnx", tmp_path / "x.npz"
    assert invoke("onnx", "export", tiny, onnx).exit_code == 0
    np.savez(arrays, x=np.zeros((1, 4), np.float32))
    for command in (
        ["predict", onnx, "--input", arrays, "-o", arrays],
        ["predict", onnx, "--input", arrays, "-o", onnx],
        ["quantize", onnx, "--calibration", arrays, "-o", arrays],
        ["optimize", onnx, "-o", onnx],
    ):
        before = Path(str(command[-1])).read_bytes()
        said = error_of(*command)
        assert f"file '{command[-1]}': it is read too; another file to write needed" in said
        assert Path(str(command[-1])).read_bytes() == before


def test_what_show_cannot_show_is_named_with_what_it_can(tmp_path: Path) -> None:
    assert "an .onnx file, a graph's .json, a .py script or an app" in error_of("show", "x.npz")
    both = ("--strategy", tmp_path / "absent.json", "--cpus", "2")
    assert "--cpus 2 found with --strategy, which has its own" in error_of("show", "lenet", *both)


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
        (
            TINY.replace("synthetic_images(70, (6,), 3)", "5"),
            "data: int returned, Splits (soapstone.frontend.data.sets) needed",
        ),
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


def test_a_folder_of_machine_code_is_one_of_levels(tmp_path: Path) -> None:
    assert "found without --level" in error_of("compile", "--folder", tmp_path)
