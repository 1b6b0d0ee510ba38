"""Gates of recurrent layers, forward and backward, and the loop over their steps.

A step of a recurrence is a few entries: products, then the gates. `repeat` runs them once a step
and writes the step's number into the gates' blocks, so that neither blocks nor
entries grow with the number of steps. Gates stand side by side in a row: column j of gate k is at
k h + j. States that the products read and write are dense and private to the entry.

What the gates do is the cell's expressions (`ir/ops/recurrent/cells.py`); a `Kernel` says where
their operands stand (`steps.py` has those of all cells). Where samples have lengths, a step past
the length of a sample does to its row what the kernel's `ended` says, and products that no sample
needs are left out.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from typing import Any
from zlib import crc32

import numpy as np

from soapstone.cache.deferred import intrinsic, types
from soapstone.ir.expression import Expression, text
from soapstone.kernels.cpu.elementwise.formulas import FUNCTIONS
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, get, loop, put
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, bind, native, run_entries
from soapstone.native.intrinsics import address_of, call_entry, i32p, i64p, stack, words
from soapstone.native.lanes import F32, I64, Lanes
from soapstone.native.memory import Block, pack
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for, useful_threads
from soapstone.records import dataclass

NARROW = 32  # lanes of a formula with many operands
_COLUMNS = 256  # of a row, in one item of work


# blocks: addresses of gates' blocks; entries: functions and blocks.
_REPEAT = Fields("count first stride blocks block_count entries entry_count")
_COPY = Fields("outer rows n source source_step(outer row) target target_step(outer row)")
_ADD = Fields("rows n x x_step y y_step target target_step")
# across: items a row, of so many columns.
_GATES = Fields("step width columns across turns stride lengths length_step")
_WITHIN = Fields("step lengths length_step samples product(function block)")
# place: an address, with the bytes from step to step and from row to row; shift: of the step;
# start: what stands in for steps outside, 0 where they begin again.
_OPERAND = Fields("place step row steps shift start start_row")
_repeat_of, _copy_of, _add_of = _REPEAT.at, _COPY.at, _ADD.at
_gates_of, _operands_of, _operand_of = _GATES.at, _GATES.table, _OPERAND.at
_within_of = _WITHIN.at
_OPERAND_BYTES = 8 * _OPERAND.words


@native()
def _repeat(block: Any) -> Any:
    w = _repeat_of(block)
    for turn in range(w.count):
        for k in range(w.block_count):
            _gates_of(i64p(w.blocks)[k]).step = w.first + turn * w.stride
        status = run_entries(w.entries, w.entry_count)
        if status != 0:
            return status
    return 0


def repeat(
    count: int, first: int, stride: int, blocks: Sequence[Block], entries: Sequence[Entry]
) -> Entry:
    """Return the entry that runs the entries `count` times, for steps first, first + stride, ….

    The step's number is written into each block.
    """
    statuses = {code: text for entry in entries for code, text in entry.statuses.items()}
    block = _REPEAT.pack(
        count=count,
        first=first,
        stride=stride,
        blocks=pack(list(blocks)),
        block_count=len(blocks),
        entries=pack(list(entries)),
        entry_count=len(entries),
    )
    return bind(_repeat, block, statuses=statuses)


@native()
def _within(block: Any) -> Any:
    w = _within_of(block)
    for sample in range(w.samples):
        if i32p(w.lengths + sample * w.length_step)[0] > i64p(w.step)[0]:
            return call_entry(w.product_function, w.product_block)
    return 0


def within(lengths: Array | None, step: Block, product: Entry) -> Entry:
    """Return an entry that runs a product where a sample is longer than a block's first word.

    lengths: (n,) int32; None where all samples have all steps.
    """
    if lengths is None:
        return product
    block = _WITHIN.pack(
        step=step,
        lengths=lengths,
        length_step=lengths.strides[0],
        samples=len(lengths),
        product=product,
    )
    return bind(_within, block, statuses=product.statuses)


@native()
def _copy(block: Any) -> int:
    w = _copy_of(block)
    for outer in range(w.outer):
        for row in range(w.rows):
            source = w.source + outer * w.source_step_outer + row * w.source_step_row
            target = w.target + outer * w.target_step_outer + row * w.target_step_row
            copy_floats(target, source, w.n)
    return 0


def copy(source: Array, target: Array) -> Entry:
    """Return the entry that copies rows of contiguous floats, (n, h) or (t, n, h)."""
    if source.ndim == 2:
        source, target = source[None], target[None]
    outer, rows, n = source.shape
    steps = {"source_step": source.strides[:2], "target_step": target.strides[:2]}
    block = _COPY.pack(outer=outer, rows=rows, n=n, source=source, target=target, **steps)
    return bind(_copy, block)


@vectorised
def _add_row(to: Lanes, x: Lanes, y: Lanes, n: Lanes) -> None:
    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        put(to, i, get(x, i, width, mask) + get(y, i, width, mask), mask)

    loop(n.builder, n, body)


@native()
def _add(block: Any) -> int:
    w = _add_of(block)
    for row in range(w.rows):
        x, y = w.x + row * w.x_step, w.y + row * w.y_step
        _add_row(w.target + row * w.target_step, x, y, w.n)
    return 0


def add(x: Array, y: Array, target: Array) -> Entry:
    """Return the entry of target = x + y, by rows (n, h) of contiguous floats."""
    rows, n = x.shape
    steps = {"x_step": x.strides[0], "y_step": y.strides[0], "target_step": target.strides[0]}
    return bind(_add, _ADD.pack(rows=rows, n=n, x=x, y=y, target=target, **steps))


_ALL = 1 << 40  # steps of what is the same at every step

Record = tuple[Any, ...]
Operands = dict[str, Any]  # an array or a record by name
Place = tuple[str, int]  # an operand, and which of the gates side by side in it
Reads = dict[Expression, tuple[Place, ...]]


def operand(array: Array) -> Record:
    """Return the record of an array (t, n, …), or (n, …) or (…) that is the same at every step.

    Of t steps that a longer recurrence fills again and again, each stands at its number modulo t.
    """
    step, row = array.strides[:2] if array.ndim >= 3 else (0, *array.strides[:-1], 0)[:2]
    steps = len(array) if array.ndim >= 3 else _ALL
    return _OPERAND.row(place=array, step=step, row=row, steps=steps, shift=0, start=0, start_row=0)


def before_step(array: Array, first: Array, stride: int) -> Record:
    """Return the record of the values a step before: `first` (n, h) before the first one."""
    step, row = array.strides[:2]
    outside = {"start": first, "start_row": first.strides[0]}
    return _OPERAND.row(place=array, step=step, row=row, steps=len(array), shift=-stride, **outside)


DECLARED: list[Kernel] = []  # those of modules that are imported


@dataclass(frozen=True, eq=False)
class Kernel:
    """The loop of a step's expressions over rows (…, h).

    reads: what is known, by expression: the sum of what stands at places.
    writes: places and what is written there, in this order.
    ended: the same for a row whose sample does not have the step.
    wide: lanes done at a time, as many as the registers hold.
    """

    name: str
    reads: Mapping[Expression, tuple[Place, ...]]
    writes: Sequence[tuple[Place, Expression]]
    ended: Sequence[tuple[Place, Expression]] = ()
    wide: int = NARROW

    def __post_init__(self) -> None:
        DECLARED.append(self)

    @property
    def natives(self) -> tuple[Native, ...]:
        """What it is compiled to: for all steps, and for those that samples have."""
        return (self.native, self.within) if self.writes else (self.within,)

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands' names, in the order of their records."""
        places = [place for each in self.reads.values() for place in each]
        places += [place for place, _ in (*self.writes, *self.ended)]
        return tuple(dict.fromkeys(name for name, _ in places))

    def _code(self, writes: Sequence[tuple[Place, Expression]]) -> int:
        """Return a number of the formulas and places, by which compiled code is kept."""
        known, written = (*self.reads,), [made for _, made in writes]
        where = f"{[*self.reads.values()]} {[place for place, _ in writes]} {self.wide}"
        code = crc32(f"{text(*known)} | {text(*written)} | {where}".encode())
        _KERNELS[code] = self, writes
        return code

    @cached_property
    def native(self) -> Native:
        """The kernel that runs a part of the items: some columns of a row each, for all turns."""
        return self._native("", _NONE)

    @cached_property
    def within(self) -> Native:
        """The same where samples have lengths."""
        return self._native("_within", self._code(self.ended))

    def _native(self, suffix: str, ended: int) -> Native:
        code, count = self._code(self.writes), len(self.operands)

        def run(block: Any, begin: int, end: int) -> int:
            w, operands = _gates_of(block), address_of(_operands_of(block))
            h = w.width
            at = words(stack(256))
            for item in range(begin, end):
                row, first = item // w.across, (item % w.across) * w.columns
                length: Any = _ALL
                if w.lengths != 0:
                    length = np.int64(i32p(w.lengths + row * w.length_step)[0])
                for turn in range(w.turns):
                    step = w.step + turn * w.stride
                    for k in range(count):
                        o = _operand_of(operands + k * _OPERAND_BYTES)
                        s = step + o.shift
                        place = o.place + row * o.row
                        if s >= 0 and s < o.steps:
                            place += s * o.step
                        elif o.start != 0:
                            place = o.start + row * o.start_row
                        else:
                            place += s % o.steps * o.step
                        at[k] = place + first * 4
                    _row(code, ended, step >= length, at, h, min(w.columns, h - first))
            return 0

        # A name of its own: compiled code is cached, and found again, by name.
        run.__name__ = run.__qualname__ = f"gates_{self.name}{suffix}"
        return Native(run, "body")

    def bind(
        self,
        operands: Operands,
        shape: tuple[int, ...],
        threads: int,
        turns: tuple[int, int, int] = (0, 1, 0),
        lengths: Array | None = None,
    ) -> tuple[Block, Entry]:
        """Return the block and the entry of a step, or of all steps.

        shape: (n, h); turns: the first step, how many, and the stride; lengths: (n,) int32.
        """
        rows, width = shape
        columns = min(width, _COLUMNS)
        records = [
            each if isinstance(each, tuple) else operand(each)
            for each in (operands[name] for name in self.operands)
        ]
        items = -(-width // _COLUMNS)
        first, count, stride = turns
        kernel = self.native if lengths is None else self.within
        block = _GATES.pack(
            *records,
            step=first,
            width=width,
            columns=columns,
            across=items,
            turns=count,
            stride=stride,
            lengths=0 if lengths is None else lengths,
            length_step=0 if lengths is None else lengths.strides[0],
            keep=(kernel,),
        )
        useful = useful_threads(threads, 64 * rows * width)
        return block, parallel_for(kernel, block, rows * items, useful)


_NONE = 0  # the code of nothing to do
_KERNELS: dict[int, tuple[Kernel, Sequence[tuple[Place, Expression]]]] = {}


@intrinsic
def _row(typing: Any, code: Any, ended: Any, over: Any, at: Any, h: Any, n: Any) -> Any:
    """Write the loop of the kernel whose code is a literal; `at`: the operands' addresses.

    ended: the code of what is done instead where a sample is over, a literal.
    """
    if not isinstance(code, types.IntegerLiteral) or not isinstance(ended, types.IntegerLiteral):
        return None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if ended.literal_value == _NONE:
            _columns(builder, code.literal_value, *args[3:])
        else:
            with builder.if_else(args[2]) as (over_now, going):
                with over_now:
                    _columns(builder, ended.literal_value, *args[3:])
                with going:
                    _columns(builder, code.literal_value, *args[3:])
        return context.get_dummy_value()

    return types.void(code, ended, types.boolean, at, types.int64, types.int64), emit


def _columns(builder: Any, code: int, at: Any, width: Any, count: Any) -> None:
    """Write the loop over a row's columns of what has a code."""
    kernel, writes = _KERNELS[code]
    h, n = Lanes(builder, width), Lanes(builder, count)
    bases = {
        name: Lanes(builder, builder.load(builder.gep(at, [I64(k)])))
        for k, name in enumerate(kernel.operands)
    }

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        known: dict[Expression, Any] = {}

        def read(name: str, gate: int) -> Lanes:
            return get(bases[name], i + h * gate if gate else i, width, mask)

        def value(made: Expression) -> Any:
            """Return the value of an expression, of which a read one is loaded once."""
            if made in kernel.reads and made not in known:
                known[made] = reduce(operator.add, (read(*p) for p in kernel.reads[made]))
            elif made not in known:
                known[made] = made.value
                if made.operands:
                    known[made] = FUNCTIONS[made.operation](*map(value, made.operands))
            return known[made]

        for place, expression in writes:
            result = value(expression)
            if not isinstance(result, Lanes):
                result = Lanes(builder, F32(result)).splat(width)
            for one, places in kernel.reads.items():
                if place in places:
                    value(one)  # before it is written over
            name, gate = place
            put(bases[name], i + h * gate if gate else i, result, mask)

    loop(builder, n, body, kernel.wide)
