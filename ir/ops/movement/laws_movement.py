"""Forms and laws of transpose, concat, split and the enlarging of kernels (TASO, Table 2.2).

A split undoes the most recent concatenation of its operand along the axis, so concatenation is not
associative here: the two ways to join three parts are split differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Form, Law
from soapstone.ir.ops.elementwise.laws_arithmetic import TABLE
from soapstone.ir.ops.elementwise.laws_pointwise import ranks
from soapstone.ir.ops.forms import AXES, front_axis, kernel_size, size_text
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Value

Readings = list[tuple[Value, ...]]
_SIZES: tuple[Value, ...] = ("3x3", "1x3", "4x4")


def _transpose(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    rank = specs[0].rank
    return {"permutation": (*range(rank - 2), rank - 1, rank - 2)} if rank >= 2 else None


def _read_transpose(attributes: Attributes, *specs: TensorSpec) -> Readings:
    return [()] if attributes == _transpose((), *specs) else []


def _concat(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    axis = front_axis(parameters[0], specs[0])
    return None if axis is None else {"axis": axis}


def _read_concat(attributes: Attributes, *specs: TensorSpec) -> Readings:
    return [(attributes["axis"] - specs[0].rank,)] if len(specs) == 2 else []


def _split(
    parameters: Sequence[Value], *specs: TensorSpec, sizes: tuple[int, int] | None = None
) -> Attributes | None:
    axis = front_axis(parameters[0], specs[0])
    if axis is None or sizes is None or sum(sizes) != specs[0].shape[axis]:
        return None
    return {"axis": axis, "sizes": tuple(sizes)}


def _read_split(attributes: Attributes, *specs: TensorSpec) -> Readings:
    return [(attributes["axis"] - specs[0].rank,)] if len(attributes["sizes"]) == 2 else []


def _enlarge(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    size, (kernel,) = kernel_size(parameters[0]), specs
    if size is None or kernel.rank != 4:
        return None
    more = [wanted - found for wanted, found in zip(size, kernel.shape[2:])]
    if any(extent < 0 or extent % 2 for extent in more):
        return None
    border = (0, 0, *(extent // 2 for extent in more))
    return {"low": border, "high": border, "interior": (0,) * 4, "value": 0.0, "mode": "constant"}


def _read_enlarge(attributes: Attributes, *specs: TensorSpec) -> Readings:
    kernel = specs[0]
    if kernel.rank != 4:
        return []
    added = [low + high for low, high in zip(attributes["low"], attributes["high"])]
    size = size_text([extent + more for extent, more in zip(kernel.shape[2:], added[2:])])
    return [(size,)] if attributes == _enlarge((size,), kernel) else []


def joined_law(name: str, text: str, *where: str, ranks: tuple[str, ...] = ()) -> Law:
    """Return the law that three parts may be joined in either order where it makes no difference.

    `{}` in the text is where they stand: what is around it forgets where they are split.
    """
    orders = "concat[a](concat[a](x, y), z)", "concat[a](x, concat[a](y, z))"
    left, right = (text.replace("{}", order) for order in orders)
    source = "the order of concatenations is only seen by splits"
    return Law(name, f"{left} = {right}", where, ranks, source)


_AXIS: dict[str, Any] = {"a": AXES}
TRANSPOSE_FORMS = (Form("transpose", 1, {}, _transpose, _read_transpose),)
CONCAT_FORMS = (Form("concat", 2, _AXIS, _concat, _read_concat),)
SPLIT_FORMS = (
    Form("split0", 1, _AXIS, _split, _read_split, output=0),
    Form("split1", 1, _AXIS, _split, _read_split, output=1),
)
ENLARGE_FORMS = (Form("enlarge", 1, {"k": _SIZES}, _enlarge, _read_enlarge),)

_PAIRS = ranks("x y", "22", "33", "44", "32", "23")
_QUADRUPLES = ranks("x y z w", "1111", "2222", "3333", "4444", "2121", "3232", "2323")

_JOINED = ranks("x y z w", "1111", "2222", "3333", "4444", "2221", "3332")

TRANSPOSE_LAWS = (
    Law("transpose-inverse", "transpose(transpose(x)) = x", source=TABLE),
    Law(
        "transpose-add",
        "transpose(add(x, y)) = add(transpose(x), transpose(y))",
        ranks=_PAIRS,
        source=TABLE,
    ),
    Law(
        "transpose-mul",
        "transpose(mul(x, y)) = mul(transpose(x), transpose(y))",
        ranks=_PAIRS,
        source=TABLE,
    ),
    Law(
        "transpose-smul",
        "smul(transpose(x), w) = transpose(smul(x, w))",
        ranks=ranks("x w", "20", "30", "40"),
        source=TABLE,
    ),
    Law("transpose-relu", "relu(transpose(x)) = transpose(relu(x))", source=TABLE),
    Law(
        "transpose-ones",
        "transpose(ones) = ones",
        ranks=ranks("ones", *"234"),
        source="a square of ones is symmetric",
    ),
)
CONCAT_LAWS = (
    Law(
        "concat-geometry",
        "concat[a](concat[b](x, y), concat[b](z, w)) = concat[b](concat[a](x, z), concat[a](y, w))",
        where=("a >= b+1",),
        source=f"{TABLE}, for any two axes",
    ),
    Law(
        "concat-smul",
        "concat[a](smul(x, w), smul(y, w)) = smul(concat[a](x, y), w)",
        ranks=ranks("x y w", "110", "220", "330", "440"),
        source=TABLE,
    ),
    Law(
        "concat-add",
        "concat[a](add(x, y), add(z, w)) = add(concat[a](x, z), concat[a](y, w))",
        ranks=_QUADRUPLES,
        source=TABLE,
    ),
    Law(
        "concat-mul",
        "concat[a](mul(x, y), mul(z, w)) = mul(concat[a](x, z), concat[a](y, w))",
        ranks=_QUADRUPLES,
        source=TABLE,
    ),
    Law("concat-relu", "concat[a](relu(x), relu(y)) = relu(concat[a](x, y))", source=TABLE),
    Law(
        "concat-transpose",
        "concat[-1](transpose(x), transpose(y)) = transpose(concat[-2](x, y))",
        source=TABLE,
    ),
    Law(
        "concat-transpose-columns",
        "concat[-2](transpose(x), transpose(y)) = transpose(concat[-1](x, y))",
        source="the mirror of concat-transpose",
        follows=("concat-transpose", "transpose-inverse"),
    ),
    *(
        Law(
            f"concat-transpose-batch{axis}",
            f"concat[{axis}](transpose(x), transpose(y)) = transpose(concat[{axis}](x, y))",
            source="axes that transpose leaves alone",
        )
        for axis in (-3, -4)
    ),
)
JOINED_LAWS = (
    *(
        joined_law(
            f"{f}-joined",
            f"{f}({{}}, w)",
            "dim(w,a) = dim(x,a) + dim(y,a) + dim(z,a)",  # of less, the split would be kept
            ranks=_JOINED,
        )
        for f in ("add", "mul")
    ),
    *(
        joined_law(
            f"concat-joined-{side}-{order}",
            f"concat[b]({operands})",
            where,
            ranks=_JOINED[1:4],
        )
        for side, operands in (("left", "{}, w"), ("right", "w, {}"))
        for order, where in (("before", "b >= a+1"), ("after", "a >= b+1"))
    ),
)
SPLIT_LAWS = (
    Law("split0-concat", "split0[a](concat[a](x, y)) = x", source=TABLE),
    Law("split1-concat", "split1[a](concat[a](x, y)) = y", source=TABLE),
    Law(
        "concat-split",
        "concat[a](split0[a](x), split1[a](x)) = x",
        source="a tensor that can be split is the concatenation of its parts",
    ),
)
_KERNELS = "x=4 y=4"
_LIKE = ("dim(x,-2) = dim(y,-2)", "dim(x,-1) = dim(y,-1)")
ENLARGE_LAWS = (
    Law("enlarge-same", "enlarge[k](x) = x", ranks=("x=4",), source="a kernel of that size"),
    Law("enlarge-twice", "enlarge[k](enlarge[h](x)) = enlarge[k](x)", ranks=("x=4",)),
    Law(
        "enlarge-add",
        "enlarge[k](add(x, y)) = add(enlarge[k](x), enlarge[k](y))",
        where=_LIKE,
        ranks=(_KERNELS,),
        source="linear, where no kernel is broadcast over another's window",
    ),
    Law(
        "enlarge-mul",
        "enlarge[k](mul(x, y)) = mul(enlarge[k](x), enlarge[k](y))",
        where=_LIKE,
        ranks=(_KERNELS,),
        source="0 times 0 is 0",
    ),
    Law(
        "enlarge-smul",
        "enlarge[k](smul(x, w)) = smul(enlarge[k](x), w)",
        ranks=("x=4 w=0",),
        source="linear",
    ),
    Law(
        "enlarge-relu",
        "enlarge[k](relu(x)) = relu(enlarge[k](x))",
        ranks=("x=4",),
        source="relu keeps 0",
    ),
    Law(
        "enlarge-concat",
        "concat[a](enlarge[k](x), enlarge[k](y)) = enlarge[k](concat[a](x, y))",
        ranks=(_KERNELS,),
        source="along channels",
    ),
    Law(
        "enlarge-transpose",
        "transpose(enlarge[k](x)) = enlarge[k](transpose(x))",
        ranks=("x=4",),
        source="a square border",
    ),
)
