"""Operands of products: views along named axes, some of which are windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from soapstone.kernels.cuda.substrate.arrays import View


@dataclass(frozen=True)
class Window:
    """A place along one axis of an operand, found from several axes of the product.

    It is (sum of axes times `steps`, plus `shift`) / `divisor`, where that is whole and from 0 to
    `size` - 1; elsewhere the element is zero. `stride`: of the operand along it.
    """

    steps: Mapping[str, int]
    shift: int
    size: int
    stride: int
    divisor: int = 1


@dataclass(frozen=True)
class Operand:
    """A view, its strides along axes of the product, and its windows."""

    view: View
    strides: Mapping[str, int]
    windows: tuple[Window, ...] = ()


Axes = Sequence[tuple[str, int]]  # names and extents


def step(operand: Operand, axes: Axes) -> int | None:
    """Return the step of an operand along axes that are counted as one, or None: it has several."""
    first, whole = None, 1
    for name, extent in reversed(axes):
        if extent == 1:
            continue
        own = operand.strides.get(name, 0)
        if first is None:
            first = own
        elif own != first * whole:
            return None
        whole *= extent
    return first or 0


def side_by_side(operand: Operand, axes: Axes) -> int:
    """Return the step between neighbours along the innermost of axes that has more than one."""
    name = next((axis for axis, extent in reversed(axes) if extent > 1), axes[-1][0])
    step = operand.strides.get(name, 0)
    step += sum(w.stride * abs(w.steps.get(name, 0)) for w in operand.windows)
    return step or 1 << 60
