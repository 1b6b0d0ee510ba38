"""Batch and layer normalisation and their gradients.

oneDNN speaks of variances, the operators of reciprocal standard deviations and running statistics:
a small native step after the primitive, or before a gradient's, translates.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    Kept,
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


@Kept
def _primitive(kind: str, x: Layout, epsilon: float, what: str, count: int) -> Primitive | None:
    """Return the primitive on one dense layout of `x`, or None where oneDNN has only plain loops.

    `kind` is batch or layer; `what` is training, inference or gradient.
    """
    name = f"{kind}_normalization"
    md, attribute = x.descriptor, attributes()
    statistics = Layout.dense(x.shape[:-1]).descriptor
    extra = () if kind == "batch" else (statistics,)
    flags = _SCALE_SHIFT | (_GLOBAL if what == "inference" else 0)
    direction = _INFERENCE if what == "inference" else _TRAINING
    with threads(count):
        try:
            ends = (engine(), direction, md, md, *extra, epsilon, flags)
            found = describe(f"{name}_forward", *ends, attribute)
            if what == "gradient":
                ends = (engine(), _BACKWARD, md, md, md, *extra, epsilon, flags)
                found = describe(f"{name}_backward", *ends, found, attribute)
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


def _forward(
    call: Call, kind: str, what: str, order: tuple[int, ...] | None, vectors: Sequence[Array]
) -> Program | None:
    """Return the program of y from x; vectors: gamma, beta, mean and variance."""
    x, y = call.inputs[0], call.outputs[0]
    dense = Layout.dense(x.shape, order)
    primitive = _primitive(kind, dense, float(call.attributes["epsilon"]), what, call.threads)
    if primitive is None:
        return None
    program = Program(call.threads)
    wanted = dense.descriptor
    arguments = {
        ARG_SRC: program.source(x, Layout.of(x, order), wanted),
        ARG_DST: program.target(y, Layout.of(y, order), wanted),
    }
    for argument, vector in zip((ARG_SCALE, ARG_SHIFT, ARG_MEAN, ARG_VARIANCE), vectors):
        arguments[argument] = _vector(program, vector)
    program.step(primitive, arguments)
    return program


@variant("batch_norm", "onednn")
def batch_norm(call: Call) -> Entry | None:
    """Return the entry of y, the new running statistics, and the batch's mean and rstd."""
    x, gamma, beta, *old = call.inputs
    y, *made = call.outputs
    if not float32(call) or not 2 <= x.ndim <= 5 or x.shape != y.shape:
        return None
    channels = x.shape[1]
    if x.size == 0 or not _vectors((gamma, beta, *old, *made), channels):
        return None
    new_mean, new_variance, mean, rstd = made
    variance = private_array(rstd)
    program = _forward(call, "batch", "training", _order(y), (gamma, beta, mean, variance))
    if program is None:
        return None
    count = x.size // channels
    at = call.attributes
    program.native(
        "running_statistics",
        channels=channels,
        mean=mean,
        variance=variance,
        old_mean=old[0],
        old_variance=old[1],
        new_mean=new_mean,
        new_variance=new_variance,
        rstd=rstd,
        epsilon=float(at["epsilon"]),
        momentum=float(at["momentum"]),
        unbias=count / max(count - 1, 1),
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
    program = _forward(call, "batch", "inference", _order(y), given)
    return None if program is None else program.entry()


def _gradient(call: Call, kind: str, order: tuple[int, ...] | None) -> Entry | None:
    """Return the entry of (dx, dgamma, dbeta) from (dy, x, gamma, mean, rstd)."""
    dy, x, gamma, mean, rstd = call.inputs
    dx, dgamma, dbeta = call.outputs
    dense = Layout.dense(x.shape, order)
    # The variance handed over holds epsilon already.
    primitive = _primitive(kind, dense, 0.0, "gradient", call.threads)
    if primitive is None:
        return None
    program = Program(call.threads)
    variance = private_array(rstd)
    program.native("variance_of", size=rstd.size, rstd=rstd, variance=variance)
    md = dense.descriptor
    vectors = {
        ARG_SCALE: gamma,
        ARG_MEAN: mean,
        ARG_VARIANCE: variance,
        ARG_DIFF_SCALE: dgamma,
        ARG_DIFF_SHIFT: dbeta,
    }
    # Layer normalisation asks for the shift, on which its gradient does not depend: any will do.
    vectors |= {ARG_SHIFT: gamma} if kind == "layer" else {}
    program.step(
        primitive,
        {
            ARG_SRC: program.source(x, Layout.of(x, order), md),
            ARG_DIFF_DST: program.source(dy, Layout.of(dy, order), md),
            ARG_DIFF_SRC: program.target(dx, Layout.of(dx, order), md),
            **{argument: _vector(program, vector) for argument, vector in vectors.items()},
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
    return _gradient(call, "batch", _order(dx))


def _rows_ready(x: Array, vectors: Sequence[Array], statistics: Sequence[Array]) -> bool:
    """Return whether layer normalisation's parameters and statistics are contiguous."""
    return (
        x.ndim >= 2
        and _vectors(vectors, x.shape[-1])
        and all(a.shape == x.shape[:-1] and a.flags.c_contiguous for a in statistics)
    )


@variant("layer_norm", "onednn", promises=True)
@over_last_axis("xcc", "xss")
def layer_norm(call: Call) -> Entry | None:
    """Return the entry of y, mean and rstd over the last axis."""
    x, gamma, beta = call.inputs
    y, mean, rstd = call.outputs
    if not float32(call) or not _rows_ready(x, (gamma, beta), (mean, rstd)):
        return None
    if x.size == 0 or x.shape != y.shape:
        return None
    variance = private_array(rstd)
    program = _forward(call, "layer", "training", None, (gamma, beta, mean, variance))
    if program is None:
        return None
    epsilon = float(call.attributes["epsilon"])
    program.native(
        "reciprocal_deviation", size=rstd.size, variance=variance, rstd=rstd, epsilon=epsilon
    )
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
    return _gradient(call, "layer", None)
