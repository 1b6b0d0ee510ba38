"""Several neighbouring elements at once: loads and stores of 16 bytes.

`loaded4(x, index)` returns four elements as a tuple, `stored4(y, index, a, b, c, d)` writes them,
and so on; of narrow elements a piece has fewer bytes, of wide ones there are several pieces. The
first element must lie at a multiple of a piece's bytes (`aligned`), which the simulator checks as
far as it can: it knows no addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from soapstone.dtypes import HALVES, learn
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.target import SIMULATED

NBYTES = 16  # of a load or a store
WIDTHS = (2, 4, 8)


def width_of(views: Iterable[View]) -> int:
    """Return how many elements are best loaded at once, where all can be: 16 bytes of most."""
    return 8 if any(each.dtype in HALVES for each in views) else 4


def aligned(view: View, width: int, strides: Iterable[int] = ()) -> bool:
    """Return whether so many elements may be loaded at once where a row begins.

    strides: of the view, along the axes by which rows are apart.
    """
    nbytes = min(NBYTES, width * np.dtype(learn(view.dtype)).itemsize)
    return view.aligned(nbytes) and all(step % width == 0 for step in (view.offset, *strides))


def width_along(views: Iterable[View], extent: int, widths: Iterable[int]) -> int:
    """Return the first of widths, else 1, in which all views can be loaded along their last axis.

    extent: of that axis.
    """
    views = list(views)
    most = width_of(views)
    for width in widths:
        fits = width <= most and extent % width == 0
        if fits and all(x.strides[-1] == 1 and aligned(x, width, x.strides[:-1]) for x in views):
            return width
    return 1


def load(names: Sequence[str], view: str, place: str) -> str:
    """Return the statement that reads as many elements as there are names."""
    return f"{', '.join(names)} = loaded{len(names)}({view}, {place})"


def store(view: str, place: str, values: Sequence[str]) -> str:
    """Return the statement that writes values side by side."""
    return f"stored{len(values)}({view}, {place}, {', '.join(values)})"


def _simulated(width: int) -> dict[str, Any]:
    def loaded(x: Any, index: Any) -> tuple[Any, ...]:
        assert index % width == 0, f"{width} elements from {index} on"
        return tuple(x[index + lane] for lane in range(width))

    def stored(y: Any, index: Any, *values: Any) -> None:
        assert index % width == 0 and len(values) == width, f"{width} elements from {index} on"
        for lane, value in enumerate(values):
            y[index + lane] = value

    return {f"loaded{width}": loaded, f"stored{width}": stored}


def _of_gpu(width: int) -> dict[str, Any]:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    word = ir.IntType(32)

    def pieces(context: Any, builder: Any, kind: Any, array: Any, index: Any) -> Any:
        """Return the type of a piece, its elements' and how many these are, and addresses."""
        element = context.get_data_type(kind.dtype)
        nbytes = context.get_abi_sizeof(element)
        each = min(width, NBYTES // nbytes)
        narrow = nbytes < 4
        of = ir.VectorType(word, each * nbytes // 4) if narrow else ir.VectorType(element, each)
        data = context.make_array(kind)(context, builder, array).data
        found = []
        for first in range(0, width, each):
            at = builder.gep(data, [builder.add(index, ir.Constant(index.type, first))])
            found.append(builder.bitcast(at, of.as_pointer()))
        return element, nbytes, each, found

    def loaded(typing: Any, x: Any, index: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = signature.args[0]
            element, nbytes, each, places = pieces(context, builder, kind, *arguments)
            model, values = context.data_model_manager[kind.dtype], []
            for place in places:
                piece = builder.load(place)
                piece.align = each * nbytes
                for lane in range(each):
                    bits = lane_of(builder, piece, lane, element, nbytes)
                    values.append(model.from_data(builder, bits))
            return context.make_tuple(builder, signature.return_type, values)

        return types.UniTuple(x.dtype, width)(x, types.int64), emit

    def lane_of(builder: Any, piece: Any, lane: int, element: Any, nbytes: int) -> Any:
        if nbytes >= 4:
            return builder.extract_element(piece, word(lane))
        bits = builder.extract_element(piece, word(lane * nbytes // 4))
        bits = builder.lshr(bits, word(lane * nbytes % 4 * 8))
        bits = builder.trunc(bits, ir.IntType(8 * nbytes))
        return bits if bits.type == element else builder.bitcast(bits, element)

    def stored(typing: Any, y: Any, index: Any, *values: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            kind = signature.args[0]
            _, nbytes, each, places = pieces(context, builder, kind, *arguments[:2])
            model = context.data_model_manager[kind.dtype]
            given = [model.as_data(builder, value) for value in arguments[2:]]
            for number, place in enumerate(places):
                piece = ir.Constant(place.type.pointee, ir.Undefined)
                mine = given[number * each : (number + 1) * each]
                for lane, value in enumerate(mine if nbytes >= 4 else words(builder, mine, nbytes)):
                    piece = builder.insert_element(piece, value, word(lane))
                builder.store(piece, place).align = each * nbytes
            return context.get_dummy_value()

        return types.void(y, types.int64, *(y.dtype for _ in values)), emit

    def words(builder: Any, values: Any, nbytes: int) -> list[Any]:
        """Return narrow elements as words of 32 bits."""
        found, bits = [], ir.IntType(8 * nbytes)
        for first in range(0, len(values), 4 // nbytes):
            made = word(0)
            for lane, value in enumerate(values[first : first + 4 // nbytes]):
                own = value if value.type == bits else builder.bitcast(value, bits)
                own = builder.shl(builder.zext(own, word), word(8 * nbytes * lane))
                made = builder.or_(made, own)
            found.append(made)
        return found

    def store_of() -> Any:
        names = ", ".join(f"v{lane}" for lane in range(width))
        space: dict[str, Any] = {"stored": stored}
        exec(f"def f(typing, y, index, {names}): return stored(typing, y, index, {names})", space)
        return space["f"]

    return {f"loaded{width}": intrinsic(loaded), f"stored{width}": intrinsic(store_of())}


VECTORS: dict[str, Any] = {}
for _width in WIDTHS:
    VECTORS |= _simulated(_width) if SIMULATED else _of_gpu(_width)
