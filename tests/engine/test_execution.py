"""Every operator on the runtime, under random strategies and mappers, against its reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.operator_checks import registry_cases, subject
from helpers.random_graphs import MACHINES, RandomMapper
from helpers.session_runs import ran

from soapstone.engine.lower import CHANNELS_LAST
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.spec import Case, OpSpec
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array

CASES = {name: (spec, case) for name, spec, case in registry_cases()}


def single(spec: OpSpec, arrays: tuple[Array, ...], attributes: dict[str, object]) -> Graph:
    """Return the graph of one operator; its operands are step inputs."""
    builder = GraphBuilder("single")
    names = [
        builder.input(f"in{i}", array.shape, array.dtype.name) for i, array in enumerate(arrays)
    ]
    builder.output(*builder.apply(spec.name, *names, name="node", **attributes))
    return builder.build()


def random_strategies(graph: Graph, seed: int, count: int) -> Iterator[Strategy]:
    """Yield strategies of one operator: the whole, then random legal splits."""
    random = np.random.default_rng(seed)
    choices = list(graph.signature(graph.nodes[0]).configurations(4))
    layouts = {
        name: CHANNELS_LAST
        for name, spec in graph.tensors.items()
        if spec.rank == 4 and name not in graph.roles and random.integers(2)
    }
    for index in range(count):
        degrees = choices[0] if index == 0 else choices[random.integers(len(choices))]
        yield Strategy(configurations={"node": Configuration(degrees)}, layouts=layouts)


@pytest.mark.parametrize("name", CASES)
def test_operator_under_random_strategies(name: str) -> None:
    spec, case = CASES[name]
    check(spec, case, zlib.crc32(name.encode()))


def check(spec: OpSpec, case: Case, seed: int) -> None:
    whole = subject(spec, case, "float32")
    graph = single(spec, whole.arrays, dict(case.attributes))
    expected = whole.run()
    random = np.random.default_rng(seed)
    for strategy in random_strategies(graph, seed, 3):
        machine = MACHINES[random.integers(len(MACHINES))]
        mapper = RandomMapper(int(random.integers(1 << 30)))
        values = {f"in{i}": array for i, array in enumerate(whole.arrays)}
        found, _ = ran(graph, values, strategy, machine, mapper, runs=2)
        for output, value in zip(graph.outputs, expected):
            np.testing.assert_allclose(
                np.asarray(found[output], np.float64),
                np.asarray(value, np.float64),
                rtol=2e-4,
                atol=2e-5,
                err_msg=f"{strategy.configurations['node'].degrees} on {machine.name}",
            )
