"""The weights of F(2x2, 3x3) in the panels of the product, made anew on each run.

Weights are (co, ci, 3, 3), dense but for the stride along co. Forward, sixteen filters lie across
the lanes, which takes a transposition; for the gradient of x, sixteen ci of one co, nine floats
apart, with the taps turned by half a turn.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from soapstone.native.entries import helper, routine
from soapstone.native.intrinsics import stack
from soapstone.native.lanes import I1, I32, LANES, Lanes, load_lanes, store_lanes
from soapstone.native.simd import load_first, splat, store, vectorised

_TAPS = 9


def _points(g: Sequence[Lanes]) -> list[Lanes]:
    """Three taps to the four points: a row or column of G g G^T."""
    even, odd = (g[0] + g[2]) * 0.5, g[1] * 0.5
    return [g[0], even + odd, even - odd, g[2]]


def _write(taps: Sequence[Lanes], to: Lanes, point: Lanes) -> None:
    """Write the sixteen values at the points, `point` bytes apart."""
    columns = [_points(taps[j::3]) for j in range(3)]
    for i, row in enumerate(zip(*columns)):
        for j, value in enumerate(_points(row)):
            store_lanes(to + point * (4 * i + j), 0, value)


def _transposed(rows: Sequence[Lanes]) -> list[Lanes]:
    """The columns of a square of lanes: each round deals two rows' lanes out in turns."""
    builder, half = rows[0].builder, LANES // 2
    orders = [[start + k // 2 + k % 2 * LANES for k in range(LANES)] for start in (0, half)]
    deals = [ir.Constant(ir.VectorType(I32, LANES), order) for order in orders]
    values = [row.value for row in rows]
    for _ in range(LANES.bit_length() - 1):
        pairs = list(zip(values[:half], values[half:]))
        values = [builder.shuffle_vector(a, b, deal) for a, b in pairs for deal in deals]
    return [Lanes(builder, value) for value in values]


def _square(x: Lanes, step: Lanes, to: Lanes) -> None:
    """Write the columns of sixteen rows, `step` bytes apart, as rows one after another."""
    rows = [load_lanes(x + step * k, 0) for k in range(LANES)]
    for k, column in enumerate(_transposed(rows)):
        store_lanes(to, k * LANES, column)


def _channel(x: Lanes, to: Lanes, point: Lanes) -> None:
    """Write the values of nine vectors of taps."""
    _write([load_lanes(x, tap * LANES) for tap in range(_TAPS)], to, point)


def _turned(x: Lanes, to: Lanes, point: Lanes) -> None:
    """Write the values of sixteen times nine floats, with the taps from the last to the first.

    A tap's sixteen floats lie in different lanes of the nine vectors, as nine is odd: they are
    gathered by selections and put in order by one shuffle.
    """
    builder = x.builder
    lines = [load_lanes(x, k * LANES).value for k in range(_TAPS)]
    taps = []
    for tap in range(_TAPS):
        places = [_TAPS * k + tap for k in range(LANES)]
        held = {place % LANES: place // LANES for place in places}
        mixed = lines[0]
        for number, line in enumerate(lines[1:], 1):
            mask = [int(held[lane] == number) for lane in range(LANES)]
            mixed = builder.select(ir.Constant(ir.VectorType(I1, LANES), mask), line, mixed)
        order = ir.Constant(ir.VectorType(I32, LANES), [place % LANES for place in places])
        taps.append(Lanes(builder, builder.shuffle_vector(mixed, mixed, order)))
    _write(taps[::-1], to, point)


_write_square, _write_channel, _write_turned = map(vectorised, (_square, _channel, _turned))


@helper
def _clear(buffer: int, lines: int) -> None:
    for i in range(lines):
        store(buffer, i * 16, splat(0.0))


@helper
def _fill(x: int, to: int, count: int) -> None:
    """Copy `count` floats to whole lines that are zero."""
    done = 0
    while done < count:
        store(to, done, load_first(x, done, min(16, count - done)))
        done += 16


@routine
def _forward(x: int, step: int, filters: int, channels: int, to: int, point: int) -> None:
    """Write up to sixteen filters by sixteen channels; what is missing is zero."""
    lines = stack(9216)
    edge = stack(9216)
    if filters < 16 or channels < 16:
        _clear(edge, 144)
        for i in range(filters):
            _fill(x + i * step, edge + i * 576, channels * 9)
        x, step = edge, 576
    for k in range(9):
        _write_square(x + k * 64, step, lines + k * 1024)
    for c in range(16):
        _write_channel(lines + c * 576, to + c * 128, point)


@routine
def _backward(x: int, step: int, filters: int, channels: int, to: int, point: int) -> None:
    """Write up to sixteen co by sixteen ci; what is missing is zero."""
    edge = stack(576)
    for c in range(16):
        source = x + c * step
        if filters < 16 or c >= channels:
            _clear(edge, 9)
            if c < channels:
                _fill(source, edge, filters * 9)
            source = edge
        _write_turned(source, to + c * 128, point)


@routine
def weights_of_panel(
    w: int,
    step: int,
    turned: int,
    filters: int,
    channels: int,
    panel: int,
    block: int,
    to: int,
    point: int,
) -> None:
    """Write sixteen channels of a panel of 32 filters, at points that lie `point` bytes apart.

    The weights lie at w, a co every `step` bytes. `turned`: the filters are ci, the channels co.
    """
    for half in range(2):
        first, start = panel * 32 + half * 16, block * 16
        held, deep = min(16, max(0, filters - first)), min(16, channels - start)
        if turned != 0:
            _backward(w + start * step + first * 36, step, held, deep, to + half * 64, point)
        else:
            _forward(w + first * step + start * 36, step, held, deep, to + half * 64, point)
