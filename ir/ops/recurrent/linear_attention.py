"""`linear_attention`: attention without a softmax, by a state that each token changes.

A state is a matrix that maps keys to values. A token lets it decay, takes out what it says of the
token's key (`delta`), adds the token's value under that key, and asks it with its queries. Dims: b,
the samples; t, the tokens; h, the states; r, the queries of one; d, the elements of keys; e, those
of values; g, the decays of a state: one, or one an element of keys.

Source: Yang et al., Gated Delta Networks: Improving Mamba2 with Delta Rule, 2025.
"""

from __future__ import annotations

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_float
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_float(inputs, *range(6))
    text = "b t h r d, b t h d, b t h e, b t h g, b t h, b h d e -> b t h r e, b h d e"
    dtypes = [inputs[0].dtype, inputs[5].dtype]
    made = einsum(text, inputs, dtypes=dtypes, kinds=dict.fromkeys("trdg", Kind.WHOLE))
    decays, width = inputs[3].shape[3], inputs[1].shape[3]
    if decays not in (1, width):
        raise ShapeError(f"dim g is {decays} in input 3; 1 or {width}, as dim d, needed")
    return made


def _linear_attention(
    attributes: Attributes, q: Array, k: Array, v: Array, decay: Array, rate: Array, state: Array
) -> tuple[Array, Array]:
    kept = np.exp(decay)
    state, y = np.array(state), np.empty((*q.shape[:4], v.shape[3]), q.dtype)
    for t in range(q.shape[1]):
        state *= kept[:, t, :, :, None]
        added = v[:, t]
        if attributes["delta"]:
            added = added - (k[:, t, :, None] @ state)[:, :, 0]
        state += k[:, t, :, :, None] * (rate[:, t, :, None] * added)[:, :, None]
        y[:, t] = q[:, t] @ state
    return y, state


define(
    name="linear_attention",
    inputs=("q", "k", "v", "decay", "rate", "state"),
    outputs=("y", "last"),
    signature=_signature,
    reference=_linear_attention,
    attributes={"delta": Attribute("bool", False)},
    flops_per_point=6,
    cases=(
        Case(("2 3 2 2 4", "2 3 2 4", "2 3 2 5", "2 3 2 1", "2 3 2", "2 2 4 5")),
        Case(("2 3 2 1 4", "2 3 2 4", "2 3 2 5", "2 3 2 4", "2 3 2", "2 2 4 5"), {"delta": True}),
        Case(("1 1 3 2 16", "1 1 3 16", "1 1 3 40", "1 1 3 1", "1 1 3", "1 3 16 40")),
        Case(("1 1 1 1 1", "1 1 1 1", "1 1 1 1", "1 1 1 1", "1 1 1", "1 1 1 1"), {"delta": True}),
        Case(("2 0 1 1 2", "2 0 1 2", "2 0 1 3", "2 0 1 1", "2 0 1", "2 1 2 3")),
        Case(("0 2 1 1 2", "0 2 1 2", "0 2 1 3", "0 2 1 2", "0 2 1", "0 1 2 3"), {"delta": True}),
    ),
    doc="what queries find in a state that tokens change one after another, and the last state",
)
