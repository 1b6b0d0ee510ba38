"""Windows of a rolled image, cut and put together, are a launch each where that is the same."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.dtypes import learn
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret

TURN = (0, 1, 3, 2, 4, 5)


def rolled(builder: GraphBuilder, x: str, axis: int, by: int) -> str:
    """Return an image moved so far towards the beginning of an axis."""
    shape = builder.spec(x).shape
    parts = []
    for first, last in ((by, shape[axis]), (0, by)):
        starts, stops = [0] * len(shape), [*shape]
        starts[axis], stops[axis] = first, last
        at = {"starts": starts, "stops": stops, "steps": (1,) * len(shape)}
        parts += builder.apply("slice", x, **at)
    return builder.apply("concat", *parts, axis=axis)[0]


def cut(builder: GraphBuilder, x: str, size: tuple[int, int]) -> str:
    n, h, w, c = builder.spec(x).shape
    apart = (n, h // size[0], size[0], w // size[1], size[1], c)
    (x,) = builder.apply("reshape", x, shape=apart)
    (x,) = builder.apply("transpose", x, permutation=TURN)
    windows = n * h * w // (size[0] * size[1])
    return builder.apply("reshape", x, shape=(windows, size[0] * size[1], c))[0]


def joined(builder: GraphBuilder, x: str, size: tuple[int, int], image: tuple[int, ...]) -> str:
    n, h, w, c = image
    (x,) = builder.apply("reshape", x, shape=(n, h // size[0], w // size[1], *size, c))
    (x,) = builder.apply("transpose", x, permutation=TURN)
    return builder.apply("reshape", x, shape=image)[0]


def shifted(
    image: tuple[int, ...], size: tuple[int, int], shift: tuple[int, int], dtype: str = "float32"
) -> Graph:
    """A function of the windows of an image that is moved, and moved back."""
    builder = GraphBuilder("windows")
    x = builder.input("x", image, dtype)
    for axis, by in enumerate(shift, 1):
        x = rolled(builder, x, axis, by) if by else x
    x = cut(builder, x, size)
    (x,) = builder.apply("softmax", x, axis=1)
    x = joined(builder, x, size, image)
    for axis, by in enumerate(shift, 1):
        x = rolled(builder, x, axis, image[axis] - by) if by else x
    builder.output(*builder.apply("affine", x, scale=2.0))
    return builder.build()


def operators(graph: Graph) -> list[str]:
    return [node.operator for node in fold_weights(graph, {}).nodes if node.spec.view is None]


def check(graph: Graph) -> None:
    x = np.random.default_rng(0).standard_normal(graph.tensors["x"].shape)
    given = {"x": x.astype(learn(graph.tensors["x"].dtype))}
    (expected,) = interpret(graph, given).values()
    with InferenceSession(graph, {}, threads=2) as session:
        (found,) = session.run(given).values()
    exact = found.dtype == np.float32
    found, expected = (each.astype(np.float64) for each in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=1e-5 if exact else 1e-2, atol=1e-6)


@pytest.mark.parametrize("image", [(1, 14, 21, 8), (3, 28, 7, 5), (2, 7, 14, 1)])
@pytest.mark.parametrize("shift", [(3, 3), (1, 6), (0, 2), (5, 0)])
def test_shifted_windows_are_one_launch_each_way(
    image: tuple[int, ...], shift: tuple[int, int]
) -> None:
    graph = shifted(image, (7, 7), shift)
    made = operators(graph)
    assert made.count("window_partition") == made.count("window_reverse") == 1
    assert "concat" not in {node.operator for node in fold_weights(graph, {}).nodes}
    check(graph)


@pytest.mark.parametrize(("size", "shift"), [((2, 3), (5, 4)), ((4, 1), (4, 2)), ((8, 12), (1, 1))])
def test_windows_of_any_size_wrap_round_anywhere(
    size: tuple[int, int], shift: tuple[int, int]
) -> None:
    check(shifted((2, 8, 12, 3), size, shift))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_windows_of_halves_are_copied_as_they_are(dtype: str) -> None:
    graph = shifted((2, 14, 14, 3), (7, 7), (3, 3), dtype)
    assert not {"window_partition", "window_reverse"} & {*operators(graph)}
    check(graph)


def test_windows_that_are_not_shifted_stay_reshapes() -> None:
    graph = shifted((2, 14, 14, 3), (7, 7), (0, 0))
    assert not {"window_partition", "window_reverse"} & {*operators(graph)}
    check(graph)


@pytest.mark.parametrize("order", [(0, 1), (1, 1)])
def test_parts_that_are_joined_otherwise_are_no_roll(order: tuple[int, int]) -> None:
    builder = GraphBuilder("straight")
    x = builder.input("x", (1, 4, 4, 3))
    at = {"steps": (1,) * 4}
    parts = [
        builder.apply("slice", x, starts=(0, k, 0, 0), stops=(1, k + 2, 4, 3), **at)[0]
        for k in (0, 2)
    ]
    (x,) = builder.apply("concat", *(parts[k] for k in order), axis=1)
    builder.output(*builder.apply("affine", cut(builder, x, (2, 2)), scale=2.0))
    graph = builder.build()
    assert "window_partition" not in operators(graph)
    check(graph)
