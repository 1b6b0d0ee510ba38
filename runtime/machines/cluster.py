"""Clusters: machines made of equal nodes, from short descriptions in TOML or JSON.

A description has one node's devices, switches and links, and the network between nodes:

    format = "soapstone-cluster"
    version = 1
    name = "p100"
    source = "where the numbers are from"
    device = "P100"                # kind of its processors, `search/cost/devices`
    devices_per_node = 4
    memory_bytes = 17179869184
    switches = ["nic"]             # of a node, where links meet
    [[links]]                      # inside a node; devices are "0", "1", ...
    ends = [["0", "1"], ["0", "nic"]]
    latency_s = 1.5e-6
    bytes_per_s = 20e9
    half_duplex = false            # by default: both directions at once
    bus = ""                       # these links share one bandwidth
    [network]                      # from each node to one switch of full bisection
    from = "nic"
    latency_s = 2e-6
    bytes_per_s = 12.5e9
    [host]                         # optional: each node's own memory, and its link to each device
    memory_bytes = 274877906944
    latency_s = 2e-6
    bytes_per_s = 12e9
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soapstone.files import read_text
from soapstone.json_text import parse, shown, wrong
from soapstone.runtime.errors import MachineError
from soapstone.runtime.machines.machine import Link, Machine, Memory, Processor, check_fields

FORMAT, VERSION = "soapstone-cluster", 1
MOST_DEVICES = 1024  # their links and routes are listed
_SHIPPED = Path(__file__).parent
_TEXT, _WHOLE, _LIST = (str, "a text"), (int, "an integer"), (list, "a list")
_FIELDS: Mapping[str, tuple[type, str]] = {  # each with what it is
    "format": _TEXT,
    "version": _WHOLE,
    "name": _TEXT,
    "source": _TEXT,
    "device": _TEXT,
    "devices_per_node": _WHOLE,
    "memory_bytes": _WHOLE,
    "switches": _LIST,
    "links": _LIST,
    "network": (dict, "a table"),
}


def shipped() -> tuple[str, ...]:
    """The names of the machines that are described already."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.toml")))


def load_machine(name: str | Path, devices: int | None = None) -> Machine:
    """The machine of a shipped name, `local`, or a TOML or JSON file.

    Args:
        devices: how many processors; default: one node of a cluster, all cores of this computer.

    Raises: MachineError for an unknown name, a bad description, or a count that does not fit.
    """
    text = str(name)
    if devices is not None and (isinstance(devices, bool) or devices < 1):
        raise MachineError(f"machine {text!r}: {devices!r} devices found, 1 or more needed")
    if devices is not None and devices > MOST_DEVICES:
        raise MachineError(
            f"machine {text!r}: {devices:,} devices found, {MOST_DEVICES:,} needed at most"
        )
    if text == "local":
        return Machine.local(devices)
    path = _SHIPPED / f"{text.lower()}.toml"
    if text.lower() not in shipped():
        path = Path(text)
        if not path.is_file():
            raise MachineError(
                f"machine {text!r} found; local, {', '.join(shipped())},"
                " or a TOML or JSON file needed"
            )
    data = _parsed(path)
    where = f"machine file {text!r}"
    try:
        if isinstance(data, Mapping) and data.get("format") == FORMAT:
            return cluster(data, devices)
        machine = Machine.from_json(data)
    except MachineError as error:
        raise MachineError(f"{where}: {error}") from None
    if devices is not None and devices != len(machine.workers):
        raise MachineError(
            f"{where}: {len(machine.workers)} processors found, {devices} devices asked for;"
            " only clusters scale"
        )
    return machine


def _parsed(path: Path) -> Any:
    where = f"machine file {str(path)!r}"
    text = read_text(path, where, MachineError)
    if path.suffix != ".toml":
        return parse(text, where, MachineError)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{where}: not TOML: {error}") from None


