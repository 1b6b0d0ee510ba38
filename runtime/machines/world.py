"""The processes of a run: which memories are whose, and which process this one is."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.records import dataclass
from soapstone.runtime.errors import MachineError
from soapstone.runtime.machines.machine import Machine


@dataclass(frozen=True)
class World:
    """Process `rank` of a run; `owners[memory]` and `runs[processor]` are ranks.

    direct: whether messages take what lies in the memory of a GPU, and bring it there.

    Every process runs the same program and takes the same decisions (control replication, Bauer et
    al., PPoPP 2021); each allocates, and runs, only what is its own.
    """

    rank: int
    owners: tuple[int, ...]
    runs: tuple[int, ...]
    direct: bool = False

    @staticmethod
    def alone(machine: Machine) -> World:
        """The world of a single process, which owns all memories and runs all processors."""
        return World(0, (0,) * len(machine.memories), (0,) * len(machine.processors))

    @staticmethod
    def of(machine: Machine, rank: int, owners: Sequence[int]) -> World:
        """Process `rank` of those that own each memory.

        Raises: MachineError for a process that owns no memory.
        """
        by_name = {memory.name: owner for memory, owner in zip(machine.memories, owners)}
        for process in range(max(owners) + 1):
            if process not in owners:
                raise MachineError(f"machine {machine.name!r}: process {process} has no memory")
        runs = tuple(by_name[processor.memory] for processor in machine.processors)
        return World(rank, tuple(owners), runs)

    @property
    def size(self) -> int:
        """The number of processes."""
        return max(self.owners) + 1

    @property
    def hosts(self) -> tuple[int, ...]:
        """The memory that each process' Python reads and writes: the first it owns."""
        return tuple(self.owners.index(process) for process in range(self.size))

    @property
    def home(self) -> int:
        """The memory that this process' Python reads and writes."""
        return self.owners.index(self.rank)

    def apart(self, one: int, two: int) -> bool:
        """Whether two memories belong to different processes."""
        return self.owners[one] != self.owners[two]
