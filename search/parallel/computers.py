"""Whole computers as single devices: a smaller machine, whose strategy is spread over the cluster.

A search on a machine with one device for each computer is fast, and finds what is worth sending
over the network. Its strategy is then spread over the devices of the computers in two ways, by
samples and by channels, and the search on all devices begins from the better one (beyond Jia,
section 3.5).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soapstone.engine.parallelism import legal
from soapstone.ir.strategy.configuration import Configuration
from soapstone.runtime import Machine, Memory, Processor
from soapstone.runtime.machines.machine import Link
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel.mcmc.initial import Parallel, computers_of, kinds_of_dims
from soapstone.search.parallel.problem.operators import Operator
from soapstone.search.parallel.problem.prepare import Model, prepare
from soapstone.search.parallel.problem.timing import described


class Computers:
    """A model on a machine that has one device for each computer of the cluster.

    Attributes:
        model: None if that would be the same machine or a single device, if computers have unequal
            numbers of devices, or if times are measured.
    """

    def __init__(self, full: Model) -> None:
        self.full = full
        self.members = computers_of(full.machine)
        sizes = {len(devices) for devices in self.members}
        self.model = None
        if len(self.members) < 2 or len(sizes) > 1 or sizes == {1}:
            return
        if not isinstance(full.machine, MeasuredMachine):
            self.model = prepare(full.graph, self._machine())

    def _machine(self) -> Machine:
        """Return the machine: rates and memories are summed, links between computers are kept."""
        full, routed = self.full.machine, self.full.routes
        processors, memories, links = [], [], []
        for name, devices in zip((str(i) for i in range(len(self.members))), self.members):
            each = [described(full, number) for number in devices]
            memories.append(
                Memory(
                    name,
                    sum(item.memory_bytes for item in each),
                    sum(item.bytes_per_s * item.memory_share for item in each),
                )
            )
            flops = sum(item.flops_per_s["float32"] * item.compute_share for item in each)
            processors.append(Processor(name, kind="computer", memory=name, flops=flops, node=name))
        for i, a in enumerate(self.members):
            way = routed.latency_s[a[0], self.members[i - 1][0]] / 2
            rate = 1.0 / routed.s_per_byte[a[0], self.members[i - 1][0]]
            links += [Link(str(i), "network", way, rate), Link("network", str(i), way, rate)]
        return Machine(full.name, tuple(processors), tuple(memories), tuple(links), ("network",))

    def spread(
        self, configurations: Mapping[str, Configuration], inside: Parallel
    ) -> dict[str, Configuration]:
        """Return a strategy for all devices, which splits each computer's part further.

        Args:
            inside: what is split within a computer. An operator without such a dim is split by
                samples; one that cannot be split runs on the first device.
        """
        spread = {}
        for item in self.full.operators:
            if item.name not in configurations:
                continue
            coarse = configurations[item.name]
            kinds = kinds_of_dims(self.full.graph, item.node)
            wanted = [dim for dim, kind in kinds.items() if kind is inside]
            wanted += [dim for dim, kind in kinds.items() if kind is Parallel.SAMPLE]
            fine = (self._cut(item, coarse, dim) for dim in wanted)
            first = tuple(self.members[device][0] for device in coarse.devices)
            whole = Configuration(coarse.degrees, first, coarse.cuts)
            spread[item.name] = next((each for each in fine if each is not None), whole)
        return spread

    def _cut(self, item: Operator, coarse: Configuration, dim: str) -> Configuration | None:
        """Return a configuration with a dim split further, a part for each device of a computer."""
        signature, each = self.full.graph.signature(item.node), len(self.members[0])
        degrees = {d.name: coarse.degrees.get(d.name, 1) for d in signature.dims}
        grid = tuple(degrees.values())
        degrees[dim] *= each
        if degrees[dim] > signature.by_name[dim].extent or dim in coarse.cuts:
            return None
        if not legal(self.full.graph, item.node, degrees):
            return None
        index = dict(zip(degrees, np.indices(tuple(degrees.values())).reshape(len(degrees), -1)))
        inside = index[dim] % each
        index[dim] = index[dim] // each
        points = np.ravel_multi_index(tuple(index.values()), grid)
        devices = tuple(self.members[coarse.devices[p]][i] for p, i in zip(points, inside))
        return Configuration({d: n for d, n in degrees.items() if n > 1}, devices, coarse.cuts)
