"""Max, average and Lp pooling of any rank, forward and backward: a thread an element.

Gradients gather: each element of x looks through the windows that it is in, so that nothing is
added from two threads at once and sums have one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.ops.reduction.folds import smallest
from soapstone.ir.ops.windows.lp_pool import filled
from soapstone.ir.ops.windows.window import Window, windows_of
from soapstone.kernels.cuda.elementwise.text import literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.cuda.substrate.element import each_element
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def _word(*operands: View) -> str:
    """Return the type of indices in operands: 32 bits, where these hold them, take half as long."""
    return "uint32" if all(each.reach < 2**31 for each in operands) else "uint64"


def _place(name: str, spatial: Sequence[str]) -> str:
    terms = [f"o_{name}", f"at_0 * s_{name}_0", f"at_1 * s_{name}_1"]
    return " + ".join([*terms, *(f"{at} * s_{name}_{2 + d}" for d, at in enumerate(spatial))])


def _read(name: str) -> str:
    """Return the text of the element of an operand that a walk has reached."""
    return f"{name}[uint64(in_{name})]"  # which is not looked for a sign


def _begin(names: Sequence[str], word: str) -> list[str]:
    """Return the statements before a walk over operands."""
    return [f"in_{name}_0 = {word}({_place(name, ())})" for name in names]


def _reach(names: Sequence[str], d: int, last: bool, word: str) -> list[str]:
    """Return the statements that go to place `p` along an axis of operands that are walked over."""
    to = "" if last else f"_{d + 1}"
    return [f"in_{x}{to} = {word}(in_{x}_{d} + p{d} * {word}(s_{x}_{2 + d}))" for x in names]


def _forward(windows: Sequence[Window], word: str, inner: Sequence[str]) -> list[str]:
    """Return loops over a window's positions inside x, which run `inner`; word: see `_word`."""
    lines, indent = _begin("x", word), ""
    for d, w in enumerate(windows):
        first = f"at_{2 + d} * {w.stride} - {w.low}"
        lines.append(f"{indent}for k{d} in range({w.kernel}):")
        indent += "    "
        lines.append(f"{indent}p{d} = {word}({first} + k{d} * {w.dilation})")
        lines.append(f"{indent}if p{d} < {word}({w.size}):")  # less than 0 is a great number
        indent += "    "
        lines += [indent + line for line in _reach("x", d, d == len(windows) - 1, word)]
    return [*lines, *(indent + line for line in inner)]


def _backward(
    windows: Sequence[Window],
    counts: Sequence[int],
    word: str,
    names: Sequence[str],
    inner: Sequence[str],
) -> list[str]:
    """Return loops over the windows that an element is in, in the order of its positions in them.

    `p`: the window, `k`: the position. names: operands that have an element for each window.
    """
    lines, indent = _begin(names, word), ""
    for d, (w, count) in enumerate(zip(windows, counts)):
        lines.append(f"{indent}t{d} = {word}(at_{2 + d} + {w.low})")
        if w.dilation == 1:  # every so many positions there is a window
            lines += [
                f"{indent}q{d} = {word}(t{d} // {word}({w.stride}))",
                f"{indent}for j{d} in range({-(-w.kernel // w.stride)}):",
                f"{indent}    p{d} = {word}(q{d} - {word}(j{d}))",
                f"{indent}    k{d} = {word}(t{d} - p{d} * {word}({w.stride}))",
                f"{indent}    if p{d} < {word}({count}) and k{d} < {word}({w.kernel}):",
            ]
        else:
            lines += [
                f"{indent}for k{d} in range({w.kernel}):",
                f"{indent}    u{d} = {word}(t{d} - {word}(k{d} * {w.dilation}))",
                f"{indent}    p{d} = {word}(u{d} // {word}({w.stride}))",
                f"{indent}    if p{d} * {word}({w.stride}) == u{d} and p{d} < {word}({count}):",
            ]
        indent += " " * 8
        lines += [indent + line for line in _reach(names, d, d == len(windows) - 1, word)]
    return [*lines, *(indent + line for line in inner)]


