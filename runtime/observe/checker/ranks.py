"""The logs of several ranks as one: what each ran of one program, and the messages between them.

Under control replication every rank logs the whole program, and its own operations. So the programs
must be the same, step by step; a message must have one start in one rank and one end in another, of
the same box of the same region; and the ranks must not wait for each other in a circle. The merged
log is then judged as that of one process whose ranks' memories share no byte.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace

from soapstone.runtime.errors import ProfileError
from soapstone.runtime.observe.checker.records import (
    Argument,
    Fill,
    Host,
    Item,
    Launch,
    Operation,
    Records,
    Replay,
    Trace,
    Use,
)

_APART = 48  # bits of an address; those above tell the ranks apart
Wrong = list[tuple[str, str]]  # kinds of violations, and what they are


def merged(logs: Sequence[Records]) -> tuple[Records, Wrong]:
    """The log of all ranks, and what is wrong with it.

    Where the programs differ, nothing else can be said: the log is empty.

    Raises: ProfileError for logs that are not those of all ranks of one run.
    """
    first = logs[0]
    machine = first.processors, first.memories, first.runs, first.owners, first.first
    for rank, log in enumerate(logs):
        theirs = log.processors, log.memories, log.runs, log.owners, log.first
        if (log.rank, log.ranks, *theirs) != (rank, len(logs), *machine):
            raise ProfileError(
                f"log: rank {log.rank} of {log.ranks} on processors {', '.join(log.processors)} "
                f"from operation {log.first} found, needed rank {rank} of {len(logs)} on "
                f"{', '.join(first.processors)} from operation {first.first}"
            )
    return (first, []) if len(logs) == 1 else _Merge(logs).run()


class _Merge:
    def __init__(self, logs: Sequence[Records]) -> None:
        self.logs = logs
        self.count = len(logs)
        self.wrong: Wrong = []
        # Regions that are one: the number that each rank has for it; and where each region is.
        self.regions: list[dict[int, int]] = []
        self.region_of: dict[tuple[int, int], int] = {}
        self.launch_of: list[dict[int, int]] = [{} for _ in logs]  # rank 0's number of each
        self.traces = {number: [trace] for number, trace in logs[0].traces.items()}  # by rank

    def run(self) -> tuple[Records, Wrong]:
        logs = self.logs
        for rank, log in enumerate(logs):
            for number in log.regions:
                self.region_of[rank, number] = len(self.regions)
                self.regions.append({rank: number})
        steps = [[i for i in log.items if not isinstance(i, Operation)] for log in logs]
        for rank in range(1, self.count):
            if not self._same_program(rank, steps[0], steps[rank]):
                return Records(), self.wrong
        untraced = [[i for i in log.items if isinstance(i, Operation)] for log in logs]
        sends = self._messages([operation for some in untraced for operation in some])
        sends_of = {
            number: self._messages([o for part in parts for o in part.operations])
            for number, parts in self.traces.items()
        }
        first = logs[0]
        found = Records(
            *(0, 1, first.processors, first.memories, first.runs, first.owners, first.first),
            max(log.clock_ns for log in logs),
        )
        self._tables(found)
        for number, parts in self.traces.items():
            found.traces[number] = self._trace(number, parts, sends_of[number])
        for rank, log in enumerate(logs):
            stamps = {self._id(rank, number): run for number, run in log.stamps.items()}
            found.stamps.update(stamps)
        self._items(found, steps, sends)
        return found, self.wrong

    def _id(self, rank: int, number: int) -> int:
        """The number of what has numbers of its own in each rank."""
        return number * self.count + rank

    # -- one program

    def _same_program(self, rank: int, ours: Sequence[Item], theirs: Sequence[Item]) -> bool:
        for step, (one, two) in enumerate(zip(ours, theirs)):
            if not self._same(rank, one, two):
                self.wrong.append(
                    (
                        "program",
                        f"step {step} of rank {rank} is {self._text(rank, two)}; of rank 0 it is "
                        f"{self._text(0, one)}",
                    )
                )
                return False
        if len(ours) != len(theirs):
            text = f"rank {rank} has {len(theirs)} steps, rank 0 has {len(ours)}"
            self.wrong.append(("program", text))
            return False
        return True

    def _same(self, rank: int, one: Item, two: Item) -> bool:
        if isinstance(one, Launch) and isinstance(two, Launch):
            self.launch_of[rank][two.id] = one.id
            return (
                (one.name, one.points, one.initialise) == (two.name, two.points, two.initialise)
                and len(one.arguments) == len(two.arguments)
                and all(
                    self._same_argument(rank, a, b) for a, b in zip(one.arguments, two.arguments)
                )
            )
        if isinstance(one, Fill) and isinstance(two, Fill):
            return one.value == two.value and self._unite((0, one.region), (rank, two.region))
        if isinstance(one, Host) and isinstance(two, Host):
            return one.action == two.action and self._unite((0, one.region), (rank, two.region))
        if isinstance(one, Replay) and isinstance(two, Replay):
            parts = self.traces[one.trace]
            if len(parts) > rank:
                return parts[rank].id == two.trace
            parts.append(self.logs[rank].traces[two.trace])
            ours, theirs = parts[0].launches, parts[rank].launches
            return len(ours) == len(theirs) and all(
                self._same(rank, a, b) for a, b in zip(ours, theirs)
            )
        return type(one) is type(two)

    def _same_argument(self, rank: int, one: Argument, two: Argument) -> bool:
        return one == replace(two, region=one.region) and self._unite(
            (0, one.region), (rank, two.region)
        )

    def _unite(self, one: tuple[int, int], two: tuple[int, int]) -> bool:
        """Take two ranks' regions as one; whether they can be."""
        a, b = (self.logs[rank].regions[number] for rank, number in (one, two))
        if replace(a, id=b.id) != b:
            return False
        mine, theirs = self.region_of[one], self.region_of[two]
        if mine == theirs:
            return True
        if self.regions[mine].keys() & self.regions[theirs].keys():
            return False
        for rank, number in self.regions[theirs].items():
            self.region_of[rank, number] = mine
            self.regions[mine][rank] = number
        self.regions[theirs] = {}
        return True

    def _text(self, rank: int, item: Item) -> str:
        regions = self.logs[rank].regions
        if isinstance(item, Launch):
            names = ", ".join(repr(regions[a.region].name) for a in item.arguments)
            return f"launch {item.name!r} of {item.points} points on {names or 'no region'}"
        if isinstance(item, Fill):
            return f"fill of region {regions[item.region].name!r} with {item.value}"
        if isinstance(item, Host):
            return f"{item.action} of region {regions[item.region].name!r}"
        if isinstance(item, Replay):
            return f"replay of trace {self.logs[rank].traces[item.trace].name!r}"
        return "a wait"

    # -- messages

    def _messages(self, operations: Sequence[Operation]) -> dict[tuple[int, int], tuple[int, int]]:
        """The send of each receive, as (rank, id); whatever does not fit is wrong."""
        ends: dict[str, dict[int, tuple[Operation, Use]]] = {"send": {}, "recv": {}}
        for operation in operations:
            for number, use in zip(operation.messages, operation.uses):
                if operation.what in ends:
                    if number in ends[operation.what]:
                        self._bad(number, f"{operation.what} twice, the second time by", operation)
                    ends[operation.what][number] = operation, use
        found = {}
        for number in sorted(ends["send"].keys() | ends["recv"].keys()):
            if number not in ends["recv"]:
                self._bad(number, "never received: it is of", ends["send"][number][0])
            elif number not in ends["send"]:
                self._bad(number, "never sent: it is for", ends["recv"][number][0])
            else:
                send, receive = ends["send"][number], ends["recv"][number]
                self._fits(number, send, receive)
                found[receive[0].rank, receive[0].id] = send[0].rank, send[0].id
        return found

    def _fits(
        self, number: int, send: tuple[Operation, Use], receive: tuple[Operation, Use]
    ) -> None:
        (one, read), (two, written) = send, receive
        if one.rank == two.rank:
            self._bad(number, "from a rank to itself:", two)
        elif one.messages != two.messages:
            self._bad(number, f"sent together with {one.messages}, received otherwise by", two)
        elif read.storage is None or written.storage is None or read.box != written.box:
            self._bad(number, f"sent of box {read.box}, received into {written.box} by", two)
        else:
            regions = [
                (o.rank, self.logs[o.rank].storages[s].region)
                for o, s in ((one, read.storage), (two, written.storage))
            ]
            if not self._unite(regions[0], regions[1]):
                self._bad(number, "sent of one region, received into another by", two)

    def _bad(self, number: int, how: str, operation: Operation) -> None:
        text = f"message {number} is {how} {operation.name!r} of rank {operation.rank}"
        self.wrong.append(("message", text))

    # -- one log

    def _tables(self, records: Records) -> None:
        for number, members in enumerate(self.regions):
            for rank, mine in list(members.items())[:1]:
                records.regions[number] = replace(self.logs[rank].regions[mine], id=number)
        for rank, log in enumerate(self.logs):
            for storage in log.storages.values():
                number = self._id(rank, storage.id)
                region = self.region_of[rank, storage.region]
                address = storage.address + (rank << _APART)
                records.storages[number] = replace(
                    storage, id=number, region=region, address=address
                )
            for scope in log.scopes:
                for number, storage in scope.storages.items():
                    address = storage.address + (rank << _APART)
                    scope.storages[number] = replace(storage, address=address)
                scope.rank = rank
                records.scopes.append(scope)
        for launch in self.logs[0].launches.values():
            records.launches[launch.id] = self._launch(launch)

    def _launch(self, launch: Launch) -> Launch:
        arguments = (replace(a, region=self.region_of[0, a.region]) for a in launch.arguments)
        return replace(launch, arguments=tuple(arguments))

    def _operation(
        self, operation: Operation, number: int, after: Iterable[int], launch: int | None
    ) -> Operation:
        """An operation under the numbers of the merged log."""
        rank = operation.rank
        log = self.logs[rank]
        for use in operation.uses:
            if use.storage is not None and log.owners[log.storages[use.storage].memory] != rank:
                text = f"{operation.name!r} of rank {rank} uses memory of another rank"
                self.wrong.append(("launch", text))
        if log.runs[operation.processor] != rank:
            text = f"{operation.name!r} of rank {rank} ran on a processor of another rank"
            self.wrong.append(("launch", text))
        uses = (
            use if use.storage is None else replace(use, storage=self._id(rank, use.storage))
            for use in operation.uses
        )
        return replace(
            operation,
            id=number,
            name=f"{operation.name} of rank {rank}",
            uses=tuple(uses),
            after=tuple(after),
            launch=launch,
        )

    def _named(self, operation: Operation) -> int | None:
        """Rank 0's number of the launch that an operation is of."""
        if operation.launch is None or operation.rank == 0:
            return operation.launch
        return self.launch_of[operation.rank].get(operation.launch)

    def _trace(
        self,
        number: int,
        parts: Sequence[Trace],
        sends: dict[tuple[int, int], tuple[int, int]],
    ) -> Trace:
        starts = [sum(len(part.operations) for part in parts[:rank]) for rank in range(self.count)]
        operations = []
        for rank, part in enumerate(parts):
            for operation in part.operations:
                after = [starts[rank] + before for before in operation.after]
                if (rank, operation.id) in sends:
                    other, send = sends[rank, operation.id]
                    after.append(starts[other] + send)
                mine = starts[rank] + operation.id
                operations.append(self._operation(operation, mine, after, self._named(operation)))
        turns = [[starts[rank] + n for n in part.order] for rank, part in enumerate(parts)]
        launches = tuple(
            replace(one, region=self.region_of[0, one.region])
            if isinstance(one, Fill)
            else self._launch(one)
            for one in parts[0].launches
        )
        order = self._one_order(parts[0].name, operations, turns)
        return Trace(number, parts[0].name, launches, tuple(operations), order)

    def _one_order(
        self, name: str, operations: Sequence[Operation], turns: Sequence[Sequence[int]]
    ) -> tuple[int, ...]:
        """An order of all ranks' operations in which none waits for a later one.

        A processor runs its operations in turn, a receive ends after its send began, and the end of
        a send may have to wait until it was received. turns: the order in each rank.
        """
        after: list[set[int]] = [set() for _ in operations]
        before = [set(operation.after) for operation in operations]
        receives = {o.messages: o.id for o in operations if o.what == "recv"}
        for operation in operations:
            if operation.what == "sent" and operation.messages in receives:
                before[operation.id].add(receives[operation.messages])
        for turn in turns:
            last: dict[int, int] = {}
            for number in turn:
                processor = operations[number].processor
                before[number].update([last[processor]] if processor in last else [])
                last[processor] = number
        for number, some in enumerate(before):
            for source in some:
                after[source].add(number)
        place = {number: (at, number) for turn in turns for at, number in enumerate(turn)}
        left = [len(some) for some in before]
        ready = [place[number] for number, count in enumerate(left) if not count]
        heapq.heapify(ready)
        order: list[int] = []
        while ready:
            number = heapq.heappop(ready)[1]
            order.append(number)
            for later in after[number]:
                left[later] -= 1
                if not left[later]:
                    heapq.heappush(ready, place[later])
        stuck = sorted((place[n] for n, count in enumerate(left) if count))
        if stuck:
            names = ", ".join(repr(operations[n].name) for _, n in stuck[:4])
            text = f"trace {name!r}: {names} wait for each other in a circle, or for those that do"
            self.wrong.append(("message", text))
        return (*order, *(number for _, number in stuck))

    def _items(
        self,
        records: Records,
        steps: Sequence[Sequence[Item]],
        sends: dict[tuple[int, int], tuple[int, int]],
    ) -> None:
        """What happened: the operations of all ranks between two steps, then the step."""
        streams = [iter(log.items) for log in self.logs]
        for place in range(len(steps[0]) + 1):
            for rank, stream in enumerate(streams):
                for item in stream:
                    if not isinstance(item, Operation):
                        break
                    after = [self._id(rank, before) for before in item.after]
                    if (rank, item.id) in sends:
                        after.append(self._id(*sends[rank, item.id]))
                    mine = self._id(rank, item.id)
                    records.items.append(self._operation(item, mine, after, self._named(item)))
            if place < len(steps[0]):
                records.items.append(self._step([some[place] for some in steps], records))

    def _step(self, step: Sequence[Item], records: Records) -> Item:
        one = step[0]
        if isinstance(one, Launch):
            return records.launches[one.id]
        if isinstance(one, Fill):
            return replace(one, region=self.region_of[0, one.region])
        if isinstance(one, Host):
            seen = [
                (self._id(rank, storage), box)
                for rank, item in enumerate(step)
                if isinstance(item, Host)
                for storage, box in item.seen
            ]
            return replace(one, region=self.region_of[0, one.region], seen=tuple(seen))
        if isinstance(one, Replay):
            runs: dict[int, tuple[int, int]] = {}
            for item in step:
                if isinstance(item, Replay):
                    start = len(runs)
                    runs.update((start + number, run) for number, run in item.runs.items())
            return Replay(one.trace, runs)
        return one
