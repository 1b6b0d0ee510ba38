"""Files are written whole or not at all, through links, for those who could read them before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from soapstone import Model, files, from_onnx, to_onnx
from soapstone.frontend.app import project


def test_a_link_stays_one_and_a_file_that_is_there_keeps_who_may_read_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    file, link = tmp_path / "runs" / "first.bin", tmp_path / "latest.bin"
    file.write_bytes(b"old")
    file.chmod(0o640)
    link.symlink_to("runs/first.bin")
    files.write(link, b"new")
    assert link.is_symlink() and file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o640
    file.unlink()
    files.check_targets(link)
    files.write(link, b"newer")
    assert file.read_bytes() == b"newer"
    file.parent.rename(tmp_path / "moved")
    for call in (files.check_targets, lambda path: files.write(path, b"")):
        with pytest.raises(OSError, match=r"latest\.bin"):
            call(link)
    assert [path.name for path in (tmp_path / "moved").iterdir()] == ["first.bin"]


def test_a_project_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(project.FILES, "nowhere/more.py", "")
    with pytest.raises(OSError, match=r"more\.py"):
        project.new_project(tmp_path / "mine")
    assert not (tmp_path / "mine").exists()
    monkeypatch.delitem(project.FILES, "nowhere/more.py")
    assert all(file.is_file() for file in project.new_project(tmp_path / "mine"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_model_is_written_to_a_pipe_and_through_a_link(tmp_path: Path) -> None:
    model = Model("net")
    model.output(model.dense(model.input("x", (2, 3)), 4))
    pipe, link, file = (tmp_path / name for name in ("pipe.onnx", "link.onnx", "file.onnx"))
    os.mkfifo(pipe)
    link.symlink_to(file)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        to_onnx(model, pipe)
        to_onnx(model, link)
        assert from_onnx(os.read(reader, 1 << 16)).inputs == from_onnx(file).inputs
    finally:
        os.close(reader)
    assert pipe.is_fifo() and link.is_symlink()
