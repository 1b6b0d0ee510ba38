"""The command that runs all of a GPU: parts are kept, retried where time ended them, and told."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

import gpu

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
