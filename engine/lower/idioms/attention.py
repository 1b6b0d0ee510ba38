"""Attention that is written as a product, a softmax and a product, fused into one operator.

Its kernel keeps scores in the cache between the two products, where three launches would write and
read all of them: 54 MB in a layer of 6 heads over 1,500 positions. Between the products there may
be scales, and a mask that is added or selected by (`attention_parts.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from soapstone.engine.lower.fold import Site
from soapstone.engine.lower.idioms.attention_parts import (
    before_swap,
    number,
    unguarded,
    unrepeated,
    unscaled,
)
from soapstone.ir.by_extents import by_extents
from soapstone.ir.graph import Node
from soapstone.ir.ops.products.attention_lower import shared
from soapstone.ir.tensor import Array
from soapstone.kernels.registry import variants

# Scores of a head, of fewer of which products of all heads are faster than a library's of each.
_LEAST_OF_LIBRARY = 64 * 64
_BY_TIME = (0, 2, 1, 3)  # heads and positions in each other's place
_HIDES = -1e30  # beside it a score is lost: adding it and putting it there are the same


def joined(site: Site, node: Node) -> str | None:
    """Return the replacement of a product that ends attention; None for other products."""
    if any(node.attributes.values()):
        return None
    shares, empty = unguarded(site.builder, node.inputs[0], site.constants)
    guard = [] if shares == node.inputs[0] else [site.only(node.inputs[0], "where")]
    softmax = site.only(shares, "softmax", readers=1 + len(guard))
    if softmax is None or None in guard:
        return None
    scores = site.builder.spec(softmax.inputs[0])
    if scores.dtype != "float32" or scores.rank not in (3, 4):
        return None
    own = any(found.name == "blocks" for found in variants("attention", "cpu"))
    if softmax.attributes["axis"] != scores.rank - 1:
        return None
    if not own and not by_extents(_pays, *scores.shape[-2:]):
        return None
    for value, hides, steps in _unmasked(site, softmax.inputs[0]):
        before, scale, scaling = unscaled(site.builder, value, site.constants)
        product = site.only(before, "matmul")
        if product is None or product.attributes["transpose_a"]:
            continue
        if site.builder.spec(before).shape != scores.shape:  # what is between repeats them
            continue
        found = _operands(site, product, node.inputs[1])
        masks = _mask(site, hides, scores.shape)
        if found is None or masks is None or not scale * found[1] > 0:
            continue
        parts = (product, *scaling, *steps, softmax, *guard, node)
        made = site.emit(
            "attention",
            *found[0],
            *masks[0],
            name=node.name,
            sources=tuple(n for part in parts if part for n in part.work_of),
            scale=scale * found[1],
            causal=masks[1],
            empty=empty,
        )
        made = site.emit("transpose", made, permutation=_BY_TIME)
        shape = (*scores.shape[:-1], site.builder.spec(made).shape[-1])
        return made if scores.rank == 4 else site.emit("reshape", made, shape=shape)
    return None


def with_shared_heads(site: Site, node: Node) -> Sequence[str] | None:
    """Return attention that reads heads of keys and values before they were repeated, or None.

    Repeated, all of them are written and read once more for each head of queries.
    """
    q, k, v, *mask = node.inputs
    few = [unrepeated(site.builder, value, axis=2) for value in (k, v)]
    if few[0] is None or few[1] is None:
        return None
    heads = [site.builder.spec(value).shape[2] for value in (q, *few) if value]
    if heads[1] != heads[2] or shared(*heads[:2]) * heads[1] != heads[0]:
        return None
    inputs = (q, few[0], few[1], *mask)
    sources, at = node.work_of, node.attributes
    return site.builder.apply("attention", *inputs, name=node.name, sources=sources, **at)


def _pays(queries: int, keys: int) -> bool:
    return queries * keys >= _LEAST_OF_LIBRARY


def _operands(site: Site, product: Node, values: str) -> tuple[list[str], float] | None:
    """Return queries, keys and values (b, t, heads, d), and the scale of the scores.

    Keys and values may have one head, which all heads of the queries share.
    """
    (q, by, _), (k, twice, _) = (unscaled(site.builder, n, site.constants) for n in product.inputs)
    turned = not product.attributes["transpose_b"]
    swapped = before_swap(site.builder, k) if turned else None
    if swapped is not None:
        k, thrice, _ = unscaled(site.builder, swapped, site.constants)
        turned, twice = False, twice * thrice
    heads, few, same = (site.builder.spec(name).shape[:-2] for name in (q, k, values))
    if few != same or few not in (heads, (*heads[:-1], 1)):
        return None
    turns = ((q, False), (k, turned), (values, False))
    return [_by_time(site, *operand) for operand in turns], by * twice


def _by_time(site: Site, value: str, turned: bool) -> str:
    """Return (b, heads, t, d), or (b, t, d) for one head, as (b, t, heads, d).

    turned: whether the last two axes are swapped.
    """
    shape = site.builder.spec(value).shape
    if len(shape) == 3:
        value = site.emit("reshape", value, shape=(shape[0], 1, *shape[1:]))
    order = (0, 3, 1, 2) if turned else _BY_TIME
    return site.emit("transpose", value, permutation=order)


def _unmasked(site: Site, scores: str) -> Iterator[tuple[str, str | None, tuple[Node, ...]]]:
    """Yield candidates for the scores before masking, with what is added and the node adding it."""
    yield scores, None, ()
    node = site.only(scores, "add", "where")
    if node is None:
        return
    if node.operator == "add":
        for value, hides in (node.inputs, node.inputs[::-1]):
            yield value, hides, (node,)
        return
    shown, *sides = node.inputs
    for place, value in enumerate(sides):
        fill = sides[1 - place]
        least = number(site.constants, fill)
        if least is not None and least <= _HIDES:
            zero = site.emit("full", shape=(), value=0.0)
            both = (fill, zero) if place else (zero, fill)
            yield value, site.emit("where", shown, *both), (node,)


def _mask(site: Site, value: str | None, shape: tuple[int, ...]) -> tuple[list[str], bool] | None:
    """Return the masks, at most one, that are added to scores, and whether they are causal."""
    if value is None:
        return [], False
    spec = site.builder.spec(value)
    aligned = (1,) * (len(shape) - spec.rank) + spec.shape
    if spec.rank > len(shape) or any(a not in (1, s) for a, s in zip(aligned, shape)):
        return None
    said = site.says(value, _hidden)
    if said == "nothing" or (said == "later" and spec.shape[-2:] == shape[-2:]):
        return [], said == "later"
    if spec.rank == len(shape) == 3:  # of one head
        value = site.emit("reshape", value, shape=(aligned[0], 1, *aligned[1:]))
    return [value], False


def _hidden(mask: Array) -> str:
    """Return what a mask hides from each query: "nothing", "later" keys, or "some" keys."""
    if not mask.any():
        return "nothing"
    if mask.ndim < 2:
        return "some"
    later = np.triu(np.ones(mask.shape[-2:], bool), 1)
    hides = np.all((mask <= _HIDES) == later) and not np.any(mask[..., ~later])
    return "later" if hides else "some"
