"""What messages among ranks take, by who takes part and size: measured, kept, interpolated.

TensorOpt, section 2.1: communication is profiled for each partitioning of devices and each size
2^i, and what lies between is interpolated. What is not known is priced by latency and bandwidth.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from soapstone.cache.sources import stamp
from soapstone.runtime import Machine
from soapstone.runtime.machines.exchanges import Exchange, exchanges
from soapstone.search.cost.database import database

SHORT = 4096  # bytes of messages whose latency is all


@dataclass(frozen=True)
class MessageTimes:
    """Nanoseconds of exchanges among ranks: those of their busiest member, by bytes of the value.

    factors: how much longer it takes in a step, for bytes below `SHORT`, and from there on.
    """

    measured: Mapping[Exchange, Mapping[int, float]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    factors: tuple[float, float] = (1.0, 1.0)

    def ns(self, exchange: Exchange, nbytes: float) -> float:
        """Return what an exchange takes: between sizes in proportion, beyond them as long a byte.

        Raises:
            KeyError: it is not known.
        """
        known = self.measured[exchange]
        sizes = sorted(known)
        found = np.interp(nbytes, sizes, [known[size] for size in sizes])
        return float(found) * max(1.0, nbytes / sizes[-1]) * self.factors[int(nbytes >= SHORT)]


def profiled(machine: Machine) -> MessageTimes:
    """Return the times of a machine of ranks; those that the cost database lacks are measured.

    Every rank must call it; all get the same.
    """
    from soapstone.runtime.executors.mpi import links
    from soapstone.runtime.executors.mpi.executor import connect

    store, comm = database(), connect()
    made = stamp(links.__name__, compiled=True)
    nodes = [processor.node for processor in machine.processors]
    about = [nodes, len(machine.memories), links.SIZES, made]
    names = {each: json.dumps(["messages", about, *each]) for each in exchanges(machine)}
    kept = comm.bcast(store.find(names.values()))
    missing = [each for each, name in names.items() if name not in kept]
    if missing:
        found = links.exchange_ns(machine, missing)
        kept |= {names[each]: [*found[each].items()] for each in missing}
        if comm.Get_rank() == 0:
            store.update({names[each]: kept[names[each]] for each in missing})
    return MessageTimes({each: dict(map(tuple, kept[name])) for each, name in names.items()})
