"""The steps of recurrent cells as kernels: forward, backward, and past a sample's length.

Each kernel's operands are arrays of all steps (t, n, …), or states and sums (n, …), by name: sums
of x w + b are `inputs`, those of h r are `sums`; what ends in `s` is of all steps; `dense` is what
the product after it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ir.expression import Expression, number, variable
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
from soapstone.kernels.cpu.recurrent.gates import Kernel, Place, Reads
from soapstone.native.lanes import LANES


def gates(expressions: Sequence[Expression], name: str) -> Reads:
    """Return expressions as read from the gates side by side in one operand."""
    return {one: ((name, k),) for k, one in enumerate(expressions)}


def written(expressions: Sequence[Expression], *names: str) -> list[tuple[Place, Expression]]:
    """Return expressions as written to the gates side by side in each of the operands."""
    return [((name, k), one) for k, one in enumerate(expressions) for name in names]


def _blank(name: str, gates: int = 1) -> list[tuple[Place, Expression]]:
    """Return zeros as written to the gates side by side in an operand."""
    return [((name, k), number(0)) for k in range(gates)]


_CARRIED = variable("carried")  # what of a state's gradient goes past steps that are left out


def _back(past: str, through: str) -> tuple[Reads, list[tuple[Place, Expression]]]:
    """Return what a step back reads and writes for a sample that does not have it.

    The product that follows writes `through`; what arrives is the sum of both.
    """
    return {_CARRIED: ((past, 0), (through, 0))}, [((past, 0), _CARRIED), *_blank(through)]


def _lstm() -> tuple[Kernel, Kernel, Kernel]:
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
        [*_blank("gates", 4), (("cells", 0), cell), *_blank("y")],
    )
    *dgates, dcell = LSTM.gradients
    reads = gates(LSTM.saved, "gates") | {new: (("cells", 0),), DC: (("dcell", 0),)}
    reads[cell] = (("before", 0),)
    writes = [*written([dcell], "dcell"), *written(dgates, "dgates", "dense")]
    backward = Kernel("lstm_grad", reads | {D: (("dy", 0), ("dstate", 0))}, writes)
    return forward, backward, _carrying(backward, 4)


def _carrying(backward: Kernel, gates: int) -> Kernel:
    """Return a step back, `dstate` being what it is given, of samples with lengths."""
    carried, ended = _back("past", "dstate")
    return Kernel(
        f"{backward.name}_carrying",
        {**backward.reads, D: (*backward.reads[D], ("past", 0)), **carried},
        [*backward.writes, *_blank("past")],
        [*_blank("dgates", gates), *_blank("dense", gates), *ended],
    )


def _rnn(activation: str) -> tuple[Kernel, Kernel, Kernel]:
    cell = rnn(activation)
    forward = Kernel(
        f"rnn_{activation}",
        {cell.reads[0]: (("y", 0), ("sums", 0))},
        written(cell.results, "y", "state"),
        _blank("y"),
    )
    backward = Kernel(
        f"rnn_{activation}_grad",
        gates(cell.results, "y") | {D: (("dy", 0), ("dstate", 0))},
        written(cell.gradients, "dgates", "dense"),
    )
    return forward, backward, _carrying(backward, 1)


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
        [*_blank("gates", 3), *_blank("hidden"), *_blank("y")],
    )
    first = Kernel(
        "gru_first",
        twice | before,
        [
            *written(GRU_FIRST.saved, "gates"),
            *written(GRU_FIRST.results[:1], "hidden", "scaled"),
        ],
        [*_blank("gates", 2), *_blank("hidden"), *_blank("scaled")],
    )
    new, given, state = GRU_SECOND.reads
    second = Kernel(
        "gru_second",
        {new: (("inputs", 2), ("sums", 0)), given: (("gates", 1),), state: (("state", 0),)},
        [(("gates", 2), GRU_SECOND.saved[0]), *written(GRU_SECOND.results, "state", "y")],
        [(("gates", 2), number(0)), *_blank("y")],
    )
    dreset, dupdate, dnew, dproduct, past = GRU.gradients
    carried, ended = _back("past", "through")
    backward = Kernel(
        "gru_grad",
        gates(GRU.saved, "gates")
        | {product: (("hidden", 0),), state: (("before", 0),)}
        | {D: (("dy", 0), ("past", 0), ("through", 0)), **carried},
        [
            *written([past], "past"),
            *written([dreset, dupdate, dnew], "dgates"),
            *written([dreset, dupdate, dproduct], "dproduct", "dense"),
        ],
        [*_blank("dgates", 3), *_blank("dproduct", 3), *_blank("dense", 3), *ended],
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
        [
            (("gates", 1), SRU.saved[0]),
            (("gates", 2), SRU.saved[1]),
            (("cells", 0), cell),
            *_blank("y"),
        ],
    )
    *dgates, dcell, dpast = SRU.gradients
    backward = Kernel(
        "sru_grad",
        {candidate: (("gates", 0),), SRU.saved[0]: (("gates", 1),), SRU.saved[1]: (("gates", 2),)}
        | {D: (("dy", 0),), DC: (("dcell", 0),), new: (("cells", 0),)}
        | {cell: (("before", 0),), past: (("highway", 0),)},
        [*written(dgates, "dgates"), *written([dpast], "dhighway"), *written([dcell], "dcell")],
        [*_blank("dgates", 3), *_blank("dhighway")],
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
        wide=LANES,
    )
    dleft, dright, dcell = NAS.gradients[:8], NAS.gradients[8:16], NAS.gradients[16]
    backward = Kernel(
        "nas_grad",
        gates(NAS.saved, "gates")
        | {D: (("dy", 0),), DC: (("dcell", 0),), cell: (("c", 0),)}
        | {factor: (place,) for place, factor in factors},
        [(("dc", 0), dcell), *written(dleft, "dinputs"), *written(dright, "dstates")],
        wide=LANES,
    )
    return forward, backward


LSTM_STEP, LSTM_BACK, LSTM_BACK_WITHIN = _lstm()
RNN = {name: _rnn(name) for name in ("tanh", "relu")}
GRU_STEP, GRU_HALF, GRU_REST, GRU_BACK = _gru()
SRU_STEPS, SRU_BACK = _sru()
_FIRST = variable("first")
# Of the states before, those of steps whose next one, in reverse, a sample does not have.
FIRST = Kernel("first", {_FIRST: (("first", 0),)}, [], [(("before", 0), _FIRST)])
NAS_STEP, NAS_BACK = _nas()
