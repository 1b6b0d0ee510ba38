"""Operators of PyTorch that are whole layers, written as smaller ones, for `compiled.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

_aten = torch.ops.aten


def _heads(x: Any, heads: int) -> Any:
    """Return (batch, heads, length, …) of (batch, length, …)."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _hidden(mask: Any, kind: int | None) -> Any:
    """Return which scores, (batch, heads, queries, keys), a mask hides; None of another kind.

    kind: 0 of (queries, keys), 1 of (batch, keys), 2 of all. A mask of numbers hides where it is
    not 0, as in PyTorch's operator.
    """
    hides = mask if mask.dtype == torch.bool else mask != 0
    if kind == 0:
        return hides[None, None]
    if kind == 1:
        return hides[:, None, None]
    return hides if kind == 2 else None


def _encoder_layer(
    x: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    out_weight: Any,
    out_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    up_weight: Any,
    up_bias: Any,
    down_weight: Any,
    down_bias: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """`nn.TransformerEncoderLayer` in inference, as PyTorch's fast path has it in one operator."""
    hidden = None if mask is None else _hidden(mask, mask_type)
    if x.is_nested or (mask is not None and hidden is None):
        return NotImplemented

    def attended(x: Any) -> Any:
        joined = functional.linear(x, qkv_weight, qkv_bias)
        q, k, v = (_heads(each, num_heads) for each in joined.split(embed_dim, -1))
        scores = (q * (embed_dim // num_heads) ** -0.5) @ k.transpose(2, 3)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        mixed = (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(x.shape)
        return functional.linear(mixed, out_weight, out_bias)

    def fed(x: Any) -> Any:
        up = functional.linear(x, up_weight, up_bias)
        up = functional.gelu(up) if use_gelu else functional.relu(up)
        return functional.linear(up, down_weight, down_bias)

    def first(x: Any) -> Any:
        return functional.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second(x: Any) -> Any:
        return functional.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = x + attended(first(x))
        return x + fed(second(x))
    x = first(x + attended(x))
    return second(x + fed(x))


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _aten._transformer_encoder_layer_fwd.default: _encoder_layer,
}
