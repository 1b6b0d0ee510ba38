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
from soapstone.native.parallel import parallel_for, useful_threads

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
            slopes = w.slopes + sample * w.slopes_step_n
            labels = w.labels + sample * w.labels_step_n
            steps = w.steps
            if w.lengths != 0:
                own = integer_at(w.lengths + sample * w.length_step, w.wide_lengths)
                steps = max(min(own, steps), 0)
            count = 0
            while count < w.places:
                label = integer_at(labels + count * w.labels_step_l, w.wide_labels)
                if label < 0:
                    break
                if label >= w.classes:
                    return _BAD_LABEL
                count += 1
            for t in range(steps, w.steps):
                for c in range(w.classes):
                    f32p(slopes + t * w.slopes_step_t + c * w.slopes_step_c)[0] = 0
            log = -math.inf
            last = 2 * count + 1
            if steps == 0 and count == 0:
                log = 0.0
            if count <= steps and steps > 0:
                for t in range(steps):
                    row = x + t * w.logits_step_t
                    top = -math.inf
                    for c in range(w.classes):
                        top = max(top, np.float64(f32p(row + c * w.logits_step_c)[0]))
                    total = 0.0
                    out = slopes + t * w.slopes_step_t
                    for c in range(w.classes):
                        each = math.exp(f32p(row + c * w.logits_step_c)[0] - top)
                        f32p(out + c * w.slopes_step_c)[0] = each
                        total += each
                    for c in range(w.classes):
                        f32p(out + c * w.slopes_step_c)[0] *= np.float32(1 / total)
                    log_sums[t] = top + math.log(total)
                # A step's states: blank, a label, blank, …; states outside of all ways are -inf.
                for t in range(steps):
                    row, at = x + t * w.logits_step_t, t * states
                    for s in range(last):
                        label = w.blank
                        if s % 2 == 1:
                            label = integer_at(labels + s // 2 * w.labels_step_l, w.wide_labels)
                        if t == 0:
                            before = 0.0 if s < 2 else -math.inf
                        else:
                            one, two = -math.inf, -math.inf
                            if s > 0:
                                one = forward[at - states + s - 1]
                            if s % 2 == 1 and s > 1:
                                other = labels + (s // 2 - 1) * w.labels_step_l
                                if integer_at(other, w.wide_labels) != label:
                                    two = forward[at - states + s - 2]
                            before = _plus(forward[at - states + s], one, two)
                        forward[at + s] = before + (
                            f32p(row + label * w.logits_step_c)[0] - log_sums[t]
                        )
                end_at = (steps - 1) * states + last - 1
                log = forward[end_at]
                if count > 0:
                    log = _plus(log, forward[end_at - 1], -math.inf)
            f32p(w.loss + sample * w.loss_step)[0] = (
                -log if log != -math.inf else (math.inf if w.infinite != 0 else 0.0)
            )
            if log == -math.inf:
                for t in range(steps):
                    for c in range(w.classes):
                        f32p(slopes + t * w.slopes_step_t + c * w.slopes_step_c)[0] = (
                            math.nan if w.infinite != 0 else 0.0
                        )
                continue
            for t in range(steps - 1, -1, -1):
                out = slopes + t * w.slopes_step_t
                now, later = t % 2 * states, (t + 1) % 2 * states
                for s in range(last):
                    label = w.blank
                    if s % 2 == 1:
                        label = integer_at(labels + s // 2 * w.labels_step_l, w.wide_labels)
                    if t == steps - 1:
                        rest = 0.0 if s >= last - 2 else -math.inf
                    else:
                        one, two = -math.inf, -math.inf
                        if s + 1 < last:
                            one = back[later + s + 1]
                        if s % 2 == 1 and s + 2 < last:
                            other = labels + (s // 2 + 1) * w.labels_step_l
                            if integer_at(other, w.wide_labels) != label:
                                two = back[later + s + 2]
                        rest = _plus(back[later + s], one, two)
                    # The step's own probability is part of the forward sum, and of what is kept
                    # for the step before.
                    share = forward[t * states + s] + rest - log
                    own = f32p(x + t * w.logits_step_t + label * w.logits_step_c)[0]
                    back[now + s] = rest + (own - log_sums[t])
                    if share > -math.inf:
                        f32p(out + label * w.slopes_step_c)[0] -= math.exp(share)
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
