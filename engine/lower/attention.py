"""Attention that a graph spells out, a product, a softmax and a product, as one operator.

Its kernel keeps scores in the cache between the products that make and read them, where three
launches write and read all of them: 54 MB in a layer of 6 heads over 1,500 positions.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from soapstone.ir.graph import Node

if TYPE_CHECKING:
    from soapstone.engine.lower.weights import Site

_LEAST = 64 * 64  # scores of a head; of fewer, one product of all heads is faster
_BY_TIME = (0, 2, 1, 3)  # heads and positions in each other's place


def joined(site: Site, node: Node) -> str | None:
    """Return what takes the place of a product that ends attention, or None where it ends none.

    Scores with a mask stay: a softmax makes NaN of a row that is all hidden, and attention zeros.
    """
    softmax = site.only(node.inputs[0], "softmax")
    if softmax is None or any(node.attributes.values()):
        return None
    scores = site.builder.spec(softmax.inputs[0])
    if scores.dtype != "float32" or scores.rank not in (3, 4):
        return None
    if softmax.attributes["axis"] != scores.rank - 1 or math.prod(scores.shape[-2:]) < _LEAST:
        return None
    factor = site.only(softmax.inputs[0], "affine")
    product = site.only((factor or softmax).inputs[0], "matmul")
    scale = factor.attributes["scale"] if factor else 1.0
    if product is None or product.attributes["transpose_a"] or not scale > 0:
        return None
    if factor and factor.attributes["shift"]:
        return None
    operands = (*product.inputs, node.inputs[1])
    if len({site.builder.spec(name).shape[:-2] for name in operands}) > 1:
        return None
    turned = (False, not product.attributes["transpose_b"], False)
    made = site.builder.apply(
        "attention",
        *(_by_time(site, name, turn) for name, turn in zip(operands, turned)),
        name=node.name,
        sources=tuple(n for part in (product, factor, softmax, node) if part for n in part.work_of),
        scale=scale,
    )[0]
    made = site.builder.apply("transpose", made, permutation=_BY_TIME)[0]
    shape = (*scores.shape[:-1], site.builder.spec(made).shape[-1])
    return made if scores.rank == 4 else site.builder.apply("reshape", made, shape=shape)[0]


def _by_time(site: Site, value: str, turned: bool) -> str:
    """Return (b, heads, t, d), or (b, t, d) of one head, as (b, t, heads, d).

    turned: its last two axes are in each other's place.
    """
    shape = site.builder.spec(value).shape
    if len(shape) == 3:
        value = site.builder.apply("reshape", value, shape=(shape[0], 1, *shape[1:]))[0]
    order = (0, 3, 1, 2) if turned else _BY_TIME
    return site.builder.apply("transpose", value, permutation=order)[0]
