"""Types that follow from an operator's signature: which axes of its operands a result has.

A form that has no rule of its own in `shapes.py` is typed here, at symbolic extents too. Its
operator's signature is bound at some sizes (`ir/dims.py`): an axis of the result that is indexed as
an axis of an operand is that axis, one under a window is what the window leaves of it, and axes of
operands that one dim indexes are equal. What was read at one size is then compared with the
signature at others; where they disagree, nothing is said.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from soapstone.ir.dims import Affine, Axis, Kind, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Value
from soapstone.search.rules import language
from soapstone.search.rules.condition import IllTyped, number, window_size
from soapstone.search.rules.shapes import (
    CONCRETE,
    Judge,
    Tree,
    Type,
    meet,
    placed,
    same,
    tensor_type,
)

Place: TypeAlias = "tuple[int, int]"  # an operand, and one of its axes
Shapes: TypeAlias = "tuple[tuple[int, ...], ...]"
_EXTENTS = (5, 6, 1)  # at which signatures are read; windows of 5 fit
_SAMPLES = 64


@dataclass(frozen=True)
class _Made:
    """An axis of the result: the operands' axes that it is; none, where its extent is 1.

    `free` says whether it keeps where these were concatenated, `window` which extent of a window
    passes over it: 0 its height, 1 its width.
    """

    of: tuple[Place, ...]
    free: bool = False
    window: int | None = None


@dataclass(frozen=True)
class Passage:
    """What a result has of its operands' axes; `equal` are axes that it lacks, of one dim each.

    `whole` says that the signature takes no other operands, such as broadcast ones.
    """

    made: tuple[_Made, ...]
    equal: tuple[tuple[Place, ...], ...]
    kinds: tuple[str, ...]  # of the parameters
    whole: bool = True

    def type(self, parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
        """Return the type of the result.

        Raises:
            IllTyped: the operands do not fit, or a condition that the judge was told is refused.
        """
        given = dict(zip(self.kinds, parameters))
        for places in (*self.equal, *(axis.of for axis in self.made)):
            for operand, axis in places[1:]:
                first, at = places[0]
                same(operands[operand].shape[axis], operands[first].shape[at], judge)
        shape, trees = [], []
        for made in self.made:
            types = [(operands[operand], axis) for operand, axis in made.of]
            extent = types[0][0].shape[types[0][1]] if types else 1
            if made.window is not None:
                size = window_size(given["size"])[made.window]
                extent = placed(extent, size, number(given["stride"]), given["padding"], judge)
            shape.append(extent)
            tree: Tree | None = None
            for place, (type_, axis) in enumerate(types if made.free else ()):
                tree = meet(tree, type_.trees[axis], judge) if place else type_.trees[axis]
            trees.append(tree)
        return Type(tuple(shape), tuple(trees))


def typed(
    symbol: str, parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge
) -> Type:
    """Return the type of a symbol applied to operands of these types.

    Raises:
        IllTyped: it does not fit them, a condition that the judge was told is refused, or its
            signature says more than axes of operands and windows over them.
    """
    kinds = language.kinds(symbol)
    for value, kind in zip(parameters, kinds):
        for type_ in operands[:1] if kind == "axis" else ():
            if not isinstance(value, int) or not -type_.rank <= value < 0:
                raise IllTyped(f"axis {value} found in a tensor of rank {type_.rank}")
    axes = tuple(value if kind == "axis" else "" for value, kind in zip(parameters, kinds))
    found = _passage(symbol, axes, tuple(type_.rank for type_ in operands))
    given = all(isinstance(extent, int) for type_ in operands for extent in type_.shape)
    if found is not None and (found.whole or not given):
        return found.type(parameters, operands, judge)
    if not given:
        raise IllTyped(f"{symbol}: its signature does not say what it makes of any extents")
    shapes = tuple(tuple(e for e in type_.shape if isinstance(e, int)) for type_ in operands)
    signature = _bound(symbol, parameters, shapes)
    if isinstance(signature, str):
        raise IllTyped(signature)
    return tensor_type(signature.outputs[language.forms()[symbol].form.output].shape)


def _bound(symbol: str, parameters: tuple[Value, ...], shapes: Shapes) -> Signature | str:
    """Return a symbol's signature on operands of these shapes, or why it does not take them."""
    declared = language.forms()[symbol]
    specs = [TensorSpec(shape, "float32") for shape in shapes]
    try:
        attributes = declared.form.attributes(parameters, *specs)
        if attributes is None:
            return f"{symbol} does not take such operands"
        return declared.spec.bind(specs, declared.spec.normalise(attributes))
    except GraphError as error:
        return str(error)


