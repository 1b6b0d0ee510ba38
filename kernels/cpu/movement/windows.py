"""Windows of an image: copies of the boxes that lie on one side of where the image wraps round."""

from __future__ import annotations

from collections.abc import Iterator

from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.arrays import strided
from soapstone.native.copies import copies
from soapstone.native.entries import noop

# Of an axis: windows, positions in them, and the image's first index there.
Piece = tuple[slice, slice, int]


def _pieces(extent: int, size: int, shift: int) -> Iterator[Piece]:
    """Yield what of an axis lies in one stretch of the image."""
    count = extent // size
    window, inside = divmod(extent - shift, size)  # the first that is from the image's beginning
    if window:
        yield slice(0, window), slice(0, size), shift
    if inside:
        yield slice(window, window + 1), slice(0, inside), shift + window * size
        yield slice(window, window + 1), slice(inside, size), 0
        window, inside = window + 1, size - inside
    if window < count:
        yield slice(window, count), slice(0, size), inside


@variant(("window_partition", "window_reverse"), "numba")
def windows(call: Call) -> Entry | None:
    """An image as its windows, or the reverse."""
    (x,), (y,), forward = call.inputs, call.outputs, call.operator == "window_partition"
    if y.size == 0:
        return noop()
    image, parts = (x, y) if forward else (y, x)
    n, h, w, c = image.shape
    high, wide = call.attributes["size"]
    a, b, e = parts.strides
    shape = (n, h // high, w // wide, high, wide, c)
    across = shape[2]
    apart = strided(parts, shape, (a * shape[1] * across, a * across, a, b * wide, b, e))
    pairs: list[tuple[Array, Array]] = []
    down = list(_pieces(h, high, call.attributes["shift"][0]))
    for rows, lines, top in down:
        for columns, places, left in _pieces(w, wide, call.attributes["shift"][1]):
            to = apart[:, rows, columns, lines, places]
            sn, sh, sw, sc = image.strides
            box = image[:, top:, left:]
            seen = strided(box, to.shape, (sn, sh * high, sw * wide, sh, sw, sc))
            pairs.append((to, seen) if forward else (seen, to))
    return copies(pairs, call.threads)
