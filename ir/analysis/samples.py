"""The dim of each operator that runs over the samples of a batch, derived from the signatures.

FlexFlow (Jia, section 3.3) marks the sample dim of every operator by hand. Here the first axis of
every step input is a sample axis, and the interval maps carry it through the graph. Where samples
are gathered for other samples, such as neighbours for vertices, those others are the samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from soapstone.ir.attributes import Attributes
from soapstone.ir.dims import Affine, Axis, Ints, Kind, Operand, Product, Signature, Whole
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import OpSpec, Tile
from soapstone.ir.tensor import Role, TensorSpec

Shape = tuple[int, ...]
Axes = tuple[int, ...]  # of values: along which samples lie, -1 where they do not


def sample_dims(graph: Graph) -> dict[str, str]:
    """Return, for each node that sees samples, the name of its sample dim."""
    axis_of = {name: 0 for name in graph.inputs(Role.INPUT) if graph.tensors[name].rank}
    result: dict[str, str] = {}
    for node in graph.nodes:
        signature = graph.signature(node)
        dim = None
        for name, operand in zip(node.inputs, signature.inputs):
            position = axis_of.get(name)
            if position is None:
                continue
            axis = operand.axes[position]
            dim = _outermost(axis)
            if dim is not None:
                break
            if isinstance(axis, Whole) and axis.of:
                dim = axis.of
                break
        if dim is None:
            continue
        result[node.name] = dim
        for name, operand in zip(node.outputs, signature.outputs):
            for position, axis in enumerate(operand.axes):
                if axis.dims[:1] == (dim,):
                    axis_of[name] = position
                    break
    return result


def meeting_samples(graph: Graph, other: Graph) -> str:
    """Return where rows of outputs depend on other rows of the inputs than theirs; "" for nowhere.

    Rows are along the first axis of all inputs and outputs. Where signatures leave it open, samples
    count as meeting.

    graph, other: of one model, for several rows and for another number of them, which differ in
    extents alone (`ir.extents.differs`).
    """
    try:
        found = _along_samples(graph, other)
    except _Meeting as meeting:
        return str(meeting)
    rows = {graph.tensors[name].shape[0] for name in graph.inputs(Role.INPUT)}
    for name in graph.outputs:
        if found.get(name) != 0 or not rows.issuperset(graph.tensors[name].shape[:1]):
            return f"output {name!r}"
    return ""


def for_samples(spec: OpSpec, attributes: Attributes, x: TensorSpec, count: int) -> Attributes:
    """Return attributes by which an operator does to each of several samples what it does to one.

    The samples lie along an axis before all others.

    spec: of an operator of one input. attributes, x: for one sample.

    Raises:
        GraphError: no attributes are known to do so, as signatures show.
    """
    found = dict(attributes)
    for name, attribute in spec.attributes.items():
        value = found[name]
        if attribute.kind == "axis":
            found[name] = value + 1
        elif attribute.kind == "axes" and value is not None:
            found[name] = tuple(axis + 1 for axis in value)
        elif name == "shape":
            found[name] = (count, *value)
        elif attribute.kind in ("axes", "ints"):
            raise GraphError(f"{spec.name}: attribute {name!r} of one sample found")
    made = spec.normalise(found)
    many = spec.bind([replace(x, shape=(count, *x.shape))], made)
    if not _apart_as_one(many, spec.bind([x], attributes)):
        raise GraphError(f"{spec.name}: samples that may meet found")
    return made


def _apart_as_one(many: Signature, one: Signature) -> bool:
    """Return whether samples are along axis 0 of all operands, and other dims index as for one."""
    pairs = list(zip((*many.inputs, *many.outputs), (*one.inputs, *one.outputs), strict=True))
    first = {operand.axes[:1] for operand, _ in pairs}
    samples = next(iter(first.pop()), None)
    if not isinstance(samples, Affine) or samples != Affine(samples.dim, samples.extent) or first:
        return False
    names: dict[str, str] = {}
    for operand, single in pairs:
        for axis, other in zip(operand.axes[1:], single.axes, strict=True):
            if samples.dim in axis.dims or len(axis.dims) != len(other.dims):
                return False
            if any(names.setdefault(a, b) != b for a, b in zip(axis.dims, other.dims)):
                return False
            if axis != _renamed(other, axis.dims):
                return False
    apart = many.by_name[samples.dim].kind is Kind.FREE and len({*names.values()}) == len(names)
    return apart and all(
        replace(many.by_name[name], name=other) == one.by_name[other]
        for name, other in names.items()
    )


def _renamed(axis: Axis, dims: tuple[str, ...]) -> Axis:
    """Return an axis that other dims index."""
    if isinstance(axis, Affine):
        return replace(axis, dim=dims[0])
    return replace(axis, dims=dims) if isinstance(axis, Product) else axis


def same_for_samples(made: Graph, other: Graph) -> bool:
    """Return whether what two graphs make of constants is the same for each sample in both.

    made, other: as of `meeting_samples`; no node reads their inputs, which tell the rows.
    """
    try:
        _along_samples(made, other)
    except _Meeting:
        return False
    return True


class _Meeting(Exception):
    """Samples meet in an operator, or what it makes depends on how many there are."""


def _along_samples(graph: Graph, other: Graph) -> dict[str, int]:
    """Return the axis of each value along which samples lie, each in an equal part of it.

    A value of constants that is longer in one graph has such an axis too, if it repeats along that,
    as a mask does that was made once and is added to each sample. All other values are the same in
    both graphs.

    graph, other: as of `meeting_samples`.

    Raises:
        _Meeting: there is none.
    """
    inputs = graph.inputs(Role.INPUT)
    rows = tuple(each.tensors[inputs[0]].shape[0] for each in (graph, other))
    axis_of = dict.fromkeys(inputs, 0)
    followed = dict[Hashable, Axes | None]()  # what was found of equal nodes, as of equal layers
    for node, twin in zip(graph.nodes, other.nodes):
        signature = graph.signature(node)
        axes = tuple(axis_of.get(name, -1) for name in node.inputs)
        shapes = tuple(other.tensors[name].shape for name in twin.outputs)
        key = id(signature), axes, shapes
        if key not in followed:
            followed[key] = _followed(node, signature, axes, shapes, rows)
        found = followed[key]
        if found is None:
            raise _Meeting(f"{node.operator} {node.name!r}")
        axis_of.update((name, axis) for name, axis in zip(node.outputs, found) if axis >= 0)
    return axis_of


def _followed(
    node: Node, signature: Signature, axes: Axes, shapes: Sequence[Shape], rows: Sequence[int]
) -> Axes | None:
    """Return the axis of each result of a node along which samples lie; None where they meet.

    axes: those of the operands; -1 where there is none. shapes: of the results in the other graph.
    """
    both = list(zip((operand.shape for operand in signature.outputs), shapes))
    operands = list(zip(axes, signature.inputs))
    dims = {aligned(operand.axes[axis], signature) for axis, operand in operands if axis >= 0}
    if not dims:
        if all(one == other for one, other in both):
            return (-1,) * len(shapes)
        dims = _longer(signature, both)
    dim = dims.pop()
    if dims or dim is None or signature.by_name[dim].kind is not Kind.FREE:
        return None
    others = any(
        dim in axis.dims and position != along
        for along, operand in operands
        for position, axis in enumerate(operand.axes)
    )
    if others or signature.by_name[dim].extent % rows[0] or differs_by_place(node, signature, dim):
        return None
    found = list[int]()
    for operand, pair in zip(signature.outputs, both):
        places = [p for p, axis in enumerate(operand.axes) if aligned(axis, signature) == dim]
        if len(places) != 1 or not _alike(pair, places[0], rows):
            return None
        found += places
    return tuple(found)


def _longer(signature: Signature, shapes: Sequence[tuple[Shape, Shape]]) -> set[str | None]:
    """Return the dims along which results of constants are longer in one of two graphs.

    None is among them where an operand is indexed by such a dim, so that they need not repeat.
    """
    known = {dim for operand in signature.inputs for dim in operand.dims}
    return {
        None if not known.isdisjoint(axis.dims) else aligned(axis, signature)
        for operand, (one, other) in zip(signature.outputs, shapes)
        for axis, a, b in zip(operand.axes, one, other)
        if a != b
    } or {None}


def _alike(shapes: tuple[Shape, Shape], axis: int, rows: Sequence[int]) -> bool:
    """Return whether shapes for two numbers of rows differ by these alone, along an axis."""
    one, other = (list(shape) for shape in shapes)
    if len(one) != len(other):
        return False
    a, b = one.pop(axis), other.pop(axis)
    return one == other and a * rows[1] == b * rows[0] and a > 0


def _outermost(axis: Axis) -> str | None:
    """Return the dim each of whose indices has consecutive elements of an axis for itself."""
    plain = isinstance(axis, Affine) and axis.stride == 1 and not axis.overlaps
    return axis.dims[0] if plain or isinstance(axis, Product) else None


def aligned(axis: Axis, signature: Signature) -> str | None:
    """Return the dim whose index i has the i-th of equal parts of an axis."""
    dim = _outermost(axis)
    if dim is None or (isinstance(axis, Affine) and axis.extent != signature.by_name[dim].extent):
        return None
    return dim


def differs_by_place(node: Node, signature: Signature, dim: str) -> bool:
    """Return whether what an operator does to an index of a dim depends on which it is."""
    if node.spec.localize is None or not signature.by_name[dim].extent:
        return False
    found = []
    for index in (0, signature.by_name[dim].extent - 1):
        lo = {each.name: np.zeros(1, np.int64) for each in signature.dims}
        hi = {each.name: np.array([each.extent]) for each in signature.dims}
        lo[dim], hi[dim] = np.array([index]), np.array([index + 1])

        def boxes(
            operands: tuple[Operand, ...],
            lo: dict[str, Ints] = lo,
            hi: dict[str, Ints] = hi,
        ) -> tuple[tuple[Ints, Ints], ...]:
            tiles = (operand.tiles(lo, hi, 1) for operand in operands)
            return tuple((first[0], last[0]) for first, last in tiles)

        tile = Tile(
            {each.name: (int(lo[each.name][0]), int(hi[each.name][0])) for each in signature.dims},
            boxes(signature.inputs),
            boxes(signature.outputs),
            tuple(operand.shape for operand in signature.inputs),
            tuple(operand.shape for operand in signature.outputs),
        )
        found.append(dict(node.spec.localize(node.attributes, tile)))
    return found[0] != found[1]
