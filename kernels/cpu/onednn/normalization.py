"""Batch and layer normalisation and their gradients.

oneDNN speaks of variances, the operators of reciprocal standard deviations and running statistics:
a small native step after the primitive, or before a gradient's, translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DIFF_DST,
    ARG_DIFF_SCALE,
    ARG_DIFF_SHIFT,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_MEAN,
    ARG_SCALE,
    ARG_SHIFT,
    ARG_SRC,
    ARG_VARIANCE,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    describe,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32, private_array
from soapstone.kernels.cpu.onednn.library import Handle, UnsupportedError, engine, threads
from soapstone.kernels.cpu.substrate.rows import over_last_axis
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_TRAINING, _INFERENCE, _BACKWARD = 64, 96, 128
_GLOBAL, _SCALE_SHIFT = 1, 2 | 4


@lru_cache(maxsize=512)
def _primitive(kind: str, x: Layout, epsilon: float, what: str, count: int) -> Primitive | None:
    """Return the primitive on one dense layout of `x`, or None where oneDNN has only plain loops.

    `kind` is batch or layer; `what` is training, inference or gradient.
    """
    name = f"{kind}_normalization"
    md, attribute = x.descriptor.address, attributes().address
    statistics = Layout.dense(x.shape[:-1]).descriptor.address
    extra = () if kind == "batch" else (statistics,)
    flags = _SCALE_SHIFT | (_GLOBAL if what == "inference" else 0)
    direction = _INFERENCE if what == "inference" else _TRAINING
    with threads(count):
        try:
            ends = (engine(), direction, md, md, *extra, epsilon, flags)
            found = describe(f"{name}_forward", *ends, attribute)
            if what == "gradient":
                ends = (engine(), _BACKWARD, md, md, md, *extra, epsilon, flags)
                found = describe(f"{name}_backward", *ends, found.address, attribute)
        except UnsupportedError:
            return None
        primitive = compile_primitive(name, found)
    return None if "ref" in primitive.implementation else primitive


def _order(x: Array) -> tuple[int, ...]:
    """Return the order of axes in which (n, c, …) activations are computed on."""
    plain = tuple(range(x.ndim))
    if x.ndim == 2 or x.shape[1] == 1 or x.strides[1] >= x.strides[-1]:
        return plain
    return (0, *plain[2:], 1)


def _vectors(arrays: Sequence[Array], size: int) -> bool:
    """Return whether all are contiguous vectors of the size."""
    return all(a.shape == (size,) and (a.strides == (4,) or size == 1) for a in arrays)


def _vector(program: Program, array: Array) -> Handle:
    return program.source(array, Layout.dense(array.shape))


@variant("batch_norm", "onednn")
def batch_norm(call: Call) -> Entry | None:
    """Return the entry of y, the new running statistics, and the batch's mean and rstd."""
    x, *given = call.inputs
    y, *made = call.outputs
    if not float32(call) or not 2 <= x.ndim <= 5 or x.shape != y.shape:
        return None
    channels = x.shape[1]
    if x.size == 0 or not _vectors((*given, *made), channels):
        return None
    order = _order(y)
    dense = Layout.dense(x.shape, order)
    epsilon = float(call.attributes["epsilon"])
    primitive = _primitive("batch", dense, epsilon, "training", call.threads)
    if primitive is None:
        return None
    gamma, beta, old_mean, old_variance = given
    new_mean, new_variance, mean, rstd = made
    program = Program(call.threads)
    wanted = dense.descriptor.address
    variance = private_array(rstd)
    program.step(
        primitive,
        {
            ARG_SRC: program.source(x, Layout.of(x, order), wanted),
            ARG_DST: program.target(y, Layout.of(y, order), wanted),
            ARG_SCALE: _vector(program, gamma),
            ARG_SHIFT: _vector(program, beta),
            ARG_MEAN: _vector(program, mean),
            ARG_VARIANCE: _vector(program, variance),
        },
    )
    count = x.size // channels
    program.native(
        "running_statistics",
        *(channels, mean, variance, old_mean, old_variance, new_mean, new_variance, rstd),
        *(epsilon, float(call.attributes["momentum"]), count / max(count - 1, 1)),
    )
    return program.entry()


