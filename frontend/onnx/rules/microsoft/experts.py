"""Mixtures of experts of com.microsoft: of each token, a few experts of many make its result.

All experts see all tokens, and what a router did not choose counts nothing; where few are chosen
in all, as of one token, their weights alone are taken. Weights of few bits stay packed.

Source: Shazeer et al., Outrageously large neural networks, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.microsoft.contrib import unpacked
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule

# Makes results (experts, t, features) of x (experts or 1, t, depth) by the layer whose weights are
# an input; of known or chosen experts.
_Layer = Callable[[Value, int, Value | None], Value]
_PLAIN = ("relu", "gelu", "silu", "identity")
_GATED = ("swiglu", "geglu")


@rule("MoE", domain=MICROSOFT)
def mixture_of_experts(n: Call) -> Value:
    def layer(x: Value, position: int, chosen: Value | None) -> Value:
        w = _of(n, n.value(position), chosen)
        x = n.broadcast(x, (w.shape[0], *x.shape[1:]))
        return _shifted(n, n("matmul", x, w, transpose_b=True), n.maybe(position + 1), chosen)

    router = n("softmax", n.cast(n.value(1), "float32"), axis=1)
    return _mixed(n, layer, (2, 4, 6), *_chosen(n, router, router))


@rule("QMoE", domain=MICROSOFT)
def mixture_of_packed_experts(n: Call) -> Value:
    n.text("quant_type", "int", ("int",))
    if n.attribute("weights_prepacked", -1) not in (-1, 0):
        raise UnsupportedError("attribute 'weights_prepacked' other than -1 or 0 is not supported")
    layers = {2: (1, 11), 5: (2, 12), 8: (3, 13)}  # the number of a layer, and its zero points
    coarse = n.attribute("accuracy_level", 0) == 4
    n.attribute("fc3_expert_weight_bits")  # which are those of the first layer where they are one
    size = n.attribute("block_size", 0)

    def layer(x: Value, position: int, chosen: Value | None) -> Value:
        number, at = layers[position]
        bits = n.attribute(f"fc{number}_expert_weight_bits") or n.attribute("expert_weight_bits", 4)
        w, scales, zeros = n.value(position), n.value(position + 1), n.maybe(at)
        if bits not in (2, 4, 8) or w.dtype != "uint8" or w.rank != 3:
            raise UnsupportedError(f"{bits} bits in {w.spec} found; 2, 4 or 8 in uint8 (e, n, k)")
        depth, columns = x.shape[2], w.shape[1]
        blocks = depth // size if size > 0 else 1
        if w.shape[2] * 8 != depth * bits or depth % blocks:
            raise OnnxError(
                f"weights {w.spec} of {bits} bits and blocks of {size} found, of {depth}"
            )
        parts = [n.reshape(w, (w.shape[0], columns, blocks, w.shape[2] // blocks))]
        parts.append(n.cast(n.reshape(scales, (w.shape[0], columns, blocks)), "float32"))
        if zeros is not None:
            rows, each = (w.shape[0] * columns, blocks) if size > 0 else (w.shape[0], columns)
            numbers = unpacked(n, zeros, bits, rows, each)
            parts.append(n.reshape(numbers, (w.shape[0], columns, blocks)))
        parts = [_of(n, part, chosen) for part in parts]
        made = []
        for expert in range(parts[0].shape[0]):
            own = n.row(x, 0, expert if x.shape[0] > 1 else 0)
            weights = [n.row(part, 0, expert) for part in parts]
            given = {"bits": bits, "zeros": zeros is not None, "coarse": coarse}
            made.append(n("matmul_nbits", own, *weights, **given))
        columned = [n.reshape(each, (1, *each.shape)) for each in made]
        y = columned[0] if len(made) == 1 else n("concat", *columned, axis=0)
        return _shifted(n, y, n.maybe(position + 2), chosen)

    if n.has(14):
        return _mixed(n, layer, (2, 5, 8), *_chosen(n, n.value(1), n.value(14)))
    n.attribute("normalize_routing_weights")  # which they are in any case
    found, places = n.all("top_k", n.cast(n.value(1), "float32"), k=_count(n), axis=1)
    return _mixed(n, layer, (2, 5, 8), n("softmax", found, axis=1), places)


def _count(n: Call) -> int:
    """Return how many experts of each token are chosen."""
    router, count = n.value(1), n.attribute("k", 1)
    if router.rank != 2 or not 1 <= count <= router.shape[1]:
        raise OnnxError(
            f"{count} experts of a router {router.spec} found; some of (tokens, experts)"
        )
    return int(count)


def _chosen(n: Call, router: Value, shares: Value) -> tuple[Value, Value]:
    """Return the shares (tokens, k) of the experts that a router chooses, and which these are."""
    _, places = n.all("top_k", n.cast(router, "float32"), k=_count(n), axis=1)
    found = n("gather_elements", n.cast(shares, "float32"), places, axis=1)
    if n.attribute("normalize_routing_weights", 0):
        found = n("div", found, n("reduce_sum", found, axes=(1,), keepdims=True))
    return found, places


def _of(n: Call, x: Value, chosen: Value | None) -> Value:
    """Return what all experts have, or the chosen ones."""
    return x if chosen is None else n("gather", x, chosen, axis=0)


def _shifted(n: Call, y: Value, bias: Value | None, chosen: Value | None) -> Value:
    if bias is None:
        return y
    bias = n.cast(_of(n, bias, chosen), y.dtype)
    return n("add", y, n.reshape(bias, (bias.shape[0], 1, bias.shape[1])))


def _mixed(
    n: Call, layer: _Layer, positions: tuple[int, int, int], shares: Value, places: Value
) -> Value:
    """Return what the chosen experts make of each token, by their shares.

    positions: of the inputs that are weights of a first and second layer, and perhaps of a third
    beside the first. shares, places: of the experts that are chosen (tokens, k).
    """
    n.refuse("use_sparse_mixer", "swiglu_limit_after_activation")
    x, experts = n.value(0), n.value(1).shape[1]
    tokens, count = places.shape
    width = x.shape[-1]
    if tokens != math.prod(x.shape[:-1]):
        raise OnnxError(f"{x.spec} and a router of {tokens} tokens found")
    flat = n.reshape(n.cast(x, "float32"), (1, tokens, width))
    column = n.reshape(shares, (tokens, count, 1))
    if 2 * tokens * count <= experts:
        each = n.broadcast(n.reshape(flat, (tokens, 1, width)), (tokens, count, width))
        each = n.reshape(each, (tokens * count, 1, width))
        y = _through(n, layer, positions, each, n.reshape(places, (tokens * count,)))
        y = n("mul", n.reshape(y, (tokens, count, width)), column)
        y = n("reduce_sum", y, axes=(1,), keepdims=False)
    else:
        own = n.known(np.arange(experts).reshape(1, 1, experts))
        hit = n("equal", n.reshape(places, (tokens, count, 1)), own)
        gates = n("mul", n.cast(hit, "float32"), column)
        gates = n.transpose(n("reduce_sum", gates, axes=(1,), keepdims=False), (1, 0))
        y = _through(n, layer, positions, flat, None)
        y = n("mul", y, n.reshape(gates, (experts, tokens, 1)))
        y = n("reduce_sum", y, axes=(0,), keepdims=False)
    return n.cast(n.reshape(y, x.shape), x.dtype)


def _through(
    n: Call, layer: _Layer, positions: tuple[int, int, int], x: Value, chosen: Value | None
) -> Value:
    """Return what experts make of tokens (experts or 1, t, width): (experts, t, width)."""
    first, second, third = positions
    kind = n.text("activation_type", "relu", (*_PLAIN, *_GATED, "relu2"))
    fusion, limit = n.attribute("swiglu_fusion", 0), n.attribute("swiglu_limit")
    numbers = {name: n.attribute(f"activation_{name}") for name in ("alpha", "beta")}
    y = layer(x, first, chosen)
    beside = layer(x, third, chosen) if n.has(third) else None
    if kind in _GATED and beside is None:
        y, beside = _halves(n, y, fusion)
    elif fusion:
        raise UnsupportedError(f"attribute 'swiglu_fusion' is {fusion}, of activation {kind!r}")
    if kind == "swiglu":
        assert beside is not None
        y, beside = _limited(n, y, beside, limit)
        alpha, beta = numbers["alpha"], numbers["beta"]
        bent = n("sigmoid", n("affine", y, scale=1.0 if alpha is None else alpha))
        y, beside = n("mul", y, bent), n("affine", beside, shift=beta or 0.0)
    else:
        y = _activated(n, kind, y)
    return layer(y if beside is None else n("mul", y, beside), second, chosen)


def _activated(n: Call, kind: str, y: Value) -> Value:
    if kind in ("gelu", "geglu"):
        return n("gelu", y, approximate="tanh")
    if kind == "relu2":
        y = n("relu", y)
        return n("mul", y, y)
    return y if kind == "identity" else n(kind, y)


def _limited(n: Call, y: Value, beside: Value, limit: Any) -> tuple[Value, Value]:
    if limit is None:
        return y, beside
    return n("clip", y, high=limit), n("clip", beside, low=-limit, high=limit)


def _halves(n: Call, y: Value, fusion: int) -> tuple[Value, Value]:
    """Return what is bent and what it gates, neighbours (fusion 1) or halves (2) of a row."""
    half = y.shape[2] // 2
    if fusion not in (1, 2) or y.shape[2] % 2:
        raise UnsupportedError(
            f"attribute 'swiglu_fusion' is {fusion}; 1 or 2, or input of its own"
        )
    if fusion == 2:
        return n.part(y, 2, 0, half), n.part(y, 2, half, 2 * half)
    pairs = n.reshape(y, (*y.shape[:2], half, 2))
    return n.row(pairs, 3, 0), n.row(pairs, 3, 1)
