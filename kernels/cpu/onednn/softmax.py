"""Softmax, its logarithm, and their gradients, over any axis of an array of any strides.

Where a row holds NaN or infinity the reference is NaN all along it. oneDNN's result is NaN where
those are and 0 (or -inf, the logarithm of 0) in the rest of the row: to put that right would be
another pass over memory, and what is not finite shows in the row all the same.
"""

from __future__ import annotations

from functools import lru_cache

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_SRC,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    dense_order,
    describe,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32
from soapstone.kernels.cpu.onednn.library import UnsupportedError, engine, threads
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant

_TRAINING, _INFERENCE = 64, 96
_SOFTMAX, _LOG_SOFTMAX = 0x30000, 0x30001


@lru_cache(maxsize=512)
def _primitive(
    algorithm: int, layout: Layout, axis: int, backward: bool, count: int
) -> Primitive | None:
    """Return the primitive on one dense layout, or None where oneDNN has only plain loops."""
    md, attribute = layout.descriptor.address, attributes().address
    direction = _TRAINING if backward else _INFERENCE
    with threads(count):
        try:
            found = describe(
                "softmax_forward", engine(), direction, algorithm, md, md, axis, attribute
            )
            if backward:
                ends = (engine(), algorithm, md, md, md, axis)
                found = describe("softmax_backward", *ends, found.address, attribute)
        except UnsupportedError:
            return None
        primitive = compile_primitive("softmax", found)
    return None if "ref" in primitive.implementation else primitive


def _bind(call: Call, arrays: dict[int, Array], out: tuple[int, Array]) -> Entry | None:
    """Return the entry on the arrays, staged to one dense layout where they differ from it."""
    argument, target = out
    if not float32(call) or any(array.shape != target.shape for array in arrays.values()):
        return None
    if target.size == 0:
        return empty()
    rank = target.ndim
    axis = int(call.attributes["axis"])
    axis += rank if axis < 0 else 0
    if not 0 <= axis < rank:
        return None
    algorithm = _LOG_SOFTMAX if call.operator.startswith("log") else _SOFTMAX
    own = dense_order(target)
    # The axis innermost: always vectorised, at the price of staging.
    for order in (own, (*(a for a in own if a != axis), axis)):
        layout = Layout.dense(target.shape, order)
        primitive = _primitive(algorithm, layout, axis, len(arrays) > 1, call.threads)
        if primitive is not None:
            break
    else:
        return None
    program = Program(call.threads)
    wanted = layout.descriptor.address
    arguments = {
        key: program.source(array, Layout.of(array, order), wanted) for key, array in arrays.items()
    }
    arguments[argument] = program.target(target, Layout.of(target, order), wanted)
    program.step(primitive, arguments)
    return program.entry()


@variant(("softmax", "log_softmax"), "onednn")
def softmax(call: Call) -> Entry | None:
    """Return the entry of y = softmax(x), or its logarithm, over the attribute `axis`."""
    return _bind(call, {ARG_SRC: call.inputs[0]}, (ARG_DST, call.outputs[0]))


@variant(("softmax_grad", "log_softmax_grad"), "onednn")
def softmax_grad(call: Call) -> Entry | None:
    """Return the entry of dx from dy and the forward result y."""
    dy, y = call.inputs
    return _bind(call, {ARG_DIFF_DST: dy, ARG_DST: y}, (ARG_DIFF_SRC, call.outputs[0]))
