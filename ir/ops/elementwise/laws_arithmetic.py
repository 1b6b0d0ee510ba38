"""Forms and laws of sums, products and relu (TASO, Table 2.2).

`add` and `mul` broadcast; a product with a scalar is also the form `smul`. The laws that Table 2.2
does not have are about relu's range: what is not negative, relu leaves as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.ops.elementwise.laws_pointwise import any_ranks, ranks
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Value

TABLE = "Table 2.2"


def _ones(parameters: Sequence[Value], shape: tuple[int, ...]) -> Array:
    return np.ones(shape)


def _scalar(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    return {} if specs[1].rank == 0 else None


def _read_scalar(attributes: Attributes, *specs: TensorSpec) -> list[tuple[Value, ...]]:
    return [()] if specs[1].rank == 0 else []


ONES = Constant("ones", None, {}, _ones)
ADD_FORMS = (Form("add", 2),)
MUL_FORMS = (Form("mul", 2), Form("smul", 2, {}, _scalar, _read_scalar))
RELU_FORMS = (Form("relu", 1),)

_TWO = any_ranks("x y")
_THREE = any_ranks("x y z")
_SCALED = ranks("x y w", "000", "110", "220", "330", "440", "210", "320", "120", "230")

ADD_LAWS = (
    Law("add-associative", "add(x, add(y, z)) = add(add(x, y), z)", ranks=_THREE, source=TABLE),
    Law("add-commutative", "add(x, y) = add(y, x)", ranks=_TWO, source=TABLE),
)
MUL_LAWS = (
    Law("mul-associative", "mul(x, mul(y, z)) = mul(mul(x, y), z)", ranks=_THREE, source=TABLE),
    Law("mul-commutative", "mul(x, y) = mul(y, x)", ranks=_TWO, source=TABLE),
    Law("mul-add", "mul(add(x, y), z) = add(mul(x, z), mul(y, z))", ranks=_THREE, source=TABLE),
    Law(
        "mul-ones",
        "mul(x, ones) = x",
        ranks=ranks("x ones", "11", "22", "33", "44", "21", "32", "31"),
        source=TABLE,
    ),
    Law(
        "mul-ones-joined",
        "mul(x, concat[a](ones, ones)) = x",
        ranks=ranks("x ones", "11", "22", "33", "44"),
        source="ones are joined to ones",
    ),
    Law(
        "smul-associative",
        "smul(smul(x, y), w) = smul(x, smul(y, w))",
        ranks=ranks("x y w", "000", "100", "200", "300", "400"),
        source=TABLE,
    ),
    Law(
        "smul-add",
        "smul(add(x, y), w) = add(smul(x, w), smul(y, w))",
        ranks=_SCALED,
        source=TABLE,
    ),
    Law(
        "smul-mul",
        "smul(mul(x, y), w) = mul(x, smul(y, w))",
        ranks=_SCALED,
        source=TABLE,
    ),
    Law(
        "smul-commutative",
        "smul(x, y) = smul(y, x)",
        ranks=("x=0 y=0",),
        source="of two scalars; with it, scalar factors may be exchanged",
    ),
    Law(
        "smul-sum",
        "smul(x, add(y, z)) = add(smul(x, y), smul(x, z))",
        ranks=ranks("x y z", "000", "100", "200", "300", "400"),
        source="linear in the scalar too",
    ),
)
RELU_LAWS = (
    Law("relu-idempotent", "relu(relu(x)) = relu(x)", source="relu's range"),
    Law("relu-sum", "relu(add(relu(x), relu(y))) = add(relu(x), relu(y))", source="relu's range"),
    Law("relu-mul", "relu(mul(x, relu(y))) = mul(relu(x), relu(y))", source="relu is homogeneous"),
    Law(
        "relu-smul",
        "relu(smul(x, relu(w))) = smul(relu(x), relu(w))",
        ranks=ranks("x w", "00", "10", "20", "30", "40"),
        source="relu is homogeneous",
    ),
    Law(
        "relu-smul-scalar",
        "relu(smul(relu(x), w)) = smul(relu(x), relu(w))",
        ranks=ranks("x w", "00", "10", "20", "30", "40"),
        source="relu is homogeneous",
    ),
    Law(
        "relu-smul-square",
        "relu(smul(x, x)) = smul(x, x)",
        ranks=("x=0",),
        source="a square is not negative",
    ),
    Law(
        "relu-smul-self",
        "smul(x, relu(x)) = smul(relu(x), relu(x))",
        ranks=("x=0",),
        source="relu(x) is 0 or x",
    ),
    Law(
        "relu-factor",
        "relu(add(x, mul(x, relu(y)))) = add(relu(x), mul(relu(x), relu(y)))",
        source="x times 1 + relu(y); relu is homogeneous",
    ),
    Law(
        "relu-factor-scalar",
        "relu(add(x, smul(x, relu(w)))) = add(relu(x), smul(relu(x), relu(w)))",
        ranks=ranks("x w", "00", "10", "20", "30", "40"),
        source="x times 1 + relu(w); relu is homogeneous",
    ),
    Law(
        "relu-masked",
        "relu(add(x, mul(y, relu(x)))) = relu(add(relu(x), mul(y, relu(x))))",
        source="where relu(x) is 0, x is not positive",
    ),
    Law(
        "relu-masked-scalar",
        "relu(add(x, smul(relu(x), w))) = relu(add(relu(x), smul(relu(x), w)))",
        ranks=ranks("x w", "00", "10", "20", "30", "40"),
        source="where relu(x) is 0, x is not positive",
    ),
    Law(
        "relu-inner-sum",
        "relu(add(x, relu(add(x, relu(y))))) = relu(add(x, add(x, relu(y))))",
        source="where the inner sum is negative, so is x",
    ),
    Law("relu-square", "relu(mul(x, x)) = mul(x, x)", source="a square is not negative"),
    Law("relu-self", "mul(x, relu(x)) = mul(relu(x), relu(x))", source="relu(x) is 0 or x"),
    Law("relu-double", "relu(add(x, x)) = add(relu(x), relu(x))", source="relu is homogeneous"),
    Law(
        "relu-self-sum",
        "relu(add(x, relu(x))) = add(relu(x), relu(x))",
        source="x and relu(x) have one sign",
    ),
    *(
        Law(
            f"relu-triple-{name}",
            f"relu(add({x}, add({y}, {z}))) = add(relu(x), add(relu(x), relu(x)))",
            source="x and relu(x) have one sign",
        )
        for name, x, y, z in (
            ("of-x", "x", "x", "x"),
            ("with-one", "x", "x", "relu(x)"),
            ("with-two", "x", "relu(x)", "relu(x)"),
        )
    ),
    Law("relu-ones", "relu(ones) = ones", ranks=ranks("ones", *"01234"), source="positive"),
)
