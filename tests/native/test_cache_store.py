"""The store of what was measured: what it refuses, what it survives, who shares it."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from soapstone.cache import caches, store
from soapstone.cache.environment import CacheWarning, environment, key
from soapstone.cache.store import Store

HERE = {"name": "some computer"}


def test_the_first_record_of_a_key_stays(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    first, second = Store("time", file, HERE), Store("time", file, HERE)
    assert first.get("conv") is None
    assert first.put("conv", 3.0) == 3.0
    assert second.put("conv", 5.0) == 3.0
    assert second.find(["conv", "pool"]) == {"conv": 3.0}
    assert len(first) == 1
    second.replace({"conv": 4.0})
    assert (second.get("conv"), Store("time", file, HERE).get("conv")) == (4.0, 4.0)


def test_other_kinds_and_environments_have_records_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    Store("time", file, HERE).put("conv", 3.0)
    assert Store("choice", file, HERE).get("conv") is None
    for other in ({"name": "another computer"}, {**HERE, "onednn": "3.2"}, None):
        assert Store("time", file, other).get("conv") is None


def test_the_environment_names_features_and_versions_and_no_brand() -> None:
    import llvmlite
    import numba
    import numpy

    found = environment()
    assert (found["numba"], found["numpy"]) == (numba.__version__, numpy.__version__)
    assert found["llvmlite"] == llvmlite.__version__
    assert int(found["cores"]) == os.cpu_count()
    assert not any(word in str(dict(found)) for word in ("(R)", "(TM)", "GHz"))
    assert all(key({**found, name: "other"}) != key(found) for name in found)


@pytest.mark.parametrize("name", ["SOAPSTONE_CHECKED", "NUMBA_OPT", "ONEDNN_MAX_CPU_ISA"])
def test_settings_that_change_what_runs_are_part_of_the_environment(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    without = key(environment.__wrapped__())
    monkeypatch.setenv(name, "1")
    assert key(environment.__wrapped__()) != without
    monkeypatch.delenv(name)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "elsewhere")
    assert key(environment.__wrapped__()) == without


@pytest.mark.parametrize("us", [0, 0.0, -1.0, math.inf, math.nan])
def test_a_time_that_is_none_is_refused(tmp_path: Path, us: float) -> None:
    times = Store("time", tmp_path / "times.sqlite", HERE)
    with pytest.raises(ValueError, match="a time above 0 needed"):
        times.put("conv", us)
    with pytest.raises(ValueError, match="a time above 0 needed"):
        times.lowest("conv", us)
    assert times.get("conv") is None


def test_the_lowest_of_a_key_is_kept_by_all(tmp_path: Path) -> None:
    first, second = (Store("time", tmp_path / "times.sqlite", HERE) for _ in range(2))
    assert [first.lowest("yardstick", us) for us in (9.0, 7.0, 8.0)] == [9.0, 7.0, 7.0]
    assert second.get("yardstick") == 7.0


# ------------------------------------------------------------------ files that cannot be used
def _said(times: Store, expected: str) -> None:
    """Check that the store works in memory, and says what is wrong exactly once."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert times.put("conv", 3.0) == 3.0
        assert times.put("pool", 4.0) == 4.0
        assert times.find(["conv", "pool"]) == {"conv": 3.0, "pool": 4.0}
    (only,) = told
    assert only.category is CacheWarning
    assert str(times.path) in str(only.message) and expected in str(only.message)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    _said(Store("time", tmp_path / "file" / "times.sqlite", HERE), "not kept")


def test_a_file_that_is_no_database_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    file.write_bytes(b"no database" * 1000)
    _said(Store("time", file, HERE), "set aside as 'times.broken'")
    assert (tmp_path / "times.broken").read_bytes() == b"no database" * 1000
    assert Store("time", file, HERE).get("conv") == 3.0


