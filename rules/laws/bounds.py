"""Which parameters and extents a law is validated at, and why these are enough.

Up to 4x4x4x4 (Jia et al., TASO, section 2.4) not all relations occur in which the windows of
convolutions and pooling can be to an image: a stride of 4 leaves one window of 3 in 4 columns. So
laws of windows are validated along rows and along columns too, where images are up to 9 long,
kernels up to 7 and strides up to 9: a longer one leaves one window, as 9 does. `relations_of` says
what tells windows apart, `relations` what occurs up to some bounds: up to these it is all that
occurs up to any (a test looks as far as 24).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

from soapstone.ir.law import Law
from soapstone.ir.ops.forms import PADDINGS
from soapstone.ir.term import Value, is_variable, parameter_variables, subterms, words_of
from soapstone.rules.laws.sizes import Limit, parameter_values, rank_choices, sizes as sizes_of
from soapstone.rules.laws.slices import passed
from soapstone.search.rules.language import kinds

WHOLE = 4  # from this limit on, laws of windows are validated along each axis too
EXTENT, KERNEL = 9, 7  # the largest along one axis, of an image and of a kernel
_WINDOWS = ("stride", "size")  # parameters that speak of windows


@dataclass(frozen=True)
class Sweep:
    """Some sizes of a law: the largest extents, and values of parameters beside those declared."""

    limit: Limit
    values: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)


def has_windows(law: Law) -> bool:
    """Return whether a law speaks of windows whose size or stride is not given."""
    return any(
        kind in _WINDOWS and is_variable(value)
        for term in subterms(law.sides)
        for value, kind in zip(term.parameters, kinds(term.symbol))
    )


def sweeps(law: Law, limit: int) -> Iterator[Sweep]:
    """Yield the bounds of a law's sizes: all up to a limit, and of windows more along each axis."""
    yield Sweep(limit)
    if has_windows(law) and limit >= WHOLE:
        strides = tuple(range(1, EXTENT + 1))
        for extents, text in (((2, 3, 1, EXTENT), "1x{}"), ((2, 3, EXTENT, 1), "{}x1")):
            sizes = tuple(text.format(size) for size in range(1, KERNEL + 1))
            yield Sweep(extents, {"stride": strides, "size": sizes})


def covered(law: Law, limit: int) -> str:
    """Return what was compared of a law that holds up to a limit, and why it is enough.

    Axes are counted at the first ranks for which the law is said.
    """
    windows = has_windows(law) and limit >= WHOLE
    along = f"1x1 to 1x{KERNEL}, 1x1 to {KERNEL}x1"
    said = []
    for name in parameter_variables(law.sides):
        values = dict.fromkeys(choice[name] for choice in parameter_values(law))
        text = ", ".join(map(str, values))
        kind = _kind(law, name)
        if windows and kind in _WINDOWS:
            text = f"1 to {EXTENT}" if kind == "stride" else f"{text}, {along}"
        said.append(f"{name}: {text}")
    axes, through = _axes(law, limit)
    if through:
        said.append(f"{through} of {axes} axes of any extent, since both sides pass slices through")
    if axes > through:
        said.append(
            f"{'the other ' if through else ''}{axes - through} axes of extents 1 to {limit}"
        )
    if windows:
        count = len(relations(EXTENT, KERNEL, EXTENT))
        said.append(f"windows along an axis of up to {EXTENT}, in all {count} relations there are")
    return "; ".join(said)


def _kind(law: Law, name: str) -> str:
    return next(
        kind
        for term in subterms(law.sides)
        for value, kind in zip(term.parameters, kinds(term.symbol))
        if name in words_of(value)
    )


def _axes(law: Law, limit: int) -> tuple[int, int]:
    """Return how many axes a law's variables have, and how many pass through whatever its values.

    An axis that windows of stride 1 leave alone is cut by those of stride 2: the fewest count.
    """
    fewest: tuple[int, int] | None = None
    for bindings in parameter_values(law):
        found = _axes_at(law, bindings, limit)
        if found is not None and (fewest is None or found[1] < fewest[1]):
            fewest = found
        if fewest is not None and not has_windows(law):  # which alone change what passes
            break
    return fewest or (0, 0)


def _axes_at(law: Law, bindings: Mapping[str, Value], limit: int) -> tuple[int, int] | None:
    """Return the same for some values of a law's parameters, at the first ranks that fit."""
    for most, ranks in itertools.product(range(2, limit + 1), rank_choices(law)):
        found = sizes_of(law, bindings, ranks, most)
        if found is not None and len(found):
            variables = [leaf for leaf in found.leaves if leaf.is_variable]
            types = found.at(0)
            places = [leaf for group in passed(found.sides, types) for leaf, _ in group]
            through = sum(leaf in variables for leaf in places)
            return sum(types[leaf].rank for leaf in variables), through
    return None


Relation: TypeAlias = "tuple[object, ...]"


def relations_of(extent: int, size: int, stride: int, padding: str) -> Iterator[Relation]:
    """Yield what tells each window along an axis from others: an element is made of one window.

    Whether it reaches over the first border, and over the last. Whether there are others. Whether
    the stride is 1, is as long as a window, shorter or longer; leaves positions unseen at the end.
    Whether the window is one position, odd or even, and as large as the image, or larger.
    """
    border = size // 2 if padding == "same" else 0
    rest = extent + 2 * border - size
    if rest < 0 or (padding == "same" and size % 2 == 0):
        return
    for start in range(-border, extent + border - size + 1, stride):
        yield (
            *(padding, start < 0, start + size > extent, rest >= stride, rest % stride > 0),
            *(stride == 1, _sign(stride - size), size == 1, size % 2, _sign(size - extent)),
        )


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


@lru_cache(maxsize=16)
def relations(extent: int, size: int, stride: int) -> frozenset[Relation]:
    """Return all relations that occur up to an extent, a size of windows and a stride."""
    every = itertools.product(range(1, extent + 1), range(1, size + 1), range(1, stride + 1))
    each = itertools.product(every, map(str, PADDINGS))
    return frozenset(r for (n, k, s), padding in each for r in relations_of(n, k, s, padding))
