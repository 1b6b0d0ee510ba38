"""Updates: optimiser steps `sgd` and `adam`, and `store`; their outputs are inputs' next values.

They are predicated: when `ok` is false, because the loss is not finite, everything stays as it was.
Dims: d0, d1, …
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Operand, Signature, Whole
from soapstone.ir.errors import ShapeError
from soapstone.ir.ops.checks import need_count, need_float, need_integer
from soapstone.ir.ops.signatures import DimTable, aligned, finish
from soapstone.ir.spec import Case, define
from soapstone.ir.tensor import Array, TensorSpec


def _signature(
    inputs: tuple[TensorSpec, ...], floats: range, lr: int, ok: int, others: tuple[int, ...] = ()
) -> Signature:
    """Return the signature of an update: the inputs `floats` but the gradient are outputs."""
    need_float(inputs, *floats, lr)
    if inputs[ok].dtype != "bool":
        raise ShapeError(f"input {ok} is {inputs[ok]}; shape () and type bool needed")
    table, operands = aligned(inputs, scalars=(lr, ok, *others))
    kept = [position for position in floats if position != 1]
    return finish(table, operands, [operands[i] for i in kept], [inputs[i].dtype for i in kept])


def _sgd_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    state = 3 if attributes["momentum"] else 2
    need_count(inputs, state + 2)
    return _signature(inputs, range(state), state, state + 1)


def _sgd(attributes: Attributes, w: Array, g: Array, *rest: Array) -> tuple[Array, ...]:
    *velocity, lr, ok = rest
    momentum = w.dtype.type(attributes["momentum"])
    step = g + w.dtype.type(attributes["weight_decay"]) * w
    state = []
    if velocity:
        state = [momentum * velocity[0] + step]
        step = step + momentum * state[0] if attributes["nesterov"] else state[0]
    return tuple(
        np.where(ok, after, before)
        for after, before in zip([w - lr * step, *state], [w, *velocity])
    )


def _adam_signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    need_integer(inputs, 5)
    return _signature(inputs, range(4), 4, 6, (5,))


def _adam(
    attributes: Attributes,
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    lr: Array,
    step: Array,
    ok: Array,
) -> tuple[Array, ...]:
    real: Any = w.dtype.type
    beta1, beta2 = attributes["beta1"], attributes["beta2"]
    decay = real(attributes["weight_decay"])
    start = w
    if attributes["decoupled"]:
        start = w * (1 - lr * decay)
    else:
        g = g + decay * w
    first = real(beta1) * m + real(1 - beta1) * g
    second = real(beta2) * v + real(1 - beta2) * g * g
    # Steps count from 1; a step of 0 has no bias to correct by and is taken as the first.
    count = max(int(step), 1)
    correction1, correction2 = real(1 - beta1**count), real(1 - beta2**count)
    scale = np.sqrt(second / correction2) + real(attributes["epsilon"])
    next_w = start - lr * (first / correction1) / scale
    return tuple(
        np.where(ok, after, before) for after, before in ((next_w, w), (first, m), (second, v))
    )


_OK = "bool"
define(
    name="sgd",
    inputs=("w", "g", "v?", "lr", "ok"),
    outputs=("w'", "v'"),
    signature=_sgd_signature,
    reference=_sgd,
    attributes={
        "momentum": Attribute("float", 0.0, minimum=0),
        "nesterov": Attribute("bool", False),
        "weight_decay": Attribute("float", 0.0, minimum=0),
    },
    flops_per_point=6,
    updates=((0, 0), (1, 2)),
    cases=(
        Case(("3 4", "3 4", "", _OK), {}, ()),
        Case(("3 4", "3 4", "", _OK), {"weight_decay": 0.1}, ()),
        Case(("3 4", "3 4", "3 4", "", _OK), {"momentum": 0.9}, ()),
        Case(
            ("2 1", "2 1", "2 1", "", _OK),
            {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
            (),
        ),
        Case(("", "", "", _OK), {}, ()),
        Case(("0 2", "0 2", "0 2", "", _OK), {"momentum": 0.5}, ()),
    ),
    doc="v' = momentum v + g + weight_decay w; w' = w - lr v'; without momentum there is no v",
)
define(
    name="adam",
    inputs=("w", "g", "m", "v", "lr", "step", "ok"),
    outputs=("w'", "m'", "v'"),
    signature=_adam_signature,
    reference=_adam,
    attributes={
        "beta1": Attribute("float", 0.9, minimum=0),
        "beta2": Attribute("float", 0.999, minimum=0),
        "epsilon": Attribute("float", 1e-8, minimum=0),
        "weight_decay": Attribute("float", 0.0, minimum=0),
        "decoupled": Attribute("bool", False),
    },
    flops_per_point=14,
    updates=((0, 0), (1, 2), (2, 3)),
    cases=tuple(
        Case((*[shape] * 4, "", f"{integer} <9", _OK), attributes, (), positive=True)
        for shape, integer, attributes in (
            ("3 4", "int64", {}),
            ("3 4", "int64", {"weight_decay": 0.1}),
            ("2 3", "int32", {"weight_decay": 0.1, "decoupled": True}),
            ("", "int64", {"beta1": 0.5, "beta2": 0.9, "epsilon": 1e-3}),
            ("0 2", "int64", {}),
        )
    ),
    doc="Adam (Kingma and Ba 2015); decoupled: AdamW, w shrinks by lr weight_decay first",
)


def _store_signature(inputs: tuple[TensorSpec, ...]) -> Signature:
    """Return the signature of pairs (next, old), perhaps with a flag; several pairs stay whole."""
    pairs, flag = divmod(len(inputs), 2)
    need_count(inputs, 2 * max(1, min(pairs, MOST_STORED)) + flag)
    if flag and inputs[-1].dtype != "bool":
        raise ShapeError(f"input {len(inputs) - 1} is {inputs[-1]}; shape () and type bool needed")
    if pairs == 1:
        table, operands = aligned(inputs, scalars=(2,))
    else:
        table = DimTable()
        operands = [Operand(tuple(Whole(extent) for extent in spec.shape)) for spec in inputs]
    old = range(1, 2 * pairs, 2)
    for k in old:
        if inputs[k] != inputs[k - 1]:
            needed = f"shape and type of input {k - 1}, {inputs[k - 1]}, needed"
            raise ShapeError(f"input {k} is {inputs[k]}; {needed}")
    return finish(table, operands, [operands[k] for k in old], [inputs[k].dtype for k in old])


def _store(attributes: Attributes, *inputs: Array) -> tuple[Array, ...]:
    ok = inputs[-1] if len(inputs) % 2 else True
    return tuple(np.where(ok, new, old) for new, old in zip(inputs[:-1:2], inputs[1::2]))


MOST_STORED = 256  # pairs of one operator
define(
    name="store",
    inputs=("x*",),
    outputs=("y*",),
    signature=lambda inputs, attributes: _store_signature(inputs),
    reference=_store,
    updates=tuple((pair, 2 * pair + 1) for pair in range(MOST_STORED)),
    flops_per_point=0,
    cases=(
        Case(("3 4", "3 4"), {}, ()),
        Case(("", ""), {}, ()),
        Case(("0 2", "0 2"), {}, ()),
        Case(("3 4", "3 4", _OK), {}, ()),
        Case(("3 4", "3 4", "2", "2", _OK), {}, ()),
    ),
    doc="of pairs of a next value and an old one the next, if a flag after them is true",
)
