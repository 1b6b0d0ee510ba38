"""bfloat16 as an element of kernels' arrays: single precision when read, rounded when stored.

Numba CUDA's own type of that name converts by functions that are linked in from C++. Here the two
conversions are a few instructions on the bits: those of a number are the upper half of a float32's,
and ties go to the even one. No arithmetic is defined; the simulator has NumPy's type in its place.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.cuda.cudaimpl import lower_cast
from numba.cuda.datamodel.models import PrimitiveModel
from numba.cuda.extending import intrinsic
from numba.cuda.models import register_model
from numba.cuda.types.ext_types import Bfloat16 as NumbaBfloat16

_WORD, _HALF = ir.IntType(32), ir.IntType(16)


class Bfloat16(NumbaBfloat16):  # type: ignore[misc]
    """The type: it converts to and from what Numba's own does."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "soapstone_bfloat16"


@register_model(Bfloat16)
class _Model(PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _HALF)


bfloat16 = Bfloat16()


@lower_cast(Bfloat16, types.Number)  # type: ignore[untyped-decorator]
def _widened(context: Any, builder: Any, source: Any, target: Any, value: Any) -> Any:
    word = builder.shl(builder.zext(value, _WORD), _WORD(16))
    return context.cast(builder, builder.bitcast(word, ir.FloatType()), types.float32, target)


@lower_cast(types.Number, Bfloat16)  # type: ignore[untyped-decorator]
def _rounded(context: Any, builder: Any, source: Any, target: Any, value: Any) -> Any:
    single = context.cast(builder, value, source, types.float32)
    word = builder.bitcast(single, _WORD)
    upper = builder.lshr(word, _WORD(16))
    even = builder.add(builder.and_(upper, _WORD(1)), _WORD(0x7FFF))
    rounded = builder.lshr(builder.add(word, even), _WORD(16))
    nan = builder.or_(upper, _WORD(0x40))
    found = builder.select(builder.fcmp_unordered("uno", single, single), nan, rounded)
    return builder.trunc(found, _HALF)


@intrinsic  # type: ignore[untyped-decorator]
def rounded(typing: Any, number: Any) -> Any:
    """Return a number as bfloat16, in a kernel."""

    def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.cast(builder, arguments[0], signature.args[0], bfloat16)

    return bfloat16(number), emit
