"""Recurrent layers over all steps in one entry: products by a library, gates by Numba.

The inputs' products run over stretches of steps, whose sums stay in the cache until their gates
need them; the recurrent ones run step by step. Which form of the weights is fastest depends on the
sizes, so each is a variant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np

from soapstone.kernels.cpu.products.forms import (
    IN_PLACE,
    MOST_ROWS,
    PANELS,
    Form,
    Weights,
    forms as all_forms,
)
from soapstone.kernels.cpu.recurrent.gates import (
    Kernel,
    Operands,
    add,
    before_step,
    copy,
    repeat,
    within,
)
from soapstone.kernels.cpu.recurrent.steps import (
    FIRST,
    LSTM_BACK,
    LSTM_BACK_WITHIN,
    LSTM_STEP,
    RNN,
)
from soapstone.kernels.cpu.substrate.layout import float32, private, rows, rows_contiguous
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native import copies
from soapstone.native.entries import noop, sequence
from soapstone.native.memory import Block, pack

STRETCH = 512  # rows of an input product, where there are as many

Bind = Callable[..., Entry | None]


def in_rows(bind: Bind) -> Bind:
    """Return a kernel of contiguous rows as one of any strides, by copies where there are none.

    Lengths, the last operand of a call that has them, are handed over by name.
    """

    @wraps(bind)
    def staged(call: Call, **form: Any) -> Entry | None:
        if call.inputs[-1].dtype == np.int32 and call.inputs[-1].flags.aligned:
            form["lengths"] = call.inputs[-1]
            call = replace(call, inputs=call.inputs[:-1])
        if not float32(call):
            return None
        operands = (*call.inputs, *call.outputs)
        scattered = {i for i, array in enumerate(operands) if not rows_contiguous(array)}
        if not scattered:
            return bind(call, **form)
        used = list(operands)
        moves: tuple[list[Entry | None], list[Entry | None]] = ([], [])
        for i in scattered:
            used[i] = private(*operands[i].shape)
            given = i < len(call.inputs)
            ends = (used[i], operands[i]) if given else (operands[i], used[i])
            moves[0 if given else 1].append(copies.copy(*ends, call.threads))
        count = len(call.inputs)
        rest = call.constants - scattered
        made = bind(
            replace(call, inputs=(*used[:count],), outputs=(*used[count:],), constants=rest), **form
        )
        return sequence([*moves[0], made, *moves[1]])

    return staged


def forms(operator: str) -> Callable[[Bind], Bind]:
    """Return a decorator that registers `bind(call, form)` as a variant for each form."""

    def register(bind: Bind) -> Bind:
        staged = in_rows(bind)

        def of_few(call: Call, form: Form) -> Entry | None:
            samples = call.outputs[0].shape[-2]  # of more, all products would be the library's
            return staged(call, form=form) if samples <= MOST_ROWS else None

        def in_place(call: Call, form: Form) -> Entry | None:
            # Measured in turns, these find in the cache the weights that another has just read;
            # in a network all come from memory, which panels are for.
            few = call.outputs[0].shape[-2] <= MOST_ROWS and {1, 2} <= call.constants
            return None if few else staged(call, form=form)

        for name, form in all_forms().items():
            bound = of_few if name == PANELS else in_place if name in IN_PLACE else staged
            variant(operator, name)(partial(bound, form=form))
        return bind

    return register


class Steps:
    """The entries of a recurrence under construction: x w + b by stretches, then steps of each.

    lengths: (n,) int32 of the samples, None where all have all steps.
    """

    def __init__(self, call: Call, form: Form, lengths: Array | None = None) -> None:
        self.threads, self.form, self.lengths = call.threads, form, lengths
        self.constants = call.constants
        self.reverse = bool(call.attributes["reverse"])
        self._entries: list[Entry] = []

    def weights(self, call: Call, position: int) -> Weights:
        """Return the weights at a position of the inputs."""
        constant = position in self.constants
        return self.form(call.inputs[position], self.threads, constant)

    def add(self, *entries: Entry) -> None:
        """Append entries, which run in this order."""
        self._entries.extend(entries)

    def needed(self, block: Block, product: Entry) -> Entry:
        """Return a product of a step, whose number is in the block, where a sample has the step."""
        return within(self.lengths, block, product)

    def run(
        self,
        steps: int,
        stretch: int,
        blocks: list[Block],
        entries: list[Entry],
        before: list[Entry],
    ) -> None:
        """Add the steps in order, each stretch of them after its entry of `before`, if any."""
        bounds = [(lo, min(lo + stretch, steps)) for lo in range(0, steps, stretch)]
        order = list(range(len(bounds)))
        for number in order[::-1] if self.reverse else order:
            lo, hi = bounds[number]
            if before:
                self.add(self.needed(pack(lo), before[number]))
            first, stride = (hi - 1, -1) if self.reverse else (lo, 1)
            self.add(repeat(hi - lo, first, stride, blocks, entries))

    def back(
        self,
        kernels: tuple[Kernel, Kernel],
        operands: Operands,
        product: Entry,
        first: Array,
    ) -> None:
        """Add the steps back of a state whose gradient is `dstate`, and of the first one then.

        kernels: without lengths, and with them. product: what makes `dstate` of `dense`.
        """
        dy, dstate = operands["dy"], operands["dstate"]
        steps, threads = len(dy), self.threads
        if self.lengths is None:
            block, step = kernels[0].bind(operands, first.shape, threads)
            self.run(steps, steps, [block], [step, product], [])
            self.add(copy(dstate, first))
            return
        past, zero = private(*first.shape), private(*first.shape)
        zero[...] = 0
        operands = {**operands, "past": past}
        block, step = kernels[1].bind(operands, first.shape, threads, lengths=self.lengths)
        self.add(copy(zero, past))
        self.run(steps, steps, [block], [step, self.needed(block, product)], [])
        self.add(add(past, dstate, first))

    def entry(self, *weights: Weights) -> Entry:
        """Return the entry of it all, the packing of weights first."""
        prepared = [entry for w in weights for entry in w.prepare]
        return sequence([*prepared, *self._entries])


def stretch_of(x: Array) -> int:
    """Return how many steps' input products run together."""
    steps, samples = x.shape[:2]
    parts = max(1, round(steps * samples / STRETCH))
    return int(-(-steps // min(parts, steps)))


def input_products(
    x: Array, w: Weights, bias: Array | None, sums: Array, stretch: int
) -> list[Entry] | None:
    """Return the entries of x w + b, one a stretch of steps, or None where the form fails.

    sums: (stretch, n, columns), dense: where each of them writes.
    """
    made: list[Entry] = []
    dense: Array | None = None
    for lo in range(0, len(x), stretch):
        part = x[lo : lo + stretch]
        out, flat = rows(sums[: len(part)]), rows(part)
        if out is None:
            return None
        staged: list[Entry] = []
        if flat is None:
            if dense is None:
                dense = private(stretch, *x.shape[1:])
            staged = [copy(part, dense[: len(part)])]
            flat = dense[: len(part)].reshape(len(out), -1)
        product = w.product(flat, out, bias)
        if product is None:
            return None
        made.append(sequence([*staged, product]))
    return made


@forms("lstm")
def lstm(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of a long short-term memory over all steps."""
    x, _, _, b, h0, c0 = call.inputs
    y, h, c, gate_values, cells = call.outputs
    if not x.size:
        return noop() if not y.size else None
    samples, width = h0.shape
    build = Steps(call, form, lengths)
    w, r = build.weights(call, 1), build.weights(call, 2)
    stretch = stretch_of(x)
    inputs, sums = private(stretch, samples, 4 * width), private(samples, 4 * width)
    state, cell = private(samples, width), private(samples, width)
    before = input_products(x, w, b, inputs, stretch)
    recurrent = r.product(state, sums)
    if before is None or recurrent is None:
        return None
    operands = {"inputs": inputs, "sums": sums, "state": state, "cell": cell, "cells": cells}
    operands |= {"gates": gate_values, "y": y}
    block, step = LSTM_STEP.bind(operands, h0.shape, call.threads, lengths=lengths)
    build.add(copy(h0, state), copy(c0, cell))
    build.run(len(x), stretch, [block], [build.needed(block, recurrent), step], before)
    build.add(copy(state, h), copy(cell, c))
    return build.entry(w, r)


@forms("lstm_grad")
def lstm_grad(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of the gradients before the gates of all steps."""
    dy, dh, dc, gate_values, cells, r, c0 = call.inputs
    dgates, dh0, dc0 = call.outputs
    if not dy.size:
        return noop()
    samples, width = dh.shape
    build = Steps(call, form, lengths)
    build.reverse = not build.reverse
    back = form(r.swapaxes(0, 1), call.threads, 5 in call.constants)
    dense = private(samples, 4 * width)
    dstate, dcell = private(samples, width), private(samples, width)
    product = back.product(dense, dstate)
    if product is None:
        return None
    before = before_step(cells, c0, 1 if build.reverse else -1)
    operands: Operands = {"dy": dy, "cells": cells, "before": before, "gates": gate_values}
    operands |= {"dgates": dgates, "dense": dense, "dstate": dstate, "dcell": dcell}
    build.add(copy(dh, dstate), copy(dc, dcell))
    build.back((LSTM_BACK, LSTM_BACK_WITHIN), operands, product, dh0)
    build.add(copy(dcell, dc0))
    return build.entry(back)


@forms("rnn")
def rnn(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of a plain recurrence over all steps."""
    x, _, _, b, h0 = call.inputs
    y, h = call.outputs
    if not x.size:
        return noop() if not y.size else None
    samples, width = h0.shape
    build = Steps(call, form, lengths)
    w, r = build.weights(call, 1), build.weights(call, 2)
    dense = y if rows(y) is not None else private(*y.shape)
    state, sums = private(samples, width), private(samples, width)
    before = input_products(x, w, b, dense, len(x))
    recurrent = r.product(state, sums)
    if before is None or recurrent is None:
        return None
    kernel = RNN[call.attributes["activation"]][0]
    operands = {"y": dense, "sums": sums, "state": state}
    block, step = kernel.bind(operands, h0.shape, call.threads, lengths=lengths)
    build.add(copy(h0, state))
    build.run(len(x), len(x), [block], [build.needed(block, recurrent), step], before)
    if dense is not y:
        build.add(copy(dense, y))
    build.add(copy(state, h))
    return build.entry(w, r)


@forms("rnn_grad")
def rnn_grad(call: Call, form: Form, lengths: Array | None = None) -> Entry | None:
    """Return the entry of the gradients before the activation of all steps."""
    dy, dh, y, r = call.inputs
    dgates, dh0 = call.outputs
    if not dy.size:
        return noop()
    build = Steps(call, form, lengths)
    build.reverse = not build.reverse
    back = form(r.swapaxes(0, 1), call.threads, 3 in call.constants)
    dense, dstate = private(*dh.shape), private(*dh.shape)
    product = back.product(dense, dstate)
    if product is None:
        return None
    operands = {"dy": dy, "y": y, "dgates": dgates, "dense": dense, "dstate": dstate}
    build.add(copy(dh, dstate))
    build.back(RNN[call.attributes["activation"]][1:], operands, product, dh0)
    return build.entry(back)


@variant("previous_step", "numba")
@in_rows
def previous_step(call: Call, lengths: Array | None = None) -> Entry | None:
    """Return the entry that moves the steps on by one."""
    y, first = call.inputs
    (out,) = call.outputs
    if not out.size:
        return noop()
    reverse = bool(call.attributes["reverse"])
    kept, start = (y[1:], out[-1]) if reverse else (y[:-1], out[0])
    moved = [copy(kept, out[:-1] if reverse else out[1:])] if len(y) > 1 else []
    moved.append(copy(first, np.asarray(start)))
    if lengths is not None and reverse:
        operands = {"first": first, "before": before_step(out, first, 1)}
        turns = (1, len(y) - 1, 1)
        moved.append(FIRST.bind(operands, first.shape, call.threads, turns, lengths)[1])
    return sequence(moved)
