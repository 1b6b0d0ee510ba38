"""Messages among ranks, measured: `mpiexec -n 2 python messages.py`; each rank prints all."""

from __future__ import annotations

from helpers.processes import say

from soapstone.runtime.executors.mpi.links import exchange_ns
from soapstone.runtime.machines.exchanges import exchanges, links_of
from soapstone.runtime.machines.start import machine_of

SIZES = (8, 1 << 16, 1 << 20)


def main() -> None:
    """Print what each exchange takes, and the links."""
    machine = machine_of("mpi", 1)
    times = exchange_ns(machine, exchanges(machine), SIZES)
    say({tuple(each): by_size for each, by_size in times.items()}, len(links_of(machine, times)))


if __name__ == "__main__":
    main()