def test_a_database_that_is_broken_in_the_middle_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    times = Store("time", file, HERE)
    times.update({f"conv {i}": 1.0 + i for i in range(2000)})
    times.close()
    whole = bytearray(file.read_bytes())
    whole[4096:] = bytes(len(whole) - 4096)
    file.write_bytes(whole)
    file.with_name("times.sqlite-wal").unlink(missing_ok=True)
    _said(Store("time", file, HERE), "set aside")
    assert Store("time", file, HERE).get("conv") == 3.0


def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE records (name TEXT)")
        other.execute("INSERT INTO records VALUES ('theirs')")
        other.commit()
    _said(Store("time", file, HERE), "not kept")
    with closing(sqlite3.connect(file)) as other:
        assert other.execute("SELECT * FROM records").fetchall() == [("theirs",)]


def test_a_file_that_another_process_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_WAIT_S", 0.05)
    file = tmp_path / "times.sqlite"
    Store("time", file, HERE).put("pad", 1.0)
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        _said(Store("time", file, HERE), "locked")


_FILL = """
import sys
from pathlib import Path
from soapstone.cache.store import Store
times = Store("time", Path(sys.argv[1]), {"name": "some computer"})
for number in range(int(sys.argv[2])):
    times.put(f"conv {number} {'x' * 500}", 1.0 + number)
    print(number, flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="limits of POSIX")
def test_a_full_disk_leaves_a_sound_file(tmp_path: Path) -> None:
    file = tmp_path / "times.sqlite"
    limit = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", limit + _FILL, str(file), "1000"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "999"  # work went on
    assert done.stderr.count("CacheWarning") == 1 and str(file) in done.stderr
    times = Store("time", file, HERE)
    assert 0 < len(times) < 1000
    assert times.get(f"conv 0 {'x' * 500}") == 1.0
    assert times.put("more", 2.0) == 2.0


@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
@pytest.mark.parametrize("records", [1, 7, 60])
def test_a_process_killed_while_it_writes_leaves_a_sound_file(tmp_path: Path, records: int) -> None:
    file = tmp_path / "times.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", _FILL, str(file), "1000000"], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    for number in range(records):
        assert writer.stdout.readline() == f"{number}\n"
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate(timeout=60)
    with closing(sqlite3.connect(file)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    times = Store("time", file, HERE)
    for number in range(records):
        assert times.get(f"conv {number} {'x' * 500}") == 1.0 + number


def _race(path: str, offset: int, start: float) -> None:
    while time.time() < start:
        pass
    times = Store("time", Path(path), HERE)
    for number in range(100):
        with times.measuring(), times.measuring():  # may be nested
            times.put(f"key {number}", 1.0 + offset + number)


def test_processes_begin_one_store_at_once(tmp_path: Path) -> None:
    path = tmp_path / "times.sqlite"
    spawn = multiprocessing.get_context("spawn")
    start = time.time() + 2
    workers = [spawn.Process(target=_race, args=(str(path), 1000 * i, start)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    times = Store("time", path, HERE)
    assert len(times) == 100
    for number in range(100):
        assert times.get(f"key {number}") in (1.0 + number, 1001.0 + number)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_opens_the_file_anew(tmp_path: Path) -> None:
    times = Store("time", tmp_path / "times.sqlite", HERE)
    times.put("parent", 1.0)
    child = os.fork()
    if child == 0:
        os._exit(0 if times.put("child", 2.0) == 2.0 and times.get("parent") == 1.0 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert times.get("child") == 2.0


def test_caches_are_listed_with_what_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOAPSTONE_CACHE", str(tmp_path))
    Store("time").update({"conv": 3.0, "pool": 4.0})
    Store("time", environment={**environment(), "onednn": "3.2"}).put("conv", 3.0)
    Store("choice", environment={**environment(), "numba": "0.1"}).put("conv", {"a": 1.0})
    (tmp_path / "kernels.sqlite").write_bytes(b"of an earlier version")
    measured, compiled, former = caches()
    assert dict(measured.entries) == {"time": 3, "choice": 1} and measured.stale == 1
    assert measured.path == store.default_path() and measured.nbytes > 0
    assert compiled.entries == {} or compiled.path != tmp_path / "compiled"
    assert former.path.name == "kernels.sqlite" and "not used" in former.problem