@variant("batch_norm_inference", "onednn")
def batch_norm_inference(call: Call) -> Entry | None:
    """Return the entry of y from the running statistics."""
    x, *given = call.inputs
    (y,) = call.outputs
    if not float32(call) or not 2 <= x.ndim <= 5 or x.shape != y.shape:
        return None
    if y.size == 0:
        return empty()
    if not _vectors(given, x.shape[1]):
        return None
    order = _order(y)
    dense = Layout.dense(x.shape, order)
    epsilon = float(call.attributes["epsilon"])
    primitive = _primitive("batch", dense, epsilon, "inference", call.threads)
    if primitive is None:
        return None
    gamma, beta, mean, variance = given
    program = Program(call.threads)
    wanted = dense.descriptor.address
    program.step(
        primitive,
        {
            ARG_SRC: program.source(x, Layout.of(x, order), wanted),
            ARG_DST: program.target(y, Layout.of(y, order), wanted),
            ARG_SCALE: _vector(program, gamma),
            ARG_SHIFT: _vector(program, beta),
            ARG_MEAN: _vector(program, mean),
            ARG_VARIANCE: _vector(program, variance),
        },
    )
    return program.entry()


def _gradient(
    call: Call, primitive: Primitive, wanted: Layout, order: tuple[int, ...] | None
) -> Entry:
    """Return the entry of (dx, dgamma, dbeta) from (dy, x, gamma, mean, rstd)."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    program = Program(call.threads)
    variance = private_array(rstd)
    program.native("variance_of", rstd.size, rstd, variance)
    md = wanted.descriptor.address
    # Layer normalisation asks for the shift, on which its gradient does not depend: any will do.
    shift = {ARG_SHIFT: _vector(program, gamma)} if call.operator == "layer_norm_grad" else {}
    program.step(
        primitive,
        shift
        | {
            ARG_SRC: program.source(x, Layout.of(x, order), md),
            ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), md),
            ARG_DIFF_SRC: program.target(dx, Layout.of(dx, order), md),
            ARG_SCALE: _vector(program, gamma),
            ARG_MEAN: _vector(program, mean),
            ARG_VARIANCE: _vector(program, variance),
            ARG_DIFF_SCALE: _vector(program, dgamma),
            ARG_DIFF_SHIFT: _vector(program, dbeta),
        },
    )
    return program.entry()


@variant("batch_norm_grad", "onednn")
def batch_norm_grad(call: Call) -> Entry | None:
    """Return the entry of dx, dgamma and dbeta."""
    dy, x, *given = call.inputs
    dx, *made = call.outputs
    if not float32(call) or not 2 <= x.ndim <= 5 or not dx.shape == dy.shape == x.shape:
        return None
    if x.size == 0 or not _vectors((*given, *made), x.shape[1]):
        return None
    order = _order(dx)
    dense = Layout.dense(x.shape, order)
    # The variance handed over holds epsilon already.
    primitive = _primitive("batch", dense, 0.0, "gradient", call.threads)
    return None if primitive is None else _gradient(call, primitive, dense, order)


def _rows_ready(x: Array, vectors: Sequence[Array], statistics: Sequence[Array]) -> bool:
    """Return whether layer normalisation's parameters and statistics are contiguous."""
    return (
        x.ndim >= 2
        and _vectors(vectors, x.shape[-1])
        and all(a.shape == x.shape[:-1] and a.flags.c_contiguous for a in statistics)
    )


@variant("layer_norm", "onednn")
@over_last_axis("xcc", "xss")
def layer_norm(call: Call) -> Entry | None:
    """Return the entry of y, mean and rstd over the last axis."""
    x, gamma, beta = call.inputs
    y, mean, rstd = call.outputs
    if not float32(call) or not _rows_ready(x, (gamma, beta), (mean, rstd)):
        return None
    if x.size == 0 or x.shape != y.shape:
        return None
    dense = Layout.dense(x.shape)
    epsilon = float(call.attributes["epsilon"])
    primitive = _primitive("layer", dense, epsilon, "training", call.threads)
    if primitive is None:
        return None
    program = Program(call.threads)
    wanted = dense.descriptor.address
    variance = private_array(rstd)
    program.step(
        primitive,
        {
            ARG_SRC: program.source(x, Layout.of(x), wanted),
            ARG_DST: program.target(y, Layout.of(y), wanted),
            ARG_SCALE: _vector(program, gamma),
            ARG_SHIFT: _vector(program, beta),
            ARG_MEAN: _vector(program, mean),
            ARG_VARIANCE: _vector(program, variance),
        },
    )
    program.native("reciprocal_deviation", rstd.size, variance, rstd, epsilon)
    return program.entry()


@variant("layer_norm_grad", "onednn")
@over_last_axis("xxcss", "xcc")
def layer_norm_grad(call: Call) -> Entry | None:
    """Return the entry of dx, dgamma and dbeta."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    if not float32(call) or not _rows_ready(x, (gamma, dgamma, dbeta), (mean, rstd)):
        return None
    if x.size == 0 or not dx.shape == dy.shape == x.shape:
        return None
    dense = Layout.dense(x.shape)
    primitive = _primitive("layer", dense, 0.0, "gradient", call.threads)
    return None if primitive is None else _gradient(call, primitive, dense, None)
