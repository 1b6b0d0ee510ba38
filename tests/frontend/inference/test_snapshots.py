"""What is kept of the session bound first: later processes answer from it, or bind anew."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.snapshots import Weights, expected, needs_snapshots, ran, settings_of, write_model
from onnx import TensorProto, helper

from soapstone.cache import objects
from soapstone.frontend.inference import snapshot_places, snapshot_writing, snapshots
from soapstone.frontend.inference.opening import Opening
from soapstone.kernels.cpu.onednn import library
from soapstone.native import snapshot
from soapstone.native.copies import copy
from soapstone.native.entries import sequence
from soapstone.native.files import MappedFile
from soapstone.native.memory import Array, Scratch, aligned_array
from soapstone.runtime import StoppedError

pytestmark = needs_snapshots
_ANSWER = """
import json, sys
import numpy as np
from soapstone import InferenceSession
asked = json.loads(sys.argv[1])
x = np.random.default_rng(1).standard_normal((asked["batch"], 3, 8, 8)).astype(np.float32)
with InferenceSession("m.onnx", threads=asked["threads"], **asked["options"]) as session:
    first = session._snapshot is not None
    y = session.run(x)["y"]
    kept = session._snapshot is not None
    again = session.run(x + 1)["y"]
    np.savez("answers.npz", y=y, again=again, third=session.run(x)["y"])
    if asked["more"]:
        assert session.meeting_samples(np.concatenate([x, x])) == ""
    then = session._snapshot is not None
session.close()
try:
    session.run(x)
    ended = "runs"
except Exception as error:
    ended = type(error).__name__
