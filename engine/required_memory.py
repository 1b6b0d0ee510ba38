"""What memories would hold if a graph were bound, without binding it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soapstone.engine.images import imaged
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.prepare import prepare
from soapstone.engine.session import CARRIED, program_of, region_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array, Role
from soapstone.kernels.choices import Choices
from soapstone.runtime import Machine
from soapstone.runtime.tracing.dry_run import DryRun

_NONE = np.zeros(0)  # contents that nobody reads


def required_memory(
    graph: Graph,
    strategy: Strategy,
    machine: Machine,
    contents: Mapping[str, Array] = NOTHING,
) -> tuple[int, ...]:
    """Return the bytes that each memory of a machine would hold if a graph were bound on it.

    Nothing is allocated: the launches are analysed and laid out as `Session.bind` does it, so the
    result equals `Session.used_bytes` after binding. Processors with a node number are those of MPI
    ranks, each of which owns an equal number of memories.

    contents: of constants by name, from which the images of gathers follow (`engine.images`).
    Without them the whole gathered value is counted.

    Raises:
        StrategyError: the strategy is not legal for the graph.
    """
    constants = graph.inputs(Role.CONSTANT)
    prepared, mapper = prepare(graph, strategy, set(constants)), GraphMapper()
    ranks = {processor.memory for processor in machine.processors if processor.node}
    step = DryRun(machine, mapper, processes=len(ranks) or 1)
    mapper.adopt(prepared.strategy)
    lowered = prepared.graph
    regions = {
        name: step.hold(region_of(lowered, name), live=graph.roles.get(name) not in CARRIED)
        for name in dict.fromkeys((*graph.roles, *lowered.outputs))
        if name not in constants
    }
    known = dict.fromkeys(constants, _NONE) | dict(contents)
    images = imaged(prepared, known, machine, range(len(machine.processors)))
    program_of(prepared, regions, known, Choices(), images).launch(step)
    return step.nbytes()
