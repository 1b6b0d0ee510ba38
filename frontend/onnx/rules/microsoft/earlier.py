"""Operators of com.microsoft that ONNX took over later, or has none of; older exporters write them.

Those whose numbers no kernel computes run between graphs (`pieces.py`).
"""

from __future__ import annotations

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.rules.movement import pad
from soapstone.frontend.onnx.rules.sampling import grid_sample
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule

rule("GridSample", domain=MICROSOFT)(grid_sample)
rule("Pad", domain=MICROSOFT)(pad)


@rule("ExpandDims", domain=MICROSOFT)
def expand_dims(n: Call) -> Value:
    x, axis = n.value(0), n.array(1)
    if axis.size != 1:
        raise OnnxError(f"axis {axis.tolist()} found; one number needed")
    place = n.axis_of(int(axis.reshape(())), x.rank + 1)
    return n.reshape(x, (*x.shape[:place], 1, *x.shape[place:]))


@rule("GatherND", domain=MICROSOFT)
def gather_nd(n: Call) -> Value:
    return n("gather_nd", n.value(0), n.value(1))


@rule("Trilu", domain=MICROSOFT)
def trilu(n: Call) -> Value:
    x, k = n.value(0), int(n.array(1).reshape(())) if n.has(1) else 0
    if x.rank < 2:
        raise OnnxError(f"input 0 has rank {x.rank}; 2 or more needed")
    k = max(-x.shape[-2], min(x.shape[-1], k))
    return n("trilu", x, k=k, upper=bool(n.attribute("upper", 1)))


@rule("Inverse", domain=MICROSOFT)
def inverse(n: Call) -> Value:
    x = n.value(0)
    if x.rank < 2 or x.shape[-1] != x.shape[-2]:
        raise OnnxError(f"input 0 is {x.spec}; square matrices needed")
    wide = n.array(0, apart=True).astype(np.float64)
    try:
        return n.known(np.linalg.inv(wide), x.dtype)
    except np.linalg.LinAlgError:
        raise OnnxError("a matrix that has no inverse found") from None


@rule("Unique", domain=MICROSOFT)
def unique(n: Call) -> list[Value]:
    """The different numbers in the order in which they come, the place of each, and counts."""
    x = n.array(0, apart=True)
    found, first, places, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True
    )
    order = np.argsort(first)
    places = np.argsort(order)[places.reshape(-1)]
    return [n.known(found[order]), n.known(places), n.known(counts[order])]


@rule("NGramRepeatBlock", domain=MICROSOFT)
def ngram_repeat_block(n: Call) -> Value:
    """Scores of tokens, minus infinity where one would make n tokens that stand there already."""
    ids, scores = n.array(0, apart=True), n.array(1, apart=True).copy()
    size = n.attribute("ngram_size", 0)
    if size < 1 or ids.ndim != 2 or scores.ndim != 2 or len(ids) != len(scores):
        raise OnnxError(f"ngram_size {size}, ids {ids.shape} and scores {scores.shape} found")
    count = ids.shape[1]
    if size <= count:
        runs = np.lib.stride_tricks.sliding_window_view(ids, size, axis=1)
        same = (runs[:, :, :-1] == ids[:, None, count - size + 1 :]).all(axis=2)
        rows, places = np.nonzero(same)
        scores[rows, runs[rows, places, -1]] = -np.inf
    return n.known(scores)