@lru_cache(maxsize=1024)
def _passage(symbol: str, axes: tuple[Value, ...], ranks: tuple[int, ...]) -> Passage | None:
    """Return what a symbol does with axes of operands of these ranks; None where that is not all.

    axes: the parameters that are axes; the others take the values that the form declares.
    """
    output = language.forms()[symbol].form.output
    found: Passage | None = None
    whole = True
    for parameters, shapes in _samples(symbol, axes, ranks):
        signature = _bound(symbol, parameters, shapes)
        if found is None and not isinstance(signature, str):
            found = _read(signature, output, language.kinds(symbol))
            if found is None:
                return None
        made = None if isinstance(signature, str) else signature.outputs[output].shape
        try:
            said = found and found.type(parameters, tuple(map(tensor_type, shapes)), CONCRETE).shape
        except IllTyped:
            said = None
        if said is None and made is not None and any(1 in shape for shape in shapes):
            whole = False  # broadcast
        elif said != made:
            return None
    return found and Passage(found.made, found.equal, found.kinds, whole)


def _samples(
    symbol: str, axes: tuple[Value, ...], ranks: tuple[int, ...]
) -> Iterator[tuple[tuple[Value, ...], Shapes]]:
    """Yield parameters and shapes at which a signature is read: the first have one extent."""
    declared = language.forms()[symbol].form.parameters.values()
    choices = [values if axis == "" else (axis,) for axis, values in zip(axes, declared)]
    parameters = list(itertools.product(*choices))
    yield parameters[0], tuple((_EXTENTS[0],) * rank for rank in ranks)
    rng = random.Random(f"{symbol}{axes}{ranks}")
    for _ in range(_SAMPLES):
        usual = rng.choices(_EXTENTS, (4, 1, 1), k=sum(ranks))
        taken = iter(usual)
        shapes = tuple(tuple(next(taken) for _ in range(rank)) for rank in ranks)
        yield rng.choice(parameters), shapes


def _read(signature: Signature, output: int, kinds: tuple[str, ...]) -> Passage | None:
    """Return what a signature at some size says, None where that is more than a passage has."""
    places: dict[str, list[Place]] = {}
    windows: dict[str, list[Place]] = {}
    for number_, operand in enumerate(signature.inputs):
        for at, axis in enumerate(operand.axes):
            place = number_, at - len(operand.axes)
            if _plain(axis):
                places.setdefault(axis.dims[0], []).append(place)
            elif isinstance(axis, Affine) and {"size", "stride", "padding"} <= set(kinds):
                windows.setdefault(axis.dim, []).append(place)
            elif axis.dims:
                return None
    made: list[_Made] = []
    count = 0
    for axis in signature.outputs[output].axes:
        (name,) = axis.dims if _plain(axis) else ("",)
        if axis.extent == 1 and not axis.dims:
            made.append(_Made(()))
        elif name in places and name not in windows:
            free = signature.by_name[name].kind is Kind.FREE
            made.append(_Made(tuple(places.pop(name)), free))
        elif len(windows.get(name, ())) == 1 and name not in places and count < 2:
            made.append(_Made(tuple(windows.pop(name)), window=count))
            count += 1
        else:
            return None
    if windows:
        return None
    return Passage(tuple(made), tuple(map(tuple, places.values())), kinds)


def _plain(axis: Axis) -> bool:
    """Return whether an axis is one dim, each index of it once."""
    return isinstance(axis, Affine) and (axis.stride, axis.offset, axis.window) == (1, 0, 1)
