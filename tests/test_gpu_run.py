"""The command that runs all of a GPU: parts are kept, retried where time ended them, and told."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks" / "execution"))

import gpu
import gpu_figures
import gpu_steps

from soapstone.frontend.app import load_app
from soapstone.frontend.training.loss_scale import mixes

OPERATOR = '{"operator": "relu", "calls": 1, "served": {}, "wrong": %s}'


def said(text: str) -> tuple[str, ...]:
    return sys.executable, "-c", text


def test_parts_that_have_ended_are_not_run_again_and_others_go_on(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    slow = (
        f"import time, pathlib; mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists(): mark.touch(); time.sleep(600)"
    )
    parts = [
        gpu.Part("good", said("print('ran')"), 120),
        gpu.Part("bad", said("raise SystemExit(3)"), 120),
        gpu.Part("slow", said(slow), gpu.GRACE_S + 3),
        gpu.Part("names", said("import sys; print(sys.argv[1])"), 120, ("a", "b")),
    ]
    for wanted in (gpu.STOPPED, gpu.ENDED):
        run = gpu.Run(tmp_path / "out", time.monotonic() + 600)
        for part in parts:
            run.part(part)
        assert run.done == {
            "good": gpu.ENDED,
            "bad": gpu.FAILED,
            "slow": wanted,
            "names a": gpu.ENDED,
            "names b": gpu.ENDED,
        }
        assert json.loads((tmp_path / "out" / "parts.json").read_text()) == run.done
    assert (tmp_path / "out" / "good.log").read_text() == "ran\n"
    assert (tmp_path / "out" / "names.log").read_text() == "a\nb\n"


def test_no_part_is_begun_when_time_is_up(tmp_path: Path) -> None:
    run = gpu.Run(tmp_path, time.monotonic() + gpu.GRACE_S / 2)
    run.part(gpu.Part("good", said("print('ran')"), 120))
    assert run.done == {}


def test_operators_that_are_wrong_are_told_by_their_last_run(tmp_path: Path) -> None:
    log = tmp_path / "quick.log"
    assert gpu.wrong(log) == []
    log.write_text(OPERATOR % '["numba: off"]' + "\nnoise\n")
    assert gpu.wrong(log) == ["relu: ['numba: off']"]
    with log.open("a") as more:
        more.write(OPERATOR % "[]" + "\n")
    assert gpu.wrong(log) == []


def test_parts_name_what_there_is(tmp_path: Path) -> None:
    parts = {each.name: each for each in gpu.parts(tmp_path, "h100")}
    assert "tests/kernels/cuda/test_libraries_on_device.py" in parts["tests"].each
    assert set(parts["quick"].each) <= set(parts["operators"].each)
    for part in parts.values():
        scripts = [Path(word) for word in part.command if word.endswith(".py")]
        assert all(script.exists() for script in scripts)


@pytest.mark.parametrize("script", gpu.GOALS)
def test_models_of_a_part_are_those_of_its_script(script: str, tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location(Path(script).stem, gpu.HERE / script)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert set(gpu.GOALS[script]) == set(module.MODELS)
    names = {name.split(":")[0] for name in module.MODELS} - {"gcn"}
    assert names <= set(gpu_figures.TINY)
    for name in names:
        assert (
            gpu_figures.TINY[name].keys()
            <= inspect.signature(load_app(name).build).parameters.keys()
        )
    part = next(each for each in gpu.parts(tmp_path, "h100") if each.each == gpu.GOALS[script])
    done = subprocess.run([*part.command, "--help"], capture_output=True)
    assert done.returncode == 2, "--models takes a name"
    assert b"--models: expected" in done.stderr


def test_a_table_has_the_rows_of_all_models_and_tells_what_failed(tmp_path: Path) -> None:
    program = tmp_path / "gpu_trial.py"
    folder = gpu.HERE
    program.write_text(
        f"import sys; sys.path.append({str(folder)!r})\n"
        "import gpu_figures\n"
        "gpu_figures.Device = gpu_figures.identity = lambda gpu: 'here'\n"
        "row = lambda name, tiny: {'letters': len(name), 'half': 1 / (name != 'bad')}\n"
        "sys.exit(gpu_figures.table_of(__file__, 'A trial.', 'Trial', ['one', 'bad'], row))\n"
    )
    rows = tmp_path / "rows.jsonl"
    command = [sys.executable, str(program), "--no-write", "--rows", str(rows)]
    for models, code in (("one", 0), ("one,bad", 1)):
        done = subprocess.run([*command, "--models", models], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert found == [
        {"model": "one", "letters": 3, "half": 1.0, "gpu": "here"},
        {"model": "bad", "error": "ZeroDivisionError: division by zero", "gpu": "here"},
    ]


def test_figures_are_kept_as_they_come_and_what_failed_is_tried_last(tmp_path: Path) -> None:
    wanted, asked = gpu_steps.figures(["lenet", "bert"]), []

    def find(figure: gpu_steps.Figure) -> dict[str, object]:
        asked.append(figure)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"error": "no"} if len(asked) == 1 else {figure.what: 2.0}

    file = tmp_path / "steps.jsonl"
    with suppress(KeyboardInterrupt):
        gpu_steps.run(wanted, file, "here", find)
    records = gpu_steps.run(wanted, file, "here", find)
    assert asked == [*wanted[:3], *wanted[2:], wanted[0]]
    assert all(record[figure.what] == 2.0 for figure, record in records.items())
    assert gpu_steps.run(wanted, file, "here", find) == records
    assert len(asked) == len(wanted) + 2
    assert gpu_steps.run(wanted[:1], file, "here", find) == records  # a table has those of all
    assert {row["model"]: row["batch"] for row in gpu_steps.table(records)} == {
        name: gpu_steps.MODELS[name] for name in ("lenet", "bert")
    }


def test_a_figure_that_takes_too_long_or_fails_says_so() -> None:
    figure = gpu_steps.Figure("lenet", "float32", "step ms")
    assert "0.01 s" in gpu_steps.in_process(figure, "h100", 0.01)["error"]
    unknown = gpu_steps.Figure("nothing", "float32", "step ms")
    assert "nothing" in gpu_steps.in_process(unknown, "h100", 100)["error"]


def test_steps_name_precisions_and_models_that_there_are() -> None:
    for precision in gpu_steps.PRECISIONS["step ms"]:
        mixes(precision)  # an error where there is none of that name
    assert set(gpu.STEPPED) == set(gpu_steps.MODELS)
