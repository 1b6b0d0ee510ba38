"""Linear attention of com.microsoft, with the gates and convolutions before it, and their states.

The numbers are those of ONNX Runtime on a processor.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule

_RULES = ("linear", "gated", "delta", "gated_delta")


@rule("LinearAttention", domain=MICROSOFT)
def linear_attention(n: Call) -> Any:
    q_heads, heads = n.attribute("q_num_heads", 0), n.attribute("kv_num_heads", 0)
    kind = n.text("update_rule", "gated_delta", _RULES)
    n.attribute("chunk_size")  # which changes no result
    n.refuse("state_window")
    q, k, v = (n.value(position) for position in range(3))
    if q_heads < 1 or heads < 1 or max(q_heads, heads) % min(q_heads, heads):
        raise OnnxError(
            f"q_num_heads {q_heads} and kv_num_heads {heads} found; one divides the other"
        )
    for x, count in ((q, q_heads), (k, heads), (v, heads)):
        if x.rank != 3 or x.shape[2] % count:
            raise OnnxError(f"{x.spec} found; rank 3, of {count} heads, needed")
    samples, count = q.shape[:2]
    width, columns = q.shape[2] // q_heads, v.shape[2] // heads
    queries = max(q_heads // heads, 1)
    if q_heads < heads:  # each query asks several states
        q = _repeated(n, n.reshape(q, (samples, count, q_heads, width)), heads)
    q = n.reshape(q, (samples, count, heads, queries, width))
    q = n("affine", q, scale=n.attribute("scale", 0.0) or 1 / math.sqrt(width))
    k = n.reshape(k, (samples, count, heads, k.shape[2] // heads))
    v = n.reshape(v, (samples, count, heads, columns))
    y, last = _recurrence(n, kind, q, k, v, n.maybe(4), n.maybe(5), n.maybe(3))
    return [n.reshape(y, (samples, count, heads * queries * columns)), last]


@rule("GatedDeltaNet", domain=MICROSOFT)
def gated_delta_net(n: Call) -> list[Value]:
    """The same of samples of equally many tokens, whose states have values' elements first."""
    kind = n.text("update_rule", "gated_delta", _RULES)
    n.attribute("chunk_size")  # which changes no result
    n.refuse("state_update_capacity")
    q, k, v, state = n.value(0), n.maybe(1), n.maybe(2), n.maybe(6)
    if k is None or v is None:
        if state is None or state.rank != 4:
            raise OnnxError("queries, keys and values in one input found; a first state needed")
        heads, columns, width = state.shape[1:]
        own = (q.shape[-1] - heads * columns) // 2
        ends = (0, own, 2 * own, q.shape[-1])
        q, k, v = (n.part(q, q.rank - 1, a, b) for a, b in itertools.pairwise(ends))
        q, k = (n.reshape(x, (*x.shape[:-1], own // width, width)) for x in (q, k))
        v = n.reshape(v, (*v.shape[:-1], heads, columns))
    if q.rank != 4 and state is None:
        raise OnnxError("tokens of all samples along one axis found; a first state needed")
    outer, (heads, columns), width = q.shape[:-2], v.shape[-2:], q.shape[-1]
    samples = q.shape[0] if q.rank == 4 else state.shape[0] if state is not None else 1
    tokens = (samples, math.prod(outer) // max(samples, 1))
    q, k = (n.cast(n.reshape(x, (*tokens, *x.shape[-2:])), "float32") for x in (q, k))
    if n.attribute("qk_l2_norm", 0):
        q, k = (_normed(n, x) for x in (q, k))
    q = n("affine", q, scale=n.attribute("scale", 0.0) or 1 / math.sqrt(width))
    if heads % q.shape[2]:
        raise OnnxError(f"{q.shape[2]} heads of queries and {heads} of values found")
    q, k = (_repeated(n, x, heads) for x in (q, k))
    decay, rate = (n.maybe(position) for position in (4, 5))
    decay = None if decay is None else _decay(n, n.cast(decay, "float32"), tokens, heads)
    if rate is not None:
        rate = n.cast(n.reshape(rate, (*tokens, heads)), "float32")
    if n.text("beta_activation", "none", ("none", "sigmoid")) == "sigmoid" and rate is not None:
        rate = n("sigmoid", rate)
    before = None if state is None else n.transpose(state, (0, 1, 3, 2))
    q = n.reshape(q, (*tokens, heads, 1, width))
    values = n.reshape(v, (*tokens, heads, columns))
    y, last = _recurrence(n, kind, q, k, values, decay, rate, before)
    y = n.cast(n.reshape(y, (*outer, heads, columns)), v.dtype)
    return [y, n.transpose(last, (0, 1, 3, 2))]


def _normed(n: Call, x: Value) -> Value:
    """Return x over the Euclidean norms of its last axis."""
    total = n("reduce_sum", n("mul", x, x), axes=(x.rank - 1,), keepdims=True)
    return n("div", x, n("sqrt", n("affine", total, shift=1e-6)))


def _repeated(n: Call, x: Value, heads: int) -> Value:
    """Return x (b, t, few, d) with each head as often in turn as makes so many heads."""
    samples, count, few, width = x.shape
    column = n.reshape(x, (samples, count, few, 1, width))
    wide = n.broadcast(column, (samples, count, few, heads // few, width))
    return n.reshape(wide, (samples, count, heads, width))


def _decay(n: Call, x: Value, tokens: tuple[int, int], heads: int) -> Value:
    """Return logarithms of decays (b, t, numbers) of what the node is given."""
    numbers = x.spec.size // max(math.prod(tokens), 1)
    x = n.reshape(x, (*tokens, heads, numbers // heads))
    kind = n.text("gate_activation", "none", ("none", "softplus", "qwen", "sigmoid", "kda"))
    if kind != "none":
        slope = n("exp", n.reshape(n.value(7), (heads, 1)))
        shift = n.value(8)
        x = n("add", x, n.reshape(shift, (heads, shift.spec.size // heads)))
        least = n.attribute("gate_lower_bound", -5.0)
        if kind in ("softplus", "qwen"):
            x = n("neg", n("mul", slope, n("softplus", x)))
        else:
            x = n("affine", n("sigmoid", n("mul", slope, x)), scale=least)
    return n.reshape(x, (*tokens, numbers))


def _recurrence(
    n: Call,
    kind: str,
    q: Value,
    k: Value,
    v: Value,
    decay: Value | None,
    rate: Value | None,
    state: Value | None,
) -> tuple[Value, Value]:
    """Return what queries (b, t, h, r, d) find (b, t, h, r, e), and the last state (b, h, d, e).

    k, v: (b, t, h, d) and (b, t, h, e). decay: (b, t, h) or (b, t, h * d), and rate: (b, t, h) or
    (b, t, 1), of the rules that have them. state: the first, zeros where there is none.
    """
    samples, count, heads, width = k.shape
    if "gated" not in kind:
        decay = n.known(np.zeros((samples, count, heads)), "float32")
    if "delta" not in kind:
        rate = n.known(np.ones((samples, count, heads)), "float32")
    if decay is None or rate is None:
        raise OnnxError(f"decay {decay} and beta {rate} found; what {kind!r} has needed")
    decays = decay.shape[2] // heads
    if state is None:
        state = n.known(np.zeros((samples, heads, width, v.shape[3])), "float32")
    wide = [n.cast(each, "float32") for each in (q, k, v, decay, rate, state)]
    wide[3] = n.reshape(wide[3], (samples, count, heads, decays))
    wide[4] = n.broadcast(wide[4], (samples, count, heads))
    y, last = n.all("linear_attention", *wide, delta="delta" in kind)
    return n.cast(y, q.dtype), n.cast(last, state.dtype)


@rule("LinearAttentionGate", domain=MICROSOFT)
def linear_attention_gate(n: Call) -> list[Value | None]:
    """Logarithms of decays of a state, and how much of what it says of a key is taken out."""
    a, b = n.value(0), n.maybe(3)
    bent = n("softplus", n("add", n.cast(a, "float32"), n.value(1)))
    decay = n.cast(n("mul", bent, n.value(2)), a.dtype)
    return [decay, None if b is None else n.cast(n("sigmoid", n.cast(b, "float32")), b.dtype)]


@rule("CausalConvWithState", domain=MICROSOFT)
def causal_convolution(n: Call) -> list[Value]:
    """Each channel's convolution with numbers up to each token, after those of a state."""
    x, w, bias, past = n.value(0), n.value(1), n.maybe(2), n.maybe(3)
    kind = n.text("activation", "none", ("none", "silu", "swish"))
    step, last = n.attribute("dilation", 1), bool(n.attribute("channels_last", 0))
    n.refuse("state_window", "state_update_capacity", "input_channels", "input_channel_offset")
    n.refuse("state_length")
    if n.attribute("ndim", 1) != 1 or n.attribute("state_channels_last", -1) != -1:
        raise UnsupportedError("ndim other than 1, or a state of another layout, is not supported")
    if w.rank != 3 or w.shape[1] != 1 or step < 1:
        raise OnnxError(
            f"weights {w.spec} and dilation {step} found; (channels, 1, k) and 1 needed"
        )
    channels, room = w.shape[0], (w.shape[2] - 1) * step

    def first(each: Value) -> Value:
        """Return what is (b, t, …) as (b, channels, t)."""
        flat = n.reshape(each, (*each.shape[:2], channels))
        return n.transpose(flat, (0, 2, 1))

    def back(each: Value) -> Value:
        moved = n.transpose(each, (0, 2, 1))
        return n.reshape(moved, (*moved.shape[:2], *x.shape[2:]))

    given = first(x) if last else x
    if past is None:
        before = n.known(np.zeros((given.shape[0], channels, room)), x.dtype)
    else:
        before = first(past) if last else past
    whole = n("concat", before, given, axis=2)
    operands = (whole, w) if bias is None else (whole, w, bias)
    y = n("conv1d", *operands, bias=bias is not None, dilation=(step,), groups=channels)
    y = y if kind == "none" else n("silu", y)
    held = n.part(whole, 2, whole.shape[2] - room, whole.shape[2])
    return [back(y), back(held)] if last else [y, held]
