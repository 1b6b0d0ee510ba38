"""Kernels in which a thread has an element of the result, and gathers what it is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, Launch
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.folds import lane_folds
from soapstone.kernels.cuda.substrate.grid import flat_launch
from soapstone.kernels.cuda.substrate.target import Kernel, built
from soapstone.kernels.cuda.substrate.vectors import VECTORS


@cache
def compiled(source: str, name: str = "each", lanes: int = 1) -> Kernel:
    """Return the kernel of a name in a source text, with folds over so many neighbours."""
    return built(name, source, **VECTORS, **(lane_folds(lanes) if lanes > 1 else {}))


def parameters(operands: Mapping[str, View]) -> tuple[list[str], list[Any]]:
    """Return the names of arguments that say where operands lie, and their values.

    Of operand x they are x, o_x, and s_x_0 and so on, its strides.
    """
    names, values = [], []
    some = next(view.span for view in operands.values() if view.span is not None)
    for name, view in operands.items():
        names += [name, f"o_{name}", *(f"s_{name}_{d}" for d, _ in enumerate(view.strides))]
        values += [some if view.span is None else view.span, view.offset, *view.strides]
    return names, values


def numbered(rank: int) -> list[str]:
    """Return the names of an element's indices."""
    return [f"at_{d}" for d in range(rank)]


def place(name: str, at: Sequence[str]) -> str:
    """Return the text of an element's index in an operand's span."""
    return " + ".join([f"o_{name}", *(f"({each}) * s_{name}_{d}" for d, each in enumerate(at))])


def read(name: str, view: View, at: Sequence[str]) -> str:
    """Return the text of an element in the type in which it is computed."""
    found, kind = f"{name}[{place(name, at)}]", wide(view.dtype)
    return found if kind == view.dtype else f"{kind}({found})"


def each_element(
    body: Sequence[str],
    shape: Sequence[int],
    operands: Mapping[str, View],
    status: DeviceArray | None = None,
    name: str = "each",
    lanes: int = 1,
) -> DeviceEntry:
    """Return the entry of a kernel that runs statements for each index of a shape.

    Neighbouring threads have neighbouring last indices.

    Args:
        body: statements, in which at_0, at_1 and so on are the indices. operands: by name, at least
            one with elements. status: given as `status`. name: what the kernel is called.
    """
    count = math.prod(shape)
    if count == 0:
        return DeviceEntry(())
    given = dict(zip(*parameters(operands)))
    steps = {key: given.pop(key) for key in [*given] if key.startswith("s_")}
    names, values = [*given], [*given.values()]
    more = ["status"] if status is not None else []
    lines = [f"def {name}(items, {', '.join([*names, *more])}):"]
    # As extents are: a kernel is of one shape. Steps of 1 cost nothing, others less.
    lines += [f"    {key} = {step}" for key, step in steps.items()]
    lines += ["    item = cuda.grid(1)", "    while item < items:"]
    axes = [(str(d), extent) for d, extent in enumerate(shape)] or [("0", 1)]
    lines += indices("item", axes, " " * 8)
    lines += [" " * 8 + line for line in body]
    lines += ["        item += cuda.gridsize(1)"]
    grid, block = flat_launch(count)
    arguments = (count, *values, *([status] if status is not None else []))
    return DeviceEntry(
        (Launch(compiled("\n".join(lines), name, lanes), (grid,), (block,), arguments),)
    )
