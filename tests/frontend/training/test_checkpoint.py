"""Checkpoints: what is written is what is read; the old one survives any fault of the writer."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.checkpoint import CheckpointError, load, save
from soapstone.ir.tensor import Array

METADATA = {"step": 3, "position": {"epoch": 1, "rate": 0.5}, "name": "réseau", "list": [1, None]}
suffixes = pytest.mark.parametrize("suffix", checkpoint.SUFFIXES)


def arrays() -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {
        "fc1.weight": random.standard_normal((3, 4)).astype(np.float32),
        "transposed": random.standard_normal((3, 4)).T,
        "strided": np.arange(20, dtype=np.int32)[::3],
        "step": np.array(7, np.int64),
        "flags": np.array([True, False]),
        "bytes": np.arange(5, dtype=np.uint8),
        "empty": np.zeros((0, 3), np.float32),
        "file": np.ones(2, np.float32),  # a keyword of np.savez
    }


@suffixes
def test_round_trip(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    for _ in range(2):  # the second replaces the first
        save(path, arrays(), METADATA)
        found, metadata = load(str(path))
        assert metadata == METADATA and found.keys() == arrays().keys()
        for name, array in arrays().items():
            np.testing.assert_array_equal(found[name], array)
            assert found[name].dtype == array.dtype and found[name].shape == array.shape
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@suffixes
def test_every_truncation_is_an_error(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    save(path, arrays(), METADATA)
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match="truncated or no") as caught:
            load(path)
        assert path.name in str(caught.value)


@suffixes
def test_changed_bytes_never_raise_anything_else(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    save(path, arrays(), METADATA)
    whole = path.read_bytes()
    random = np.random.default_rng(1)
    for position in random.integers(0, len(whole), 200):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            load(path)
        except CheckpointError as error:
            assert path.name in str(error)


def write_foreign(path: Path, text: str | None) -> None:
    """Write a file of the right format with other metadata, or with none."""
    if path.suffix == ".npz":
        np.savez(path, x=np.zeros(2), **({} if text is None else {"soapstone": np.array(text)}))
        return
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(2)}, path, None if text is None else {"soapstone": text})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "metadata is missing"),
        ("{", "metadata is not JSON"),
        ("[1]", r"format \[1\] found, 'soapstone-checkpoint' needed"),
        ('{"format": "other"}', "format 'other' found"),
        ('{"format": "soapstone-checkpoint", "version": 2}', "version 2 found, 1 needed"),
        ('{"format": "soapstone-checkpoint", "version": 1}', "metadata None found"),
    ],
)
@suffixes
def test_foreign_files(suffix: str, text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    write_foreign(path, text)
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_names_that_are_no_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "a.pt", "a.pkl"):
        with pytest.raises(CheckpointError, match=r"needed$"):
            save(tmp_path / name, {}, {})
        with pytest.raises(CheckpointError, match=r"suffix '.*' found, \.safetensors or \.npz"):
            load(tmp_path / name)
    with pytest.raises(CheckpointError, match="no such file"):
        load(tmp_path / "absent.npz")


@suffixes
def test_what_cannot_be_written_leaves_the_old_one(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    save(path, arrays(), METADATA)
    before = path.read_bytes()
    bad: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"x": np.array([None])}, {}),
        ({"x": np.array(["text"])}, {}),
        ({"soapstone": np.zeros(2)}, {}),
        ({}, {"x": object()}),
        ({}, {"x": float("nan")}),
    ]
    for values, metadata in bad:
        with pytest.raises(CheckpointError):
            save(path, values, metadata)
    with pytest.raises(OSError, match="there is no folder"):
        save(tmp_path / "absent" / f"a{suffix}", arrays(), {})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_no_file_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    text = json.dumps({"format": checkpoint.FORMAT, "version": 1, "metadata": {}})
    np.savez(path, x=np.array([{}]), soapstone=np.array(text))
    with pytest.raises(CheckpointError, match="allow_pickle=False"):
        load(path)


def test_check_names_what_does_not_fit() -> None:
    given = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(2, np.int32)}
    expected: dict[str, tuple[tuple[int, ...], str]] = {
        "a": ((2, 3), "float32"),
        "b": ((2,), "int32"),
    }
    checkpoint.check(given, expected)
    for changed, message in (
        ({**expected, "c": ((), "float32")}, "array 'c' missing"),
        ({"a": expected["a"]}, "array 'b' found, but not in this model"),
        ({**expected, "a": ((3, 2), "float32")}, r"'a': float32\[2, 3\] found, float32\[3, 2\] n"),
        ({**expected, "b": ((2,), "int64")}, r"'b': int32\[2\] found, int64\[2\] needed"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.check(given, changed)


def test_fields_have_the_types_of_the_example() -> None:
    like = {"epoch": 0, "loss": 0.0}
    found = checkpoint.fields({"position": {"epoch": 2, "loss": 3}}, "position", like)
    assert found == {"epoch": 2, "loss": 3.0} and isinstance(found["loss"], float)
    for value, message in (
        (None, "field 'position': None found, an object needed"),
        ({"epoch": 1}, r"position\.loss is missing"),
        ({"epoch": 1, "loss": 1, "x": 1}, r"position\.x is unknown"),
        ({"epoch": 1.5, "loss": 1}, r"position\.epoch: 1\.5 found, int needed"),
        ({"epoch": True, "loss": 1}, r"position\.epoch: True found, int needed"),
        ({"epoch": 1, "loss": "1"}, r"position\.loss: '1' found, float needed"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.fields({"position": value}, "position", like)


WRITER = """
import sys
import numpy as np
from soapstone.frontend.training.checkpoint import save
number = 0
while True:
    save(sys.argv[1], {"x": np.full(500_000, number)}, {"number": number})
    print(number, flush=True)
    number += 1
"""


@suffixes
def test_a_killed_writer_leaves_a_whole_checkpoint(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    for attempt in range(6):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline()
            time.sleep(0.003 * attempt)
            writer.kill()
        found, metadata = load(path)
        assert (found["x"] == metadata["number"]).all() and len(found["x"]) == 500_000


@pytest.mark.parametrize("moment", ["fsync", "replace"])
@suffixes
def test_killed_before_the_renaming(suffix: str, moment: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    save(path, arrays(), METADATA)
    before = path.read_bytes()
    script = (
        "import os, signal, sys\n"
        "import numpy as np\n"
        "from soapstone.frontend.training.checkpoint import save\n"
        f"os.{moment} = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "save(sys.argv[1], {'x': np.zeros(1000)}, {})\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes() == before
    assert len(os.listdir(tmp_path)) == 2  # the old one, and what the writer had begun
    save(path, {"x": np.ones(3)}, {})
    np.testing.assert_array_equal(load(path)[0]["x"], np.ones(3))
