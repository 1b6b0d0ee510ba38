"""Every operator on the runtime, under random strategies and mappers, against its reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from helpers.graph_runs import MACHINES, RandomMapper
from helpers.operator_checks import named, subject
from helpers.session_runs import ran

from soapstone.engine.lower import CHANNELS_LAST
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.spec import OpSpec, operators
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array


def single(spec: OpSpec, arrays: tuple[Array, ...], attributes: dict[str, object]) -> Graph:
    """Return the graph of one operator; its operands are step inputs."""
    builder = GraphBuilder("single")
    names = [
        builder.input(f"in{i}", array.shape, array.dtype.name) for i, array in enumerate(arrays)
    ]
    builder.output(*builder.apply(spec.name, *names, name="node", **attributes))
    return builder.build()


def random_strategies(graph: Graph, random: np.random.Generator, whole: bool) -> Iterator[Strategy]:
    """Yield strategies of one operator: the whole, where that is asked for, and a legal split."""
    choices = list(graph.signature(graph.nodes[0]).configurations(4))
    layouts = {
        name: CHANNELS_LAST[spec.rank]
        for name, spec in graph.tensors.items()
        if spec.rank in CHANNELS_LAST and name not in graph.roles and random.integers(2)
    }
    for degrees in (*choices[: int(whole)], choices[random.integers(len(choices))]):
        yield Strategy(configurations={"node": Configuration(degrees)}, layouts=layouts)


@pytest.mark.parametrize("spec", operators(), ids=lambda spec: spec.name)
def test_operator_under_random_strategies(spec: OpSpec) -> None:
    """The first case whole, and every case under a random strategy, machine and mapper."""
    random = np.random.default_rng(zlib.crc32(spec.name.encode()))
    for number, case in enumerate(spec.cases):
        item = subject(spec, case, "float32")
        graph, expected = single(spec, item.arrays, dict(case.attributes)), item.run()
        values = {f"in{i}": array for i, array in enumerate(item.arrays)}
        for strategy in random_strategies(graph, random, whole=number == 0):
            machine = MACHINES[random.integers(len(MACHINES))]
            mapper = RandomMapper(int(random.integers(1 << 30)))
            with named(case, strategy.configurations["node"].degrees, machine.name):
                found, _ = ran(graph, values, strategy, machine, mapper, runs=2)
                for output, value in zip(graph.outputs, expected, strict=True):
                    np.testing.assert_allclose(
                        np.asarray(found[output], np.float64),
                        np.asarray(value, np.float64),
                        rtol=2e-4,
                        atol=2e-5,
                    )