print(json.dumps([first, kept, then, ended]))
"""


def _answers(folder: Path, weights: Weights, **asked: Any) -> list[Any]:
    """Return where a process had its answers from, after its answers were compared."""
    batch = asked.get("batch", 2)
    given = {"batch": 2, "threads": 2, "options": {}, "more": False, **asked}
    text = ran(folder, _ANSWER, json.dumps(given), settings=asked.get("settings", {}))
    x = np.random.default_rng(1).standard_normal((batch, 3, 8, 8)).astype(np.float32)
    with np.load(folder / "answers.npz") as found:
        for name, inputs in (("y", x), ("again", x + 1), ("third", x)):
            np.testing.assert_allclose(found[name], expected(weights, inputs), 1e-4, 1e-5)
    told: list[Any] = json.loads(text)
    assert told[3] == "StoppedError"
    return told[:3]


_BOUND, _KEPT = [False, False, False], [True, True, True]


def test_a_later_process_answers_from_what_an_earlier_one_bound(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    assert _answers(tmp_path, weights) == _BOUND
    # What is not kept is bound, by the same session: another question, or another shape.
    assert _answers(tmp_path, weights, more=True) == [True, True, False]
    exact: dict[str, Any] = {"options": {"tune": False}}  # every number of rows is bound
    assert _answers(tmp_path, weights, **exact) == _BOUND
    assert _answers(tmp_path, weights, **exact, batch=3) == [True, False, False]
    # Another model of the same name and time has its own.
    status = os.stat(tmp_path / "m.onnx")
    other = write_model(tmp_path, scale=2.0)
    os.utime(tmp_path / "m.onnx", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _answers(tmp_path, other) == _BOUND


@pytest.mark.long
def test_what_decides_about_kernels_is_part_of_what_is_kept(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    assert _answers(tmp_path, weights) == _BOUND
    assert _answers(tmp_path, weights) == _KEPT
    for asked in ({"threads": 1}, {"options": {"tune": False}}, {"settings": {"DNNL_X": "1"}}):
        assert _answers(tmp_path, weights, **asked) == _BOUND
    for asked in ({"options": {"plain": True}}, {"options": {"cpus": 1}}):
        assert _answers(tmp_path, weights, **asked) == _BOUND
    assert _answers(tmp_path, weights) == _KEPT
    # What has been measured since may choose other kernels.
    (tmp_path / "cache" / "measured-1.changed").write_bytes(b"later")
    assert _answers(tmp_path, weights) == _BOUND
    assert _answers(tmp_path, weights) == _KEPT


def test_other_code_in_another_place_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path() -> Path:
        place = snapshot_places.place_of(tmp_path / "m.onnx", snapshots.Options(1, True, "float32"))
        assert place is not None
        return place.path

    write_model(tmp_path)
    known = {path()}
    monkeypatch.setattr(library, "path", lambda: "/elsewhere/libdnnl.so.3")
    known.add(path())
    monkeypatch.setattr(snapshot_places, "__file__", "/elsewhere/places.py")
    known.add(path())
    assert len(known) == 3


def test_names_of_files_need_not_be_text(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"m\xff\r")  # its file is mapped, under this name
    folder.mkdir()
    weights = write_model(folder)
    assert _answers(folder, weights) == _BOUND
    assert _answers(folder, weights) == _KEPT
    assert (
        snapshot_places.place_of(folder / "m.onnx", snapshot_places.Options(1, True, "float32"))
        is not None
    )


def test_what_gives_another_answer_is_not_kept(tmp_path: Path) -> None:
    wanted, y = (aligned_array((64,), np.float32, zero=True) for _ in range(2))
    other = np.ones_like(y)
    steps = {
        "kept": ((y, wanted),),
        "work": ((y, wanted.view(Scratch)),),  # it is said to count for nothing, but counts
        "changed": ((y, wanted), (wanted, other)),  # the answer is the first's alone
    }
    for name, made in steps.items():
        copied = [copy(to, of, 1) for to, of in made]
        entry = sequence([each for each in copied if each is not None])
        functions = {each: ("", *told) for each, told in objects.LOADED.items()}
        ends: dict[Any, Any] = {("output", "y"): y}
        told, _ = snapshot.taken(entry, ends, [y], None, functions, library.recipe)
        data, pieces = told()
        place = tmp_path / name
        header = {"natives": (), "data": data}
        snapshot_writing.write(place, header, pieces, None, {}, {"y": y.copy()}, 1)
        assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_many_pieces_are_written_where_they_belong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_writing, "_PARTS", 4)
    rows = [aligned_array((n,), np.float32, zero=True) for n in (5000, 4097, 9000, 4100, 6001)]
    made = [np.arange(len(row), dtype=np.float32) + 1 for row in rows]
    for row, filled in zip(rows, made):
        row[:] = filled
    ends = [aligned_array((len(row),), np.float32) for row in rows]
    copied = [copy(to, of, 1) for to, of in zip(ends, rows)]
    entry = sequence([each for each in copied if each is not None])
    functions = {each: ("", *told) for each, told in objects.LOADED.items()}
    given: dict[Any, Any] = {("output", str(n)): end for n, end in enumerate(ends)}
    told, _ = snapshot.taken(entry, given, ends, None, functions, library.recipe)
    data, pieces = told()
    assert len(pieces) > 4
    answer = {str(n): each for n, each in enumerate(made)}
    header = {"natives": (), "data": data}
    snapshot_writing.write(tmp_path / "kept", header, pieces, None, {}, answer, 1)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_what_cannot_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(snapshot_writing, "write_at", full)
    of, to = (aligned_array((5000,), np.float32, zero=True) for _ in range(2))
    entry = copy(to, of, 1)
    assert entry is not None
    functions = {each: ("", *told) for each, told in objects.LOADED.items()}
    told, _ = snapshot.taken(entry, {("output", "y"): to}, [to], None, functions, library.recipe)
    data, pieces = told()
    header = {"natives": (), "data": data}
    snapshot_writing.write(tmp_path / "kept", header, pieces, None, {}, {"y": to.copy()}, 1)
    assert not list(tmp_path.iterdir())


def test_what_is_damaged_is_not_used(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    assert _answers(tmp_path, weights) == _BOUND
    (file,) = (tmp_path / "cache" / "sessions").iterdir()
    whole = file.read_bytes()
    for place in (100, len(whole) - 4):  # of the header, of the contents
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1 :])
        assert _answers(tmp_path, weights)[1:] == _BOUND[1:]


_TOLD = """
import json, sys
import numpy as np
from soapstone import InferenceSession
with InferenceSession("m.onnx", threads=1) as session:
    x = np.arange(6, dtype=np.float32)
    found = session.run({"x": x, "shape": np.array(json.loads(sys.argv[1]))})["y"]
