"""Constants that vary along one axis only, whatever operators make them, as vectors along it."""

from __future__ import annotations

import itertools

from soapstone.engine.lower.fold import Site
from soapstone.ir.graph import Node


def vector_over(site: Site, value: str, shape: tuple[int, ...], axis: int) -> str | None:
    """Return a constant as a vector over an axis of the shape that it is broadcast to, or None.

    None if it varies along other axes too, or may: only broadcasts, concatenations and splits along
    the axis, and element-wise operators are traced.
    """
    found = site.builder.spec(value).shape
    if len(found) > len(shape):
        return None
    aligned = (1,) * (len(shape) - len(found)) + found
    if any(own not in (1, whole) for own, whole in zip(aligned, shape)):
        return None
    if all(extent == 1 for i, extent in enumerate(aligned) if i != axis):
        return _along(site, value, shape[axis])
    if value in site.constants:
        return _by_contents(site, value, shape, axis)
    maker = site.builder.maker(value)
    return None if maker is None else _behind(site, maker, value, shape, axis)


def _along(site: Site, value: str, extent: int) -> str:
    """Return a constant with `extent` elements, or with one, as a vector."""
    spec = site.builder.spec(value)
    maker = site.builder.maker(value)
    if maker is not None and maker.operator == "reshape":
        whole = maker.inputs[0]
        if site.builder.spec(whole).shape == (extent,):
            return whole
    if spec.rank != 1:
        value = site.emit("reshape", value, shape=(spec.size,))
    if spec.size != extent:
        value = site.emit("broadcast", value, shape=(extent,))
    return value


def _behind(site: Site, maker: Node, value: str, shape: tuple[int, ...], axis: int) -> str | None:
    """Return the vector of a constant, derived from the node that makes it."""
    at = maker.attributes
    own = axis - len(shape) + site.builder.spec(value).rank  # the axis as the constant counts it
    if maker.operator == "broadcast":
        return vector_over(site, maker.inputs[0], shape, axis)
    if maker.operator == "full":
        return site.emit("full", **{**at, "shape": (shape[axis],)})
    if maker.spec.view == "concat" and at["axis"] == own:
        parts = []
        for name in maker.inputs:
            extent = site.builder.spec(name).shape[own]
            part = vector_over(site, name, _with(shape, axis, extent), axis)
            if part is None:
                return None
            parts.append(part)
        return site.emit("concat", *parts, axis=0)
    if maker.spec.view == "split" and at["axis"] == own:
        bounds = list(itertools.accumulate(at["sizes"], initial=0))
        whole = vector_over(site, maker.inputs[0], _with(shape, axis, bounds[-1]), axis)
        index = maker.outputs.index(value)
        start, stop = bounds[index : index + 2]
        if whole is None:
            return None
        return site.emit("slice", whole, starts=(start,), stops=(stop,), steps=(1,))
    if maker.spec.elementwise and maker.spec.localize is None and len(maker.outputs) == 1:
        operands = [vector_over(site, name, shape, axis) for name in maker.inputs]
        if operands and None not in operands:
            return site.emit(maker.operator, *filter(None, operands), **at)
    return None


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


def _by_contents(site: Site, value: str, shape: tuple[int, ...], axis: int) -> str | None:
    """Return the vector of a constant whose contents are equal along every other axis."""
    array = site.constants[value]
    own = axis - len(shape) + array.ndim
    first = tuple(slice(None) if i == own else slice(0, 1) for i in range(array.ndim))
    if array.size == 0 or not (array == array[first]).all():
        return None
    stops = tuple(e if i == own else 1 for i, e in enumerate(array.shape))
    cut = site.emit("slice", value, starts=(0,) * array.ndim, stops=stops, steps=(1,) * array.ndim)
    return _along(site, cut, shape[axis])
