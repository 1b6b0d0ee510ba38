"""Local response normalisation across channels and its gradient: a thread an element.

The gradient is two launches: each channel's share of its own sum is kept between them, so that the
neighbours' sums are not made again for each of their channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.ir.ops.normalization.response import reach
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def _at(view: View, channel: str) -> list[str]:
    return [channel if d == 1 else f"at_{d}" for d, _ in enumerate(view.shape)]


def _scale(attributes: Mapping[str, Any], x: View, channel: str) -> list[str]:
    """Return the statements that make `scale`, by which channel `channel` of x is divided."""
    low, high = reach(attributes)
    kind, share = wide(x.dtype), attributes["alpha"] / attributes["size"]
    return [
        f"squares = {kind}(0)",
        f"for near in range(max({channel} - {low}, 0), min({channel} + {high + 1}, {x.shape[1]})):",
        f"    value = {kind}(x[{place('x', _at(x, 'near'))}])",
        "    squares += value * value",
        f"scale = {kind}({float(attributes['bias'])!r}) + {kind}({share!r}) * squares",
        f"factor = power(scale, {kind}({-attributes['beta']!r}))",
    ]


def _first(attributes: Mapping[str, Any]) -> int:
    """Return the first channel of x that a tile makes."""
    return int(attributes.get("channels", (0,))[0])


@variant("lrn", "numba", processor="cuda")
def lrn(call: Call) -> DeviceEntry:
    """Return the entry of x over a power of the squares around."""
    (x,), (y,) = views(call)
    kind = wide(x.dtype)
    body = [f"channel = at_1 + {_first(call.attributes)}", *_scale(call.attributes, x, "channel")]
    body += [f"made = {kind}(x[{place('x', _at(x, 'channel'))}]) * factor"]
    body += [f"y[{place('y', _at(y, 'at_1'))}] = {y.dtype}(made)"]
    return each_element(body, y.shape, {"x": x, "y": y})


@variant("lrn_grad", "numba", processor="cuda")
def lrn_grad(call: Call) -> DeviceEntry:
    """Return the entry of the gradient: of a channel itself, and by the sums that it is in."""
    (dy, x), (dx,) = views(call)
    at, kind = call.attributes, wide(x.dtype)
    if dx.size == 0:
        return DeviceEntry(())
    known = f"{at.get('offset', 0)}"  # the channel of x that is the first of dy
    low, high = reach(at)
    own = room(dy.shape, kind, call.inputs[0])
    shares = [f"channel = at_1 + {known}", *_scale(at, x, "channel")]
    value = f"{kind}(dy[{place('dy', _at(dy, 'at_1'))}])"
    shares += [f"made = {value} * {kind}(x[{place('x', _at(x, 'channel'))}]) * factor / scale"]
    shares += [f"own[{place('own', _at(own, 'at_1'))}] = made"]
    first = each_element(shares, dy.shape, {"dy": dy, "x": x, "own": own})
    twice = 2 * at["alpha"] * at["beta"] / at["size"]
    body: Sequence[str] = [
        f"channel = at_1 + {_first(at)}",
        *_scale(at, x, "channel"),
        f"inner = {kind}(0)",
        f"begin = max(channel - {high} - {known}, 0)",
        f"for near in range(begin, min(channel + {low + 1} - {known}, {dy.shape[1]})):",
        f"    inner += own[{place('own', _at(own, 'near'))}]",
        f"made = {kind}(0)",
        f"mine = channel - {known}",
        f"if mine >= 0 and mine < {dy.shape[1]}:",
        f"    made = {kind}(dy[{place('dy', _at(dy, 'mine'))}]) * factor",
        f"made -= {kind}({twice!r}) * {kind}(x[{place('x', _at(x, 'channel'))}]) * inner",
        f"dx[{place('dx', _at(dx, 'at_1'))}] = {dx.dtype}(made)",
    ]
    second = each_element(body, dx.shape, {"dy": dy, "x": x, "own": own, "dx": dx})
    return sequence((first, second))
