"""Entries out of oneDNN primitives: a list of (primitive, arguments) run by one native loop.

An entry's block is int64: [dnnl_primitive_execute, stream, steps, (primitive, nargs, args)*]. A
step whose primitive is 0 calls the native function `nargs` on the block `args` instead. oneDNN's
own status is the entry's. Scratchpads and staged copies are private to the entry, so two entries of
one primitive may run at once. Constant operands are packed when the entry is made.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DST,
    ARG_SCRATCHPAD,
    ARG_SRC,
    SCRATCHPAD,
    Layout,
    Primitive,
    buffer,
    equal,
    memory,
    nbytes,
    reorder_primitive,
    usable,
)
from soapstone.kernels.cpu.onednn.library import STATUSES, Handle, OneDnnError, library, stream
from soapstone.kernels.entry import Array, Call, Entry

_HEADER = 3
_STEP = 3
_MESSAGES = {code: f"oneDNN: {text}" for code, text in STATUSES.items()}


class _Argument(C.Structure):
    _fields_ = (("index", C.c_int), ("memory", C.c_void_p))


@cache
def _native(name: str) -> int:
    """Return a compiled function's address (Numba is imported, and it is compiled, here)."""
    from soapstone.kernels.cpu.onednn import trampoline

    return int(trampoline.compiled(name).address)


@dataclass(frozen=True)
class _Step:
    """A primitive with its arguments, or a native function (by name) with its block."""

    what: Primitive | str
    arguments: dict[int, Handle]
    block: Array | None = None


@dataclass
class Program:
    """A sequence of primitives under construction; `entry()` freezes it.

    Operands are given as arrays with the descriptor the primitive wants. Where that differs from
    the array's own, a reorder through a private buffer goes before (`source`) or after (`target`).
    """

    threads: int
    _steps: list[_Step] = field(default_factory=list)
    _after: list[_Step] = field(default_factory=list)
    _keep: list[object] = field(default_factory=list)

    def private(self, descriptor: int) -> Handle:
        """Return memory of the descriptor in a buffer of the entry's own (its `keep`)."""
        store = buffer(nbytes(descriptor))
        return memory(descriptor, store.ctypes.data, store)

    def source(
        self, array: Array, layout: Layout, wanted: int = 0, *, constant: bool = False
    ) -> Handle:
        """Return memory with the array's contents in the `wanted` descriptor (0: as it is).

        A `constant` array is copied here and now; the entry does not keep it.
        """
        own = layout.descriptor
        here = memory(own.address, array.ctypes.data)
        if not wanted or equal(own.address, wanted):
            self._keep.extend((array, own))
            return here
        staged = self.private(wanted)
        step = _Step(
            reorder_primitive(own.address, wanted, self.threads), {ARG_SRC: here, ARG_DST: staged}
        )
        if constant:
            self._run([step])
            return staged
        self._keep.extend((array, own))
        self._steps.append(step)
        return staged

    def target(self, array: Array, layout: Layout, wanted: int = 0) -> Handle:
        """Return memory in the `wanted` descriptor whose contents end up in the array."""
        own = layout.descriptor
        self._keep.extend((array, own))
        here = memory(own.address, array.ctypes.data)
        if not wanted or equal(own.address, wanted):
            return here
        staged = self.private(wanted)
        step = reorder_primitive(wanted, own.address, self.threads)
        self._after.append(_Step(step, {ARG_SRC: staged, ARG_DST: here}))
        return staged

    def dense_source(self, array: Array) -> Array:
        """Return a private C-contiguous array that is given the array's contents on each run."""
        own, flat = Layout.of(array), Layout.dense(array.shape)
        store = private_array(array)
        self._keep.extend((array, store))
        here = memory(own.descriptor.address, array.ctypes.data)
        self.copy(
            *(here, own.descriptor.address),
            *(memory(flat.descriptor.address, store.ctypes.data), flat.descriptor.address),
        )
        return store

    def dense_target(self, array: Array) -> Array:
        """Return a private C-contiguous array whose contents end up in the array."""
        own, flat = Layout.of(array), Layout.dense(array.shape)
        store = private_array(array)
        self._keep.extend((array, store))
        step = reorder_primitive(flat.descriptor.address, own.descriptor.address, self.threads)
        arguments = {
            ARG_SRC: memory(flat.descriptor.address, store.ctypes.data),
            ARG_DST: memory(own.descriptor.address, array.ctypes.data),
        }
        self._after.append(_Step(step, arguments))
        return store

    def step(self, primitive: Primitive, arguments: Mapping[int, Handle]) -> None:
        """Append a primitive; its scratchpad is added here."""
        self._steps.append(_Step(primitive, dict(arguments)))

    def native(self, name: str, *values: Array | int | float) -> None:
        """Append the native function `name` of trampoline.py on a block of the values.

        Arrays go as addresses and are kept alive; floats as the bits of a double.
        """
        block = np.zeros(len(values), np.int64)
        for index, value in enumerate(values):
            if isinstance(value, np.ndarray):
                block[index] = value.ctypes.data
                self._keep.append(value)
            elif isinstance(value, float):
                block[index] = np.float64(value).view(np.int64)
            else:
                block[index] = value
        self._steps.append(_Step(name, {}, block))

    def copy(self, source: Handle, source_md: int, target: Handle, target_md: int) -> None:
        """Append a reorder between two memories."""
        step = reorder_primitive(source_md, target_md, self.threads)
        self._steps.append(_Step(step, {ARG_SRC: source, ARG_DST: target}))

    def entry(self) -> Entry:
        """Return the native entry that runs the steps, then the reorders of the targets."""
        return self._entry(self._steps + self._after)

    def _run(self, steps: list[_Step]) -> None:
        from soapstone.kernels.cpu.native import run

        status = run(self._entry(steps))
        if status:
            raise OneDnnError(f"packing weights: {STATUSES.get(status, status)}", status)

    def _entry(self, steps: list[_Step]) -> Entry:
        lane = stream()
        # Steps run one after another: one scratchpad serves them all.
        primitives = [step.what for step in steps if isinstance(step.what, Primitive)]
        scratch = buffer(max((p.scratch_bytes for p in primitives), default=0))
        block = np.zeros(_HEADER + _STEP * len(steps), np.int64)
        execute = int(C.cast(library().dnnl_primitive_execute, C.c_void_p).value or 0)
        block[:_HEADER] = execute, lane.address, len(steps)
        keep: list[object] = [self._keep, scratch, lane, block]
        for index, step in enumerate(steps):
            words, kept = _words(step, scratch)
            block[_HEADER + _STEP * index :][:_STEP] = words
            keep.append(kept)
        return Entry(_native("execute"), block.ctypes.data, tuple(keep), _MESSAGES)


