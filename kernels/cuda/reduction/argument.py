"""Where a row has its extreme value: argmax, argmin, hardmax; gradients of reductions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.normalization.rowwise import rowwise
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.cuda.substrate.folds import accumulator
from soapstone.kernels.cuda.training.losses import first_of
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]


def _argument(name: str, call: Call) -> DeviceEntry:
    (x,), (y,) = views(call)
    at = call.attributes
    if x.size == 0:
        return DeviceEntry(())
    axis = at["axis"] % len(x.shape)
    phases = first_of(name, accumulator(x.dtype), x.shape[axis], at["select_last_index"])
    return rowwise([x], [axis], phases, [], lambda t, v, k: [], [y], lambda t, k, o, _: [k[1]])


variant("argmax", "numba", processor="cuda")(partial(_argument, "max"))
variant("argmin", "numba", processor="cuda")(partial(_argument, "min"))


@variant("hardmax", "numba", processor="cuda")
def hardmax(call: Call) -> DeviceEntry:
    """Return the entry of one at the first maximum along the axis, zero elsewhere."""
    (x,), (y,) = views(call)
    axis, kind = call.attributes["axis"] % len(x.shape), wide(x.dtype)

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        hit = f"{known[1].name} == ITEM"
        return [text.set(f"({literal(1, kind)} if {hit} else {literal(0, kind)})", kind)]

    phases = first_of("max", accumulator(x.dtype), x.shape[axis])
    return rowwise([x], [axis], phases, [y], item)
