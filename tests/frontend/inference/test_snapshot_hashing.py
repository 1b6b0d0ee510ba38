"""When a model's bytes are hashed, to tell whether a snapshot is of them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.snapshots import Weights, expected, needs_snapshots, ran, write_model

from soapstone.frontend.inference import snapshot_places, snapshots

pytestmark = needs_snapshots
_HASHED = """
import sys
import threading
import numpy as np
from soapstone import InferenceSession
from soapstone.frontend.inference import snapshot_places
from soapstone.frontend.inference.opening import Opening
from soapstone.native.files import MappedFile
if sys.argv[1] == "settled":
    snapshot_places._SETTLED_NS = 0  # a file that was written just now, too
found, beside, digest = [], [], MappedFile.digest
opens = threading.current_thread()
def told(*given):
    thread = threading.current_thread()
    if thread is opens:
        found.append("hashed")
    else:
        beside.append("hashed-in-keeping" if "_keep" in thread.name else "hashed-beside")
    return digest(*given)
MappedFile.digest = told
x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
with InferenceSession("m.onnx", threads=1) as session:
    found.append("kept" if session._snapshot is not None else "bound")
    y = session.run(x)["y"]
    found.append("answered")
np.savez("answers.npz", y=y)
print(*found, *beside)
"""


def _hashed(folder: Path, weights: Weights, how: str = "settled") -> str:
    """Return in which order a process hashed the model, opened it and answered, and what other
    threads of it hashed.
    """
    told = ran(folder, _HASHED, how)
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    with np.load(folder / "answers.npz") as found:
        np.testing.assert_allclose(found["y"], expected(weights, x), 1e-4, 1e-5)
    return told.strip()


def test_a_model_is_hashed_after_its_answer(tmp_path: Path) -> None:
    weights = write_model(tmp_path)
    assert _hashed(tmp_path, weights) == "bound answered hashed-beside"
    assert _hashed(tmp_path, weights) == "kept answered"
    # The same bytes in another state, and others of the same size and time in the same file.
    file = tmp_path / "m.onnx"
    status = file.stat()
    os.utime(file, ns=(0, 0))
    assert _hashed(tmp_path, weights) == "hashed kept answered"
    assert _hashed(tmp_path, weights) == "kept answered"
    other = tmp_path / "other"
    other.mkdir()
    changed = write_model(other, scale=2.0)
    file.write_bytes((other / "m.onnx").read_bytes())
    os.utime(file, ns=(0, 0))
    assert (file.stat().st_ino, file.stat().st_size) == (status.st_ino, status.st_size)
    assert _hashed(tmp_path, changed) == "hashed bound answered"
    assert _hashed(tmp_path, changed) == "kept answered"
    # A note that is damaged, or of another file, says nothing.
    (note,) = (tmp_path / "cache" / "opened").iterdir()
    mark, name = note.read_text().split()
    (kept,) = {each.name for each in (tmp_path / "cache" / "sessions").iterdir()} - {name}
    note.write_text(f"{mark} {kept}")
    assert _hashed(tmp_path, changed) == "hashed kept answered"
    note.write_text("")
    assert _hashed(tmp_path, changed) == "hashed kept answered"


def test_a_model_that_may_be_written_again_in_the_same_state_is_hashed_by_all(
    tmp_path: Path,
) -> None:
    weights = write_model(tmp_path)
    assert _hashed(tmp_path, weights, "") == "hashed bound answered hashed-in-keeping"
    assert _hashed(tmp_path, weights, "") == "hashed kept answered"
    assert not (tmp_path / "cache" / "opened").exists()


def test_nothing_is_noted_of_a_file_that_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_places, "_SETTLED_NS", 0)
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "m.onnx"
    file.write_bytes(b"some")
    for change, noted in (("", True), ("later", False)):
        place = snapshot_places.place_of(file, snapshots.Options(1, True, "float32"))
        assert place is not None and place.settled and place.noted() is None
        if change:
            file.write_bytes(b"more")
            os.utime(file, ns=(place.state[3], place.state[3]))
        place.note()
        assert place.noted() == (place.path if noted else None)
        assert len(list(tmp_path.glob("cache/opened/*"))) == 1
        for each in tmp_path.glob("cache/opened/*"):
            each.write_text("")
