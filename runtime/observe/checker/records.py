"""What a log says, as values: tables by id, and what happened in the order of the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Box = tuple[tuple[int, ...], tuple[int, ...]]
MESSAGES = ("send", "sent", "post", "recv")  # starts and ends of them
WHAT = ("task", "copy", "fill", "fold", *MESSAGES)


@dataclass(frozen=True)
class Region:
    """A logical region. zero: what was never written reads as. known: it was there before.

    held: of an argument of a task that launches tasks, its privilege there.
    """

    id: int
    name: str
    shape: tuple[int, ...]
    zero: str
    transient: bool
    known: bool
    held: str | None = None


@dataclass(frozen=True)
class Storage:
    """An instance's bytes. valid: boxes that held the region's contents when the log began."""

    id: int
    region: int
    memory: int
    box: Box
    address: int
    strides: tuple[int, ...]
    itemsize: int
    valid: tuple[Box, ...] | None


@dataclass(frozen=True)
class Argument:
    """A region argument of a launch: the boxes of each point's tile, and the privilege."""

    region: int
    privilege: str
    reduction: str | None
    identity: str | None
    tiles: tuple[tuple[Box, ...], ...]


@dataclass(frozen=True)
class Launch:
    """A launch as the program asked for it."""

    id: int
    name: str
    points: int
    initialise: bool
    arguments: tuple[Argument, ...]


@dataclass(frozen=True)
class Fill:
    """A fill as the program asked for it."""

    region: int
    value: str


@dataclass(frozen=True)
class Use:
    """A box of a storage (None: nothing) that an operation reads, writes or both."""

    storage: int | None
    box: Box
    access: str


@dataclass(frozen=True)
class Part:
    """One partial result that a fold takes: slice `place` of use `use`, and boxes relative to it.

    target: in the output's box. source: in the slice. None: all of it.
    """

    use: int
    place: int
    target: tuple[tuple[int, int], ...] | None
    source: tuple[tuple[int, int], ...] | None


@dataclass(frozen=True)
class Operation:
    """An operation as it was given to a worker.

    messages: the numbers of those that it starts or ends, one for each use. A message of a trace is
    started by a "send" or a "post" (of room for it), and has ended with the "sent" or "recv";
    others are a "send" and a "recv". rank: of the process that ran it.
    """

    id: int
    what: str
    name: str
    launch: int | None
    point: int
    processor: int
    idle: bool
    uses: tuple[Use, ...]
    after: tuple[int, ...]
    issued: int
    value: str | None = None
    fresh: str | None = None
    parts: tuple[Part, ...] = ()
    messages: tuple[int, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Trace:
    """A captured step: what it launches, and the operations that a replay runs."""

    id: int
    name: str
    launches: tuple[Launch | Fill, ...]
    operations: tuple[Operation, ...]
    order: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """One replay: when each operation of its trace started and ended."""

    trace: int
    runs: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Host:
    """What Python did to a region, through boxes of its instances."""

    action: Literal["read", "write", "claim"]
    region: int
    seen: tuple[tuple[int, Box], ...]
    at: int


@dataclass(frozen=True)
class Wait:
    """A point at which nothing was running."""

    at: int


Item = Launch | Fill | Operation | Replay | Host | Wait


@dataclass(frozen=True)
class Scope:
    """The task that launched what a part of a log holds, and from when until when (ns)."""

    task: str
    point: int
    depth: int
    begin: int
    end: int


@dataclass
class Records:
    """A log, of one rank or of all, or a part of one: what a task launched (`scope`)."""

    rank: int = 0
    ranks: int = 1
    processors: tuple[str, ...] = ()
    memories: tuple[str, ...] = ()
    runs: tuple[int, ...] = ()  # the rank of each processor
    owners: tuple[int, ...] = ()  # the rank of each memory
    first: int = 0
    clock_ns: int = 0  # by which times may be wrong
    regions: dict[int, Region] = field(default_factory=dict)
    storages: dict[int, Storage] = field(default_factory=dict)
    launches: dict[int, Launch] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    stamps: dict[int, tuple[int, int]] = field(default_factory=dict)  # of untraced operations
    items: list[Item] = field(default_factory=list)
    scope: Scope | None = None
    scopes: list[Records] = field(default_factory=list)
