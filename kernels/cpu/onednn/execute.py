"""Entries out of oneDNN primitives: a sequence of native steps.

A step is an entry of its own: `steps.primitive`, or another function of `steps`. oneDNN's
own status is the entry's. Scratchpads and staged copies are private to the entry, or to those that
one worker runs one at a time (`native.memory.Workspace`), so workers may run entries of a primitive
at once. Constant operands are packed when the entry is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from soapstone import system
from soapstone.dtypes import name_of
from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DST,
    ARG_SCRATCHPAD,
    ARG_SRC,
    SCRATCHPAD,
    Layout,
    Primitive,
    buffer,
    equal,
    known,
    memory,
    nbytes,
    reorder_primitive,
    usable,
)
from soapstone.kernels.cpu.onednn.library import (
    STATUSES,
    Descriptor,
    Handle,
    library,
    stream,
    threads,
)
from soapstone.kernels.entry import BFLOAT16, Array, Call, Entry
from soapstone.native.copies import copy
from soapstone.native.entries import sequence
from soapstone.native.memory import Block, pack, scratch, scratch_array
from soapstone.native.shared import packed
from soapstone.native.walks import in_places
from soapstone.records import dataclass

_ALONE = 1 << 20  # bytes of weights for each thread that packs them: fewer are not worth waking it
_MESSAGES = {code: f"oneDNN: {text}" for code, text in STATUSES.items()}


@dataclass(frozen=True)
class _Step:
    """A primitive with its arguments, or an entry."""

    what: Primitive | Entry
    arguments: dict[int, Handle] = field(default_factory=dict)


@dataclass
class Program:
    """A sequence of primitives under construction; `entry()` freezes it.

    Operands are given as arrays with the descriptor the primitive wants. Where that differs from
    the array's own, a reorder through a private buffer goes before (`source`) or after (`target`).
    """

    threads: int
    _steps: list[_Step] = field(default_factory=list)
    _after: list[_Step] = field(default_factory=list)

    def private(self, descriptor: Descriptor) -> Handle:
        """Return memory of the descriptor in a buffer of its own."""
        return memory(descriptor, scratch(nbytes(descriptor)))

    def source(
        self, array: Array, layout: Layout, wanted: Descriptor = 0, *, constant: bool = False
    ) -> Handle:
        """Return memory with the array's contents in the `wanted` descriptor (0: as it is).

        A `constant` array is copied here and now, unless it has been before; the entry does not
        keep it, and shares the copy with those that have the same.
        """
        own = layout.descriptor
        if not wanted or equal(own, wanted):
            return memory(own, array)
        if constant:

            def make(array: Array) -> Array:
                return self._packed(array, own, wanted)

            return memory(wanted, packed(array, ("onednn", known(wanted)), make))
        staged = self.private(wanted)
        self.copy(memory(own, array), own, staged, wanted)
        return staged

    def _packed(self, array: Array, own: Descriptor, wanted: Descriptor) -> Array:
        """Return a copy of the array's contents in the `wanted` descriptor."""
        size = nbytes(wanted)
        store, count = buffer(size), max(1, min(self.threads, size // _ALONE))
        reorder, lane = reorder_primitive(own, wanted, count), stream()
        given = {ARG_SRC: memory(own, array), ARG_DST: memory(wanted, store)}
        given |= _scratchpad(reorder, scratch(reorder.scratch_bytes))
        block = arguments(given)
        with threads(count):
            library().dnnl_primitive_execute(reorder.primitive, lane, len(given), block.address)
        return store

    def target(self, array: Array, layout: Layout, wanted: Descriptor = 0) -> Handle:
        """Return memory in the `wanted` descriptor whose contents end up in the array."""
        own = layout.descriptor
        here = memory(own, array)
        if not wanted or equal(own, wanted):
            return here
        staged = self.private(wanted)
        step = reorder_primitive(wanted, own, self.threads)
        self._after.append(_Step(step, {ARG_SRC: staged, ARG_DST: here}))
        return staged

    def dense_source(self, array: Array, order: Sequence[int] | None = None) -> Array:
        """Return a private array that is given the array's contents on each run.

        order: of its axes in memory, outermost first; None: their own.
        """
        store = private_array(array, order)
        self._steps.append(self._copied(store, array))
        return store

    def dense_target(self, array: Array, order: Sequence[int] | None = None) -> Array:
        """Return a private array, as `dense_source` does, whose contents end up in the array."""
        store = private_array(array, order)
        self._after.append(self._copied(array, store))
        return store

    def _copied(self, to: Array, x: Array) -> _Step:
        """Return the copy between arrays of a type: a reorder takes longer, most so in a team."""
        made = copy(to, x, self.threads)
        assert made is not None  # as it is of types that oneDNN lacks
        return _Step(made)

    def step(self, primitive: Primitive, arguments: Mapping[int, Handle]) -> None:
        """Append a primitive; its scratchpad is added here."""
        self._steps.append(_Step(primitive, dict(arguments)))

    def native(self, name: str, **values: Array | int | float) -> None:
        """Append the function `name` of `steps`, on the values of its `FIELDS`."""
        self._steps.append(_Step(_native(name, (), **values)))

    def copy(
        self, source: Handle, source_md: Descriptor, target: Handle, target_md: Descriptor
    ) -> None:
        """Append a reorder between two memories."""
        step = reorder_primitive(source_md, target_md, self.threads)
        self._steps.append(_Step(step, {ARG_SRC: source, ARG_DST: target}))

    def entry(self) -> Entry:
        """Return the native entry that runs the steps, then the reorders of the targets."""
        return self._entry(self._steps + self._after)

    def _entry(self, steps: list[_Step]) -> Entry:
        # Steps run one after another: one scratchpad serves them all.
        primitives = [step.what for step in steps if isinstance(step.what, Primitive)]
        room = scratch(max((p.scratch_bytes for p in primitives), default=0))
        return sequence([_step(step, room) for step in steps])


def _native(name: str, keep: tuple[Any, ...], **values: Any) -> Entry:
    """Return the entry of a function of `steps` (Numba is imported, and it is compiled, here)."""
    from soapstone.kernels.cpu.onednn import steps

    block = steps.FIELDS[name].pack(keep=keep, **values)
    return Entry(getattr(steps, name).address, block, _MESSAGES)


def _step(step: _Step, room: Array) -> Entry:
    """Return the entry of a step, whose primitive works in the scratchpad."""
    if isinstance(step.what, Entry):
        return step.what
    primitive, lane = step.what, stream()
    given = step.arguments | _scratchpad(primitive, room)
    return _native(
        "primitive",
        keep=(lane, primitive, primitive.primitive, *given.values()),
        execute=system.address(library().dnnl_primitive_execute),
        primitive=primitive.primitive.address,
        stream=lane.address,
        count=len(given),
        arguments=arguments(given),
    )


def _scratchpad(primitive: Primitive, room: Array) -> dict[int, Handle]:
    """Return the memory that a primitive works in, by its argument, where it needs any."""
    if not primitive.scratch_bytes:
        return {}
    return {ARG_SCRATCHPAD: memory(primitive.descriptor(SCRATCHPAD), room)}


def arguments(given: Mapping[int, Handle]) -> Block:
    """Return the execution arguments of a primitive: C structs of a number and a memory."""
    return pack(
        *((number, handle.address) for number, handle in given.items()), keep=(*given.values(),)
    )


def private_array(like: Array, order: Sequence[int] | None = None) -> Array:
    """Return an uninitialised dense array of shape and type, on a cache line's bound.

    order: of its axes in memory, outermost first; None: their own.
    """
    axes = range(like.ndim) if order is None else order
    made = scratch_array(tuple(like.shape[axis] for axis in axes), like.dtype)
    return made if order is None else in_places(made, tuple(order))


def empty() -> Entry:
    """Return an entry that does nothing: for outputs without elements."""
    return Program(1).entry()


def served(call: Call, *dtypes: str) -> bool:
    """Return whether every operand is memory that oneDNN can address, of these types if any.

    Outputs must not overlap themselves.
    """
    operands = (*call.inputs, *call.outputs)
    return all(
        usable(array, BFLOAT16 in dtypes) and (not dtypes or name_of(array.dtype) in dtypes)
        for array in operands
    ) and not any(Layout.of(array).overlaps for array in call.outputs)


def float32(call: Call) -> bool:
    """Return whether every operand is float32 memory that oneDNN can address; see `served`."""
    return served(call, "float32")
