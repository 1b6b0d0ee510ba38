"""Linear attention: each thread takes states of its own, and their tokens one after another."""

from __future__ import annotations

import math
from typing import Any

from soapstone.kernels.cpu.substrate.layout import is_float32
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.blocks import Fields
from soapstone.native.entries import native, noop, routine
from soapstone.native.intrinsics import f32p, stack
from soapstone.native.threads.parallel import parallel_for, useful_threads

_MOST = 1024  # elements of a value, of which a row is on the stack

# All operands are contiguous; d, e: elements of keys and values; decays: of a state.
_STATES = Fields("q k v decay rate state y last tokens states queries d e decays delta")
_states_of = _STATES.at


@routine
def _asked(found: Any, row: Any, key: float, kept: float, n: int) -> None:
    """Let a row of a state decay, and add what it says of a key's element to what is found."""
    for i in range(n):
        value = row[i] * kept
        row[i] = value
        found[i] += key * value


@routine
def _added(row: Any, new: Any, key: float, n: int) -> None:
    for i in range(n):
        row[i] += key * new[i]


@native("body")
def _tokens(block: int, begin: int, end: int) -> int:
    w = _states_of(block)
    new = f32p(stack(4096))
    size = w.d * w.e
    for item in range(begin, end):
        sample, head = item // w.states, item % w.states
        state, before = f32p(w.last + 4 * item * size), f32p(w.state + 4 * item * size)
        for i in range(size):
            state[i] = before[i]
        for token in range(w.tokens):
            place = (sample * w.tokens + token) * w.states + head
            key, decay = f32p(w.k + 4 * place * w.d), f32p(w.decay + 4 * place * w.decays)
            value, rate = f32p(w.v + 4 * place * w.e), f32p(w.rate)[place]
            kept = math.exp(decay[0])
            for i in range(w.e):
                new[i] = 0.0
            for j in range(w.d):
                if w.decays != 1:
                    kept = math.exp(decay[j])
                row = f32p(w.last + 4 * (item * size + j * w.e))
                _asked(new, row, key[j], kept, w.e)
            for i in range(w.e):
                new[i] = rate * (value[i] - new[i]) if w.delta != 0 else rate * value[i]
            for j in range(w.d):
                _added(f32p(w.last + 4 * (item * size + j * w.e)), new, key[j], w.e)
            for query in range(w.queries):
                asked = place * w.queries + query
                q, y = f32p(w.q + 4 * asked * w.d), f32p(w.y + 4 * asked * w.e)
                for i in range(w.e):
                    y[i] = 0.0
                for j in range(w.d):
                    _added(y, f32p(w.last + 4 * (item * size + j * w.e)), q[j], w.e)
    return 0


@variant("linear_attention", "numba")
def linear_attention(call: Call) -> Entry | None:
    """The tokens of float32 operands that are contiguous."""
    (q, k, v, decay, rate, state), (y, last) = call.inputs, call.outputs
    arrays = (q, k, v, decay, rate, state, y, last)
    if not is_float32(*arrays) or not all(each.flags.c_contiguous for each in arrays):
        return None
    if v.shape[3] > _MOST:
        return None
    samples, tokens, states, queries, d = q.shape
    if last.size == 0 and y.size == 0:
        return noop()
    names = ("q", "k", "v", "decay", "rate", "state", "y", "last")
    block = _STATES.pack(
        **dict(zip(names, arrays)),
        tokens=tokens,
        states=states,
        queries=queries,
        d=d,
        e=v.shape[3],
        decays=decay.shape[3],
        delta=call.attributes["delta"],
    )
    threads = useful_threads(call.threads, (2 + tokens) * last.nbytes)
    return parallel_for(_tokens, block, samples * states, threads)