def _words(step: _Step, scratch: Array) -> tuple[tuple[int, int, int], object]:
    """Return a step's three words of the block, and what they point to."""
    if isinstance(step.what, str):
        block = step.block
        return (0, _native(step.what), 0 if block is None else block.ctypes.data), block
    primitive, given = step.what, dict(step.arguments)
    if primitive.scratch_bytes:
        descriptor = primitive.descriptor(SCRATCHPAD)
        given[ARG_SCRATCHPAD] = memory(descriptor, scratch.ctypes.data)
    packed = (_Argument * len(given))(*[_Argument(k, m.address) for k, m in given.items()])
    words = (primitive.primitive.address, len(given), C.addressof(packed))
    return words, (primitive, given, packed)


def private_array(like: Array) -> Array:
    """Return an uninitialised C-contiguous float32 array of the shape, on a cache line's bound."""
    return buffer(like.size * 4).view(np.float32).reshape(like.shape)


def empty() -> Entry:
    """Return an entry that does nothing: for outputs without elements."""
    return Program(1).entry()


def float32(call: Call, rank: int | None = None, only: tuple[int, ...] | None = None) -> bool:
    """Return whether every operand is float32 memory that oneDNN can address.

    `rank`, where given, is asked of the operands numbered in `only` (inputs, then outputs).
    Outputs must not overlap themselves.
    """
    operands = (*call.inputs, *call.outputs)
    chosen = operands if only is None else [operands[index] for index in only]
    return (
        all(array.dtype == np.float32 and usable(array) for array in operands)
        and (rank is None or all(array.ndim == rank for array in chosen))
        and not any(Layout.of(array).overlaps for array in call.outputs)
    )
