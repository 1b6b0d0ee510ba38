"""ONNX attention: mapped to the fused operator where that means the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.values import Value, rule

_OPTIONS = ("softcap", "softmax_precision", "qk_matmul_output_mode")


@rule("Attention")
def attention(n: Call) -> Any:
    """Map plain attention; caches, caps and other outputs are what ONNX's body makes of them."""
    q, k, v, mask = n.value(0), n.value(1), n.value(2), n.maybe(3)
    windows = [n.attribute(f"{side}_window_size", -1) for side in ("left", "right")]
    if any(n.attribute(name, 0) for name in _OPTIONS) or windows != [-1, -1]:
        return NotImplemented
    if len(n) > 4 or any(n.wants(output) for output in (1, 2, 3)) or q.spec.is_half:
        return NotImplemented
    if mask is not None and mask.dtype == "bool":
        mask = n("where", mask, n.like(0, q), n.like(-np.inf, q))
    if mask is not None and (mask.dtype != q.dtype or mask.shape[-1:] != k.shape[-2:-1]):
        return NotImplemented
    if q.rank == 3:
        heads = n.attribute("q_num_heads", 0), n.attribute("kv_num_heads", 0)
    else:
        heads = q.shape[1], k.shape[1]
    if heads[0] != heads[1] or heads[0] < 1 or v.dtype != q.dtype:
        return NotImplemented
    parts = [_by_head(n, value, heads[0]) for value in (q, k, v)]
    if any(part is None for part in parts):
        return NotImplemented
    operands = [part for part in parts if part is not None]
    if mask is not None:
        operands.append(mask)
    scale, causal = n.attribute("scale"), bool(n.attribute("is_causal", 0))
    y = n("attention", *operands, scale=scale, causal=causal)
    if q.rank == 4:
        return n.transpose(y, (0, 2, 1, 3))
    return n.reshape(y, (*y.shape[:2], y.shape[2] * y.shape[3]))


def _by_head(n: Call, x: Value, heads: int) -> Value | None:
    """Return x as (b, t, heads, d), or None where its elements do not divide."""
    if x.rank == 4:
        return n.transpose(x, (0, 2, 1, 3))
    if x.shape[2] % heads:
        return None
    return n.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))
