"""Form and laws of matrix products (TASO, Table 2.2), of matrices and of batches of them.

The table says what happens to columns; the mirror for rows follows through transposes, and is
declared too, since it makes proofs short.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.ops.elementwise.laws_arithmetic import TABLE
from soapstone.ir.ops.elementwise.laws_pointwise import ranks
from soapstone.ir.ops.movement.laws_movement import joined_law
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Value


def _matmul(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    fits = all(spec.rank >= 2 for spec in specs)
    return {"transpose_a": False, "transpose_b": False} if fits else None


def _read_matmul(attributes: Attributes, *specs: TensorSpec) -> list[tuple[Value, ...]]:
    return [()] if attributes == _matmul((), *specs) else []


def _identity(parameters: Sequence[Value], shape: tuple[int, ...]) -> Array | None:
    return np.eye(shape[0]) if len(shape) == 2 and shape[0] == shape[1] else None


MATMUL_FORMS = (Form("matmul", 2, {}, _matmul, _read_matmul),)
IDENTITY_MATRIX = Constant("identity_matrix", 2, {}, _identity)

_TWO = ranks("x y", "22", "33", "44", "32", "23")
_THREE = ranks("x y z", "222", "333", "444", "322", "332", "323", "233", "223", "232")
_SCALED = ranks("x y w", "220", "330", "440", "320", "230")
_INNER = ranks("x z y w", "2222", "3333", "4444", "3322", "2233")
_JOINED = ranks("x y z w", "2222", "3333", "3332", "2223")
_MIRROR = ("transpose-inverse", "transpose-matmul")

MATMUL_LAWS = (
    Law(
        "matmul-associative",
        "matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)",
        ranks=_THREE,
        source=TABLE,
    ),
    Law("matmul-smul", "smul(matmul(x, y), w) = matmul(x, smul(y, w))", (), _SCALED, TABLE),
    Law(
        "smul-matmul",
        "smul(matmul(x, y), w) = matmul(smul(x, w), y)",
        ranks=_SCALED,
        source="the mirror of matmul-smul",
        follows=("matmul-smul", "transpose-smul", *_MIRROR),
    ),
    Law(
        "matmul-add",
        "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))",
        ranks=_THREE,
        source=TABLE,
    ),
    Law(
        "add-matmul",
        "matmul(add(x, y), z) = add(matmul(x, z), matmul(y, z))",
        ranks=_THREE,
        source="the mirror of matmul-add",
        follows=("matmul-add", "transpose-add", *_MIRROR),
    ),
    Law(
        "transpose-matmul",
        "transpose(matmul(x, y)) = matmul(transpose(y), transpose(x))",
        ranks=_TWO,
        source=TABLE,
    ),
    Law(
        "concat-matmul-columns",
        "concat[-1](matmul(x, y), matmul(x, z)) = matmul(x, concat[-1](y, z))",
        ranks=ranks("x y z", "222", "333", "444", "322", "233"),
        source=TABLE,
    ),
    Law(
        "concat-matmul-rows",
        "concat[-2](matmul(x, z), matmul(y, z)) = matmul(concat[-2](x, y), z)",
        ranks=ranks("x y z", "222", "333", "444", "332", "223"),
        source="the mirror of concat-matmul-columns",
        follows=("concat-matmul-columns", "concat-transpose", *_MIRROR),
    ),
    Law(
        "concat-matmul-inner",
        "matmul(concat[-1](x, z), concat[-2](y, w)) = add(matmul(x, y), matmul(z, w))",
        ranks=_INNER,
        source=TABLE,
    ),
    *(
        Law(
            f"concat-matmul-batch{axis}",
            f"concat[{axis}](matmul(x, y), matmul(z, w))"
            f" = matmul(concat[{axis}](x, z), concat[{axis}](y, w))",
            ranks=ranks("x y z w", *digits),
            source="matrices of a batch are independent",
        )
        for axis, digits in ((-3, ("3333", "4444")), (-4, ("4444",)))
    ),
    joined_law("matmul-joined-columns", "matmul({}, w)", "a = -1", ranks=_JOINED),
    joined_law("matmul-joined-rows", "matmul(w, {})", "a = -2", ranks=_JOINED),
    Law(
        "matmul-identity",
        "matmul(x, identity_matrix) = x",
        ranks=ranks("x", *"234"),
        source=TABLE,
    ),
    Law(
        "identity-matmul",
        "matmul(identity_matrix, x) = x",
        ranks=ranks("x", *"234"),
        source="the mirror of matmul-identity",
        follows=("matmul-identity", *_MIRROR),
    ),
    Law(
        "transpose-identity",
        "transpose(identity_matrix) = identity_matrix",
        source="the two identities are one",
        follows=("matmul-identity", *_MIRROR),
    ),
    Law(
        "identity-square",
        "mul(identity_matrix, identity_matrix) = identity_matrix",
        source="of zeros and ones",
    ),
    Law(
        "identity-diagonal",
        "mul(transpose(x), identity_matrix) = mul(x, identity_matrix)",
        where=tuple(f"dim(x,{axis}) = dim(identity_matrix,-1)" for axis in (-2, -1)),
        ranks=ranks("x", *"234"),
        source="what is left is the diagonal",
    ),
    Law(
        "diagonal-of-squares",
        "relu(mul(matmul(transpose(x), x), identity_matrix))"
        " = mul(matmul(transpose(x), x), identity_matrix)",
        where=("dim(x,-1) = dim(identity_matrix,-1)",),
        ranks=ranks("x", *"234"),
        source="the diagonal holds sums of squares",
    ),
    Law("relu-identity", "relu(identity_matrix) = identity_matrix", source="not negative"),
    Law(
        "relu-matmul",
        "relu(matmul(relu(x), relu(y))) = matmul(relu(x), relu(y))",
        ranks=_TWO,
        source="relu's range",
    ),
)
