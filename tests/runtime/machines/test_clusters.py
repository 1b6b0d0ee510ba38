"""Described machines: clusters, routes over their links, and the command line of strategies."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.runtime import Link, Machine, MachineError, Memory, Processor
from soapstone.runtime.machines.cluster import cluster, load_machine, shipped
from soapstone.runtime.machines.routes import routes

K80 = Path(__file__).parents[3] / "runtime" / "machines" / "k80.toml"


def description(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = tomllib.loads(K80.read_text())
    return data | changes


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_cluster_scales_and_is_connected(name: str) -> None:
    for devices in (1, 4, 13):
        machine = load_machine(name, devices)
        assert len(machine.processors) == devices
        found = routes(machine)
        apart = ~np.eye(devices, dtype=bool)
        assert (found.s_per_byte[apart] > 0).all()
        assert (np.diag(found.s_per_byte) == 0).all()
        assert Machine.from_json(machine.describe()) == machine


def test_routes_take_the_links_of_the_description() -> None:
    """Neighbours on a K80 node meet at their switch, others at the shared one."""
    machine = load_machine("k80", 8)
    found = routes(machine)

    def way(a: int, b: int) -> list[str]:
        place = a * 8 + b
        numbers = found.route[found.route_ptr[place] : found.route_ptr[place + 1]]
        return sorted(found.channels[n] for n in numbers)

    assert way(0, 1) == ["memory 0.0 -> pair0 0", "pair0 0 -> memory 0.1"]
    assert "shared PCIe 0" in way(0, 2)
    assert "host 0 -> network" in way(0, 5)
    assert found.latency_s[0, 1] < found.latency_s[0, 2] < found.latency_s[0, 5]
    assert found.s_per_byte[0, 5] == pytest.approx(1 / 6.5e9)


def test_a_half_duplex_link_is_one_channel() -> None:
    links = [{"ends": [["0", "1"]], "latency_s": 1e-6, "bytes_per_s": 1e9, "half_duplex": True}]
    data = description(links=links, switches=[], devices_per_node=2)
    data["network"] = {"from": "0", "latency_s": 1e-6, "bytes_per_s": 1e9}
    found = routes(cluster(data))
    assert len(found.channels) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "'version': 2 found, 1 needed"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"devices_per_node": 0}, "'devices_per_node': 0 found"),
        ({"devices_per_node": 10**9}, "'devices_per_node': 1000000000 found, 1 to 1,024 needed"),
        ({"switches": [["nic"]]}, "'switches': .* found, a list of names needed"),
        ({"network": None}, "'network': null found, a table needed"),
        ({"links": [3]}, r"links\[0\]: 3 found, a table needed"),
        ({"links": [{"ends": [["0", "x"]], "latency_s": 0, "bytes_per_s": 1}]}, "two of"),
        ({"links": [{"ends": [["0", "1"]], "latency_s": 0}]}, "'bytes_per_s' is missing"),
        ({"network": {"from": "x", "latency_s": 0, "bytes_per_s": 1}}, "'from' is 'x'"),
        ({"links": []}, "no way over links"),
    ],
)
def test_bad_descriptions_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MachineError, match=message):
        routes(cluster(description(**changes), 8))


def test_files_and_names_are_checked(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="'cray' found; local, a100, h100"):
        load_machine("cray")
    with pytest.raises(MachineError, match="0 devices found"):
        load_machine("p100", 0)
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(MachineError, match=r"bad\.toml"):
        load_machine(tmp_path / "bad.toml")
    machine = Machine("two", (Processor("a"),), (Memory("system", 1 << 30),))
    machine.save(tmp_path / "two.json")
    assert load_machine(tmp_path / "two.json") == machine
    with pytest.raises(MachineError, match="only clusters scale"):
        load_machine(tmp_path / "two.json", 2)


def test_switches_may_not_share_names_with_memories() -> None:
    memories = (Memory("m", 1), Memory("n", 1))
    with pytest.raises(MachineError, match="more than once"):
        Machine("x", (Processor("a", memory="m"),), memories, (), ("m",))
    with pytest.raises(MachineError, match="needed one of"):
        Machine("x", (Processor("a", memory="m"),), memories, (Link("m", "s", 0.0, 1.0),))


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.long
def test_strategies_on_the_command_line(tmp_path: Path) -> None:
    where = ["--machine", "k80", "--devices", "4", "--batch-size", "64"]
    path = tmp_path / "found.json"
    picture, timeline = tmp_path / "found.svg", tmp_path / "step.json"
    made = run(
        *("strategy", "search", "lenet", *where, "--proposals", "40", "-o", str(path), "--json"),
        *("--picture", str(picture), "--timeline", str(timeline)),
    )
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout.splitlines()[-1])
    assert found["proposals"] == 40
    assert found["lower_bound_us"] <= found["step_us"] <= found["initial_us"]["data"]
    assert len(found["peak_bytes_per_device"]) == 4
    assert picture.read_text().startswith("<svg")
    assert json.loads(timeline.read_text())["traceEvents"]
    simulated = run("strategy", "simulate", "lenet", *where, "-s", str(path), "--json")
    assert json.loads(simulated.stdout.splitlines()[-1])["step_us"] == found["step_us"]
    shown = run("strategy", "show", str(path))
    assert "conv1" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("strategy", "simulate", "lenet", "-m", "p100", "-s", "lazy"), "one of data, model"),
        (("strategy", "simulate", "lenet", "-m", "cray", "-s", "data"), "machine 'cray' found"),
        (("strategy", "search", "nothing", "-m", "p100"), "app 'nothing' found"),
        (("strategy", "search", "lenet", "-m", "p100", "--method", "luck"), "'luck' found"),
        (("strategy", "search", "lenet", "-m", "p100", "--size", "depth=3"), "'depth' found"),
        (("strategy", "search", "lenet", "-m", "p100", "--size", "batch_size=3"), "one of none"),
        (("strategy", "search", "lenet", "-m", "p100", "--devices", "9999999"), "1,024 needed"),
        (("strategy", "show", "none.json"), "none.json"),
        (("machine", "show", "cray"), "machine 'cray' found"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_machines_on_the_command_line(tmp_path: Path) -> None:
    listed = json.loads(run("machine", "list", "--json").stdout)
    assert {row["name"] for row in listed["machines"]} == {"local", *shipped()}
    path = tmp_path / "here.json"
    made = run("machine", "measure", "--cpus", "2", "-o", str(path), "--json")
    assert made.exit_code == 0, made.output
    here = load_machine(path)
    assert all(processor.flops and processor.flops > 1e8 for processor in here.processors)
    assert all(memory.bytes_per_s and memory.bytes_per_s > 1e8 for memory in here.memories)
    simulated = run("strategy", "simulate", "mlp", "-m", str(path), "-s", "data", "--json")
    assert simulated.exit_code == 0, simulated.output