def _position(windows: Sequence[Window]) -> str:
    """Return the text of a position's number in its window."""
    text = "0"
    for d, w in enumerate(windows):
        text = f"({text}) * {w.kernel} + k{d}"
    return text


def _divisor(
    windows: Sequence[Window], excess: Sequence[int], include_pad: bool, at: Sequence[str]
) -> list[str]:
    """Return statements that make `divisor`, over how many elements a window's average is."""
    lines = ["divisor = 1"]
    for d, (w, beyond) in enumerate(zip(windows, excess)):
        end = w.size + (w.high - beyond if include_pad else 0)
        lines += [f"b{d} = int64({at[d]}) * {w.stride} - {w.low}"]
        if w.dilation == 1:
            first = f"b{d}" if include_pad else f"max(b{d}, 0)"
            lines += [f"h{d} = max(min(b{d} + {w.kernel}, {end}) - {first}, 0)"]
        else:
            lines += [f"h{d} = 0", f"for c{d} in range({w.kernel}):"]
            test = f"b{d} + c{d} * {w.dilation} < {end}"
            test += "" if include_pad else f" and b{d} + c{d} * {w.dilation} >= 0"
            lines += [f"    if {test}: h{d} += 1"]
        lines += [f"divisor = divisor * h{d}"]
    return [*lines, "divisor = max(divisor, 1)"]


def _windows(call: Call, size: Sequence[int]) -> list[Window]:
    return windows_of(call.attributes, size, call.attributes["kernel"])


def _max_pool(call: Call) -> DeviceEntry:
    (x,), (y, *index) = views(call)
    windows = _windows(call, x.shape[2:])
    kind = wide(x.dtype)
    word = _word(x, y)
    least = smallest(np.dtype(x.dtype))
    start = f"{kind}(-inf)" if kind.startswith("float") else literal(least, kind)
    body, inner = [f"best = {start}"], [f"value = {kind}({_read('x')})"]
    if index:
        body += ["place = -1"]
        inner += [
            "if place < 0 or value > best or (value != value and best == best):",
            "    best = value",
            f"    place = {_position(windows)}",
        ]
    else:
        inner += ["best = value if value > best or value != value else best"]
    at = [f"at_{2 + d}" for d, _ in enumerate(windows)]
    body += _forward(windows, word, inner)
    body += [
        f"y[{_place('y', at)}] = {y.dtype}(best)"
        if y.dtype != "bool"
        else f"y[{_place('y', at)}] = best"
    ]
    operands = {"x": x, "y": y}
    if index:
        operands["z"] = index[0]
        body += [f"z[{_place('z', at)}] = {index[0].dtype}(max(place, 0))"]
    return each_element(body, y.shape, operands)


def _max_pool_grad(call: Call) -> DeviceEntry:
    (dy, index), (dx,) = views(call)
    word = _word(dy, index, dx)
    windows = _windows(call, dx.shape[2:])
    kind = wide(dy.dtype)
    inner = [
        f"if {_read('index')} == {_position(windows)}:",
        f"    total += {kind}({_read('dy')})",
    ]
    at = [f"at_{2 + d}" for d, _ in enumerate(windows)]
    body = [f"total = {kind}(0)", *_backward(windows, dy.shape[2:], word, ["dy", "index"], inner)]
    body += [f"dx[{_place('dx', at)}] = {dx.dtype}(total)"]
    return each_element(body, dx.shape, {"dy": dy, "index": index, "dx": dx})


def _avg_pool(call: Call) -> DeviceEntry:
    (x,), (y,) = views(call)
    word = _word(x, y)
    windows = _windows(call, x.shape[2:])
    kind, at = wide(x.dtype), [f"at_{2 + d}" for d, _ in enumerate(windows)]
    excess = call.attributes.get("excess", (0,) * len(windows))
    body = [f"total = {kind}(0)", *_forward(windows, word, [f"total += {kind}({_read('x')})"])]
    body += _divisor(windows, excess, call.attributes["include_pad"], at)
    body += [f"y[{_place('y', at)}] = {y.dtype}(total / {kind}(divisor))"]
    return each_element(body, y.shape, {"x": x, "y": y})


