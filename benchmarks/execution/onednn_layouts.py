"""Milliseconds per oneDNN convolution and pooling in three layouts: NCHW, channels-last, blocked.

    python benchmarks/execution/onednn_layouts.py [--threads 1 2] [--net lenet alexnet]

Times are the best of several runs. "blocked" leaves every operand's layout to oneDNN and reports
the primitive alone: what chaining blocked layers would cost, without any reorder. In "nchw" and
"nhwc" the activations have those strides and weights are in the primitive's own layout; the time
to reorder them is apart ("wreorder": forward + backward weights in, weight gradient out).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time

import numpy as np

from soapstone.kernels.cpu.onednn import descriptors as d
from soapstone.kernels.cpu.onednn.execute import Program
from soapstone.kernels.cpu.onednn.library import Handle, engine, threads, version
from soapstone.kernels.entry import Entry

# (name, batch, channels, size, filters, kernel, stride, padding)
CONVOLUTIONS = {
    "lenet": [("c1", 64, 1, 28, 6, 5, 1, 2), ("c2", 64, 6, 14, 16, 5, 1, 0)],
    "alexnet": [
        ("c1", 64, 3, 64, 64, 11, 2, 2),
        ("c2", 64, 64, 14, 192, 5, 1, 2),
        ("c3", 64, 192, 6, 384, 3, 1, 1),
        ("c4", 64, 384, 6, 256, 3, 1, 1),
        ("c5", 64, 256, 6, 256, 3, 1, 1),
    ],
}
# (name, batch, channels, size, kernel, stride)
POOLS = {
    "lenet": [("p1", 64, 6, 28, 2, 2), ("p2", 64, 16, 10, 2, 2)],
    "alexnet": [("p1", 64, 64, 29, 3, 2), ("p2", 64, 192, 14, 3, 2), ("p5", 64, 256, 6, 3, 2)],
}
NULL = None
FORWARD_TRAINING, AUTO, MAX, WORKSPACE = 64, 3, 0x1FF, 64


def milliseconds(entry: Entry, threads_: int, budget_s: float = 0.15) -> float:
    """Return the best time of an entry."""
    call = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p)(entry.address)
    best = float("inf")
    with threads(threads_):
        if call(entry.block):
            raise RuntimeError("entry failed")
        end = time.perf_counter() + budget_s
        while best == float("inf") or time.perf_counter() < end:
            start = time.perf_counter()
            call(entry.block)
            best = min(best, time.perf_counter() - start)
    return best * 1e3


def layouts(kind: str, *shapes: tuple[int, ...]) -> list[d.Layout]:
    """Return the layouts of activations of the shapes."""
    if kind == "blocked":
        return [d.Layout.any(shape) for shape in shapes]
    order = d.PLAIN_4D if kind == "nchw" else d.CHANNELS_LAST_4D
    return [d.Layout.dense(shape, order) for shape in shapes]


def time_primitive(
    name: str, description: Handle, operands: dict[int, int], count: int
) -> tuple[float, str, d.Primitive]:
    """Return the milliseconds, implementation and primitive, on private memories."""
    with threads(count):
        primitive = d.compile_primitive(name, description)
    program = Program(count)
    memories = {
        argument: program.private(primitive.descriptor(what, 1 if argument in (41, 169) else 0))
        for argument, what in operands.items()
    }
    for argument, store in memories.items():
        # Written once: never-touched pages would all be the one zero page, and fit any cache.
        fill = 0 if argument == WORKSPACE else 1
        store.keep[: store.keep.size // 4 * 4].view(np.float32 if fill else np.int32)[:] = fill
    program.step(primitive, memories)
    return milliseconds(program.entry(), count), primitive.implementation, primitive


def time_reorder(source: int, target: int, count: int) -> float:
    """Return the milliseconds of a reorder between two descriptors."""
    if d.equal(source, target):
        return 0.0
    program = Program(count)
    program.copy(
        program.private(source),
        source,
        program.private(target),
        target,
    )
    return milliseconds(program.entry(), count, 0.1)


def convolution(spec: tuple, kind: str, count: int) -> dict:
    """Return times and implementations of the three convolutions of a layer."""
    _, n, c, size, o, k, stride, pad = spec
    out = (size + 2 * pad - k) // stride + 1
    x, y = layouts(kind, (n, c, size, size), (n, o, out, out))
    w, b = d.Layout.any((o, c, k, k)), d.Layout.dense((o,))
    window = (d.dims((stride, stride)), d.dims((0, 0)), d.dims((pad, pad)), d.dims((pad, pad)))
    at = d.attributes().address
    with threads(count):
        forward = d.describe(
            "convolution_forward",
            engine(),
            FORWARD_TRAINING,
            AUTO,
            *(v.descriptor.address for v in (x, w, b, y)),
            *window,
            at,
        )
        data = d.describe(
            "convolution_backward_data",
            engine(),
            AUTO,
            *(v.descriptor.address for v in (x, w, y)),
            *window,
            forward.address,
            at,
        )
        weights = d.describe(
            "convolution_backward_weights",
            engine(),
            AUTO,
            *(v.descriptor.address for v in (x, w, b, y)),
            *window,
            forward.address,
            at,
        )
    plain = d.Layout.dense((o, c, k, k)).descriptor.address
    fwd, fwd_impl, p = time_primitive(
        "convolution", forward, {1: d.SOURCE, 33: d.WEIGHTS, 41: d.WEIGHTS, 17: d.TARGET}, count
    )
    reorders = time_reorder(plain, p.descriptor(d.WEIGHTS), count)
    dx, dx_impl, p = time_primitive(
        "convolution", data, {129: d.DIFF_SOURCE, 33: d.WEIGHTS, 145: d.DIFF_TARGET}, count
    )
    reorders += time_reorder(plain, p.descriptor(d.WEIGHTS), count)
    dw, dw_impl, p = time_primitive(
        "convolution",
        weights,
        {1: d.SOURCE, 145: d.DIFF_TARGET, 161: d.DIFF_WEIGHTS, 169: d.DIFF_WEIGHTS},
        count,
    )
    reorders += time_reorder(p.descriptor(d.DIFF_WEIGHTS), plain, count)
    flops = 2 * n * o * c * k * k * out * out
    return {
        "fwd": fwd,
        "dx": dx,
        "dw": dw,
        "wreorder": reorders,
        "impl": [fwd_impl, dx_impl, dw_impl],
        "gflops_fwd": flops / fwd / 1e6,
    }


def pooling(spec: tuple, kind: str, count: int) -> dict:
    """Return times of a max pooling with workspace and its gradient."""
    _, n, c, size, k, stride = spec
    out = (size - k) // stride + 1
    (x,) = layouts("nchw" if kind == "nchw" else "nhwc", (n, c, size, size))
    x_md = blocked((n, c, size, size)) if kind == "blocked" else x.descriptor.address
    window = (d.dims((stride,) * 2), d.dims((k, k)), *(d.dims((0, 0)) for _ in range(3)))
    at = d.attributes().address
    y_md = d.Layout.any((n, c, out, out)).descriptor.address
    with threads(count):
        forward = d.describe(
            "pooling_forward", engine(), FORWARD_TRAINING, MAX, x_md, y_md, *window, at
        )
        dst = d.compile_primitive("pooling", forward).descriptor(d.TARGET)
        backward = d.describe(
            "pooling_backward", engine(), MAX, x_md, dst, *window, forward.address, at
        )
    fwd, impl, _ = time_primitive(
        "pooling", forward, {1: d.SOURCE, 17: d.TARGET, 64: d.WORKSPACE}, count
    )
    dx, impl2, _ = time_primitive(
        "pooling", backward, {129: d.DIFF_SOURCE, 145: d.DIFF_TARGET, 64: d.WORKSPACE}, count
    )
    return {"fwd": fwd, "dx": dx, "impl": [impl, impl2]}


def blocked(shape: tuple[int, ...]) -> int:
    """Return the descriptor a convolution chooses for activations of the shape."""
    c = shape[1]
    a = d.Layout.any(shape).descriptor.address
    k = d.Layout.any((c, c, 3, 3)).descriptor.address
    window = (d.dims((1, 1)), d.dims((0, 0)), d.dims((1, 1)), d.dims((1, 1)))
    pd = d.describe(
        "convolution_forward",
        engine(),
        FORWARD_TRAINING,
        AUTO,
        a,
        k,
        NULL,
        a,
        *window,
        d.attributes().address,
    )
    KEPT.append(primitive := d.compile_primitive("convolution", pd))
    return primitive.descriptor(d.TARGET)


KEPT: list[d.Primitive] = []


def main() -> None:
    """Print a Markdown table, then the numbers as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--net", nargs="*", default=list(CONVOLUTIONS))
    parser.add_argument("--layouts", nargs="*", default=["nchw", "nhwc", "blocked"])
    options = parser.parse_args()
    print("oneDNN", version())
    print("| net | layer | threads | layout | fwd | dx | dw | wreorder | impl |")
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for net in options.net:
        work = [(s, convolution) for s in CONVOLUTIONS[net]] + [(s, pooling) for s in POOLS[net]]
        for count in options.threads:
            for spec, measure in work:
                for kind in options.layouts:
                    row = measure(spec, kind, count)
                    rows.append(
                        {"net": net, "layer": spec[0], "threads": count, "layout": kind, **row}
                    )
                    cells = [
                        f"{row[k]:.3f}" if k in row else "" for k in ("fwd", "dx", "dw", "wreorder")
                    ]
                    print(
                        f"| {net} | {spec[0]} | {count} | {kind} | {' | '.join(cells)} | "
                        f"{' / '.join(row['impl'])} |",
                        flush=True,
                    )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
