"""The gated recurrent unit and the simple one over all steps, each in one entry."""

from __future__ import annotations

import numpy as np

from soapstone.kernels.cpu.products.forms import Form, Weights
from soapstone.kernels.cpu.recurrent.gates import Operands, add, before_step, copy, within
from soapstone.kernels.cpu.recurrent.layers import Steps, forms, in_rows, input_products, stretch_of
from soapstone.kernels.cpu.recurrent.steps import (
    GRU_BACK,
    GRU_HALF,
    GRU_REST,
    GRU_STEP,
    SRU_BACK,
    SRU_STEPS,
)
from soapstone.kernels.cpu.substrate.layout import private
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.entries import noop, sequence
from soapstone.native.memory import Block

Parts = tuple[list[Block], list[Entry], list[Weights]]


def gru_step(
    call: Call,
    form: Form,
    position: int,
    rb: Array,
    ends: tuple[Array, Array],
    results: tuple[Array, ...],
    lengths: Array | None = None,
) -> Parts | None:
    """Return the blocks and entries of one step of a call, and the weights they use.

    position: of the recurrent weights; ends: sums of the inputs (steps, n, 3h), state (n, h);
    results: gates, hidden, y of all steps.
    """
    inputs, state = ends
    samples, width = state.shape
    r, threads = call.inputs[position], call.threads
    constant = position in call.constants
    gates, hidden, y = results
    operands = {"inputs": inputs, "state": state, "gates": gates, "hidden": hidden, "y": y}
    if call.attributes["linear_before_reset"]:
        weights = form(r, threads, constant)
        sums = private(samples, 3 * width)
        product = weights.product(state, sums, rb)
        if product is None:
            return None
        operands["sums"] = sums
        block, step = GRU_STEP.bind(operands, state.shape, threads, lengths=lengths)
        return [block], [within(lengths, block, product), step], [weights]
    each = [form(part, threads, constant) for part in (r[:, : 2 * width], r[:, 2 * width :])]
    scaled = private(samples, width)
    pair = private(samples, 2 * width), private(samples, width)
    first = each[0].product(state, pair[0], rb[: 2 * width])
    second = each[1].product(scaled, pair[1], rb[2 * width :])
    if first is None or second is None:
        return None
    operands["scaled"] = scaled
    (half, early), (rest, late) = (
        kernel.bind({**operands, "sums": sums}, state.shape, threads, lengths=lengths)
        for kernel, sums in ((GRU_HALF, pair[0]), (GRU_REST, pair[1]))
    )
    first, second = (within(lengths, half, product) for product in (first, second))
    return [half, rest], [first, early, second, late], each


