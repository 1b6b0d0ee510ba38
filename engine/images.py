"""Images: each point task of a gather receives only the rows that its entries name.

Processors that share a memory gather from the whole value. With separate memories that would copy
all of it to each of them. So the rows that a part's entries name, its image, are packed into a tile
of a region made for it: each processor packs those of its rows that others need, and only they are
copied. The tile keeps the order of row numbers, and entries are renumbered accordingly, so sums are
over the same rows in the same order, with the same bits.

The operator's signature says what is gathered, and which operands name the rows (`Whole.by`); the
rows themselves follow from the contents of those operands, which must be constants. The images of a
partition are Legion's (Treichler et al., Dependent partitioning, OOPSLA 2016).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from soapstone.engine.expand import Argument, NodeLaunch, Operand
from soapstone.engine.prepare import Prepared
from soapstone.ir.dims import Ints, Whole
from soapstone.ir.graph import Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.records import dataclass
from soapstone.runtime import Machine, Read, Write

_PACK = "gather"  # rows by number; its tiles hold the rows of one part


@dataclass(frozen=True)
class Image:
    """The rows that the entries of each part name.

    Attributes:
        rows: their numbers, ascending in each part, one part after another; int32.
        starts: (parts + 1), where the rows of each part begin.
        homes: (parts, parts + 1), where the rows that each part owns begin among them.
        entries: the entries, renumbered within the image of their part; those of parts that are
            computed elsewhere are undefined.
    """

    rows: Array
    starts: Ints
    homes: Ints
    entries: Array

    @classmethod
    def of(
        cls, indptr: Array, indices: Array, cuts: Sequence[int], mine: Collection[int] | None = None
    ) -> Image:
        """Return the images of parts.

        Args:
            indptr, indices: the rows that each index of a dim gathers from, in CSR.
            cuts: the boundaries of the parts of that dim, and of the rows.
            mine: the parts whose entries are renumbered; by default all.
        """
        parts, named = len(cuts) - 1, np.zeros(cuts[-1], bool)
        entries = np.zeros(len(indices), np.int32)
        rows = []
        for part, (first, past) in enumerate(pairwise(cuts)):
            held = slice(int(indptr[first]), int(indptr[past]))
            named[:] = False
            named[indices[held]] = True
            rows.append(np.flatnonzero(named).astype(np.int32))
            if mine is None or part in mine:
                place = np.cumsum(named, dtype=np.int32) - 1
                entries[held] = place[indices[held]]
        starts = np.concatenate([[0], np.cumsum([len(each) for each in rows])])
        homes = [start + np.searchsorted(each, cuts) for start, each in zip(starts, rows)]
        empty = np.zeros(0, np.int32)
        whole = np.concatenate([empty, *rows])
        return cls(whole, starts, np.reshape(homes, (parts, parts + 1)), entries)

    @property
    def moved(self) -> int:
        """The number of rows that parts need and others own."""
        counts = np.diff(self.homes, axis=1)
        return int(counts.sum() - np.trace(counts))


@dataclass
class Images:
    """The launches of a program in which parts gather from images, and what these need.

    Attributes:
        constants: the rows to pack, and the renumbered entries, by name.
        regions: shapes and types of packed rows, by name.
    """

    launches: tuple[NodeLaunch, ...]
    constants: dict[str, Array] = field(default_factory=dict)
    regions: dict[str, TensorSpec] = field(default_factory=dict)


def imaged(
    prepared: Prepared,
    constants: Mapping[str, Array],
    machine: Machine,
    processors: Collection[int],
) -> Images:
    """Return launches that gather from images where memories are separate.

    Args:
        prepared: what is launched. constants: contents, by name.
        machine: where the launches run. processors: those of this process.
    """
    memories = [processor.memory for processor in machine.processors]
    if len(set(memories)) < 2:
        return Images(prepared.launches)
    found, made = Images(()), list[NodeLaunch]()
    images: dict[tuple[Any, ...], tuple[str, Image]] = {}
    for item in prepared.launches:
        places = _gathered(item, constants, prepared)
        devices = item.configuration.devices
        if not places or len({memories[device] for device in devices}) < 2:
            made.append(item)
            continue
        axis = _axis(item, places[0])
        names = [str(item.inputs[i].constant) for i in axis.by]
        cuts = (0, *item.hi[axis.of].tolist())
        key = (*names, cuts, devices)
        if key not in images:
            mine = {part for part, device in enumerate(devices) if device in processors}
            image = Image.of(constants[names[0]], constants[names[1]], cuts, mine)
            images[key] = f"{names[1]}.image{len(images) or ''}", image
            found.constants[f"{images[key][0]}.rows"] = image.rows
            found.constants[images[key][0]] = image.entries
        if len(images[key][1].rows):
            made += _Imaging(item, *images[key], found, prepared, constants).launches(places)
        else:
            made.append(item)
    found.launches = tuple(made)
    return found


def _axis(item: NodeLaunch, place: int) -> Whole:
    """Return the axis of an input that is gathered."""
    axis = item.signature.inputs[place].axes[0]
    assert isinstance(axis, Whole)
    return axis


def _gathered(
    item: NodeLaunch, constants: Mapping[str, Array], prepared: Prepared
) -> tuple[int, ...]:
    """Return the gathered inputs of a launch if they can be images; none unless all of them can.

    Their dim must be the only one that is split, into as many parts as there are points; the rows
    must be split alike, in what is launched or in a view of it that keeps rows.
    """
    axes = [operand.axes[0] if operand.axes else None for operand in item.signature.inputs]
    places = tuple(
        place
        for place, axis in enumerate(axes)
        if isinstance(axis, Whole) and axis.by and not axis.offsets
    )
    offsets = [n for n, axis in enumerate(axes) if isinstance(axis, Whole) and axis.offsets]
    if not places or item.points < 2 or any(item.inputs[n].constant is None for n in offsets):
        return ()
    axis = _axis(item, places[0])
    extent, degrees = item.signature.by_name[axis.of].extent, item.configuration.degrees
    alone = degrees.get(axis.of, 1) == item.points == len(item.configuration.devices)
    known = [item.inputs[i].constant for i in axis.by]
    sizes = [len(constants.get(name or "", ())) for name in known]
    if not alone or axis.extent != extent or sizes[0] != extent + 1 or not sizes[1]:
        return ()
    for place in places:
        operand = item.inputs[place]
        if operand.argument < 0:
            return ()
        steps = () if operand.view is None else operand.view.steps
        rows = [prepared.region(item.arguments[operand.argument].region).shape[0]]
        rows += [argument[0] if kind == "reshape" else -1 for kind, argument in steps]
        if set(rows) != {extent} or (operand.view is not None and operand.view.box is not None):
            return ()
    return places


@dataclass
class _Imaging:
    """A launch and its image: makes the launches that pack rows, and the one that gathers."""

    item: NodeLaunch
    name: str
    image: Image
    found: Images
    prepared: Prepared
    contents: Mapping[str, Array]

    def launches(self, places: Sequence[int]) -> list[NodeLaunch]:
        """Return the launches that pack rows of each operand, and the one that gathers them."""
        item, image, found = self.item, self.image, self.found
        axis, packs = _axis(item, places[0]), dict[str, NodeLaunch]()
        arguments, inputs = list(item.arguments), list(item.inputs)
        for place in places:
            operand, spec = inputs[place], item.signature.inputs[place]
            given = item.arguments[operand.argument]
            packed = f"{item.node.name}.{given.region}.image"
            packs[given.region] = self._pack(packed, given, axis.of)
            tiles = _boxes(image.starts[:-1], image.starts[1:], found.regions[packed].shape)
            arguments[operand.argument] = Argument(packed, *tiles, Read)
            own = _boxes(image.starts[:-1], image.starts[1:], spec.shape)
            inputs[place] = replace(operand, lo=own[0], hi=own[1])
        entries = axis.by[1]
        inputs[entries] = replace(inputs[entries], constant=self.name)
        for place, given_axes in enumerate(item.signature.inputs):
            first = given_axes.axes[0] if given_axes.axes else None
            if isinstance(first, Whole) and first.offsets and first.by:
                inputs[place] = self._offsets(inputs[place])
        if axis.named:
            ends = image.starts[:-1, None], image.starts[1:, None]
            inputs.append(Operand(*ends, constant=f"{self.name}.rows"))
        return [*packs.values(), replace(item, arguments=tuple(arguments), inputs=tuple(inputs))]

    def _offsets(self, operand: Operand) -> Operand:
        """Return the offsets of each part's rows, part after part, with the same differences."""
        name, image = f"{self.name}.{operand.constant}", self.image
        parts = np.split(
            np.diff(self.contents[str(operand.constant)])[image.rows], image.starts[1:]
        )
        offsets = [np.concatenate([[0], np.cumsum(part)]) for part in parts[: len(image.homes)]]
        self.found.constants[name] = np.concatenate(offsets).astype(np.int64)
        number = np.arange(len(offsets))  # of offsets there is one more than of rows
        first, past = image.starts[:-1] + number, image.starts[1:] + number + 1
        return replace(operand, lo=first[:, None], hi=past[:, None], constant=name)

    def _pack(self, packed: str, given: Argument, dim: str) -> NodeLaunch:
        """Return the launch that packs the rows of a region. dim: of the parts."""
        image, source = self.image, self.prepared.region(given.region)
        devices = self.item.configuration.devices
        rest = source.shape[1:]
        self.found.regions[packed] = TensorSpec((len(image.rows), *rest), source.dtype)
        spec, ids = operator(_PACK), TensorSpec((len(image.rows),), "int32")
        rows = f"{self.name}.rows"
        node = Node(
            packed,
            _PACK,
            (given.region, rows),
            (packed,),
            (("axis", 0),),
            sources=self.item.node.work_of,
        )
        # A point for each two parts of which one names rows of the other, where those rows are.
        reader, owner = np.nonzero(np.diff(image.homes, axis=1))
        begin, end = image.homes[reader, owner], image.homes[reader, owner + 1]
        first, past = self.item.lo[dim][owner], self.item.hi[dim][owner]
        table, made = _boxes(first, past, source.shape), _boxes(begin, end, source.shape)
        whole = {f"d{axis}": np.zeros_like(begin) for axis in range(1, source.rank)}
        full = {
            f"d{axis}": np.full_like(begin, source.shape[axis]) for axis in range(1, source.rank)
        }
        return NodeLaunch(
            node,
            spec.bind((source, ids), node.attributes),
            Configuration({"i0": len(begin)}, tuple(devices[part] for part in owner)),
            (len(begin),),
            {"i0": begin, "v": first, **whole},
            {"i0": end, "v": past, **full},
            (Argument(given.region, *table, Read), Argument(packed, *made, Write)),
            (
                Operand(*table, argument=0),
                Operand(begin[:, None], end[:, None], constant=rows),
            ),
            (Operand(*made, argument=1),),
        )


def _boxes(first: Ints, past: Ints, shape: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the boxes of ranges of rows, whole along the other axes."""
    lo = np.zeros((len(first), len(shape)), np.int64)
    hi = np.tile(np.array(shape, np.int64), (len(first), 1))
    lo[:, 0], hi[:, 0] = first, past
    return lo, hi
