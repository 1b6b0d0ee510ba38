"""Machine descriptions: round trips, and an error that names the field for every bad one."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from soapstone.runtime import Link, Machine, MachineError, Memory, Processor
from soapstone.runtime.machines.cluster import load_machine


def _cluster() -> Machine:
    return Machine(
        "pair",
        (Processor("gpu0", "gpu", 1, "hbm0", 9.5e12), Processor("gpu1", "gpu", 1, "hbm1")),
        (Memory("hbm0", 1 << 34, 7.3e11), Memory("hbm1", 1 << 34)),
        (Link("hbm0", "hbm1", 1e-6, 2e10), Link("hbm1", "hbm0", 1e-6, 2e10)),
    )


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    machine = _cluster()
    machine.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == machine
    assert Machine.from_json(machine.to_json()) == machine
    assert machine.describe() == Machine.from_json(machine.describe()).describe()


def test_local_spreads_processors_over_memories() -> None:
    machine = Machine.local(4, memories=2, memory_bytes=1 << 20)
    assert [p.memory for p in machine.processors] == ["memory0", "memory0", "memory1", "memory1"]
    assert {(link.source, link.target) for link in machine.links} == {
        ("memory0", "memory1"),
        ("memory1", "memory0"),
    }
    assert machine.host.name == "memory0" and machine.host.capacity_bytes == 1 << 20
    assert len(Machine.local().processors) >= 1


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("name"), "field 'name' is missing"),
        (lambda d: d.pop("version"), "field 'version' is missing"),
        (lambda d: d.update(version=2), "field 'version': 2 found, 1 needed"),
        (lambda d: d.update(version=True), "field 'version': true found"),
        (lambda d: d.update(speed=3), "unknown field 'speed'"),
        (lambda d: d.update(processors={}), "field 'processors': {} found, a list needed"),
        (lambda d: d.update(processors=[None]), r"processors\[0\]: null found, an object needed"),
        (lambda d: d["processors"][0].update(threads=10**400), "'threads' is 1000"),
        (lambda d: d.update(processors=[]), "field 'processors' is empty"),
        (lambda d: d.update(memories=[]), "field 'memories' is empty"),
        (lambda d: d.update(name=""), "non-empty string"),
        (lambda d: d.update(name=4), "non-empty string"),
        (lambda d: d["processors"].append(3), r"processors\[2\]: 3 found"),
        (lambda d: d["processors"][0].update(cores=2), r"processors\[0\]: unknown field 'cores'"),
        (lambda d: d["processors"][0].pop("name"), r"processors\[0\]: field 'name' is missing"),
        (lambda d: d["processors"][0].update(threads=0), "'threads' is 0"),
        (lambda d: d["processors"][0].update(threads=True), "'threads' is True"),
        (lambda d: d["processors"][0].update(threads=1.5), "'threads' is 1.5"),
        (lambda d: d["processors"][0].update(flops=float("nan")), "'flops' is nan"),
        (lambda d: d["processors"][0].update(flops=-1.0), "'flops' is -1.0"),
        (lambda d: d["processors"][0].update(flops="fast"), "'flops' is 'fast'"),
        (lambda d: d["processors"][0].update(memory="ram"), "'memory' is 'ram'"),
        (lambda d: d["processors"][1].update(name="gpu0"), "'gpu0' more than once"),
        (lambda d: d["memories"][0].pop("capacity_bytes"), "'capacity_bytes' is missing"),
        (lambda d: d["memories"][0].update(capacity_bytes=-5), "'capacity_bytes' is -5"),
        (lambda d: d["memories"][0].update(capacity_bytes=1e9), "an integer"),
        (lambda d: d["memories"][1].update(name="hbm0"), "'hbm0' more than once"),
        (lambda d: d["memories"][0].update(bytes_per_s=float("inf")), "'bytes_per_s' is inf"),
        (lambda d: d["links"][0].update(source="disk"), "'source' is 'disk'"),
        (lambda d: d["links"][0].update(target="hbm0"), "to itself"),
        (lambda d: d["links"][0].update(latency_s=-1), "'latency_s' is -1"),
        (lambda d: d["links"][0].update(bytes_per_s=0), "'bytes_per_s' is 0"),
        (lambda d: d["links"][0].update(bytes_per_s=None), "'bytes_per_s' is None"),
        (lambda d: d["links"][0].pop("latency_s"), "'latency_s' is missing"),
        (lambda d: d["links"].append(d["links"][0]), "more than once"),
    ],
)
def test_each_bad_field_is_named(change: Change, message: str) -> None:
    data = copy.deepcopy(_cluster().to_json())
    change(data)
    with pytest.raises(MachineError, match=message):
        Machine.from_json(data)


def test_bad_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{")
    with pytest.raises(MachineError, match=r"bad\.json': not JSON"):
        Machine.load(path)
    path.write_text(json.dumps([1]))
    with pytest.raises(MachineError, match=r"bad\.json': machine: \[1\] found, an object needed"):
        Machine.load(path)
    path.write_bytes(b"\xff\xfe")
    for read in (Machine.load, load_machine):
        with pytest.raises(MachineError, match=r"bad\.json': other bytes found, UTF-8 text needed"):
            read(path)
    with pytest.raises(OSError):
        Machine.load(tmp_path / "absent.json")


@pytest.mark.parametrize("arguments", [{"cpus": 0}, {"memories": 0}, {"cpus": 1, "threads": 0}])
def test_local_checks_its_arguments(arguments: dict[str, int]) -> None:
    with pytest.raises(MachineError):
        Machine.local(**arguments)
