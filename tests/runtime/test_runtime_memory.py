"""Memory that is not there is an error of the launch that needs it, never a killed process."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soapstone import system
from soapstone.native.memory import CHECKED
from soapstone.runtime import Machine, MemoryExhausted, Partition, ReadWrite, Region, Runtime, Task

TOUCH = Task("touch", (ReadWrite,), lambda x: None)


def _group(folder: Path, **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_limits_of_control_groups_are_those_of_all_groups_above(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("4:cpu,memory:/jobs/mine\n2:cpu:/\n0::/other/one\n")
    old = {"memory__stat": "cache 5\ntotal_inactive_file 40\n"}
    _group(root / "memory", memory__limit_in_bytes=10**18, memory__usage_in_bytes=70, **old)
    _group(root / "memory/jobs", memory__limit_in_bytes=500, memory__usage_in_bytes=140, **old)
    new = {"memory__stat": "inactive_file 7\n"}
    _group(root / "other", memory__max="max", memory__current=9, **new)
    _group(root / "other/one", memory__max=300, memory__current=107, **new)
    found = {(g.limit, g.used) for g in system.group_limits(root, membership)}
    assert found == {(10**18, 30), (500, 100), (300, 100)}


def test_shares_of_cores_are_the_least_of_all_groups_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "self"
    membership.write_text("4:memory:/\n2:cpu,cpuacct:/jobs/mine\n0::/other/one\n")
    _group(root / "cpu/jobs", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100_000)
    _group(root / "other/one", cpu__max="max 100000")
    assert system.group_share(root, membership) == math.inf
    _group(root / "cpu/jobs/mine", cpu__cfs_quota_us=350_000, cpu__cfs_period_us=100_000)
    assert system.group_share(root, membership) == 3.5
    _group(root / "other", cpu__max="150000 100000")
    assert system.group_share(root, membership) == 1.5
    monkeypatch.setattr(system, "core_numbers", lambda: list(range(64)))
    for share, cores in ((math.inf, 64), (80.0, 64), (1.5, 2), (2.0, 2), (0.25, 1)):
        monkeypatch.setattr(system, "_own_share", lambda share=share: share)
        assert system.usable_cores() == cores


def test_no_control_group_limits_nothing(tmp_path: Path) -> None:
    assert system.group_limits(tmp_path, tmp_path / "absent") == []
    assert system.group_share(tmp_path, tmp_path / "absent") == math.inf


def test_the_default_capacity_is_what_this_process_could_have() -> None:
    machine = Machine.local(1)
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.memories[0].capacity_bytes == system.physical_bytes() <= pages


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> int:
    """What the system says is available; the real number changes with what else runs."""
    monkeypatch.setattr("soapstone.runtime.machines.memory.available_bytes", lambda: 1 << 30)
    return 1 << 30


def test_a_launch_beyond_what_is_available_is_refused_whatever_the_capacity(available: int) -> None:
    with Runtime(Machine.local(1, memory_bytes=1 << 50)) as runtime:
        small = Region((8,), "u1", "small")
        runtime.launch(TOUCH, Partition.whole(small))
        huge = Region((int(available * 1.2),), "u1", "huge")
        with pytest.raises(MemoryExhausted, match=r"'huge' needs \d+ bytes, this computer has \d+"):
            runtime.launch(TOUCH, Partition.whole(huge))
        runtime.launch(TOUCH, Partition.whole(small))  # the runtime goes on
        runtime.wait()


@pytest.mark.skipif(CHECKED, reason="checked mode touches all that an entry is given")
def test_pages_that_were_claimed_and_not_touched_count(available: int) -> None:
    with Runtime(Machine.local(1, memory_bytes=1 << 50)) as runtime:
        regions = [Region((available // 4,), "u1", f"r{n}") for n in range(6)]
        with pytest.raises(MemoryExhausted, match="this computer has"):
            for region in regions:  # zero pages: none of them is resident
                runtime.launch(TOUCH, Partition.whole(region))
                runtime.wait()


def test_memory_the_system_refuses_is_named() -> None:
    program = """
import resource
from soapstone.runtime import Machine, Region, Runtime
with Runtime(Machine.local(1)) as runtime:
    held = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20),) * 2)
    try:
        runtime.fill(Region((1 << 28,), "u1", "wide"), 1)
    except MemoryError as error:
        print(type(error).__name__, error)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("no /proc")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "MemoryExhausted" in done.stdout, done.stderr
    assert "region 'wide' needs 268435456 bytes" in done.stdout
    assert "operating system refuses" in done.stdout
