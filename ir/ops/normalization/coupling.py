"""`couple_pairs`: the probabilities of classes that fit those of each two of them best.

Source: Wu, Lin and Weng, Probability estimates for multi-class classification by pairwise coupling,
Journal of Machine Learning Research 5, 2004: Algorithm 2, stopped as LIBSVM stops it.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec

MOST_ROUNDS = 100
TOLERANCE = 0.005  # over the number of classes


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, 0)
    kinds = {"c": Kind.WHOLE, "k": Kind.WHOLE}
    made = einsum("n c k -> n c", inputs, dtypes=[inputs[0].dtype], kinds=kinds)
    _, classes, others = inputs[0].shape
    if classes != others:
        raise ShapeError(f"dim c is {classes}, dim k {others}; as many needed")
    return made


def _couple_pairs(attributes: Attributes, r: Array) -> Array:
    count, wide = r.shape[1], r.astype(np.float64)  # a step may come close to -1
    made = np.full(r.shape[:2], 1 / max(count, 1))
    if not made.size:
        return made.astype(r.dtype)
    q = -wide.transpose(0, 2, 1) * wide
    each = np.arange(count)
    q[:, each, each] = (wide**2).sum(axis=1) - wide[:, each, each] ** 2
    rows = np.arange(len(r))  # those that have not come to rest
    for _ in range(MOST_ROUNDS):
        p, part = made[rows], q[rows]
        product = np.einsum("nij,nj->ni", part, p)
        total = (p * product).sum(axis=1)
        moving = ~(np.abs(product - total[:, None]).max(axis=1) < TOLERANCE / count)
        rows, p, part = rows[moving], p[moving], part[moving]
        product, total = product[moving], total[moving]
        if not rows.size:
            break
        for i in each:
            step = (total - product[:, i]) / part[:, i, i]
            p[:, i] += step
            grown = 1 + step
            total = (total + step * (step * part[:, i, i] + 2 * product[:, i])) / grown / grown
            product = (product + step[:, None] * part[:, i]) / grown[:, None]
            p /= grown[:, None]
        made[rows] = p
    return made.astype(r.dtype)


define(
    name="couple_pairs",
    inputs=("r",),
    signature=_signature,
    reference=_couple_pairs,
    flops_per_point=20,
    cases=(
        Case(("4 3 3",), positive=True),
        Case(("2 2 2",), positive=True),
        Case(("1 1 1",)),
        Case(("0 2 2",)),
    ),
    doc="the probabilities of classes (n, c) that fit r (n, c, c) best; r[:, i, j] is that of"
    " class i against class j",
)
