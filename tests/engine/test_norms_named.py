"""Root-mean-square norms that graphs spell out become one operator where that is the same."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.engine.lower import fold_weights
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
