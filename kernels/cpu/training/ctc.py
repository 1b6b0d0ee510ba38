"""Connectionist temporal classification: forward and backward sums of a sample, in log space."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.kernels.cpu.substrate.integers import integer_at, is_integer
from soapstone.kernels.cpu.substrate.layout import is_float32, overlaps
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper, native, noop
from soapstone.native.intrinsics import f32p, f64p
from soapstone.native.memory import aligned_array
from soapstone.native.threads.parallel import parallel_for, useful_threads

_BAD_LABEL = 1

# Strides in bytes; wide: whether integers are int64. scratch: of each worker, for forward sums by
# step and state, backward sums of two steps, and logarithms of the sums of exponentials by step.
_CTC = Fields(
    "logits labels lengths loss slopes scratch room workers samples steps classes places"
    " wide_labels wide_lengths blank infinite"
    " logits_step(n t c) labels_step(n l) length_step loss_step slopes_step(n t c)"
)
_ctc_of = _CTC.at


@helper
def _plus(a: float, b: float, c: float) -> float:
    """The logarithm of exp(a) + exp(b) + exp(c)."""
    top = max(a, b, c)
    if top == -math.inf:
        return top
    return top + math.log(math.exp(a - top) + math.exp(b - top) + math.exp(c - top))


# x, labels and slopes are the addresses where those of one sample begin.


@helper
def _class_of(w: Any, labels: int, state: int) -> Any:
    """The class of a state; states are blank, a label, blank, and so on."""
    if state % 2 == 0:
        return w.blank
    return integer_at(labels + state // 2 * w.labels_step_l, w.wide_labels)


@helper
def _count(w: Any, labels: int) -> Any:
    """How many labels a sample has before the first negative one; -1 where one is no class."""
    for place in range(w.places):
        label = _class_of(w, labels, 2 * place + 1)
        if label < 0:
            return place
        if label >= w.classes:
            return -1
    return w.places


@helper
def _fill(w: Any, slopes: int, begin: int, end: int, value: float) -> None:
    """Make the slopes of some steps all alike."""
    for t in range(begin, end):
        for c in range(w.classes):
            f32p(slopes + t * w.slopes_step_t + c * w.slopes_step_c)[0] = value


@helper
def _softmax(w: Any, x: int, slopes: int, steps: int, log_sums: Any) -> None:
    """Write the softmax of each step to the slopes, and the logarithms of what it divides by."""
    for t in range(steps):
        row, out = x + t * w.logits_step_t, slopes + t * w.slopes_step_t
        top = -math.inf
        for c in range(w.classes):
            top = max(top, np.float64(f32p(row + c * w.logits_step_c)[0]))
        total = 0.0
        for c in range(w.classes):
            each = math.exp(f32p(row + c * w.logits_step_c)[0] - top)
            f32p(out + c * w.slopes_step_c)[0] = each
            total += each
        for c in range(w.classes):
            f32p(out + c * w.slopes_step_c)[0] *= np.float32(1 / total)
        log_sums[t] = top + math.log(total)


@helper
def _joined(
    w: Any, labels: int, sums: Any, at: int, state: int, label: int, last: int, way: int
) -> float:
    """The sum over the states from which one is reached; those outside of all ways are -inf.

    at: where the sums of the step before begin, or with way 1 in place of -1 of the step after.
    label: the state's class.
    """
    one, two = -math.inf, -math.inf
    if 0 <= state + way < last:
        one = sums[at + state + way]
    other = state + 2 * way
    if state % 2 == 1 and 0 <= other < last and _class_of(w, labels, other) != label:
        two = sums[at + other]
    return _plus(sums[at + state], one, two)


@helper
def _forward(
    w: Any, x: int, labels: int, steps: int, states: int, last: int, forward: Any, log_sums: Any
) -> Any:
    """Write the forward sums of all steps and states; return the logarithm of their total."""
    for t in range(steps):
        row, at = x + t * w.logits_step_t, t * states
        for s in range(last):
            label = _class_of(w, labels, s)
            if t == 0:
                before = 0.0 if s < 2 else -math.inf
            else:
                before = _joined(w, labels, forward, at - states, s, label, last, -1)
            forward[at + s] = before + (f32p(row + label * w.logits_step_c)[0] - log_sums[t])
    end = (steps - 1) * states + last - 1
    if last == 1:
        return forward[end]
    return _plus(forward[end], forward[end - 1], -math.inf)


@helper
def _backward(
    w: Any,
    x: int,
    labels: int,
    slopes: int,
    steps: int,
    states: int,
    last: int,
    forward: Any,
    back: Any,
    log_sums: Any,
    log: float,
) -> None:
    """Take each state's share of all ways from the slopes, which are the softmax.

    log: the logarithm of the sum of all ways.
    """
    for t in range(steps - 1, -1, -1):
        row, out = x + t * w.logits_step_t, slopes + t * w.slopes_step_t
        now, later = t % 2 * states, (t + 1) % 2 * states
        for s in range(last):
            label = _class_of(w, labels, s)
            if t == steps - 1:
                rest = 0.0 if s >= last - 2 else -math.inf
            else:
                rest = _joined(w, labels, back, later, s, label, last, 1)
            # The step's own probability is part of the forward sum, and of what is kept for the
            # step before.
            share = forward[t * states + s] + rest - log
            back[now + s] = rest + (f32p(row + label * w.logits_step_c)[0] - log_sums[t])
            if share > -math.inf:
                f32p(out + label * w.slopes_step_c)[0] -= math.exp(share)


@native("body")
def _rows(block: Any, begin: int, end: int) -> int:
    w = _ctc_of(block)
    states = 2 * min(w.places, w.steps) + 3
    for worker in range(begin, end):
        forward = f64p(w.scratch + worker * w.room)
        back = f64p(w.scratch + worker * w.room + 8 * w.steps * states)
        log_sums = f64p(w.scratch + worker * w.room + 8 * (w.steps + 2) * states)
        for sample in range(worker, w.samples, w.workers):
            x = w.logits + sample * w.logits_step_n
            labels = w.labels + sample * w.labels_step_n
            slopes = w.slopes + sample * w.slopes_step_n
            steps = w.steps
            if w.lengths != 0:
                own = integer_at(w.lengths + sample * w.length_step, w.wide_lengths)
                steps = max(min(own, steps), 0)
            count = _count(w, labels)
            if count < 0:
                return _BAD_LABEL
            last = 2 * count + 1
            log = 0.0 if steps == 0 and count == 0 else -math.inf
            if count <= steps and steps > 0:
                _softmax(w, x, slopes, steps, log_sums)
                log = _forward(w, x, labels, steps, states, last, forward, log_sums)
            impossible = log == -math.inf
            loss = -log
            if impossible and w.infinite == 0:
                loss = 0.0
            f32p(w.loss + sample * w.loss_step)[0] = loss
            _fill(w, slopes, steps, w.steps, 0.0)
            if impossible:
                _fill(w, slopes, 0, steps, math.nan if w.infinite != 0 else 0.0)
            else:
                _backward(w, x, labels, slopes, steps, states, last, forward, back, log_sums, log)
    return 0


@variant("ctc", "numba")
def ctc(call: Call) -> Entry | None:
    """Return the entry of the loss of each sample and the gradient of its logits."""
    logits, labels, *lengths = call.inputs
    loss, slopes = call.outputs
    if not is_float32(logits, loss, slopes) or not all(map(is_integer, (labels, *lengths))):
        return None
    if overlaps(loss) or overlaps(slopes):
        return None
    if not len(loss):
        return noop()
    samples, steps, classes = logits.shape
    places = labels.shape[1]
    states = 2 * min(places, steps) + 3
    workers = min(useful_threads(call.threads, 64 * steps * (states + classes) * samples), samples)
    room = 8 * ((steps + 2) * states + steps)
    block = _CTC.pack(
        logits=logits,
        labels=labels,
        lengths=lengths[0] if lengths else 0,
        loss=loss,
        slopes=slopes,
        scratch=aligned_array((workers * max(room, 8) // 8,), np.float64),
        room=room,
        workers=workers,
        samples=samples,
        steps=steps,
        classes=classes,
        places=places,
        wide_labels=labels.dtype == np.int64,
        wide_lengths=bool(lengths) and lengths[0].dtype == np.int64,
        blank=call.attributes["blank"],
        infinite=not call.attributes["zero_infinity"],
        logits_step=logits.strides,
        labels_step=labels.strides,
        length_step=lengths[0].strides[0] if lengths else 0,
        loss_step=loss.strides[0],
        slopes_step=slopes.strides,
    )
    statuses = {_BAD_LABEL: f"a label is not below {classes}, the number of classes"}
    return parallel_for(_rows, block, workers, workers, statuses)
