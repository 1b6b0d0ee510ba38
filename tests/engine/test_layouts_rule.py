"""Which values begin channels-last, and that nothing but memory differs."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.engine.lower import CHANNELS_LAST, channels_last
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Role

RANKS = (1, 2)  # places of a window


def convolved(places: int) -> Graph:
    """Two convolutions with a norm, a GELU and a sum between them, then channels at the end."""
    builder = GraphBuilder("convolved")
    size = (13, 9)[:places]
    x = builder.input("x", (2, 6, *size))
    weights = [
        builder.input(name, (8, channels, *(3,) * places), role=Role.PARAMETER)
        for name, channels in (("w", 6), ("v", 8))
    ]
    ends = (1,) * 2 * places

    def emit(operator: str, *values: str, **attributes: object) -> str:
        return builder.apply(operator, *values, name=attributes.pop("name", None), **attributes)[0]

    first = emit(f"conv{places}d", x, weights[0], padding=ends, bias=False, name="first")
    joined = emit("add", emit("gelu", first, name="gelu"), first, name="joined")
    pooled = emit(f"max_pool{places}d", joined, kernel=(2,) * places, name="pooled")
    second = emit(f"conv{places}d", pooled, weights[1], padding=ends, bias=False, name="second")
    order = (0, *range(2, places + 2), 1)
    turned = emit("transpose", second, permutation=order, name="turned")
    builder.output(emit("softmax", turned, axis=places + 1))
    return builder.build()


@pytest.mark.parametrize("places", RANKS)
def test_values_between_windows_are_channels_last(places: int) -> None:
    graph = convolved(places)
    found = channels_last(graph)
    between = {"first", "gelu", "joined", "pooled", "second"}
    assert found == dict.fromkeys(between, CHANNELS_LAST[places + 2])


@pytest.mark.parametrize("places", RANKS)
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_those_of_the_sequential_run(places: int, threads: int) -> None:
    graph = convolved(places)
    random = np.random.default_rng(0)
    values = {
        name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        for name in graph.roles
    }
    expected = interpret(graph, values)
    given = {"x": values.pop("x")}
    with InferenceSession(graph, values, threads=threads) as session:
        (found,) = session.run(given).values()
        assert "turned" not in session.variants(given), "a look at memory that lies so already"
    np.testing.assert_allclose(found, expected[graph.outputs[0]], atol=2e-5)
