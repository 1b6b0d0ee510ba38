"""Gates of recurrent layers, forward and backward, and the loop over their steps.

A step of a recurrence is a few entries: products, then the gates. `repeat` runs them once a step
and writes the step's number into the gates' blocks, so that neither blocks nor
entries grow with the number of steps. Gates stand side by side in a row: column j of gate k is at
k h + j. States that the products read and write are dense and private to the entry.

What the gates do is the cell's expressions (`ir/ops/recurrent/cells.py`); a `Kernel` says where
their operands stand.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any
from zlib import crc32

from numba import types
from numba.extending import intrinsic

from soapstone.ir.expression import Expression, text
from soapstone.ir.ops.recurrent.cells import (
    DC,
    GRU,
    GRU_FIRST,
    GRU_SECOND,
    LSTM,
    NAS,
    PRODUCT,
    SRU,
    D,
    rnn,
)
from soapstone.kernels.cpu.elementwise.formulas import FUNCTIONS
from soapstone.kernels.cpu.elementwise.lane_loops import copy_floats, get, loop, put
from soapstone.kernels.entry import Array, Entry
from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, bind, native, parallel_for, run_entries, useful_threads
from soapstone.native.intrinsics import address_of, i64p, stack, words
from soapstone.native.lanes import I64, LANES, Lanes
from soapstone.native.memory import Block, pack
from soapstone.native.simd import vectorised

NARROW = 32  # lanes of a formula with many operands
_COLUMNS = 256  # of a row, in one item of work


# blocks: addresses of gates' blocks; entries: functions and blocks.
_REPEAT = Fields("count first stride blocks block_count entries entry_count")
_COPY = Fields("outer rows n source source_step(outer row) target target_step(outer row)")
_ADD = Fields("rows n x x_step y y_step target target_step")
# across: items a row, of so many columns.
_GATES = Fields("step width columns across turns stride")
# place: an address, with the bytes from step to step and from row to row; shift: of the step;
# start: what stands in for steps outside, 0 where they begin again.
_OPERAND = Fields("place step row steps shift start start_row")
_repeat_of, _copy_of, _add_of = _REPEAT.at, _COPY.at, _ADD.at
_gates_of, _operands_of, _operand_of = _GATES.at, _GATES.table, _OPERAND.at
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


def before(array: Array, first: Array, stride: int) -> Record:
    """Return the record of the values a step before: `first` (n, h) before the first one."""
    step, row = array.strides[:2]
    outside = {"start": first, "start_row": first.strides[0]}
    return _OPERAND.row(place=array, step=step, row=row, steps=len(array), shift=-stride, **outside)


@dataclass(frozen=True, eq=False)
class Kernel:
    """The loop of a step's expressions over rows (…, h).

    reads: what is known, by expression: the sum of what stands at places.
    writes: places and what is written there, in this order.
    wide: lanes done at a time, as many as the registers hold.
    """

    name: str
    reads: Mapping[Expression, tuple[Place, ...]]
    writes: Sequence[tuple[Place, Expression]]
    wide: int = NARROW

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """The operands' names, in the order of their records."""
        places = [place for each in self.reads.values() for place in each]
        return tuple(dict.fromkeys(name for name, _ in [*places, *(p for p, _ in self.writes)]))

    @cached_property
    def code(self) -> int:
        """A number of the formulas and places, by which compiled code is kept."""
        known, written = (*self.reads,), [made for _, made in self.writes]
        where = f"{[*self.reads.values()]} {[place for place, _ in self.writes]} {self.wide}"
        code = crc32(f"{text(*known)} | {text(*written)} | {where}".encode())
        _KERNELS[code] = self
        return code

    @cached_property
    def native(self) -> Native:
        """The kernel that runs a part of the items: some columns of a row each, for all turns."""
        code, count = self.code, len(self.operands)

        def run(block: Any, begin: int, end: int) -> int:
            w, operands = _gates_of(block), address_of(_operands_of(block))
            h = w.width
            at = words(stack(256))
            for item in range(begin, end):
                row, first = item // w.across, (item % w.across) * w.columns
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
                    _row(code, at, h, min(w.columns, h - first))
            return 0

        # A name of its own: compiled code is cached, and found again, by name.
        run.__name__ = run.__qualname__ = f"gates_{self.name}"
        return Native(run, "body")

    def bind(
        self,
        operands: Operands,
        shape: tuple[int, ...],
        threads: int,
        turns: tuple[int, int, int] = (0, 1, 0),
    ) -> tuple[Block, Entry]:
        """Return the block and the entry of a step, or of all steps.

        shape: (n, h); turns: the first step, how many, and the stride.
        """
        rows, width = shape
        columns = min(width, _COLUMNS)
        records = [
            each if isinstance(each, tuple) else operand(each)
            for each in (operands[name] for name in self.operands)
        ]
        items = -(-width // _COLUMNS)
        first, count, stride = turns
        block = _GATES.pack(
            *records,
            step=first,
            width=width,
            columns=columns,
            across=items,
            turns=count,
            stride=stride,
            keep=(self.native,),
        )
        useful = useful_threads(threads, 64 * rows * width)
        return block, parallel_for(self.native, block, rows * items, useful)


_KERNELS: dict[int, Kernel] = {}


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _row(typing: Any, code: Any, at: Any, h: Any, n: Any) -> Any:
    """Write the loop of the kernel whose code is a literal; `at`: the operands' addresses."""
    if not isinstance(code, types.IntegerLiteral):
        return None
    kernel = _KERNELS[code.literal_value]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        h, n = Lanes(builder, args[2]), Lanes(builder, args[3])
        bases = {
            name: Lanes(builder, builder.load(builder.gep(args[1], [I64(k)])))
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

            for place, expression in kernel.writes:
                result = value(expression)
                for one, places in kernel.reads.items():
                    if place in places:
                        value(one)  # before it is written over
                name, gate = place
                put(bases[name], i + h * gate if gate else i, result, mask)

        loop(builder, n, body, kernel.wide)
        return context.get_dummy_value()

    return types.void(code, at, types.int64, types.int64), emit


def gates(expressions: Sequence[Expression], name: str) -> Reads:
    """Return expressions as read from the gates side by side in one operand."""
    return {one: ((name, k),) for k, one in enumerate(expressions)}


def written(expressions: Sequence[Expression], *names: str) -> list[tuple[Place, Expression]]:
    """Return expressions as written to the gates side by side in each of the operands."""
    return [((name, k), one) for k, one in enumerate(expressions) for name in names]


def _lstm() -> tuple[Kernel, Kernel]:
    *sums, cell = LSTM.reads
    y, new = LSTM.results
    forward = Kernel(
        "lstm",
        {one: (("inputs", k), ("sums", k)) for k, one in enumerate(sums)} | {cell: (("cell", 0),)},
        [
            *written(LSTM.saved, "gates"),
            *written([new], "cell", "cells"),
            *written([y], "state", "y"),
        ],
    )
    *dgates, dcell = LSTM.gradients
    backward = Kernel(
        "lstm_grad",
        gates(LSTM.saved, "gates")
        | {new: (("cells", 0),), D: (("dy", 0), ("dstate", 0)), DC: (("dcell", 0),)}
        | {cell: (("before", 0),)},
        [*written([dcell], "dcell"), *written(dgates, "dgates", "dense")],
    )
    return forward, backward


def _rnn(activation: str) -> tuple[Kernel, Kernel]:
    cell = rnn(activation)
    forward = Kernel(
        f"rnn_{activation}",
        {cell.reads[0]: (("y", 0), ("sums", 0))},
        written(cell.results, "y", "state"),
    )
    backward = Kernel(
        f"rnn_{activation}_grad",
        gates(cell.results, "y") | {D: (("dy", 0), ("dstate", 0))},
        written(cell.gradients, "dgates", "dense"),
    )
    return forward, backward


def _gru() -> tuple[Kernel, Kernel, Kernel, Kernel]:
    reset, update, new, product, state = GRU.reads
    twice: Reads = {one: (("inputs", k), ("sums", k)) for k, one in enumerate((reset, update))}
    before: Reads = {state: (("state", 0),)}
    forward = Kernel(
        "gru",
        {**twice, new: (("inputs", 2),), product: (("sums", 2),), **before},
        [
            *written(GRU.saved, "gates"),
            *written([product], "hidden"),
            *written(GRU.results, "state", "y"),
        ],
    )
    first = Kernel(
        "gru_first",
        twice | before,
        [
            *written(GRU_FIRST.saved, "gates"),
            *written(GRU_FIRST.results[:1], "hidden", "scaled"),
        ],
    )
    new, given, state = GRU_SECOND.reads
    second = Kernel(
        "gru_second",
        {new: (("inputs", 2), ("sums", 0)), given: (("gates", 1),), state: (("state", 0),)},
        [(("gates", 2), GRU_SECOND.saved[0]), *written(GRU_SECOND.results, "state", "y")],
    )
    dreset, dupdate, dnew, dproduct, past = GRU.gradients
    backward = Kernel(
        "gru_grad",
        gates(GRU.saved, "gates")
        | {product: (("hidden", 0),), state: (("before", 0),)}
        | {D: (("dy", 0), ("past", 0), ("through", 0))},
        [
            *written([past], "past"),
            *written([dreset, dupdate, dnew], "dgates"),
            *written([dreset, dupdate, dproduct], "dproduct", "dense"),
        ],
    )
    return forward, first, second, backward


def _sru() -> tuple[Kernel, Kernel]:
    candidate, forget, reset, cell, past = SRU.reads
    y, new = SRU.results
    forward = Kernel(
        "sru",
        {candidate: (("gates", 0),), forget: (("gates", 1), ("bias", 0))}
        | {reset: (("gates", 2), ("bias", 1)), cell: (("cell", 0),), past: (("highway", 0),)},
        [
            (("gates", 1), SRU.saved[0]),
            (("gates", 2), SRU.saved[1]),
            *written([new], "cell", "cells"),
            *written([y], "y"),
        ],
    )
    *dgates, dcell, dpast = SRU.gradients
    backward = Kernel(
        "sru_grad",
        {candidate: (("gates", 0),), SRU.saved[0]: (("gates", 1),), SRU.saved[1]: (("gates", 2),)}
        | {D: (("dy", 0),), DC: (("dcell", 0),), new: (("cells", 0),)}
        | {cell: (("before", 0),), past: (("highway", 0),)},
        [*written(dgates, "dgates"), *written([dpast], "dhighway"), *written([dcell], "dcell")],
    )
    return forward, backward


def _nas() -> tuple[Kernel, Kernel]:
    left, right, cell = NAS.reads[:8], NAS.reads[8:16], NAS.reads[16]
    y, new = NAS.results
    factors = [(("left", 0), left[PRODUCT]), (("right", 0), right[PRODUCT])]
    forward = Kernel(
        "nas",
        gates(left, "inputs") | gates(right, "states") | {cell: (("c", 0),)},
        [*factors, *written(NAS.saved, "gates"), (("cell", 0), new), (("y", 0), y)],
        LANES,
    )
    dleft, dright, dcell = NAS.gradients[:8], NAS.gradients[8:16], NAS.gradients[16]
    backward = Kernel(
        "nas_grad",
        gates(NAS.saved, "gates")
        | {D: (("dy", 0),), DC: (("dcell", 0),), cell: (("c", 0),)}
        | {factor: (place,) for place, factor in factors},
        [(("dc", 0), dcell), *written(dleft, "dinputs"), *written(dright, "dstates")],
        LANES,
    )
    return forward, backward


# Each kernel's operands are arrays of all steps (t, n, …), or states and sums (n, …), by name:
# sums of x w + b are `inputs`, those of h r are `sums`; what ends in `s` is of all steps; `dense`
# is what the product after it reads.
LSTM_STEP, LSTM_BACK = _lstm()
RNN = {name: _rnn(name) for name in ("tanh", "relu")}
GRU_STEP, GRU_HALF, GRU_REST, GRU_BACK = _gru()
SRU_STEPS, SRU_BACK = _sru()
NAS_STEP, NAS_BACK = _nas()