print(json.dumps(found.tolist()))
"""


def test_a_model_whose_shapes_depend_on_contents_is_not_kept(tmp_path: Path) -> None:
    values = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [6]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, [2]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b"]),
    ]
    nodes = [
        helper.make_node("Reshape", ["x", "shape"], ["r"]),
        helper.make_node("Transpose", ["r"], ["t"]),
        helper.make_node("Tanh", ["t"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    opsets = [helper.make_opsetid("", 18)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    for shape in ([2, 3], [3, 2]):
        told = ran(tmp_path, _TOLD, json.dumps(shape))
        expected = np.tanh(np.arange(6, dtype=np.float32)).reshape(shape).T
        np.testing.assert_allclose(json.loads(told), expected, 1e-6)


_CHANGED = """
import os, sys
import numpy as np
from soapstone import InferenceSession
x = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
with InferenceSession("m.onnx", threads=1) as session:
    first = session._snapshot is not None
    if sys.argv[1] == "replaced":
        os.replace("other.onnx", "m.onnx")
    elif sys.argv[1] == "gone":
        os.unlink("m.onnx")
    found = [session.run(x[:n]) for n in (2, 3)]
np.savez("answers.npz", y=found[0]["y"], more=found[1]["y"], first=first)
kinds = {found[0]["h"].dtype.name, found[1]["h"].dtype.name}
assert kinds == {"bfloat16"}, kinds
halves = [each["h"][:2].astype(np.float32) for each in found]
np.testing.assert_array_equal(*halves)
"""


def _changed(folder: Path, weights: Weights, how: str) -> bool:
    """Return whether a process that changed the file while it was open found what was kept."""
    command = [sys.executable, "-c", _CHANGED, how]
    done = subprocess.run(
        command, cwd=folder, env=settings_of(folder), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    x = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    with np.load(folder / "answers.npz") as found:
        np.testing.assert_allclose(found["y"], expected(weights, x[:2]), 1e-4, 1e-5)
        np.testing.assert_allclose(found["more"], expected(weights, x), 1e-4, 1e-5)
        return bool(found["first"])


def test_a_session_is_of_the_file_that_it_opened(tmp_path: Path) -> None:
    other = write_model(tmp_path, scale=2.0, halves=True)
    os.replace(tmp_path / "m.onnx", tmp_path / "other.onnx")
    weights = write_model(tmp_path, halves=True)
    # What was bound of a file is not what is kept of another that has taken its place.
    assert not _changed(tmp_path, weights, "replaced")
    assert not _changed(tmp_path, other, "")
    assert _changed(tmp_path, other, "")
    # What is kept is of the file that was found, whatever else is asked for later.
    write_model(tmp_path, halves=True)
    os.replace(tmp_path / "m.onnx", tmp_path / "other.onnx")
    write_model(tmp_path, scale=2.0, halves=True)
    assert _changed(tmp_path, other, "replaced")
    write_model(tmp_path, scale=2.0, halves=True)
    assert _changed(tmp_path, other, "gone")


def test_a_process_that_has_bound_and_kept_one_reads_no_file_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import soapstone.kernels.registry  # noqa: F401  (kernels may have been registered)

    (tmp_path / "m.onnx").write_bytes(b"model")
    looked: list[object] = []
    monkeypatch.setattr(snapshots, "place_of", lambda model, options: looked.append(model))
    for kept, reads in ((False, 1), (True, 1)):
        monkeypatch.setattr(snapshots.Keeper, "kept", kept)
        found = snapshots.find(tmp_path / "m.onnx", snapshots.Options(1, True, "float32"))
        assert found == (None, None)
        assert len(looked) == reads


_OPENED = """
import numpy as np
from soapstone import InferenceSession
x = np.load("x.npy")
with InferenceSession("m.onnx", threads=2) as session:
    answers = [session.run(x)["y"] for _ in range(3)]
    assert session._snapshot is not None and session._opening._thread is None
    answers.append(session.run(x)["y"])
    session.settle()
    bound = [len(serial.bounds.held) for serial in session._serial]
    print(session._snapshot is None, len(bound), *bound)
    answers += [session.run(x)["y"], session.run(x[:1])["y"]]
    np.savez("answers.npz", *answers)
with InferenceSession("m.onnx", threads=2) as session:
    pass