def cluster(data: Mapping[str, Any], devices: int | None = None) -> Machine:
    """The machine with so many devices (default: one node) of a parsed description.

    Raises: MachineError naming the field, what was found and what was needed.
    """
    check_fields("cluster", data, _FIELDS, ("host",))
    for key, (kind, needed) in _FIELDS.items():
        if not isinstance(data[key], kind) or isinstance(data[key], bool):
            raise MachineError(f"cluster: {wrong(data, key, needed)}")
    if data["version"] != VERSION:
        raise MachineError(f"cluster: {wrong(data, 'version', str(VERSION))}")
    each = data["devices_per_node"]
    if not 1 <= each <= MOST_DEVICES:
        needed = f"1 to {MOST_DEVICES:,}"
        raise MachineError(f"cluster: {wrong(data, 'devices_per_node', needed)}")
    if not all(isinstance(switch, str) for switch in data["switches"]):
        raise MachineError(f"cluster: {wrong(data, 'switches', 'a list of names')}")
    count = each if devices is None else devices
    nodes = -(-count // each)
    known = {*map(str, range(each)), *data["switches"]}
    processors, memories, hosts, links, switches = [], [], [], [], []
    for node in range(nodes):
        here = range(min(each, count - node * each))
        for device in here:
            name = f"{node}.{device}"
            memories.append(Memory(f"memory {name}", data["memory_bytes"]))
            processors.append(
                Processor(
                    f"{data['device']} {name}",
                    kind=data["device"],
                    memory=f"memory {name}",
                    node=f"node {node}",
                )
            )
        present = {str(device): f"memory {node}.{device}" for device in here}
        present |= {switch: f"{switch} {node}" for switch in data["switches"]}
        switches += [f"{switch} {node}" for switch in data["switches"]]
        for position, entry in enumerate(data["links"]):
            links += _links(entry, f"cluster: links[{position}]", known, present, node)
        if "host" in data:
            memory, more = _host(data["host"], node, [f"memory {node}.{device}" for device in here])
            hosts.append(memory)
            links += more
    if nodes > 1:
        switches.append("network")
        links += _network(data["network"], known, nodes)
    return Machine(
        f"{data['name']}-{count}",
        tuple(processors),
        (*memories, *hosts),
        tuple(links),
        tuple(switches),
    )


def _links(
    entry: object, where: str, known: set[str], present: Mapping[str, str], node: int
) -> list[Link]:
    if not isinstance(entry, Mapping):
        raise MachineError(f"{where}: {shown(entry)} found, a table needed")
    check_fields(where, entry, ("ends", "latency_s", "bytes_per_s"), ("half_duplex", "bus"))
    made = []
    for ends in entry["ends"] if isinstance(entry["ends"], list) else [entry["ends"]]:
        if not (isinstance(ends, list) and len(ends) == 2 and set(map(str, ends)) <= known):
            raise MachineError(
                f"{where}: field 'ends' has {ends!r}, two of {', '.join(sorted(known))} needed"
            )
        a, b = map(str, ends)
        if a not in present or b not in present:
            continue  # the last node may have fewer devices
        shared = f"{entry['bus']} {node}" if entry.get("bus") else ""
        if entry.get("half_duplex") and not shared:
            shared = f"{present[a]} <-> {present[b]}"
        for source, target in ((a, b), (b, a)):
            made.append(
                Link(
                    present[source],
                    present[target],
                    entry["latency_s"],
                    entry["bytes_per_s"],
                    shared,
                )
            )
    return made


def _host(entry: object, node: int, devices: list[str]) -> tuple[Memory, list[Link]]:
    """Return a node's own memory, and the links between it and those of its devices."""
    if not isinstance(entry, Mapping):
        raise MachineError(f"cluster: host: {entry!r} found, a table needed")
    check_fields("cluster: host", entry, ("memory_bytes", "latency_s", "bytes_per_s"))
    name = f"host memory {node}"
    links = [
        Link(*ends, entry["latency_s"], entry["bytes_per_s"])
        for device in devices
        for ends in ((device, name), (name, device))
    ]
    return Memory(name, entry["memory_bytes"]), links


def _network(entry: Mapping[str, Any], known: set[str], nodes: int) -> list[Link]:
    wanted = {"from", "latency_s", "bytes_per_s"}
    if set(entry) != wanted:
        raise MachineError(f"cluster: network: {sorted(entry)} found, {sorted(wanted)} needed")
    if entry["from"] not in known:
        raise MachineError(
            f"cluster: network: field 'from' is {entry['from']!r}, one of {sorted(known)} needed"
        )
    made = []
    for node in range(nodes):
        place = f"{entry['from']} {node}"
        for source, target in ((place, "network"), ("network", place)):
            made.append(Link(source, target, entry["latency_s"] / 2, entry["bytes_per_s"]))
    return made
