"""Random graphs of all operators, run in every way; and that the comparison would see a fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from random_graphs import Sample, bounds, draw, failure, shrink

from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.spec import operator
from soapstone.ir.tensor import TensorSpec

BLOCK = 8


@pytest.mark.parametrize("first", range(0, 10 * BLOCK, BLOCK))
def test_every_way_of_running_a_graph_equals_the_reference(first: int) -> None:
    """A sample of what `benchmarks/random_graphs.py` runs."""
    found = {seed: failure(draw(seed)) for seed in range(first, first + BLOCK)}
    assert not {seed: text for seed, text in found.items() if text}


def test_almost_all_is_compared_and_small_faults_are_seen() -> None:
    certain = elements = seen = moved = 0
    for seed in range(60):
        sample = draw(seed)
        for allowed in bounds(sample).values():
            value = allowed.value
            certain += int(np.count_nonzero(allowed.certain))
            elements += value.size
            assert not allowed.misfit(value)
            if value.size == 0 or value.dtype.kind != "f":
                continue
            with np.errstate(all="ignore"):
                wrong = value + np.asarray(0.1 * max(1.0, np.abs(value).max()), value.dtype)
            if np.isfinite(wrong).all():
                moved += 1
                seen += bool(allowed.misfit(wrong))
    assert certain > 0.99 * elements
    assert seen > 0.9 * moved > 0


def test_what_fails_is_made_smaller() -> None:
    """Down to the one operator without which it would not fail."""

    def fails(sample: Sample) -> bool:
        return any(node.operator == name for node in sample.graph.nodes)

    for seed in range(5):
        sample = draw(seed)
        name = sample.graph.nodes[len(sample.graph.nodes) // 2].operator
        made = shrink(sample, fails)
        assert [node.operator for node in made.graph.nodes] == [name]
        assert not failure(replace(made, seed=seed))


def test_a_seed_is_a_graph() -> None:
    assert str(draw(3)) == str(draw(3)) != str(draw(4))


@pytest.mark.parametrize(
    ("name", "specs", "attributes"),
    [
        ("matmul", ("int8 2 3", "float32 3 4"), {}),
        ("linear", ("int8 2 3", "int8 3 4"), {"bias": False, "activation": "gelu"}),
        ("affine", ("uint8 4",), {"scale": -1.0}),
        ("affine", ("int32 4",), {"scale": 0.5}),
        ("power", ("int32 4",), {"exponent": -1.0}),
        ("pow_grad", ("int32 4", "int32 4", "int32 4"), {}),
        ("reduce_max_grad", ("int32 1", "int32 4", "int32 1"), {"axes": (0,), "keepdims": True}),
    ],
)
def test_whole_numbers_are_refused_where_they_have_no_meaning(
    name: str, specs: tuple[str, ...], attributes: dict[str, object]
) -> None:
    """Random graphs found these: accepted, and then errors or results of another type."""
    given = []
    for text in specs:
        dtype, *shape = text.split()
        given.append(TensorSpec(tuple(map(int, shape)), dtype))
    spec = operator(name)
    with pytest.raises(ShapeError, match="needed"):
        spec.bind(given, spec.normalise(attributes))


def test_the_gradient_of_a_bag_refuses_indices_outside_its_table() -> None:
    spec = operator("embedding_bag_max_grad")
    ids, row = np.array([[1]]), np.ones((1, 2), np.float32)
    for rows in (0, 1):
        with pytest.raises(GraphError, match="index 1 found"):
            spec.run(spec.normalise({}), row, ids, np.ones((rows, 2), np.float32), row)
