"""Files that are damaged, foreign or hostile: one kind of error each, or what was written."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs.hostile_files import outcomes

from soapstone import Machine, Model, Strategy, files
from soapstone.errors import DataError
from soapstone.frontend.data.npz import NpzFile
from soapstone.frontend.inference.predict import read_arrays
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.files import storage
from soapstone.ir.files.graphs import load_graph, save_graph
from soapstone.ir.plan import Action, MemoryPlan, Step
from soapstone.ir.tensor import Array

ARRAYS = {
    "w": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.ones(5),
    "n": np.array(3, np.int64),
}


def model() -> Model:
    made = Model("net", seed=1)
    made.output(made.dense(made.input("x", (4, 6)), 5, activation="relu", name="fc"))
    return made


def data(path: Path) -> None:
    np.savez(path, x=np.arange(24.0).reshape(6, 4), y=np.arange(6))


def compressed(path: Path) -> None:
    np.savez_compressed(path, x=np.arange(24.0).reshape(6, 4), y=np.arange(6))


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(
        one[n].dtype == other[n].dtype and np.array_equal(one[n], other[n]) for n in one
    )


def graph_values(path: Path) -> None:
    save_graph(model().graph, path.with_suffix(".json"), model().weights())


Case = tuple[str, Callable[[Path], object], Callable[[Path], object], type[Exception], bool]
CASES: dict[str, Case] = {  # file, writer, reader, error, whether a changed byte must be seen
    "checkpoint.npz": (
        "a.npz",
        lambda p: checkpoint.save(p, ARRAYS, {"step": 3}),
        checkpoint.load,
        CheckpointError,
        True,
    ),
    "checkpoint.safetensors": (
        "a.safetensors",
        lambda p: checkpoint.save(p, ARRAYS, {"step": 3}),
        checkpoint.load,
        CheckpointError,
        True,
    ),
    "data": ("a.npz", data, lambda p: NpzFile.open(p).read(), DataError, False),
    "compressed": ("a.npz", compressed, read_arrays, DataError, False),
    "strategy": (
        "a.json",
        lambda p: Strategy(machine=Machine.local(cpus=2).describe(), model="net").save(p),
        Strategy.load,
        StrategyError,
        True,
    ),
    "plan": (
        "a.json",
        lambda p: MemoryPlan(64, (Step(Action.ALLOCATE, "x", 8, 0),)).save(p),
        MemoryPlan.load,
        GraphError,
        True,
    ),
    "graph": ("a.json", lambda p: save_graph(model().graph, p), load_graph, GraphError, True),
    "values": (
        "a.safetensors",
        graph_values,
        lambda p: load_graph(p.with_suffix(".json")),
        GraphError,
        True,
    ),
}


def mutations(whole: bytes, random: np.random.Generator, count: int) -> list[bytes]:
    """Return damaged copies: bits flipped, bytes replaced, cut, doubled, or moved."""
    result = []
    for number in range(count):
        at = int(random.integers(len(whole)))
        one = bytearray(whole)
        if number % 5 < 2:
            one[at] ^= 1 << int(random.integers(8))
        elif number % 5 == 2:
            one[at] = int(random.integers(256))
        elif number % 5 == 3:
            del one[at : at + int(random.integers(1, 9))]
        else:
            one[at:at] = one[max(0, at - 8) : at]
        result.append(bytes(one))
    return result


def equal(one: Any, other: Any) -> bool:
    """Return whether two things that were read are the same, arrays compared by contents."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_damaged_files_are_refused_or_read_as_they_were(name: str, tmp_path: Path) -> None:
    file, write, read, error, sealed = CASES[name]
    path = tmp_path / file
    write(path)
    good, whole = read(path), path.read_bytes()
    refused = 0
    for data in mutations(whole, np.random.default_rng(len(name)), 60):
        path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = read(path)
            except error as fault:
                assert path.stem in str(fault), fault
                refused += 1
                continue
        assert not sealed or equal(found, good), data
    assert refused >= 20  # most of a data file is samples, which have the CRC of zip


def test_every_flipped_bit_of_a_strategy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    Strategy(model="net").save(path)
    whole = path.read_bytes().rstrip()
    assert Strategy.load(path) == Strategy(model="net")
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(StrategyError):
            Strategy.load(path)


def test_a_file_without_a_checksum_is_read_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    Strategy(model="net").save(path)
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields, indent=1))
    with pytest.raises(StrategyError, match="damaged or edited; without the field 'checksum'"):
        Strategy.load(path)
    del fields["checksum"]
    path.write_text(json.dumps(fields))
    with pytest.warns(UserWarning, match=r"s\.json' has no checksum"):
        assert Strategy.load(path) == Strategy(model="net")


