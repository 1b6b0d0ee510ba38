"""Single steps of recurrent layers, each in one entry."""

from __future__ import annotations

from soapstone.kernels.cpu.products.forms import Form
from soapstone.kernels.cpu.recurrent.gates import copy
from soapstone.kernels.cpu.recurrent.layers import forms, in_rows
from soapstone.kernels.cpu.recurrent.steps import LSTM_BACK, LSTM_STEP, NAS_BACK, NAS_STEP
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import noop, sequence


def _sums(
    call: Call, form: Form, biases: tuple[Array | None, Array | None]
) -> tuple[list[Entry], Array, Array] | None:
    """Return the entries of x w and h r, each with its bias, and where they write."""
    x, h, _, w, _, _ = call.inputs
    made: list[Entry] = []
    sums = []
    for position, a, bias in ((3, x, biases[0]), (4, h, biases[1])):
        weights = form(call.inputs[position], call.threads, position in call.constants)
        out = private(len(a), w.shape[1])
        product = weights.product(a, out, bias)
        if product is None:
            return None
        made += [*weights.prepare, product]
        sums.append(out)
    return made, sums[0], sums[1]


@forms("lstm_cell")
def lstm_cell(call: Call, form: Form) -> Entry | None:
    """Return the entry of one step of a long short-term memory."""
    x, h, c, _, _, b = call.inputs
    y, cell, gate_values = call.outputs
    if not x.size:
        return noop() if not y.size else None
    made = _sums(call, form, (b, None))
    if made is None:
        return None
    entries, inputs, sums = made
    state, kept = private(*h.shape), private(*c.shape)
    operands = {"inputs": inputs, "sums": sums, "state": state, "cell": kept, "cells": cell}
    operands |= {"gates": gate_values, "y": y}
    _, step = LSTM_STEP.bind(operands, h.shape, call.threads)
    return sequence([*entries, copy(c, kept), step])


@variant("lstm_cell_grad", "numba")
@in_rows
def lstm_cell_grad(call: Call) -> Entry | None:
    """Return the entry of the gradients of one step of a long short-term memory."""
    dy, dcell, gate_values, cell, c = call.inputs
    dgates, dc = call.outputs
    if not dy.size:
        return noop()
    none, kept = private(*c.shape), private(*c.shape)
    none[...] = 0
    operands = {"dy": dy, "cells": cell, "before": c, "dstate": none, "dcell": kept}
    operands |= {"gates": gate_values, "dgates": dgates, "dense": private(*dgates.shape)}
    _, step = LSTM_BACK.bind(operands, c.shape, call.threads)
    return sequence([copy(dcell, kept), step, copy(kept, dc)])


@forms("nas_cell")
def nas_cell(call: Call, form: Form) -> Entry | None:
    """Return the entry of one step of the cell found by architecture search."""
    x, _, c, _, _, b = call.inputs
    if not x.size:
        return noop() if not call.outputs[0].size else None
    made = _sums(call, form, (None, b))
    if made is None:
        return None
    entries, inputs, states = made
    operands = dict(zip(("y", "cell", "gates", "left", "right"), call.outputs))
    operands |= {"inputs": inputs, "states": states, "c": c}
    _, step = NAS_STEP.bind(operands, c.shape, call.threads)
    return sequence([*entries, step])


@variant("nas_cell_grad", "numba")
@in_rows
def nas_cell_grad(call: Call) -> Entry | None:
    """Return the entry of the gradients of one step of the cell found by architecture search."""
    if not call.inputs[0].size:
        return noop()
    names = ("dy", "dcell", "gates", "left", "right", "c", "dinputs", "dstates", "dc")
    operands = dict(zip(names, (*call.inputs, *call.outputs)))
    return NAS_BACK.bind(operands, call.inputs[0].shape, call.threads)[1]
