"""Copies between layouts: `reorder`, and the operators that are such copies."""

from __future__ import annotations

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DST,
    ARG_SRC,
    Kept,
    Layout,
    Primitive,
    reorder_primitive,
    usable,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty
from soapstone.kernels.cpu.onednn.library import UnsupportedError
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_MAX_RANK = 12  # DNNL_MAX_NDIMS


def reorder(source: Array, target: Array, threads: int) -> Entry | None:
    """Return the entry that copies source to target, of equal shape and any strides.

    None where oneDNN cannot: other types than float32, int32, uint8 and int8, or broadcast axes.
    """
    if target.size == 0 and source.shape == target.shape:
        return empty()
    if (
        source.shape != target.shape
        or source.dtype != target.dtype
        or not 0 < source.ndim <= _MAX_RANK
        or not (usable(source) and usable(target))
        or Layout.of(target).overlaps
    ):
        return None
    program = Program(threads)
    ends = Layout.of(source), Layout.of(target)
    primitive = _primitive(*ends, threads)
    if primitive is None:
        return None
    arguments = {
        ARG_SRC: program.source(source, ends[0]),
        ARG_DST: program.source(target, ends[1]),
    }
    program.step(primitive, arguments)
    return program.entry()


@Kept
def _primitive(source: Layout, target: Layout, count: int) -> Primitive | None:
    """Return the primitive, or None where oneDNN has none."""
    try:
        return reorder_primitive(source.descriptor, target.descriptor, count)
    except UnsupportedError:
        return None


@variant("transpose", "onednn")
def transpose(call: Call) -> Entry | None:
    """Return the entry of y = x with its axes in the order of the attribute `permutation`."""
    (x,), (y,) = call.inputs, call.outputs
    return reorder(x.transpose(call.attributes["permutation"]), y, call.threads)


@variant("reshape", "onednn")
def reshape(call: Call) -> Entry | None:
    """Return the entry of y = x in another shape, read row by row, where one side is contiguous.

    The other side may have any strides, as a channels-last x that is flattened has.
    """
    (x,), (y,) = call.inputs, call.outputs
    if x.size != y.size:
        return None
    if y.flags.c_contiguous:
        return reorder(x, y.reshape(x.shape), call.threads)
    if x.flags.c_contiguous:
        return reorder(x.reshape(y.shape), y, call.threads)
    return None
