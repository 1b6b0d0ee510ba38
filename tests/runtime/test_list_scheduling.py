"""The order of a step over ranks: what may go on goes on, messages leave early, nothing starves."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.runtime import Partition, ReadWrite, Region, Task
from soapstone.runtime.analysis.instance import Storage, Use
from soapstone.runtime.analysis.message import joined, launches
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.machines.world import World
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.tracing.bucket import HEAVY_BYTES
from soapstone.runtime.tracing.list_scheduling import LAG_BYTES, WINDOW, list_schedule

TWO = World(0, (0, 1), (0, 1))


class Program:
    """Operations of two ranks in program order, with their dependences."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.edges: list[tuple[int, int]] = []

    def task(self, rank: int, nbytes: int, *after: int) -> int:
        """Add a task that touches so many bytes; return its number."""
        region = Region((nbytes,), np.uint8, "data")
        task = Task("work", (ReadWrite,), body=lambda context, data: None)
        launch = Launch(task, (Partition.whole(region),), (), (True,), (1,), "work")
        return self._add(launch, rank, region, after)

    def message(self, source: int, *after: int, nbytes: int = 64) -> tuple[int, int]:
        """Add a message to the other rank; return the numbers of its send and its receive."""
        region = Region((nbytes,), np.uint8, "data")
        box = (0,), (nbytes,)
        storages = [Storage(region, memory, box, None) for memory in (source, 1 - source)]
        send, receive = launches(Partition.whole(region), TWO, *storages)
        return (
            self._add(send, source, region, after),
            self._add(receive, 1 - source, region, ()),
        )

    def _add(self, launch: Launch, rank: int, region: Region, after: tuple[int, ...]) -> int:
        number = len(self.operations)
        box = (0,), region.shape
        use = Use(Storage(region, rank, box, None), box, True, False)
        self.operations.append(Operation(number, launch, 0, rank, (use,), 0, None))
        self.edges += [(before, number) for before in after]
        return number

    def ordered(self) -> list[int]:
        edges = joined(self.operations, np.array(self.edges, np.int64).reshape(-1, 2))
        found = list_schedule(self.operations, range(len(self.operations)), edges, TWO)
        place = {number: position for position, number in enumerate(found)}
        assert sorted(found) == list(range(len(self.operations)))
        assert all(place[a] < place[b] for a, b in edges.tolist())
        return found


def test_a_rank_does_what_it_can_while_a_message_travels() -> None:
    program = Program()
    made = program.task(0, HEAVY_BYTES)
    _, receive = program.message(0, made)
    reads = program.task(1, 100, receive)
    others = [program.task(1, LAG_BYTES) for _ in range(3)]
    found = program.ordered()
    mine = [number for number in found if program.operations[number].processor == 1]
    # The second of them begins before the message can have come, the third after that.
    assert mine == [others[0], others[1], receive, reads, others[2]]


def test_a_message_leaves_as_soon_as_there_is_what_it_carries() -> None:
    program = Program()
    made = program.task(0, HEAVY_BYTES)
    later = [program.task(0, HEAVY_BYTES) for _ in range(3)]
    send, _ = program.message(0, made)
    mine = [n for n in program.ordered() if program.operations[n].processor == 0]
    assert mine == [made, send, *later]


def test_nothing_falls_behind_without_bound() -> None:
    """The message comes only after hours of the other rank, but is waited for in the end."""
    program = Program()
    made = program.task(0, 1 << 40)
    _, receive = program.message(0, made)
    for _ in range(4 * WINDOW):
        program.task(1, 10)
    mine = [n for n in program.ordered() if program.operations[n].processor == 1]
    assert mine[-1] == receive  # what nothing can be done for yet keeps nobody waiting

    program = Program()
    _, receive = program.message(0)
    for _ in range(4 * WINDOW):
        program.task(1, 10)
    mine = [n for n in program.ordered() if program.operations[n].processor == 1]
    assert mine.index(receive) == WINDOW - 1  # it is under way, and its place is the second


@pytest.mark.parametrize("seed", range(8))
def test_every_dependence_points_forward(seed: int) -> None:
    random = np.random.default_rng(seed)
    program = Program()
    here: dict[int, list[int]] = {0: [], 1: []}  # what the tasks of a rank may depend on
    for _ in range(150):
        rank = int(random.integers(2))
        some = here[rank]
        after = {int(n) for n in random.choice(some, min(3, len(some)))} if some else set()
        if some and random.random() < 0.3:
            _, receive = program.message(rank, *after, nbytes=int(random.integers(1, 1 << 20)))
            here[1 - rank].append(receive)
        else:
            here[rank].append(program.task(rank, int(random.integers(1, 1 << 22)), *after))
    program.ordered()
