"""`frontend.einsum` against np.einsum, on graphs run by the references."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.frontend.einsum import einsum
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.training.autodiff import gradients

Shapes = tuple[tuple[int, ...], ...]
EQUATIONS: list[tuple[str, Shapes]] = [
    ("ij->ji", ((2, 3),)),
    ("ij->", ((2, 3),)),
    ("ij->j", ((2, 3),)),
    ("i->i", ((4,),)),
    (",->", ((), ())),
    ("ij,jk->ik", ((2, 3), (3, 4))),
    ("ij,jk", ((2, 3), (3, 4))),
    ("ba,ca", ((2, 3), (4, 3))),
    ("ji,jk->ik", ((3, 2), (3, 4))),
    ("ij,kj->ki", ((2, 3), (4, 3))),
    ("bij,bjk->bik", ((5, 2, 3), (5, 3, 4))),
    ("bij,bkj->bki", ((5, 2, 3), (5, 4, 3))),
    ("bij, bjk", ((5, 2, 3), (5, 3, 4))),
    ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
    ("bqhd,bkhd->bhqk", ((2, 4, 3, 5), (2, 6, 3, 5))),
    ("bhqk,bkhd->bqhd", ((2, 3, 4, 6), (2, 6, 3, 5))),
    ("i,j->ij", ((3,), (4,))),
    ("i,j->ji", ((3,), (4,))),
    ("i,i->i", ((3,), (3,))),
    ("i,i", ((3,), (3,))),
    ("ij,ij->ij", ((2, 3), (2, 3))),
    ("ij,ji->ij", ((2, 3), (3, 2))),
    ("ij,j->ij", ((2, 3), (3,))),
    ("ij,i->ij", ((2, 3), (2,))),
    ("ij,ij->", ((2, 3), (2, 3))),
    ("ijk,jl->ikl", ((2, 3, 4), (3, 5))),
    ("ijkl,klm->mij", ((2, 3, 4, 5), (4, 5, 2))),
    ("ijkl,lkm->mij", ((2, 3, 4, 5), (5, 4, 2))),
    ("ij,jk,kl->il", ((2, 3), (3, 4), (4, 5))),
    ("i,j,k->kji", ((2,), (3,), (4,))),
    ("ab,ab,ac->c", ((2, 3), (2, 3), (2, 4))),
    ("ii->i", ((4, 4),)),
    ("ii->", ((4, 4),)),
    ("ii", ((4, 4),)),
    ("iji->j", ((3, 2, 3),)),
    ("iijj->ij", ((2, 2, 3, 3),)),
    ("iii->i", ((3, 3, 3),)),
    ("bii->bi", ((2, 3, 3),)),
    ("ii,ij->j", ((3, 3), (3, 2))),
    ("...ij->...ji", ((2, 3, 4),)),
    ("...ij,...jk->...ik", ((2, 5, 3, 4), (5, 4, 2))),
    ("...ij,...jk", ((2, 1, 3, 4), (5, 4, 2))),
    ("...ii->...i", ((2, 3, 3),)),
    ("i...->...", ((2, 3, 4),)),
    ("...,...", ((2, 3), (3,))),
    ("...i,...i->...", ((2, 3), (3,))),
    ("a...b,b...->...a", ((2, 3, 4), (4, 3))),
    ("ij,jk->ik", ((1, 3), (3, 1))),
    ("ij,jk->ik", ((2, 1), (3, 4))),
    ("ij,ij->ij", ((2, 1), (1, 3))),
    ("ij,ij->i", ((2, 1), (2, 3))),
    ("ij,jk->ik", ((2, 0), (0, 4))),
    ("ij,jk->ik", ((0, 3), (3, 4))),
    ("ij,k->i", ((2, 3), (4,))),
    ("Ab,bC->AC", ((2, 3), (3, 4))),
]


def build(equation: str, shapes: Shapes, dtype: str = "float64") -> tuple[Graph, str]:
    builder = GraphBuilder()
    names = [builder.input(f"x{i}", shape, dtype) for i, shape in enumerate(shapes)]
    y = einsum(builder, equation, names)
    builder.output(y)
    return builder.build(), y


@pytest.mark.parametrize(("equation", "shapes"), EQUATIONS)
def test_equals_numpy(equation: str, shapes: Shapes) -> None:
    generator = np.random.default_rng(len(equation))
    graph, y = build(equation, shapes)
    arrays = [generator.standard_normal(shape) for shape in shapes]
    made = interpret(graph, {f"x{i}": array for i, array in enumerate(arrays)})[y]
    want = np.einsum(equation, *arrays)
    assert made.shape == want.shape
    np.testing.assert_allclose(made, want, rtol=1e-12, atol=1e-12)


def test_integers_keep_their_type() -> None:
    graph, y = build("ij,jk->ki", ((2, 3), (3, 4)), "int64")
    a, b = np.arange(6).reshape(2, 3), np.arange(12).reshape(3, 4)
    made = interpret(graph, {"x0": a, "x1": b})[y]
    assert made.dtype == np.int64
    np.testing.assert_array_equal(made, (a @ b).T)


def test_a_matrix_product_is_one_operator() -> None:
    for equation, shapes in (
        ("bhqd,bhkd->bhqk", ((2, 3, 4, 5), (2, 3, 6, 5))),
        ("bij,bjk->bik", ((5, 2, 3), (5, 3, 4))),
        ("ji,jk->ik", ((3, 2), (3, 4))),
        ("ij,jk->ki", ((2, 3), (3, 4))),
    ):
        graph, _ = build(equation, shapes)
        assert [node.operator for node in graph.nodes] == ["matmul"]


@pytest.mark.parametrize("equation", ["bqhd,bkhd->bqhk", "bbhd,bkhd->hk", "bqhd,bkhe->"])
def test_gradients_equal_finite_differences(equation: str) -> None:
    generator = np.random.default_rng(0)
    builder = GraphBuilder()
    arrays = {
        "x": generator.standard_normal((2, 2, 3, 4)),
        "y": generator.standard_normal((2, 2, 3, 4)),
    }
    for name, array in arrays.items():
        builder.input(name, array.shape, "float64")
    z = einsum(builder, equation, ["x", "y"])
    (square,) = builder.apply("mul", z, z)
    (loss,) = builder.apply("reduce_sum", square, axes=tuple(range(builder.spec(z).rank)))
    found = gradients(builder, loss, ["x", "y"])
    builder.output(loss, *found.values())
    graph = builder.build()
    results = interpret(graph, arrays)
    for name, array in arrays.items():
        direction = generator.standard_normal(array.shape)
        ends = [
            interpret(graph, arrays | {name: array + sign * 1e-6 * direction})[loss]
            for sign in (1, -1)
        ]
        exact = np.sum(results[found[name]] * direction)
        np.testing.assert_allclose(exact, (ends[0] - ends[1]) / 2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("equation", "shapes", "error", "message"),
    [
        ("ij,jk->ik", ((2, 3),), GraphError, "1 operands found, 2 needed"),
        ("ij->ii", ((2, 3),), GraphError, "subscript i is twice in the output"),
        ("ij->ik", ((2, 3),), GraphError, "subscript k of the output is in no input"),
        ("i1->i", ((2, 3),), GraphError, "'1' found, a letter"),
        ("i...j...->i", ((2, 3),), GraphError, "'.' found, a letter"),
        ("ijk->i", ((2, 3),), ShapeError, "rank 2; ijk needs 3"),
        ("...ijk->i", ((2, 3),), ShapeError, "needs 3 or more"),
        ("i->i", ((2, 3),), ShapeError, "rank 2; i needs 1"),
        ("ij,jk->ik", ((2, 3), (4, 5)), ShapeError, "subscript j is 3 but 4 in operand 1"),
        ("ii->i", ((2, 3),), ShapeError, "subscript i is 2 and 3 in operand 0"),
    ],
)
def test_errors_say_what_is_wrong(
    equation: str, shapes: Shapes, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build(equation, shapes)


def test_operands_of_different_types_are_refused() -> None:
    builder = GraphBuilder()
    builder.input("a", (2,), "float32")
    builder.input("b", (2,), "float64")
    with pytest.raises(ShapeError, match="operand 1 is float64; float32 of operand 0 needed"):
        einsum(builder, "i,i->", ["a", "b"])
