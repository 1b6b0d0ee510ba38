"""Probabilities that fit those of pairs of classes: a thread has a row, in double precision."""

from __future__ import annotations

from soapstone.ir.ops.normalization.coupling import MOST_ROUNDS, TOLERANCE
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import room, views
from soapstone.kernels.cuda.substrate.element import each_element, place
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


@variant("couple_pairs", "numba", processor="cuda")
def couple_pairs(call: Call) -> DeviceEntry:
    """Return the entry of rounds over the classes of each row, until the row is at rest."""
    (r,), (y,) = views(call)
    if y.size == 0:
        return DeviceEntry(())
    rows, count = y.shape
    # The share of each class, what its row of q gives with them, and its own place in q.
    operands = {"r": r, "made": y}
    operands |= {name: room((rows, count), "float64", r.span) for name in ("p", "f", "own")}

    def at(name: str, *index: str) -> str:
        return f"{name}[{place(name, ['at_0', *index])}]"

    def pair(one: str, other: str) -> str:
        return f"float64({at('r', one, other)})"

    q = f"({at('own', 'i')} if i == k else -{pair('k', 'i')} * {pair('i', 'k')})"
    body = [
        f"for i in range({count}):",
        "    squares = float64(0)",
        f"    for k in range({count}):",
        f"        if k != i: squares += {pair('k', 'i')} * {pair('k', 'i')}",
        f"    {at('own', 'i')} = squares",
        f"    {at('p', 'i')} = float64(1) / float64({count})",
        "round, rest = 0, False",
        f"while not rest and round < {MOST_ROUNDS}:",
        "    round += 1",
        "    total = float64(0)",
        f"    for i in range({count}):",
        "        product = float64(0)",
        f"        for k in range({count}): product += {q} * {at('p', 'k')}",
        f"        {at('f', 'i')} = product",
        f"        total += {at('p', 'i')} * product",
        "    rest = True",
        f"    for i in range({count}):",
        f"        near = abs({at('f', 'i')} - total) < float64({TOLERANCE / count!r})",
        "        rest = rest and near",
        "    if not rest:",
        f"        for i in range({count}):",
        f"            step = (total - {at('f', 'i')}) / {at('own', 'i')}",
        "            grown = float64(1) + step",
        f"            more = step * {at('own', 'i')} + float64(2) * {at('f', 'i')}",
        "            total = (total + step * more) / grown / grown",
        f"            {at('p', 'i')} = {at('p', 'i')} + step",
        f"            for k in range({count}):",
        f"                {at('f', 'k')} = ({at('f', 'k')} + step * {q}) / grown",
        f"                {at('p', 'k')} = {at('p', 'k')} / grown",
        f"for i in range({count}): {at('made', 'i')} = {y.dtype}({at('p', 'i')})",
    ]
    return each_element(body, (rows,), operands)
