"""Machines: processors, memories and the links between them, real or only described."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, replace
from functools import cached_property
from typing import Any, TypeVar

from soapstone.files import read_text, write
from soapstone.json_text import parse, shown, wrong
from soapstone.records import dataclass
from soapstone.runtime.errors import MachineError
from soapstone.system import physical_bytes, usable_cores

VERSION = 1
MOST_THREADS = 8192  # of one process: the system refuses more sooner or later, or ends it
PROCESS = "process"  # the kind of processors whose Python bodies run in a process of their own
COPIER = "copier"  # the kind of those that run no tasks, but what is copied to or from a memory
CUDA = "cuda"  # the kind of those that are NVIDIA GPUs: their memory is a device's
_T = TypeVar("_T")


def _text(owner: str, name: str, found: object) -> None:
    if not isinstance(found, str) or not found:
        raise MachineError(f"{owner}: field {name!r} is {found!r}, a non-empty string needed")


def _number(
    owner: str, name: str, found: object, *, whole: bool, least: float, optional: bool = False
) -> None:
    if optional and found is None:
        return
    kind = "an integer" if whole else "a finite number"
    good = isinstance(found, int) if whole else isinstance(found, int | float)
    good = good and not isinstance(found, bool)
    if good and least <= found <= sys.float_info.max:  # type: ignore[operator]
        return
    also = " or null" if optional else ""
    raise MachineError(f"{owner}: field {name!r} is {found!r}, {kind} >= {least:g}{also} needed")


@dataclass(frozen=True)
class Processor:
    """One worker: `threads` hardware threads that run one point task at a time.

    `kind` "process" runs Python bodies in a process of its own, out of the interpreter's lock;
    "cuda" is a GPU, whose memory is its own and has copiers; the first is the driver's first; the
    first "copier" of a memory makes the copies to it, the second those from it, and no tasks.
    `memory` names the memory its instances live in by default; `flops` is its peak rate in
    floating-point operations a second, or None when unknown; `node` is the computer it is in, empty
    where there is but one.

    Raises: MachineError.
    """

    name: str
    kind: str = "cpu"
    threads: int = 1
    memory: str = "system"
    flops: float | None = None
    node: str = ""

    def __post_init__(self) -> None:
        _text("processor", "name", self.name)
        owner = f"processor {self.name!r}"
        _text(owner, "kind", self.kind)
        _text(owner, "memory", self.memory)
        _number(owner, "threads", self.threads, whole=True, least=1)
        if self.threads > MOST_THREADS:
            raise MachineError(f"{owner}: {self.threads:,} threads found, {MOST_THREADS:,} at most")
        _number(owner, "flops", self.flops, whole=False, least=0, optional=True)
        if not isinstance(self.node, str):
            raise MachineError(f"{owner}: field 'node' is {self.node!r}, a string needed")


@dataclass(frozen=True)
class Memory:
    """A memory of `capacity_bytes`, read and written at `bytes_per_s` (None when unknown).

    Raises: MachineError.
    """

    name: str
    capacity_bytes: int
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        _text("memory", "name", self.name)
        owner = f"memory {self.name!r}"
        _number(owner, "capacity_bytes", self.capacity_bytes, whole=True, least=1)
        _number(owner, "bytes_per_s", self.bytes_per_s, whole=False, least=0, optional=True)


@dataclass(frozen=True)
class Link:
    """A one-way link between two memories or switches.

    source, target: their names. latency_s: seconds that a message takes besides its bytes.
    bytes_per_s: bytes a second.

    Links that name the same `bus` share its bandwidth: a half-duplex cable is two links on a bus.

    Raises: MachineError.
    """

    source: str
    target: str
    latency_s: float
    bytes_per_s: float
    bus: str = ""

    def __post_init__(self) -> None:
        _text("link", "source", self.source)
        _text("link", "target", self.target)
        owner = f"link {self.source!r} -> {self.target!r}"
        _number(owner, "latency_s", self.latency_s, whole=False, least=0)
        _number(owner, "bytes_per_s", self.bytes_per_s, whole=False, least=1e-300)
        if not isinstance(self.bus, str):
            raise MachineError(f"{owner}: field 'bus' is {self.bus!r}, a string needed")


def check_fields(what: str, found: object, needed: Iterable[str], also: Iterable[str] = ()) -> None:
    """Refuse an object that lacks a needed field, or has one that is not known.

    also: the fields that may be left out.

    Raises: MachineError naming the field.
    """
    if not isinstance(found, Mapping):
        raise MachineError(f"{what}: {shown(found)} found, an object needed")
    needed = tuple(needed)
    known = (*needed, *also)
    for key in found:
        if key not in known:
            raise MachineError(f"{what}: unknown field {key!r}; known: {', '.join(known)}")
    for key in needed:
        if key not in found:
            raise MachineError(f"{what}: field {key!r} is missing")


def _parse(kind: type[_T], what: str, found: Any) -> _T:
    """One dataclass from one JSON object."""
    about = fields(kind)  # type: ignore[arg-type]
    needed = [field.name for field in about if field.default is MISSING]
    check_fields(what, found, needed, {field.name for field in about} - set(needed))
    return kind(**found)


@dataclass(frozen=True)
class Machine:
    """Processors, memories and links; order is meaning: processor index i is `processors[i]`.

    Copiers come last, two a memory.

    The first memory is the host memory: what Python reads and writes. `switches` are where links
    meet that hold no data; a copy between memories takes the fastest way over them (`routes`).

    Raises: MachineError for duplicate names, unknown memories or an empty machine.
    """

    name: str
    processors: tuple[Processor, ...]
    memories: tuple[Memory, ...]
    links: tuple[Link, ...] = ()
    switches: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _text("machine", "name", self.name)
        owner = f"machine {self.name!r}"
        wanted = (("processors", Processor), ("memories", Memory), ("links", Link))
        for name, kind in wanted:
            found = tuple(getattr(self, name))
            object.__setattr__(self, name, found)
            if not found and name != "links":
                raise MachineError(f"{owner}: field {name!r} is empty, at least one needed")
            for item in found:
                if not isinstance(item, kind):
                    raise MachineError(
                        f"{owner}: field {name!r} holds {item!r}, a {kind.__name__} needed"
                    )
        object.__setattr__(self, "switches", tuple(self.switches))
        for switch in self.switches:
            _text(owner, "switches", switch)
        places = [*(item.name for item in self.memories), *self.switches]
        for name, names in (
            ("processors", [item.name for item in self.processors]),
            ("memories or switches", places),
            ("links", [(item.source, item.target) for item in self.links]),
        ):
            for item, count in Counter(names).items():
                if count > 1:
                    raise MachineError(f"{owner}: field {name!r} has {item!r} more than once")
        present = {memory.name for memory in self.memories}
        for processor in self.processors:
            if processor.memory not in present:
                raise MachineError(
                    f"{owner}: processor {processor.name!r}: field 'memory' is "
                    f"{processor.memory!r}, needed one of {sorted(present)}"
                )
        if 0 in self.devices:
            raise MachineError(
                f"{owner}: memory {self.memories[0].name!r} is the host's and a GPU's; another"
                " first memory needed"
            )
        if self.processors[: len(self.workers)] != self.workers or not self.workers:
            raise MachineError(f"{owner}: copiers found before or without other processors")
        for name, count in Counter(p.memory for p in self.processors[len(self.workers) :]).items():
            if count != 2:
                raise MachineError(f"{owner}: memory {name!r}: {count} copiers found, 2 needed")
        ends = set(places)
        for link in self.links:
            for name, end in (("source", link.source), ("target", link.target)):
                if end not in ends:
                    raise MachineError(
                        f"{owner}: link {link.source!r} -> {link.target!r}: field {name!r} is "
                        f"{end!r}, needed one of {sorted(ends)}"
                    )
            if link.source == link.target:
                raise MachineError(f"{owner}: link from {link.source!r} to itself")

    @cached_property
    def workers(self) -> tuple[Processor, ...]:
        """The processors that tasks are placed on: all but copiers."""
        return tuple(each for each in self.processors if each.kind != COPIER)

    @cached_property
    def devices(self) -> Mapping[int, int]:
        """The memories of GPUs, by index, and the number that each GPU has on its node."""
        nodes = {p.memory: p.node for p in self.processors if p.kind == CUDA}
        index = {memory.name: number for number, memory in enumerate(self.memories)}
        count: Counter[str] = Counter()
        found = {}
        for name, node in nodes.items():
            found[index[name]] = count[node]
            count[node] += 1
        return found

    @property
    def host(self) -> Memory:
        """The memory that Python reads and writes: the first."""
        return self.memories[0]

    @staticmethod
    def local(
        cpus: int | None = None,
        threads: int = 1,
        memory_bytes: int | None = None,
        memories: int = 1,
        processes: bool = False,
        gpus: int = 0,
    ) -> Machine:
        """This computer: `cpus` processors (default: all cores) of `threads` threads each.

        With `gpus` its processors are so many NVIDIA GPUs instead (docs/cuda.md), each with its
        memory and two copiers, with the computer's memory behind them.

        With `memories` > 1 the processors are spread over separate memories, linked pairwise:
        all are this computer's memory, so this is for testing copies. `memory_bytes` is the
        capacity of each (default: physical memory, or the control group's limit where that is
        lower, divided equally). What other processes use of it counts when memory is claimed.
        With `processes`, Python bodies run in a process for each processor.

        Raises: MachineError.
        """
        _number("Machine.local", "threads", threads, whole=True, least=1)
        _number("Machine.local", "gpus", gpus, whole=True, least=0)
        if gpus:
            if cpus is not None or memories > 1 or processes:
                raise MachineError(
                    f"Machine.local: {gpus} gpus found beside cpus, memories or processes; a"
                    " machine of GPUs has none of these"
                )
            from soapstone.runtime.devices.machine import gpu_machine

            return gpu_machine(gpus, memory_bytes)
        if cpus is None:
            cpus = max(1, usable_cores() // threads)
        _number("Machine.local", "cpus", cpus, whole=True, least=1)
        if cpus * threads > MOST_THREADS:
            raise MachineError(
                f"Machine.local: {cpus:,} processors of {threads:,} threads found,"
                f" {MOST_THREADS:,} threads in all needed at most"
            )
        _number("Machine.local", "memories", memories, whole=True, least=1)
        if memory_bytes is None:
            memory_bytes = physical_bytes() // memories
        kind = PROCESS if processes else "cpu"
        names = ["system"] if memories == 1 else [f"memory{m}" for m in range(memories)]
        return Machine(
            name="local",
            processors=tuple(
                Processor(f"cpu{p}", kind, threads, memory=names[p * memories // cpus])
                for p in range(cpus)
            ),
            memories=tuple(Memory(name, memory_bytes) for name in names),
            links=tuple(
                Link(a, b, latency_s=1e-6, bytes_per_s=10e9) for a in names for b in names if a != b
            ),
        )

    def bounded(self, memory_bytes: int, copiers: bool = False) -> Machine:
        """This machine with a memory of `memory_bytes` between its processors and each memory.

        Processors of "system" then work in "system.bounded", as those of a device do in its own
        memory; mappers that stream (`bounded_memory`) run more in it than it holds. With `copiers`,
        two more processors copy to and from each such memory, while the others compute. GPUs work
        in memories of their own already, with copiers: these have `memory_bytes` then.

        Raises: MachineError.
        """
        _number("Machine.bounded", "memory_bytes", memory_bytes, whole=True, least=1)
        if self.devices:
            return self.limited(memory_bytes)
        used = list(dict.fromkeys(processor.memory for processor in self.processors))
        rates = {memory.name: memory.bytes_per_s or 10e9 for memory in self.memories}
        nodes = {processor.memory: processor.node for processor in self.processors}
        return replace(
            self,
            processors=(
                *(replace(p, memory=f"{p.memory}.bounded") for p in self.processors),
                *(
                    Processor(f"{name}.{way}", COPIER, memory=f"{name}.bounded", node=nodes[name])
                    for name in (used if copiers else ())
                    for way in ("in", "out")
                ),
            ),
            memories=(*self.memories, *(Memory(f"{name}.bounded", memory_bytes) for name in used)),
            links=(
                *self.links,
                *(
                    Link(*ends, latency_s=1e-6, bytes_per_s=rates[name])
                    for name in used
                    for ends in ((name, f"{name}.bounded"), (f"{name}.bounded", name))
                ),
            ),
        )

    def limited(self, memory_bytes: int) -> Machine:
        """This machine where memories that processors work in have `memory_bytes` at most.

        Raises: MachineError.
        """
        _number("Machine.limited", "memory_bytes", memory_bytes, whole=True, least=1)
        used = {processor.memory for processor in self.processors}
        return replace(
            self,
            memories=tuple(
                replace(each, capacity_bytes=min(each.capacity_bytes, memory_bytes))
                if each.name in used
                else each
                for each in self.memories
            ),
        )

    def describe(self) -> dict[str, Any]:
        """A stable dictionary of everything in the machine; `from_json` reads it back."""
        return {
            "version": VERSION,
            "name": self.name,
            "processors": [asdict(item) for item in self.processors],
            "memories": [asdict(item) for item in self.memories],
            "links": [asdict(item) for item in self.links],
            "switches": list(self.switches),
        }

    def to_json(self) -> dict[str, Any]:
        """The machine as a JSON-ready dictionary (versioned)."""
        return self.describe()

    @staticmethod
    def from_json(data: Any) -> Machine:
        """The machine that a dictionary (data), as of `to_json`, describes.

        Raises: MachineError naming the field, what was found and what was needed.
        """
        needed = ("version", "name", "processors", "memories")
        check_fields("machine", data, needed, ("links", "switches"))
        version = data["version"]
        if version != VERSION or isinstance(version, bool):
            raise MachineError(f"machine: {wrong(data, 'version', str(VERSION))}")
        kinds = {"processors": Processor, "memories": Memory, "links": Link, "switches": None}
        lists: dict[str, tuple[Any, ...]] = {}
        for key, kind in kinds.items():
            found = data.get(key, [])
            if not isinstance(found, list):
                raise MachineError(f"machine: {wrong(data, key, 'a list')}")
            lists[key] = tuple(
                item if kind is None else _parse(kind, f"{key}[{i}]", item)
                for i, item in enumerate(found)
            )
        return Machine(data["name"], **lists)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Machine:
        """The machine in a JSON file.

        Raises: MachineError for a file that is not JSON or not a machine; OSError.
        """
        where = f"machine file {os.fspath(path)!r}"
        data = parse(read_text(path, where, MachineError), where, MachineError)
        try:
            return Machine.from_json(data)
        except MachineError as error:
            raise MachineError(f"{where}: {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the machine to a JSON file that `load` reads, whole or not at all."""
        write(path, (json.dumps(self.to_json(), indent=2) + "\n").encode())
