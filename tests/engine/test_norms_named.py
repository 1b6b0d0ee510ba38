"""Norms that graphs spell out become one operator where that is the same."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.engine.lower import fold_weights
from soapstone.engine.lower.weights import split_constants
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Role

FORMS = ("reciprocal", "power", "div")


def spelled(
    form: str = "reciprocal",
    *,
    axis: int = 2,
    epsilon: float = 1e-5,
    exponent: float | None = 2.0,
    gamma: tuple[int, ...] = (24,),
    constant: bool = True,
    gamma_first: bool = True,
    seen: bool = False,
) -> Graph:
    """A norm of (2, 5, 24); exponent None: x times itself. seen: its middle is an output too."""
    builder = GraphBuilder("spelled")
    x = builder.input("x", (2, 5, 24))
    role = Role.PARAMETER if constant else Role.INPUT
    weight = builder.input("gamma", gamma, role=role)

    def emit(operator: str, *values: str, **attributes: object) -> str:
        return builder.apply(operator, *values, **attributes)[0]

    square = emit("mul", x, x) if exponent is None else emit("power", x, exponent=exponent)
    mean = emit("reduce_mean", square, axes=(axis,), keepdims=True)
    shifted = emit("affine", mean, shift=epsilon) if epsilon else mean
    if form == "div":
        middle = emit("div", x, emit("sqrt", shifted))
    elif form == "power":
        middle = emit("mul", emit("power", shifted, exponent=-0.5), x)
    else:
        middle = emit("mul", x, emit("reciprocal", emit("sqrt", shifted)))
    operands = (weight, middle) if gamma_first else (middle, weight)
    y = emit("mul", *operands)
    builder.output(emit("add", y, x), *([middle] if seen else []))
    return builder.build()


def values(graph: Graph, role: Role) -> dict[str, np.ndarray]:
    random = np.random.default_rng(2)
    return {
        name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        for name in graph.inputs(role)
    }


def operators(graph: Graph) -> list[str]:
    weights = values(graph, Role.PARAMETER)
    return [node.operator for node in fold_weights(graph, weights).nodes]


def check(graph: Graph) -> None:
    weights, given = values(graph, Role.PARAMETER), values(graph, Role.INPUT)
    expected = interpret(graph, {**weights, **given})
    with InferenceSession(graph, weights) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exponent", [2.0, None])
@pytest.mark.parametrize("gamma_first", [False, True])
def test_a_norm_that_is_spelled_out_is_one_operator(
    form: str, exponent: float | None, gamma_first: bool
) -> None:
    graph = spelled(form, exponent=exponent, gamma_first=gamma_first)
    assert sorted(operators(graph)) == ["add", "rms_norm"]
    check(graph)


def test_it_does_the_work_of_all_its_parts() -> None:
    graph = spelled()
    folded = fold_weights(graph, values(graph, Role.PARAMETER))
    (node,) = (node for node in folded.nodes if node.operator == "rms_norm")
    assert {*node.work_of} == {n.name for n in graph.nodes if n.operator != "add"}


@pytest.mark.parametrize(
    "graph",
    [
        spelled(axis=1),
        spelled(epsilon=0.0),
        spelled(epsilon=-1e-9),
        spelled(exponent=4.0),
        spelled(gamma=(5, 24)),
        spelled(constant=False),
        spelled(seen=True),
    ],
    ids=[
        "other axis",
        "no epsilon",
        "negative epsilon",
        "fourth powers",
        "of rows",
        "given",
        "seen",
    ],
)
def test_other_arithmetic_stays(graph: Graph) -> None:
    assert "rms_norm" not in operators(graph)
    check(graph)


def between_reshapes(
    parts: tuple[int, ...] = (2, 3, 40),
    *,
    back: tuple[int, ...] = (2, 6, 4, 5),
    after: tuple[tuple[str, tuple[int, ...]], ...] = (("mul", (6, 1, 1)), ("add", (6, 1, 1))),
    constant: bool = True,
    seen: bool = False,
) -> Graph:
    """A group norm of (2, 6, 4, 5) as exporters write it. seen: its middle is an output too."""
    builder = GraphBuilder("between_reshapes")
    x = builder.input("x", (2, 6, 4, 5))

    def weight(name: str, shape: tuple[int, ...]) -> str:
        return builder.input(name, shape, role=Role.PARAMETER if constant else Role.INPUT)

    apart = builder.apply("reshape", x, shape=parts)[0]
    vectors = [weight(name, parts[1:2]) for name in ("gamma", "beta")]
    normal = builder.apply("instance_norm", apart, *vectors, epsilon=1e-3)[0]
    y = builder.apply("reshape", normal, shape=back)[0]
    for number, (operator, shape) in enumerate(after):
        y = builder.apply(operator, weight(f"w{number}", shape), y)[0]
    builder.output(builder.apply("relu", y)[0], *([normal] if seen else []))
    return builder.build()


@pytest.mark.parametrize(
    "after",
    [
        (),
        (("mul", (6, 1, 1)), ("add", (6, 1, 1))),
        (("add", (1, 6, 1, 1)),),
        (("mul", (1, 6, 1, 1)), ("mul", (6, 1, 1))),
    ],
    ids=["nothing", "both", "shift", "scales"],
)
def test_a_group_norm_between_reshapes_is_one_operator(
    after: tuple[tuple[str, tuple[int, ...]], ...],
) -> None:
    graph = between_reshapes(after=after)
    folded = fold_weights(graph, values(graph, Role.PARAMETER))
    _, rest = split_constants(folded, set(graph.inputs(Role.PARAMETER)))
    assert [node.operator for node in rest.nodes] == ["group_norm", "relu"]
    check(graph)


@pytest.mark.parametrize(
    "graph",
    [
        between_reshapes((2, 4, 30)),
        between_reshapes((1, 6, 40)),
        between_reshapes(back=(2, 3, 8, 5), after=()),
        between_reshapes(constant=False),
        between_reshapes(seen=True),
    ],
    ids=["groups of parts of channels", "other samples", "other channels", "given", "seen"],
)
def test_other_norms_between_reshapes_stay(graph: Graph) -> None:
    assert "group_norm" not in operators(graph)
    check(graph)


def test_what_varies_over_positions_stays_behind_a_group_norm() -> None:
    graph = between_reshapes(after=(("mul", (6, 4, 1)), ("add", (6, 1, 1))))
    made = operators(graph)
    assert made.count("group_norm") == 1
    assert made.count("mul") == 1
    check(graph)
