"""Random graphs of all operators, run in every way; and that the comparison would see a fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.graph_runs import bounds, failure, shrink
from helpers.random_graphs import Sample, draw

from soapstone.engine.lower.verify import check_graph
from soapstone.frontend.inference.session import InferenceSession
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, TensorSpec

BLOCK = 8


@pytest.mark.parametrize("first", range(0, 10 * BLOCK, BLOCK))
def test_every_way_of_running_a_graph_equals_the_reference(first: int) -> None:
    """A sample of what `benchmarks/correctness/random_graphs.py` runs."""
    found = {seed: failure(draw(seed)) for seed in range(first, first + BLOCK)}
    assert not {seed: text for seed, text in found.items() if text}


def test_almost_all_is_compared_and_small_faults_are_seen() -> None:
    seen = moved = 0
    shares = []  # of elements that are compared, by sample: one may be large
    for seed in range(120):
        sample = draw(seed)
        certain = elements = 0
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
        shares.append(certain / max(1, elements))
    assert np.mean(shares) > 0.95
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
    check_graph(draw(9710033).graph)  # with an input that was drawn for an operator that was not


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


NAN = float("nan")
FOUND: tuple[tuple[str, tuple[Array, ...], dict[str, object]], ...] = (
    # Nothing was launched for an output of which no input's index is a part.
    (
        "conv_transpose1d",
        (np.ones((1, 6, 0)), np.ones((6, 1, 3)), np.ones(3)),
        {"groups": 3, "dilation": (2,), "output_padding": (1,), "padding": (0, 0), "stride": (1,)},
    ),
    (
        "sru_grad",
        tuple(
            np.ones(shape, np.float32)
            for shape in ((3, 2, 3), (2, 3), (3, 2, 12), (3, 2, 3), (3, 2, 0), (2, 3))
        ),
        {"reverse": True},
    ),
    (
        "rnn_grad",
        (
            np.full((2, 1, 2), NAN, np.float32),
            np.ones((1, 2), np.float32),
            np.zeros((2, 1, 2), np.float32),
            np.ones((2, 2), np.float32),
        ),
        {"activation": "relu"},
    ),
    ("pick", (np.ones((4, 3), np.bool_), np.arange(4) % 3), {"base": 0, "total": None}),
    (
        "batch_norm_statistics",
        (np.full((2, 2), 0.5, np.float32), np.ones((1, 2, 3), np.float32))
        + (np.full(2, 0.5, np.float32),) * 4,
        {"count": 0},
    ),
    ("relu_grad", (np.full(12, NAN, np.float32), np.zeros(12, np.float32)), {}),
    (
        "leaky_relu_grad",
        (np.ones(20, np.float32), np.full(20, NAN, np.float32)),
        {"alpha": 0.25},
    ),
    # A value that no query of a tile sees is not read there, and the reference multiplies it by 0.
    (
        "attention",
        (
            *(np.ones((1, 9, 2, 4), np.float32) for _ in range(2)),
            np.where(
                np.arange(9)[:, None, None] == 8, np.float32(NAN), np.ones((1, 9, 2, 4), np.float32)
            ),
        ),
        {"causal": True},
    ),
    (
        "with_epilogue",
        tuple(np.ones(each, np.uint8) for each in ((2, 3, 8), (8, 6), 6, (2, 3, 6))),
        {
            "operator": "linear",
            "items": (("activation", None), ("bias", True)),
            "arity": 3,
            "program": (("add", (0, 1), ()), ("relu", (2,), ())),
            "wide": False,
        },
    ),
)


@pytest.mark.parametrize("positions", [5, 70])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_of_what_a_causal_mask_hides_only_values_may_make_a_result_nan(
    positions: int, value: float
) -> None:
    random = np.random.default_rng(positions)
    arrays = [random.standard_normal((1, positions, 2, 8), np.float32) for _ in range(3)]
    builder = GraphBuilder("attention")
    names = [builder.input(f"in{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    builder.output(builder.apply("attention", *names, causal=True)[0])
    graph, last = builder.build(), positions - 1
    for operand in (1, 2):
        given = [array.copy() for array in arrays]
        given[operand][0, last, 0, 0] = value
        hidden, clean = dict(zip(names, given)), dict(zip(names, arrays))
        with InferenceSession(graph, {}) as session:
            (found,), (wanted,) = session.run(hidden).values(), session.run(clean).values()
        kept = np.isfinite(found) if operand == 2 else np.ones(found.shape, bool)
        np.testing.assert_array_equal(
            found[:, :last][kept[:, :last]], wanted[:, :last][kept[:, :last]]
        )
        assert (
            np.isfinite(found[..., 1:]).all()
            if operand == 2
            else np.isfinite(found[:, :last]).all()
        )
        known = bounds(Sample(0, graph, hidden))[graph.outputs[0]]
        assert not known.misfit(found)
        assert known.certain[:, :last, 1].all()  # another head is compared


@pytest.mark.parametrize(
    ("name", "arrays", "attributes"), FOUND, ids=[name for name, _, _ in FOUND]
)
def test_what_random_graphs_found(
    name: str, arrays: tuple[Array, ...], attributes: dict[str, object]
) -> None:
    """By every kernel that serves it, and under a strategy."""
    builder = GraphBuilder(name)
    names = [builder.input(f"in{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    builder.output(*builder.apply(name, *names, **attributes))
    graph, values = builder.build(), dict(zip(names, arrays))
    for seed in range(8):
        assert not failure(Sample(seed, graph, values))


def test_every_point_reads_a_scalar_that_is_seen_as_one() -> None:
    builder = GraphBuilder("scalar")
    x, one = builder.input("x", (3, 3)), builder.input("one", ())
    (row,) = builder.apply("reshape", one, shape=(1,))
    (scalar,) = builder.apply("reshape", row, shape=())
    builder.output(*builder.apply("sub", x, scalar))
    values = {"x": np.arange(9, dtype=np.float32).reshape(3, 3), "one": np.array(2, np.float32)}
    for seed in range(8):
        assert not failure(Sample(seed, builder.build(), values), ("strategy",))


def test_sums_of_integers_have_no_bias() -> None:
    builder = GraphBuilder("sums")
    x, w = builder.input("x", (3, 6), "uint8"), builder.input("w", (6, 4), "int8")
    zero = builder.input("zero", (), "int32")
    with pytest.raises(ShapeError, match="sums of integers have no bias"):
        builder.apply("quantized_linear", x, w, zero, to="int32", bias=True)