"""


@pytest.mark.parametrize("batch", ["n", 2])
def test_the_model_is_opened_once_a_snapshot_has_answered_some_times(
    tmp_path: Path, batch: Any
) -> None:
    weights = write_model(tmp_path)
    model = onnx.load(tmp_path / "m.onnx")
    if batch == 2:
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 2
        onnx.save(model, tmp_path / "m.onnx")
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    assert _answers(tmp_path, weights) == _BOUND
    np.save(tmp_path / "x.npy", x)
    program = _OPENED if batch == "n" else _OPENED.replace(', session.run(x[:1])["y"]', "")
    told = ran(tmp_path, program)
    # Where no other shape can come, nothing is opened for it.
    assert told.split() == (["True", "1", "1"] if batch == "n" else ["False", "0"])
    with np.load(tmp_path / "answers.npz") as found:
        for each in found.values():
            np.testing.assert_allclose(each, expected(weights, x)[: len(each)], 1e-4, 1e-5)
            assert len(each) < 2 or each.tobytes() == found["arr_0"].tobytes()


_STEPPED = """
import numpy as np
from soapstone import InferenceSession
x = np.load("x.npy")
with InferenceSession("m.onnx", threads=2) as session:
    kept = session._snapshot
    opening, began = session._opening, []
    opening.begin = lambda given, apart, then: began.append(apart)
    out = np.empty((5, 5), np.float32)
    answers = [session.run(x[:n])["y"] for n in (2, 3, 1, 16)]
    assert session.run(x[:5], out={"y": out})["y"] is out
    assert session._snapshot is kept is not None and set(began) == {True}, "nothing is opened"
    del opening.begin
    session.run(x[:3])
    session.settle()
    assert session._snapshot is None
    held = session.serial.bounds.held
    before = list(held)
    answers += [out, session.run(x[:7])["y"]]
    assert list(held) == before, "the graph of two rows is enough"
    answers.append(session.run(x[:17])["y"])
    np.savez("answers.npz", *answers)
"""


def test_other_numbers_of_rows_are_answered_in_steps_of_a_snapshot(tmp_path: Path) -> None:
    """A process that lived on has found that rows are apart; a later one need not ask a graph."""
    weights = write_model(tmp_path)
    x = np.random.default_rng(1).standard_normal((17, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    first = """
import numpy as np
from soapstone import InferenceSession
with InferenceSession("m.onnx", threads=2) as session:
    session.run(np.load("x.npy")[:2])
    session.settle()
"""
    for program in (first, _STEPPED):
        ran(tmp_path, program)
    with np.load(tmp_path / "answers.npz") as found:
        answers = list(found.values())
    assert [len(each) for each in answers] == [2, 3, 1, 16, 5, 7, 17]
    for each in answers:
        np.testing.assert_allclose(each, expected(weights, x[: len(each)]), 1e-4, 1e-5)


def test_a_session_that_is_closed_while_a_thread_opens_its_model_closes_that() -> None:
    begun, go, closed = threading.Event(), threading.Event(), list[str]()

    class Serial:
        lock = threading.Lock()

        def close(self) -> None:
            closed.append("closed")

    def opened() -> Any:
        begun.set()
        assert go.wait(60)
        return (Serial(),)

    def ended() -> None:
        raise StoppedError("it was closed")

    opening = Opening(opened)
    opening.begin({}, False, ended)
    assert begun.wait(60)
    closing = threading.Thread(target=opening.close)
    closing.start()
    closing.join(0.05)
    assert closing.is_alive() and not closed, "the file is read"
    go.set()
    closing.join(60)
    assert closed == ["closed"]


def test_closing_waits_for_what_is_being_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs read the model's file, which may be written to once its session is closed."""
    file = tmp_path / "m.onnx"
    file.write_bytes(b"some")
    x = np.zeros(3, np.float32)
    header = {
        "model": ("m", (("x", "float32", (3,), ()),), ("y",)),
        "data": {"ends": {("input", "x"): (0, 0, "float32", (3,), (4,))}, "there": (0,)},
    }
    options = snapshots.Options(1, False, "float32")
    made = snapshots.Snapshot(tmp_path / "kept", MappedFile.of(file), header, options)
    inside, leave, said = threading.Event(), threading.Event(), list[str]()

    def answer(*_: object) -> dict[str, Array]:
        inside.set()
        leave.wait(60)
        said.append("answered")
        return {"y": x}

    monkeypatch.setattr(snapshots.Snapshot, "_contents", lambda _: x)
    monkeypatch.setattr(snapshots, "restored", lambda *_: object())
    monkeypatch.setattr(snapshots, "answered", answer)
    run = threading.Thread(target=made.run, args=(x, {}))
    run.start()
    assert inside.wait(60)
    close = threading.Thread(target=lambda: (made.close(), said.append("closed")))
    close.start()
    leave.set()
    run.join()
    close.join()
    assert said == ["answered", "closed"]
    assert made.run(x, {}) is None
