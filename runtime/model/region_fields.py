"""Regions with several fields: one index space, a storage for each field (struct of arrays).

A launch that names such a region (or a partition of it) becomes a launch over single-field
regions before it is analysed, so dependences, copies and traces know of fields nothing at all:
tasks that use different fields are independent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from types import MappingProxyType
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.errors import BoundsError
from soapstone.runtime.model.region import Region


@dataclass(frozen=True, eq=False, init=False)
class FieldRegion(Region):
    """A logical array whose elements have named fields, each field a region of its own.

        particles = FieldRegion((1000,), {"x": "f4", "v": "f4"}, "particles")
        tiles = Partition.tiled(particles, 4)  # cuts every field
        particles["x"], tiles["x"]             # the region and the partition of one field

    fields: the dtype of each. shape, name and transient are those of a `Region`. `dtype` is the
    structured dtype of the fields, in which the host reads and writes elements.

    Raises: BoundsError for no fields, names that are no identifiers, or a negative extent;
    TypeError for a dtype that holds Python objects.
    """

    fields: Mapping[str, Region] = field(init=False, default_factory=dict)

    def __init__(
        self,
        shape: Sequence[int] | int,
        fields: Mapping[str, Any],
        name: str = "",
        transient: bool = False,
    ) -> None:
        if not fields:
            raise BoundsError(f"region {name!r}: no fields found, at least one needed")
        for each in fields:
            if not isinstance(each, str) or not each.isidentifier():
                raise BoundsError(f"region {name!r}: field {each!r} found, an identifier needed")
        made = {
            each: Region(shape, dtype, f"{name}.{each}", transient)
            for each, dtype in fields.items()
        }
        self._hold(shape, made, name, transient)

    def _hold(
        self,
        shape: Sequence[int] | int,
        fields: Mapping[str, Region],
        name: str,
        transient: bool,
    ) -> None:
        dtype = np.dtype([(each, region.dtype) for each, region in fields.items()])
        Region.__init__(self, shape, dtype, name, transient)
        object.__setattr__(self, "fields", MappingProxyType(dict(fields)))

    def __getitem__(self, field: str) -> Region:
        """The region of one field.

        Raises: BoundsError for a field it does not have.
        """
        found = self.fields.get(field)
        if found is None:
            raise BoundsError(
                f"region {self.name!r}: field {field!r} found, one of {', '.join(self.fields)} "
                "needed"
            )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    @staticmethod
    def of(fields: Mapping[str, Region], name: str = "") -> FieldRegion:
        """The region whose fields are these regions of one shape.

        Raises: BoundsError for no fields or several shapes.
        """
        shapes = {region.shape for region in fields.values()}
        if len(shapes) != 1:
            raise BoundsError(f"region {name!r}: fields of shapes {sorted(shapes)}, one needed")
        found = object.__new__(FieldRegion)
        transient = all(region.transient for region in fields.values())
        found._hold(shapes.pop(), fields, name, transient)
        return found

    def only(self, *fields: str) -> FieldRegion:
        """The same region seen through some of its fields, in the order given.

        Raises: BoundsError.
        """
        return FieldRegion.of({name: self[name] for name in fields}, self.name)

    def split(self, array: Any) -> dict[str, Array]:
        """The contents of each field. array: structured, or a mapping from names to arrays.

        Raises: BoundsError for other fields than this region's.
        """
        given = array if isinstance(array, Mapping) else np.asarray(array)
        names = tuple(given) if isinstance(given, Mapping) else (given.dtype.names or ())
        if set(names) != set(self.fields):
            raise BoundsError(
                f"write of region {self.name!r}: fields {', '.join(map(str, names)) or 'none'} "
                f"found, {', '.join(self.fields)} needed"
            )
        return {name: given[name] for name in self.fields}

    def join(self, arrays: Mapping[str, Array]) -> Array:
        """The structured array of the fields' contents, which arrays has by name."""
        found = np.empty(self.shape, dtype=self.dtype)
        for name, array in arrays.items():
            found[name] = array
        return found


class FieldViews:
    """What the body of a task sees of a region with several fields: an array for each.

    `views.x` and `views["x"]` are the array of field x. arrays: those of the tile, by field.
    """

    __slots__ = ("_arrays",)

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = arrays

    def __getitem__(self, field: str) -> Array:
        return self._arrays[field]

    def __getattr__(self, field: str) -> Array:
        try:
            return self._arrays[field]
        except KeyError:
            held = ", ".join(self._arrays)
            raise AttributeError(f"field {field!r} found, one of {held} needed") from None

    def __setattr__(self, field: str, value: Any) -> None:
        if field == "_arrays":
            object.__setattr__(self, field, value)
        elif value is not self[field]:  # `views.x += 1` assigns the array it changed in place
            raise AttributeError(
                f"field {field!r} cannot be replaced: assign to views.{field}[...]"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)
