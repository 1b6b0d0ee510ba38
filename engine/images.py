"""Images: of what a point task gathers from, only the rows that its entries name are its own.

Where processors share a memory they gather from the whole of a value. Where memories are apart that
would bring all of it to each of them. So the rows that a part's entries name, its image, are packed
into a tile of a region made for it: who has rows of a part packs those that another names, and only
they are copied. The tile has rows in the order of their numbers, in which the part's entries are
numbered again, so sums are of the same rows in the same order, with the same bits.

What is gathered, and which operands say which rows, is in the operator's signature (`Whole.by`);
which rows it is follows from the contents of those operands, which must be constants. The images of
a partition are Legion's (Treichler et al., Dependent partitioning, OOPSLA 2016).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from soapstone.engine.expand import Argument, NodeLaunch, Operand
from soapstone.ir.dims import Ints, Whole
from soapstone.ir.graph import Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.runtime import Machine, Read, Write

_PACK = "embedding"  # rows of a table by number; its tiles hold the rows of one part


@dataclass(frozen=True)
class Image:
    """The rows that the entries of each part name.

    Attributes:
        rows: their numbers, ascending in each part, one part after the other; int32.
        starts: (parts + 1), where the rows of each begin.
        homes: (parts, parts + 1), where those begin among them that each part has.
        entries: the numbers of the rows that entries name, counted in the image of their part;
            those of parts that are computed elsewhere are not looked at.
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
            indptr, indices: which rows each index of a dim gathers from, in CSR.
            cuts: where the parts of the dim begin and end, and those of what has the rows.
            mine: the parts whose entries are numbered; by default all.
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
        """How many rows parts need that others have."""
        counts = np.diff(self.homes, axis=1)
        return int(counts.sum() - np.trace(counts))


@dataclass
class Images:
    """The launches of a program in which parts gather from images; regions and constants of those.

    Attributes:
        constants: the rows that are packed, and entries numbered by image, by name.
        regions: shapes and types of packed rows, by name.
    """

    launches: tuple[NodeLaunch, ...]
    constants: dict[str, Array] = field(default_factory=dict)
    regions: dict[str, TensorSpec] = field(default_factory=dict)


def imaged(
    launches: Sequence[NodeLaunch],
    constants: Mapping[str, Array],
    machine: Machine,
    processors: Collection[int],
) -> Images:
    """Return launches that gather from images where memories are apart.

    Args:
        constants: contents, by name.
        machine: where the launches run. processors: those of this process.
    """
    memories = [processor.memory for processor in machine.processors]
    found, made = Images(()), list[NodeLaunch]()
    images: dict[tuple[Any, ...], tuple[str, Image]] = {}
    for item in launches:
        place = _gathered(item, constants)
        devices = item.configuration.devices
        if place is None or len({memories[device] for device in devices}) < 2:
            made.append(item)
            continue
        axis = item.signature.inputs[place].axes[0]
        assert isinstance(axis, Whole)
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
            made += _launches(item, place, *images[key], found.regions)
        else:
            made.append(item)
    found.launches = tuple(made)
    return found


def _gathered(item: NodeLaunch, constants: Mapping[str, Array]) -> int | None:
    """Return which input of a launch can be an image; None where none can.

    Its dim must be all that is cut, in as many parts as there are points, and its rows be as many.
    """
    for place, operand in enumerate(item.signature.inputs):
        axis = operand.axes[0] if operand.axes else None
        if not isinstance(axis, Whole) or not axis.by or item.points < 2:
            continue
        extent, degrees = item.signature.by_name[axis.of].extent, item.configuration.degrees
        alone = degrees.get(axis.of, 1) == item.points == len(item.configuration.devices)
        known = [item.inputs[i].constant for i in axis.by]
        sizes = [len(constants.get(name or "", ())) for name in known]
        plain = item.inputs[place].argument >= 0 and item.inputs[place].view is None
        if alone and plain and extent == axis.extent and sizes[0] == extent + 1 and sizes[1]:
            return place
    return None


def _launches(
    item: NodeLaunch, place: int, name: str, image: Image, regions: dict[str, TensorSpec]
) -> tuple[NodeLaunch, NodeLaunch]:
    """Return the launch that packs rows, and the one that gathers from them."""
    axis = item.signature.inputs[place].axes[0]
    assert isinstance(axis, Whole)
    devices, (_, width) = item.configuration.devices, item.signature.inputs[place].shape
    given = item.arguments[item.inputs[place].argument]
    dtype = str(np.dtype(item.signature.dtypes[0]))
    packed = f"{item.node.name}.{given.region}.image"
    regions[packed] = TensorSpec((len(image.rows), width), dtype)
    source = TensorSpec(item.signature.inputs[place].shape, dtype)
    spec, ids = operator(_PACK), TensorSpec((len(image.rows),), "int32")
    node = Node(packed, _PACK, (f"{name}.rows", given.region), (packed,), sources=item.node.work_of)

    # A point for each two parts of which one names rows of the other, where those rows are.
    reader, owner = np.nonzero(np.diff(image.homes, axis=1))
    begin, end = image.homes[reader, owner], image.homes[reader, owner + 1]
    first, past = item.lo[axis.of][owner], item.hi[axis.of][owner]
    zero, full = np.zeros_like(begin), np.full_like(begin, width)
    table = np.stack([first, zero], 1), np.stack([past, full], 1)
    made = np.stack([begin, zero], 1), np.stack([end, full], 1)
    pack = NodeLaunch(
        node,
        spec.bind((ids, source), {}),
        Configuration({"d0": len(begin)}, tuple(devices[part] for part in owner)),
        (len(begin),),
        {"d0": begin, "v": first, "d": zero},
        {"d0": end, "v": past, "d": full},
        (Argument(given.region, *table, Read), Argument(packed, *made, Write)),
        (
            Operand(begin[:, None], end[:, None], constant=f"{name}.rows"),
            Operand(*table, argument=0),
        ),
        (Operand(*made, argument=1),),
    )
    zeros, widths = np.zeros(item.points, np.int64), np.full(item.points, width)
    tiles = np.stack([image.starts[:-1], zeros], 1), np.stack([image.starts[1:], widths], 1)
    arguments, inputs = list(item.arguments), list(item.inputs)
    arguments[inputs[place].argument] = Argument(packed, *tiles, Read)
    inputs[place] = Operand(*tiles, argument=inputs[place].argument)
    entries = axis.by[1]
    inputs[entries] = replace(inputs[entries], constant=name)
    return pack, replace(item, arguments=tuple(arguments), inputs=tuple(inputs))