# ------------------------------------------------------------------------------------------- bombs
def member(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    """Return the npy header of an array, without its contents."""
    stream = io.BytesIO()
    header = {"descr": dtype, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, contents in members.items():
            file.writestr(f"{name}.npy", contents)


def encrypted(path: Path) -> None:
    archive(path, {"x": member((2,)) + bytes(8)})
    whole = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        whole[whole.index(mark) + offset] |= 1
    path.write_bytes(bytes(whole))


BOMBS: dict[str, Callable[[Path], None]] = {
    "a header of 2^46 floats": lambda p: archive(p, {"x": member((1 << 46,))}),
    "negative extents": lambda p: archive(p, {"x": member((-1, 4))}),
    "a product beyond 64 bits": lambda p: archive(p, {"x": member((1 << 62, 1 << 62))}),
    "64 megabytes of zeros": lambda p: archive(
        p, {"x": member((1 << 24,)) + bytes(1 << 26)}, zipfile.ZIP_DEFLATED
    ),
    "bzip2": lambda p: archive(p, {"x": member((2,)) + bytes(8)}, zipfile.ZIP_BZIP2),
    "objects": lambda p: np.savez(p, x=np.array([{}], object)),
    "many members": lambda p: archive(p, {f"x{i}": b"" for i in range(9_000)}),
    "encrypted": encrypted,
    "more than the header says": lambda p: archive(p, {"x": member((2,)) + bytes(80)}),
}


def test_npz_bombs_take_no_memory(tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("limits of address space are Linux's")
    for number, make in enumerate(BOMBS.values()):
        make(tmp_path / f"data{number}.npz")
        for kind in ("arrays", "checkpoint"):
            os.link(tmp_path / f"data{number}.npz", tmp_path / f"{kind}{number}.npz")
    errors = {"data": "DataError", "arrays": "DataError", "checkpoint": "CheckpointError"}
    for name, found in outcomes(tmp_path, limit=1 << 25).items():
        assert found is not None and found[0] == errors[name.rstrip("0123456789.npz")], (
            name,
            found,
        )
        assert name in found[1], found


def test_the_limit_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros(1000, np.float32))
    monkeypatch.setenv("SOAPSTONE_MAX_BYTES", "4000")
    assert read_arrays(path)["x"].nbytes == 4000
    monkeypatch.setenv("SOAPSTONE_MAX_BYTES", "3999")
    with pytest.raises(DataError, match=r"4,000 bytes; 3,999 at most \(SOAPSTONE_MAX_BYTES\)"):
        read_arrays(path)
    monkeypatch.setenv("SOAPSTONE_MAX_BYTES", "lots")
    with pytest.raises(DataError, match="SOAPSTONE_MAX_BYTES 'lots' found; bytes such as"):
        read_arrays(path)


# --------------------------------------------------------------------------------------- full disks
WRITER = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from soapstone.frontend.training import checkpoint
from soapstone import files
from soapstone.runtime import Machine
from soapstone.runtime.observe.profile import Profile
from soapstone.runtime.observe.timeline_picture import save_picture

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    name = Path(sys.argv[1]).name
    if name == "a.json":
        files.write(sys.argv[1], bytes(5000))
    elif name == "machine.json":
        Machine.local(cpus=100).save(sys.argv[1])
    elif name == "timeline.json":
        Profile(Machine.local(cpus=100), "long" * 1000).save(sys.argv[1])
    elif name == "a.svg":
        save_picture(Profile(Machine.local(cpus=100), "long" * 1000), sys.argv[1])
    else:
        checkpoint.save(sys.argv[1], {"x": np.zeros(5000)}, {})
except OSError as error:
    print(error.filename, error)
"""


@pytest.mark.parametrize(
    "name", ["a.npz", "a.safetensors", "a.json", "machine.json", "timeline.json", "a.svg"]
)
def test_a_disk_that_is_full_names_the_users_file_and_leaves_it(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"as it was")
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{path} ") and "partial" not in done.stdout, done
    assert path.read_bytes() == b"as it was"
    assert os.listdir(tmp_path) == [name]


def test_files_have_the_rights_that_the_process_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    with contextlib.ExitStack() as stack:
        stack.callback(os.umask, before)
        files.write(tmp_path / "a", b"x")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_safetensors_are_what_the_library_reads(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    arrays = {
        **ARRAYS,
        "empty": np.zeros((0, 3), np.float16),
        "flags": np.array([True, False]),
        "strided": np.arange(20, dtype=np.int16)[::3],
        "transposed": np.arange(6.0).reshape(2, 3).T,
    }
    path = tmp_path / "a.safetensors"
    files.write(path, storage.safetensors_writer(arrays, {"k": "v"}))
    assert same(load_file(path), {n: np.asarray(a) for n, a in arrays.items()})