@forms("gru")
def gru(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of a gated recurrent unit over all steps."""
    x, _, _, b, rb, h0 = call.inputs
    y, h, gates, hidden = call.outputs
    if not x.size:
        return noop() if not y.size else None
    samples, width = h0.shape
    build = Steps(call, form, lengths)
    w = build.weights(call, 1)
    stretch = stretch_of(x)
    inputs, state = private(stretch, samples, 3 * width), private(samples, width)
    before = input_products(x, w, b, inputs, stretch)
    made = gru_step(call, form, 2, rb, (inputs, state), (gates, hidden, y), lengths)
    if before is None or made is None:
        return None
    blocks, entries, weights = made
    build.add(copy(h0, state))
    build.run(len(x), stretch, blocks, entries, before)
    build.add(copy(state, h))
    return build.entry(w, *weights)


@forms("gru_grad")
def gru_grad(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of the gradients before the gates of all steps."""
    dy, dh, gates, hidden, before, _ = call.inputs
    dgates, dproduct, dh0 = call.outputs
    if not call.attributes["linear_before_reset"]:
        return None
    if not dy.size:
        return noop()
    build = Steps(call, form)
    build.reverse = not build.reverse
    made = _grad_step(call, form, (dy, gates, hidden, before), (dgates, dproduct), dh, lengths)
    if made is None:
        return None
    block, entries, start, ends, weights = made
    build.add(start)
    build.run(len(dy), len(dy), [block], entries, [])
    build.add(add(*ends, dh0))
    return build.entry(weights)


def _grad_step(
    call: Call,
    form: Form,
    given: tuple[Array, Array, Array, Array],
    made: tuple[Array, Array],
    dh: Array | None,
    lengths: Array | None = None,
) -> tuple[Block, list[Entry], Entry, tuple[Array, Array], Weights] | None:
    """Return the block and entries of a step, the entry before the first, and both ends."""
    samples, width = given[0].shape[1:]
    position = len(call.inputs) - 1
    turned = call.inputs[position].swapaxes(0, 1)
    back = form(turned, call.threads, position in call.constants)
    dense = private(samples, 3 * width)
    past, through = private(samples, width), private(samples, width)
    product = back.product(dense, through)
    if product is None:
        return None
    zero = private(samples, width)
    zero[...] = 0
    start = sequence([copy(zero if dh is None else dh, past), copy(zero, through)])
    names = ("dy", "gates", "hidden", "before", "dgates", "dproduct")
    operands = dict(zip(names, (*given, *made)))
    operands |= {"past": past, "through": through, "dense": dense}
    block, step = GRU_BACK.bind(operands, past.shape, call.threads, lengths=lengths)
    return block, [step, within(lengths, block, product)], start, (past, through), back


@forms("gru_cell")
def gru_cell(call: Call, form: Form) -> Entry | None:
    """Return the entry of one step of a gated recurrent unit."""
    x, h, w, _, b, rb = call.inputs
    y, gates, hidden = call.outputs
    if not x.size:
        return noop() if not y.size else None
    samples, width = h.shape
    left = form(w, call.threads, 2 in call.constants)
    inputs, state = private(1, samples, 3 * width), private(samples, width)
    product = left.product(x, inputs[0], b)
    results = (gates[None], hidden[None], y[None])
    made = gru_step(call, form, 3, rb, (inputs, state), results)
    if product is None or made is None:
        return None
    _, entries, weights = made
    prepared = [entry for used in (left, *weights) for entry in used.prepare]
    return sequence([*prepared, copy(h, state), product, *entries])


@forms("gru_cell_grad")
def gru_cell_grad(call: Call, form: Form) -> Entry | None:
    """Return the entry of the gradients of one step of a gated recurrent unit."""
    dy, gates, hidden, h, _ = call.inputs
    dgates, dproduct, dh = call.outputs
    if not call.attributes["linear_before_reset"]:
        return None
    if not dy.size:
        return noop()
    given = (dy[None], gates[None], hidden[None], h[None])
    made = _grad_step(call, form, given, (dgates[None], dproduct[None]), None)
    if made is None:
        return None
    _, entries, start, ends, weights = made
    return sequence([*weights.prepare, start, *entries, add(*ends, dh)])


@forms("sru")
def sru(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of a simple recurrent unit over all steps."""
    x, _, b, c0 = call.inputs
    y, c, gates, cells = call.outputs
    if not x.size:
        return noop() if not y.size else None
    width = c0.shape[1]
    build = Steps(call, form)
    w = build.weights(call, 1)
    dense = gates if gates.flags.c_contiguous else private(*gates.shape)
    products = input_products(x, w, None, dense, len(x))
    if products is None:
        return None
    highway = dense[..., 3 * width :] if gates.shape[2] == 4 * width else x
    cell = private(*c0.shape)
    turns = (len(x) - 1, len(x), -1) if build.reverse else (0, len(x), 1)
    operands = {"gates": dense, "highway": highway, "cells": cells, "y": y, "cell": cell}
    operands["bias"] = b
    _, steps = SRU_STEPS.bind(operands, c0.shape, call.threads, turns, lengths)
    build.add(copy(c0, cell), *products, steps)
    if dense is not gates:
        build.add(copy(dense, gates))
    build.add(copy(cell, c))
    return build.entry(w)


@variant("sru_grad", "numba")
@in_rows
def sru_grad(call: Call, lengths: Array | None = None) -> Entry | None:
    """Return the entry of the gradients of a simple recurrent unit over all steps."""
    dy, dc, gates, cells, x, c0 = call.inputs
    dgates, direct, dc0 = call.outputs
    if not dy.size:
        return None if direct.size else noop()
    width = c0.shape[1]
    own = gates.shape[2] == 4 * width
    highway = gates[..., 3 * width :] if own else x
    dhighway = dgates[..., 3 * width :] if own else direct
    dcell = private(*c0.shape)
    backward = not call.attributes["reverse"]
    turns = (len(dy) - 1, len(dy), -1) if backward else (0, len(dy), 1)
    entries = [copy(dc, dcell)]
    if own:
        entries.append(copy(_zeros(direct), direct))
    operands: Operands = {"dy": dy, "gates": gates, "cells": cells, "highway": highway}
    operands |= {"dgates": dgates, "dhighway": dhighway, "dcell": dcell}
    operands["before"] = before_step(cells, c0, -turns[2])
    _, steps = SRU_BACK.bind(operands, c0.shape, call.threads, turns, lengths)
    return sequence([*entries, steps, copy(dcell, dc0)])


def _zeros(like: Array) -> Array:
    """Return zeros of a shape (t, n, k): one row, seen at every step and sample."""
    row = private(like.shape[2])
    row[...] = 0
    return np.lib.stride_tricks.as_strided(row, like.shape, (0, 0, 4))
