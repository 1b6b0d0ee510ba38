"""Sums of products of bytes, where the processor adds four of them in one instruction.

Others would be exact only where no sum of two overflows 16 bits, so there these kernels are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from soapstone.dtypes import BYTES
from soapstone.kernels.cpu.onednn import convolution, matmul
from soapstone.kernels.cpu.onednn.descriptors import ALGORITHMS, Activation, Step
from soapstone.kernels.cpu.onednn.execute import Program, empty, served
from soapstone.kernels.cpu.onednn.library import multiplies_bytes
from soapstone.kernels.cpu.onednn.scaling import Scaling
from soapstone.kernels.cpu.onednn.sequences import as_image
from soapstone.kernels.cpu.substrate.layout import rows
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.promises import held

_RESULTS = ("float32", "int32")


def _scaling(call: Call, rounds: bool) -> Scaling | None:
    """Return what a call's operands are scaled by, or None where types are not oneDNN's."""
    x, w, zero, *vectors = call.inputs
    (y,) = call.outputs
    if x.dtype.name not in BYTES or w.dtype != np.int8:
        return None
    if zero.dtype not in (np.int32, x.dtype):
        return None
    if any(vector.dtype != np.float32 for vector in vectors):
        return None
    if y.dtype.name not in (BYTES if rounds else _RESULTS):
        return None
    centred = 2 in call.constants and not held(zero).any()
    w_zero = call.attributes.get("w_zero", 0)
    return Scaling(zero, centred, vectors[0] if vectors else None, w_zero)


def _folded(call: Call, steps: Sequence[Step]) -> tuple[Call, Sequence[Step]]:
    """Return the call with what its first step multiplies by and adds in its scale and bias."""
    first = steps[0] if steps else None
    vectors = call.inputs[3:]
    known = bool(vectors) and call.constants.issuperset(range(3, 3 + len(vectors)))
    known = known and all(vector.dtype == np.float32 for vector in vectors)
    if not (known and isinstance(first, Activation) and first.algorithm == ALGORITHMS["linear"]):
        return call, steps
    scale, *bias = (held(vector) * np.float32(first.alpha) for vector in vectors)
    if bias or first.beta:
        bias = [(bias[0] if bias else np.zeros_like(scale)) + np.float32(first.beta)]
    attributes = {**call.attributes, "bias": bool(bias)}
    inputs = (*call.inputs[:3], scale, *bias)
    return replace(call, inputs=inputs, attributes=attributes), steps[1:]


def conv(call: Call, steps: Sequence[Step] = (), rounds: bool = False) -> Entry | None:
    """Return the entry of a convolution's sums, scaled, then the steps, perhaps made bytes."""
    call, steps = _folded(call, steps)
    scaling = _scaling(call, rounds)
    if scaling is None:
        return None
    x, w, _, *vectors = call.inputs
    arrays = {"x": x, "w": w, "y": call.outputs[0]}
    if call.attributes["bias"]:
        arrays["bias"] = vectors[1]
    return convolution.bind(call, "forward", arrays, steps, scaling=scaling)


def linear(call: Call, steps: Sequence[Step] = (), rounds: bool = False) -> Entry | None:
    """Return the entry of x's rows times w, scaled, then the steps, perhaps made bytes."""
    call, steps = _folded(call, steps)
    scaling = _scaling(call, rounds)
    x, w, _, *vectors = call.inputs
    (y,) = call.outputs
    if scaling is None or not served(call) or x.ndim < 1:
        return None
    if y.size == 0:
        return empty()
    after = matmul.row_steps(steps, y)
    if after is None or x.size == 0:
        return None
    if x.ndim == 1:
        x, y = x[None], y[None]
    program = Program(call.threads)
    sides = rows(x), rows(y)
    if sides[0] is None or sides[1] is None:
        return None
    bias = vectors[1] if call.attributes["bias"] else None
    operands = sides[0], w, sides[1]
    return matmul.product(program, operands, bias, after, "first", 1 in call.constants, scaling)


for _operators, _bind in (
    (("quantized_conv1d",), as_image(conv)),
    (("quantized_conv2d", "quantized_conv3d"), conv),
    (("quantized_linear",), linear),
):
    variant(_operators, "onednn", runs=multiplies_bytes())(_bind)
