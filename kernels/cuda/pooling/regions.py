"""Regions of images, read between pixels: a thread has a bin of a channel of a region."""

from __future__ import annotations

from soapstone.ir.ops.windows.roi_align import MOST_PLACES
from soapstone.kernels.cuda.elementwise.text import literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import views, zeros
from soapstone.kernels.cuda.substrate.element import each_element, place, read
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

WRONG = 1  # the status of a region that is not in an image, not finite or too large


@variant("roi_align", "numba", processor="cuda")
def roi_align(call: Call) -> DeviceEntry | None:
    """Return the entry of regions of images of any strides."""
    (x, rois, images), (y,) = views(call)
    if y.size == 0:
        return DeviceEntry(())
    if x.size == 0:
        return None
    at, kind, own = call.attributes, wide(rois.dtype), wide(x.dtype)
    count, height, width = x.shape[0], *x.shape[2:]
    zero, one, half = (literal(number, kind) for number in (0, 1, 0.5))
    scale = literal(at["spatial_scale"], kind)
    shift = literal(0.5 if at["half_pixel"] else 0.0, kind)
    most, maximum = literal(1e30, kind), at["mode"] == "max"

    def edge(number: int) -> str:
        return f"{read('rois', rois, ['at_0', str(number)])} * {scale} - {shift}"

    def axis(name: str, start: int, bins: int) -> list[str]:
        ratio = at["sampling_ratio"]
        places = f"int64(ceil_{kind}(long_{name} / {literal(bins, kind)}))"
        return [
            f"start_{name} = {edge(start)}",
            f"long_{name} = {edge(start + 2)} - start_{name}",
            *([] if at["half_pixel"] else [f"long_{name} = max(long_{name}, {one})"]),
            f"count_{name} = int64({ratio or MOST_PLACES + 1})",
            f"if not (-{most} < start_{name} < {most} and -{most} < long_{name} < {most}):",
            f"    count_{name} = int64({MOST_PLACES + 1})",
            *([] if ratio else ["else:", f"    count_{name} = {places}"]),
            f"step_{name} = long_{name} / {literal(bins, kind)}",
        ]

    def position(name: str, bin_at: str, extent: int) -> list[str]:
        return [
            f"{name} = start_{name} + {kind}({bin_at}) * step_{name}",
            f"{name} = {name} + ({kind}(n_{name}) + {half}) * step_{name} / {kind}(count_{name})",
            f"in_{name} = -{one} <= {name} <= {literal(extent, kind)}",
            f"{name} = min(max({name}, {zero}), {literal(extent - 1, kind)})",
            f"low_{name} = int64({name})",
            f"high_{name} = min(low_{name} + 1, {extent - 1})",
            f"part_{name} = {name} - {kind}(low_{name})",
        ]

    def corner(down: str, across: str) -> str:
        by = "part_y" if down == "high_y" else f"({one} - part_y)"
        bx = "part_x" if across == "high_x" else f"({one} - part_x)"
        return f"{read('source', x, ['image', 'at_1', down, across])} * {own}({by} * {bx})"

    corners = [corner(a, b) for a in ("low_y", "high_y") for b in ("low_x", "high_x")]
    larger = "found if first else max(total, found)"
    body = [
        f"image = int64(images[{place('images', ['at_0'])}])",
        *axis("y", 1, at["size"][0]),
        *axis("x", 0, at["size"][1]),
        f"total, first = {literal(0, own)}, True",
        f"if image < 0 or image >= {count} or max(count_y, count_x) > {MOST_PLACES}:",
        f"    status[0] = {WRONG}",
        "    count_y, count_x, image = int64(0), int64(0), int64(0)",
        "for n_y in range(count_y):",
        *("    " + line for line in position("y", "at_2", height)),
        "    for n_x in range(count_x):",
        *(" " * 8 + line for line in position("x", "at_3", width)),
        f"        a, b, c, d = ({', '.join([literal(0, own)] * 4)})",
        "        if in_y and in_x:",
        *(f"            {name} = {text}" for name, text in zip("abcd", corners)),
        "        found = max(max(a, b), max(c, d))" if maximum else "        found = a + b + c + d",
        f"        total = {larger if maximum else 'total + found'}",
        "        first = False",
    ]
    if not maximum:
        body += [f"total = total / {own}(max(count_y * count_x, 1))"]
    body += [f"made[{place('made', ['at_0', 'at_1', 'at_2', 'at_3'])}] = total"]
    status = zeros(1, "int32", call.outputs[0])
    text = (
        f"{call.operator}: a region outside of its image's number, not finite or of large bins"
        f" found; images 0 to {count - 1} and bins of {MOST_PLACES} pixels at most needed"
    )
    operands = {"source": x, "rois": rois, "images": images, "made": y}
    found = each_element(body, y.shape, operands, status)
    return DeviceEntry(found.launches, status, {WRONG: text})
