"""Rotary embeddings that graphs spell out become one launch where that computes the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.dtypes import learn
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret

SHAPE = (2, 3, 5, 12)  # samples, heads, positions, elements
Spelling = Callable[["Writer", str, str, str], str]


class Writer:
    """Writes a graph, of which x (samples, heads, positions, elements) is turned."""

    def __init__(self, dtype: str = "float32") -> None:
        self.builder = GraphBuilder("rotary")
        self.dtype = dtype

    def __call__(self, operator: str, *values: str, **attributes: object) -> str:
        return self.builder.apply(operator, *values, **attributes)[0]

    def part(self, x: str, start: int, stop: int, step: int = 1) -> str:
        lead = self.builder.spec(x).shape[:-1]
        none, ones = (0,) * len(lead), (1,) * len(lead)
        at = {"starts": (*none, start), "stops": (*lead, stop), "steps": (*ones, step)}
        return self("slice", x, **at)

    def column(self, x: str) -> str:
        return self("reshape", x, shape=(*self.builder.spec(x).shape, 1))

    def halves(self, x: str) -> tuple[str, ...]:
        rank, width = len(self.builder.spec(x).shape), self.builder.spec(x).shape[-1]
        return self.builder.apply("split", x, axis=rank - 1, sizes=(width // 2,) * 2)


def torch_halves(w: Writer, x: str, cosine: str, sine: str) -> str:
    width = w.builder.spec(x).shape[-1]
    low, high = w.part(x, 0, width // 2), w.part(x, width // 2, width)
    turned = w("concat", w("neg", high), low, axis=3)
    return w("add", w("mul", x, cosine), w("mul", turned, sine))


def torch_neighbours(w: Writer, x: str, cosine: str, sine: str) -> str:
    shape = w.builder.spec(x).shape
    even, odd = w.part(x, 0, shape[-1], 2), w.part(x, 1, shape[-1], 2)
    both = w("concat", w.column(w("affine", odd, scale=-1.0)), w.column(even), axis=4)
    turned = w("reshape", both, shape=shape)
    return w("add", w("mul", sine, turned), w("mul", x, cosine))


def onnx_halves(w: Writer, x: str, cosine: str, sine: str) -> str:
    low, high = w.halves(x)
    first = w("sub", w("mul", cosine, low), w("mul", sine, high))
    second = w("add", w("mul", sine, low), w("mul", cosine, high))
    return w("concat", first, second, axis=3)


def onnx_neighbours(w: Writer, x: str, cosine: str, sine: str) -> str:
    shape = w.builder.spec(x).shape
    pairs = w("reshape", x, shape=(*shape[:-1], shape[-1] // 2, 2))
    low, high = (
        w("reshape", w.part(pairs, k, k + 1), shape=(*shape[:-1], shape[-1] // 2)) for k in (0, 1)
    )
    first = w("sub", w("mul", low, cosine), w("mul", high, sine))
    second = w("add", w("mul", low, sine), w("mul", high, cosine))
    both = w("concat", w.column(first), w.column(second), axis=4)
    return w("reshape", both, shape=shape)


BY_TORCH = [torch_halves, torch_neighbours]
SPELLINGS = [*BY_TORCH, onnx_halves, onnx_neighbours]


def spelled(
    how: Spelling,
    table: tuple[int, ...] = (1, 1, 5),
    width: int = 12,
    dtype: str = "float32",
    by_time: bool = False,
    inside: bool = False,
    by_pair: bool | None = None,
) -> Graph:
    """A graph that turns the first `width` elements of x.

    by_time: x is a transpose of what has positions before heads. inside: x is a part of more.
    by_pair: whether tables have a number for each pair; as ONNX has them, not torch, by default.
    """
    w = Writer(dtype)
    shape = list(SHAPE)
    if inside:
        shape[-1] *= 3
    if by_time:
        shape[1], shape[2] = shape[2], shape[1]
    x = w.builder.input("x", tuple(shape), dtype)
    if by_time:
        x = w("transpose", x, permutation=(0, 2, 1, 3))
    if inside:
        x = w.part(x, 12, 24)
    by_pair = how not in BY_TORCH if by_pair is None else by_pair
    numbers = width // 2 if by_pair else width
    tables = [w.builder.input(name, (*table, numbers), dtype) for name in ("cosine", "sine")]
    y = how(w, w.part(x, 0, width) if width < 12 else x, *tables)
    if width < 12:
        y = w("concat", y, w.part(x, width, 12), axis=3)
    w.builder.output(y)
    return w.builder.build()


def rotations(graph: Graph) -> list[dict[str, object]]:
    nodes = fold_weights(graph, {}).nodes
    return [dict(n.attributes) for n in nodes if n.operator == "rotary_embedding"]


def check(graph: Graph, tolerance: float = 1e-6) -> None:
    random = np.random.default_rng(0)
    given = {
        name: random.standard_normal(spec.shape).astype(learn(spec.dtype))
        for name, spec in ((name, graph.tensors[name]) for name in graph.roles)
    }
    (expected,) = interpret(graph, given).values()
    with InferenceSession(graph, {}, threads=2) as session:
        (found,) = session.run(given).values()
    assert found.dtype == expected.dtype
    near = {"atol": tolerance, "rtol": tolerance}
    np.testing.assert_allclose(found.astype(np.float64), expected.astype(np.float64), **near)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("table", [(1, 1, 5), (5,), (2, 1, 5), (2, 3, 5), (1, 3, 1), ()])
def test_each_spelling_is_one_launch(how: Spelling, table: tuple[int, ...]) -> None:
    graph = spelled(how, table)
    interleaved = how in (torch_neighbours, onnx_neighbours)
    assert rotations(graph) == [{"width": None, "interleaved": interleaved}]
    assert len(fold_weights(graph, {}).nodes) == 1
    check(graph)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_elements_that_are_not_turned_are_copied_by_the_same_launch(
    how: Spelling, by_time: bool, inside: bool
) -> None:
    graph = spelled(how, width=8, by_time=by_time, inside=inside)
    assert [made["width"] for made in rotations(graph)] == [8]
    assert {n.operator for n in fold_weights(graph, {}).nodes if n.spec.view is None} == {
        "rotary_embedding"
    }
    check(graph)


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_halves_are_turned_in_single_precision(how: Spelling, dtype: str, tolerance: float) -> None:
    graph = spelled(how, dtype=dtype, by_time=True)
    assert len(rotations(graph)) == 1
    check(graph, tolerance)


def test_one_head_is_told_from_its_table_by_who_is_turned() -> None:
    w = Writer()
    x, *tables = (w.builder.input(name, (2, 1, 5, 12)) for name in ("x", "cosine", "sine"))
    w.builder.output(torch_halves(w, x, *tables))
    graph = w.builder.build()
    (node,) = fold_weights(graph, {}).nodes
    assert node.inputs == ("x", "cosine", "sine")
    check(graph)


def test_its_launch_does_the_work_of_all_of_them() -> None:
    graph = spelled(torch_halves)
    (node,) = fold_weights(graph, {}).nodes
    assert {*node.work_of} == {each.name for each in graph.nodes}


def backwards(w: Writer, x: str, cosine: str, sine: str) -> str:
    """Turn by the negative angles."""
    low, high = w.halves(x)
    turned = w("concat", high, w("neg", low), axis=3)
    return w("add", w("mul", x, cosine), w("mul", turned, sine))


def exchanged(w: Writer, x: str, cosine: str, sine: str) -> str:
    """Add what has the same table twice."""
    low, high = w.halves(x)
    turned = w("concat", w("neg", high), low, axis=3)
    return w("add", w("mul", x, cosine), w("mul", turned, cosine))


def of_two(w: Writer, x: str, cosine: str, sine: str) -> str:
    """Turn one value by another."""
    low, high = w.halves(w("neg", w("exp", x)))
    turned = w("concat", w("neg", high), low, axis=3)
    return w("add", w("mul", x, cosine), w("mul", turned, sine))


def reversed_halves(w: Writer, x: str, cosine: str, sine: str) -> str:
    """Take elements of each half backwards."""
    low, high = w.halves(x)
    turned = w("concat", w("neg", w("reverse", high, axes=(3,))), low, axis=3)
    return w("add", w("mul", x, cosine), w("mul", turned, sine))


@pytest.mark.parametrize("how", [backwards, exchanged, of_two, reversed_halves])
def test_what_turns_nothing_stays(how: Spelling) -> None:
    graph = spelled(how, by_pair=False)
    assert rotations(graph) == []
    check(graph)
