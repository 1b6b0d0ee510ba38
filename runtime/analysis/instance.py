"""Physical instances: where a region's elements are, which are valid, and who uses them.

Validity is a boolean array over a grid of cells: the region cut at every tile boundary seen so far.
A set of all cells or none is just True or False, so programs in one memory need no arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.native.walks import in_places
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.tiling import Box, Shape, Tiling, cells_of, covered_by, overlaps

Cells = bool | Array  # a set of elements: all, none, or the cells where the array is True
InstanceKey = tuple[int, Box | None, tuple[int, ...] | None]  # memory, box (None: whole), order

READ, WRITE = 1, 2
_USES_LIMIT = 64


def each_once(values: Array) -> Array:
    """Return numbers, or rows of them, sorted and without repeats.

    `np.unique` does the same, but imports masked arrays for it.
    """
    rows = values.ndim == 2
    values = values[np.lexsort(values.T[::-1])] if rows else np.sort(values)
    first = np.ones(len(values), bool)
    others = values[1:] != values[:-1]
    first[1:] = others.any(axis=1) if rows else others
    found: Array = values[first]
    return found


class Storage:
    """The bytes of one instance: a box of a region in a memory, with an axis order.

    `array` has the box's logical shape (a permuted view for an order other than C); it is None for
    a transient instance of a trace until the arena is planned. In a memory with a backing one,
    `offset` is its place, `after` are the operations that may still use its bytes, and `chosen`
    says whether the mapper chose the place: such an instance is filled with all contents that its
    region has.
    """

    __slots__ = (
        "__weakref__",
        "after",
        "array",
        "box",
        "chosen",
        "dtype",
        "memory",
        "name",
        "nbytes",
        "offset",
        "order",
        "shape",
        "transient",
    )

    def __init__(
        self, region: Region, memory: int, box: Box, order: tuple[int, ...] | None
    ) -> None:
        self.memory = memory
        self.box = box
        self.shape: Shape = tuple(high - low for low, high in zip(*box))
        self.dtype = region.dtype
        self.order = order
        self.nbytes = math.prod(self.shape) * region.dtype.itemsize
        self.name = region.name
        self.transient = region.transient
        self.offset: int | None = None
        self.chosen = False
        self.after: Array = np.zeros(0, dtype=np.int64)
        self.array: Array | None = None

    def fit(self, boxes: Iterable[Box]) -> None:
        """Shrink to the smallest box that holds all of some boxes; only before it has bytes."""
        filled = [box for box in boxes if all(low < high for low, high in zip(*box))]
        if filled:
            low, high = (zip(*sides) for sides in zip(*filled))
            self.box = tuple(map(min, low)), tuple(map(max, high))
            self.shape = tuple(b - a for a, b in zip(*self.box))
            self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    def attach(self, buffer: Array) -> None:
        """Use the first bytes of a uint8 buffer."""
        flat = buffer[: self.nbytes].view(self.dtype)
        if self.order is None:
            self.array = flat.reshape(self.shape)
        else:
            physical = flat.reshape([self.shape[axis] for axis in self.order])
            self.array = in_places(physical, self.order)

    def strides(self) -> tuple[int, ...]:
        """Bytes between neighbours along each axis, known before the storage has bytes."""
        order = self.order if self.order is not None else range(len(self.shape))
        strides = [0] * len(self.shape)
        step = self.dtype.itemsize
        for axis in reversed(list(order)):
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides)

    def span(self, box: Box) -> tuple[int, int]:
        """The byte range inside the storage that a box of the region touches."""
        low = high = 0
        for a, b, base, stride in zip(box[0], box[1], self.box[0], self.strides()):
            if b <= a:
                return (0, 0)
            low += (a - base) * stride
            high += (b - 1 - base) * stride
        return (low, high + self.dtype.itemsize)

    def in_row(self, box: Box) -> bool:
        """Whether a box of the region is one range of bytes, in C order."""
        low, high = self.span(box)
        dense = math.prod(b - a for a, b in zip(*box)) * self.dtype.itemsize == high - low
        return self.order is None and dense

    def view(self, box: Box) -> Array:
        """The NumPy view of a box of the region."""
        view: Array = self.whole[self.part(box)]
        return view

    def part(self, box: Box) -> Any:
        """The index of a box of the region in the array."""
        index = [slice(a - o, b - o) for a, b, o in zip(*box, self.box[0], strict=True)]
        return tuple(index) or ...

    @property
    def whole(self) -> Array:
        """The array of all the bytes."""
        if self.array is None:
            raise ValueError(f"instance of region {self.name!r} has no bytes yet")
        return self.array


class Use:
    """How one operation accesses one argument: a box of a storage (None if the box is empty)."""

    __slots__ = ("_part", "box", "squeeze", "storage", "writes")

    def __init__(self, storage: Storage | None, box: Box, writes: bool, squeeze: bool) -> None:
        self.storage = storage
        self.box = box
        self.writes = writes
        self.squeeze = squeeze
        self._part: Any = None  # of the storage's array

    def view(self, dtype: np.dtype[Any]) -> Array:
        """The array of the box, without the leading axis of a reduction buffer."""
        if self.storage is None:
            shape = tuple(high - low for low, high in zip(*self.box))
            return np.zeros(shape[1:] if self.squeeze else shape, dtype=dtype)
        if self._part is None:
            self._part = ... if self.box == self.storage.box else self.storage.part(self.box)
        array: Array = self.storage.whole[self._part]
        return array[0, ...] if self.squeeze else array


class Users:
    """The point tasks of one launch that use an instance through one tiling."""

    __slots__ = ("ids", "tiling")

    def __init__(self, tiling: Tiling, ids: Array) -> None:
        self.tiling = tiling
        self.ids = ids

    def edges(self, tiling: Tiling, ids: Array) -> tuple[Array, Array] | None:
        """The dependences of later point tasks on these: those whose boxes overlap."""
        if self.tiling is tiling and tiling.disjoint:
            if tiling.empty:
                filled = tiling.volume > 0
                return self.ids[filled], ids[filled]
            return self.ids, ids
        first, second = overlaps(self.tiling, tiling)
        return (self.ids[first], ids[second]) if first.size else None

    def beyond(self, tiling: Tiling) -> Users | None:
        """The users whose boxes a write through a tiling does not cover."""
        if self.tiling is tiling:
            return None
        covered = covered_by(tiling, self.tiling)
        count = np.count_nonzero(covered)
        if not count:
            return self
        if count == covered.size:
            return None
        points = np.nonzero(~covered)[0]
        return Users(self.tiling.subset(points), self.ids[points])


class Instance:
    """What an analysis knows of a storage: the valid cells, and the users since the last writes.

    `inherited` are the cells that are still as when a capture began; `required` are those of them
    that the capture read, which are the trace's precondition.
    """

    __slots__ = (
        "_uses",
        "inherited",
        "readers",
        "required",
        "storage",
        "turns",
        "used",
        "valid",
        "writers",
    )

    def __init__(self, storage: Storage, valid: Cells, inherited: Cells = False) -> None:
        self.storage = storage
        self.readers: list[Users] = []
        self.writers: list[Users] = []
        self.valid = valid
        self.inherited = inherited
        self.required: Cells = False
        self.turns = 0  # of copies from and to it since it was written: when the next may begin
        self.used = 0  # the first operation of the launch that used it last
        self._uses: dict[tuple[int, bool, bool], list[Use]] = {}

    def uses(self, tiling: Tiling, writes: bool, squeeze: bool) -> list[Use]:
        """The uses of a launch all of whose points use this instance through one tiling."""
        key = (tiling.uid, writes, squeeze)
        uses = self._uses.get(key)
        if uses is None:
            if len(self._uses) > _USES_LIMIT:
                self._uses.clear()
            uses = [
                Use(self.storage if volume else None, box, writes, squeeze)
                for box, volume in zip(tiling.boxes, tiling.volume.tolist())
            ]
            self._uses[key] = uses
        return uses

    def depend(self, tiling: Tiling, ids: Array, access: int) -> list[tuple[Array, Array]]:
        """The dependences of new point tasks on this instance's users; records the new users.

        Readers depend on writers, and writers on all users. Users whose boxes a writer covers are
        forgotten, since whatever conflicts with them later conflicts with that writer too.

        Returns pairs of int64 arrays (sources, targets).
        """
        writes = access & WRITE
        before = self.writers + self.readers if writes else self.writers
        edges = [user.edges(tiling, ids) for user in before]
        after = self.storage.after
        if writes and after.size:
            edges.append((np.repeat(after, ids.size), np.tile(ids, after.size)))
        mine = Users(tiling, ids)
        if writes:
            self.writers = [w for user in self.writers if (w := user.beyond(tiling)) is not None]
            self.readers = [r for user in self.readers if (r := user.beyond(tiling)) is not None]
            self.writers.append(mine)
        else:
            self.readers.append(mine)
        return [pair for pair in edges if pair is not None]

    def forget(self, below: int | None = None) -> None:
        """Forget users that have ended: all of them, or those with all ids below a watermark."""
        self.writers, self.readers = (
            []
            if below is None
            else [user for user in users if int(user.ids.max(initial=-1)) >= below]
            for users in (self.writers, self.readers)
        )
        after = self.storage.after
        if after.size and (below is None or int(after.max()) < below):
            self.storage.after = np.zeros(0, dtype=np.int64)


class Instances:
    """All instances of one region, and the grid of cells on which validity is kept."""

    __slots__ = (
        "_masks",
        "by_key",
        "cuts",
        "live",
        "name",
        "shape",
        "tracking",
        "written",
    )

    def __init__(self, region: Region, tracking: bool = False) -> None:
        self.shape = region.shape
        self.name = region.name
        self.by_key: dict[InstanceKey, Instance] = {}
        self.cuts: list[Array] = [np.array([0, max(1, n)], dtype=np.int64) for n in region.shape]
        self._masks: dict[int, Cells] = {}
        self.tracking = tracking
        self.written: Cells = False  # by a capture, when tracking
        self.live = False  # the host holds an array of it, and may write it between steps

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.by_key.values())

    @property
    def sole(self) -> bool:
        """Whether one instance is of the whole region and valid everywhere, and there is no other.

        Then nothing need be copied or kept up to date.
        """
        if len(self.by_key) != 1:
            return False
        (instance,) = self.by_key.values()
        return instance.valid is True

    # -- sets of cells

    def cells(self, value: Cells) -> Array:
        """A set as an array over the cells; a new array if the set is True or False."""
        if isinstance(value, bool):
            return np.full([cut.size - 1 for cut in self.cuts], value, dtype=bool)
        return value

    def mask(self, tiling: Tiling) -> Cells:
        """The cells in the union of a tiling's boxes."""
        mask = self._masks.get(tiling.uid)
        if mask is not None:
            return mask
        if tiling.complete:
            mask = True
        else:
            self._refine(tiling)
            cells = self.cells(False)
            for low, high in tiling.boxes:
                cells[cells_of(self.cuts, low, high)] = True
            mask = simplify(cells)
        self._masks[tiling.uid] = mask
        return mask

    def _refine(self, tiling: Tiling) -> None:
        """Cut the cells at every boundary of a tiling."""
        self.cut([*np.concatenate([tiling.lo, tiling.hi]).T])

    def cut(self, faces: Sequence[Array]) -> None:
        """Cut the cells at more coordinates. faces: the coordinates along each axis."""
        cuts = [
            cut if at <= set(cut.tolist()) else np.array(sorted(at.union(cut.tolist())), np.int64)
            for cut, at in ((cut, set(more.tolist())) for cut, more in zip(self.cuts, faces))
        ]
        if all(new is old for new, old in zip(cuts, self.cuts)):
            return
        source = [
            np.searchsorted(old, new[:-1], side="right") - 1 for new, old in zip(cuts, self.cuts)
        ]
        picks = np.ix_(*source)
        for instance in self:
            for name in ("valid", "inherited", "required"):
                value = getattr(instance, name)
                if not isinstance(value, bool):
                    setattr(instance, name, value[picks])
        if not isinstance(self.written, bool):
            self.written = self.written[picks]
        self.cuts = cuts
        self._masks.clear()

    def mend(self) -> None:
        """Make the sets fit the cells again, after an interrupt while cells were being cut.

        What was valid where is then unknown: a whole instance counts as valid, or none does.
        """
        shape = tuple(cut.size - 1 for cut in self.cuts)
        sets = [self.written, *[v for i in self for v in (i.valid, i.inherited, i.required)]]
        self._masks.clear()
        if all(isinstance(value, bool) or value.shape == shape for value in sets):
            return
        self.written = False
        for instance in self:
            instance.valid = instance.inherited = instance.required = False
        wholes = [instance for key, instance in self.by_key.items() if key[1] is None]
        for instance in wholes[:1]:
            instance.valid = True

    def translated(self, value: Cells, other: Instances) -> Cells:
        """Convert a set over another state's cells to this one's, which are cut as needed."""
        if isinstance(value, bool):
            return value
        self.cut(other.cuts)
        source = [
            np.searchsorted(theirs, mine[:-1], side="right") - 1
            for theirs, mine in zip(other.cuts, self.cuts)
        ]
        picked: Array = value[np.ix_(*source)]
        return simplify(picked)

    # -- validity

    def missing(self, instance: Instance, tiling: Tiling) -> Cells:
        """The cells in a tiling's union that are not valid in an instance."""
        if instance.valid is True:
            return False
        return minus(self.mask(tiling), instance.valid)

    def elsewhere(self, instance: Instance) -> Cells:
        """The cells that are valid in other instances."""
        found: Cells = False
        for other in self:
            if other is not instance:
                found = union(found, other.valid)
        return found

    def wrote(self, instance: Instance, tiling: Tiling) -> None:
        """Record that a tiling's union was written in one instance, which makes others stale."""
        if instance.valid is True and len(self.by_key) == 1 and not self.tracking:
            return
        written = self.mask(tiling)
        if self.tracking:
            self.written = union(self.written, written)
        for other in self:
            if other is instance:
                other.valid, other.turns = union(other.valid, written), 0
            else:
                other.valid = minus(other.valid, written)
            other.inherited = minus(other.inherited, written)

    def copied(self, source: Instance, target: Instance, tiling: Tiling) -> None:
        """Record a copy of a tiling's union between two instances."""
        cells = self.mask(tiling)
        self.read(source, tiling)
        target.valid = union(target.valid, cells)
        target.inherited = minus(target.inherited, cells)

    def read(self, instance: Instance, tiling: Tiling) -> None:
        """Record which cells must be valid before the capture because a read needs them."""
        if instance.inherited is False or instance.required is True:
            return
        needed = both(self.mask(tiling), instance.inherited)
        instance.required = union(instance.required, needed)

    def boxes(self, cells: Array, offset: tuple[int, ...]) -> Iterator[Box]:
        """The boxes that make up a set, found greedily; the set is emptied.

        offset: the cell at which the array begins. A region without elements has no boxes.
        """
        while 0 not in self.shape and cells.any():
            start = tuple(int(i) for i in np.unravel_index(int(cells.argmax()), cells.shape))
            stop = [i + 1 for i in start]
            for axis in reversed(range(len(start))):
                while stop[axis] < cells.shape[axis]:
                    grown = [slice(a, b) for a, b in zip(start, stop)]
                    grown[axis] = slice(stop[axis], stop[axis] + 1)
                    if not cells[tuple(grown)].all():
                        break
                    stop[axis] += 1
            cells[tuple(slice(a, b) for a, b in zip(start, stop))] = False
            yield (
                tuple(int(cut[a + o]) for cut, a, o in zip(self.cuts, start, offset)),
                tuple(int(cut[b + o]) for cut, b, o in zip(self.cuts, stop, offset)),
            )


def simplify(cells: Array) -> Cells:
    """A set as True or False where it is everything or nothing."""
    count = int(np.count_nonzero(cells))
    return cells if 0 < count < cells.size else count == cells.size


def union(a: Cells, b: Cells) -> Cells:
    """Elements of either set."""
    if a is True or b is True:
        return True
    if a is False:
        return b
    return a if b is False else simplify(a | b)


def both(a: Cells, b: Cells) -> Cells:
    """Elements that are in both sets."""
    if a is False or b is False:
        return False
    if a is True:
        return b
    return a if b is True else simplify(a & b)


def minus(a: Cells, b: Cells) -> Cells:
    """Elements of the first set that are not in the second."""
    if a is False or b is True:
        return False
    if b is False:
        return a
    return simplify(~b if a is True else a & ~b)