def _avg_pool_grad(call: Call) -> DeviceEntry:
    (dy,), (dx,) = views(call)
    word = _word(dy, dx)
    windows = _windows(call, dx.shape[2:])
    kind, at = wide(dy.dtype), [f"at_{2 + d}" for d, _ in enumerate(windows)]
    excess = call.attributes.get("excess", (0,) * len(windows))
    of = [f"p{d}" for d, _ in enumerate(windows)]
    inner = _divisor(windows, excess, call.attributes["include_pad"], of)
    inner += [f"total += {kind}({_read('dy')}) / {kind}(divisor)"]
    body = [f"total = {kind}(0)", *_backward(windows, dy.shape[2:], word, ["dy"], inner)]
    body += [f"dx[{_place('dx', at)}] = {dx.dtype}(total)"]
    return each_element(body, dx.shape, {"dy": dy, "dx": dx})


def _powered(name: str, p: int, kind: str) -> str:
    """Return the text of a whole power of a value that is not negative."""
    return " * ".join([name] * p) if 0 < p <= 3 else f"power({name}, {kind}({p}))"


@variant("lp_pool", "numba", processor="cuda")
def lp_pool(call: Call) -> DeviceEntry:
    """Return the entry of the p-norm of each window."""
    (x,), (y,) = views(call)
    word = _word(x, y)
    at = filled(call.attributes)
    windows, kind, p = windows_of(at, x.shape[2:], at["kernel"]), wide(x.dtype), at["p"]
    inner = [f"value = abs({kind}({_read('x')}))"]
    inner += [f"total += {_powered('value', p, kind)}"]
    roots = {1: "total", 2: "sqrt(total)"}
    root = roots.get(p, f"power(total, {kind}({1 / p!r}))")
    body = [f"total = {kind}(0)", *_forward(windows, word, inner)]
    body += [
        f"y[{_place('y', [f'at_{2 + d}' for d, _ in enumerate(windows)])}] = {y.dtype}({root})"
    ]
    return each_element(body, y.shape, {"x": x, "y": y})


@variant("lp_pool_grad", "numba", processor="cuda")
def lp_pool_grad(call: Call) -> DeviceEntry:
    """Return the entry of what each element adds to the norms of the windows that it is in."""
    (dy, y, x), (dx,) = views(call)
    word = _word(dy, y, dx)
    at = filled(call.attributes)
    windows, kind, p = windows_of(at, x.shape[2:], at["kernel"]), wide(x.dtype), at["p"]
    norm = _powered("norm", p - 1, kind) if p > 1 else f"{kind}(1)"
    inner = [f"norm = {kind}({_read('y')})"]
    inner += [f"if norm != {kind}(0): total += {kind}({_read('dy')}) / ({norm})"]
    own = [f"at_{2 + d}" for d, _ in enumerate(windows)]
    body = [f"total = {kind}(0)", *_backward(windows, dy.shape[2:], word, ["dy", "y"], inner)]
    body += [f"value = {kind}(x[{_place('x', own)}])", "size = abs(value)"]
    body += [f"total = total * ({_powered('size', p - 1, kind)})"] if p > 1 else []
    body += [f"if value < {kind}(0): total = -total"]
    body += [f"if value == {kind}(0): total = {kind}(0)"]
    body += [f"dx[{_place('dx', own)}] = {dx.dtype}(total)"]
    return each_element(body, dx.shape, {"dy": dy, "y": y, "x": x, "dx": dx})


for _rank in (1, 2, 3):
    for _name, _bind in (
        (f"max_pool{_rank}d", _max_pool),
        (f"max_pool{_rank}d_grad", _max_pool_grad),
        (f"avg_pool{_rank}d", _avg_pool),
        (f"avg_pool{_rank}d_grad", _avg_pool_grad),
    ):
        variant(_name, "numba", processor="cuda")(_bind)
