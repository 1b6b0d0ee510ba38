"""Entries of one worker: of equal calls the first is bound, and others share its code."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any

from soapstone.kernels.entry import Array, Entry
from soapstone.native import memory
from soapstone.native.arrays import reach, start
from soapstone.native.memory import LINE
from soapstone.native.promises import Notes, contents
from soapstone.native.relocation import FixedError, Relocatable
from soapstone.records import dataclass

Selected = tuple[str, Entry | None]


class EntryCache:
    """Entries of calls that one worker runs one after another; those of equal calls share code."""

    def __init__(self) -> None:
        self._first: dict[Hashable, _First] = {}

    def select(
        self,
        operator: str,
        of: Hashable,
        inputs: tuple[Array, ...],
        outputs: tuple[Array, ...],
        constants: frozenset[int],
        bind: Callable[[], Selected],
    ) -> Selected:
        """Return the name and entry of the variant that serves a call.

        Args:
            operator, of: what is called; all that the call is besides that and its operands.
            constants: those inputs. bind: selects and binds the variant,
                where this was not done for an equal call, or does not serve this one.
        """
        if memory.CHECKED:
            return bind()
        operands = (*inputs, *outputs)
        starts = [start(array) for array in operands]
        key = operator, of, len(inputs), constants, _forms(operands, starts, constants)
        first = self._first.get(key)
        if first is None:
            with Notes().taken() as notes:
                name, entry = bind()
            self._first[key] = _First(name, entry, operands, notes)
            return name, entry
        made = first.relocatable((operator, first.name))
        if made is None:
            return bind()
        found = made.at(operands, starts)
        if found is not None:
            return first.name, found
        with Notes().taken() as notes:
            name, entry = bind()
        if name == first.name and entry is not None:
            made.show(entry, operands, notes)
        return name, entry


@dataclass
class _First:
    """The first call of a form, and what others are made of where there are some."""

    name: str
    entry: Entry | None
    operands: tuple[Array, ...]
    notes: Notes
    known: bool = False
    made: Relocatable | None = None

    def relocatable(self, of: Hashable) -> Relocatable | None:
        if not self.known and self.entry is not None:
            with suppress(FixedError):
                self.made = Relocatable(of, self.entry, self.operands, self.notes)
        self.known = True
        return self.made


def _forms(
    operands: tuple[Array, ...], starts: Sequence[int], constants: frozenset[int]
) -> Hashable:
    """Return how operands lie, each and those that are no constants to each other."""
    forms, spans = list[Any](), list[tuple[int, int]]()
    for number, (array, first) in enumerate(zip(operands, starts)):
        shape, strides = array.shape, array.strides
        forms += shape, strides, array.dtype.num
        if number in constants:
            if array.size == 1:  # which a kernel may make part of its code
                forms.append(contents(array).tobytes())
            continue
        low, high = reach(shape, strides, array.itemsize)
        low, high = first + low, first + high
        forms.append(first % LINE)
        for other, (begin, end) in enumerate(spans):
            if low < end and begin < high:
                forms.append((other, low - begin))
        spans.append((low, high))
    return tuple(forms)


__all__ = ["EntryCache"]
