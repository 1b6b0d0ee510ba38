"""Unary elementwise functions and their gradients on tensors of equal strides."""

from __future__ import annotations

from functools import lru_cache

from soapstone.kernels.cpu.onednn.descriptors import (
    ARG_DIFF_DST,
    ARG_DIFF_SRC,
    ARG_DST,
    ARG_SRC,
    EXP,
    GELU_ERF,
    GELU_TANH,
    LINEAR,
    LOG,
    LOGISTIC,
    NAN_SAFE_RELU,
    POWER,
    RELU,
    SQRT,
    TANH,
    Activation,
    Layout,
    Primitive,
    attributes,
    compile_primitive,
    dense_order,
    describe,
)
from soapstone.kernels.cpu.onednn.execute import Program, empty, float32
from soapstone.kernels.cpu.onednn.library import UnsupportedError, engine, threads
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.registry import variant

_TRAINING, _INFERENCE = 64, 96
_RELU_OUT, _TANH_OUT, _LOGISTIC_OUT = 0x100, 0x101, 0x104
_FIXED = {
    "relu": NAN_SAFE_RELU,
    "sigmoid": Activation(LOGISTIC),
    "tanh": Activation(TANH),
    "exp": Activation(EXP),
    "log": Activation(LOG),
    "sqrt": Activation(SQRT),
    "neg": Activation(LINEAR, -1.0, 0.0),
}
# Gradients read the forward's result ("y") or its argument ("x"), as the operators' second input.
_GRADIENTS = {
    "relu_grad": (Activation(_RELU_OUT), ARG_DST),
    "tanh_grad": (Activation(_TANH_OUT), ARG_DST),
    "sigmoid_grad": (Activation(_LOGISTIC_OUT), ARG_DST),
}
_GELU = {"none": GELU_ERF, "tanh": GELU_TANH}


def _function(call: Call) -> tuple[Activation, int] | None:
    """Return the algorithm and what a gradient's second input is, or None: not oneDNN's."""
    at, name = call.attributes, call.operator
    if name in _FIXED:
        return _FIXED[name], 0
    if name in _GRADIENTS:
        return _GRADIENTS[name]
    if name == "leaky_relu":
        return Activation(RELU, float(at["alpha"])), 0
    if name.startswith("gelu"):
        algorithm = _GELU.get(at.get("approximate", "none"))
        return None if algorithm is None else (Activation(algorithm), ARG_SRC)
    if name == "affine":
        return Activation(LINEAR, float(at["scale"]), float(at["shift"])), 0
    if name == "power":
        return Activation(POWER, 1.0, float(at["exponent"])), 0
    return None


@lru_cache(maxsize=512)
def _primitive(
    activation: Activation, layout: Layout, backward: bool, count: int
) -> Primitive | None:
    md, attribute = layout.descriptor.address, attributes().address
    parameters = (activation.alpha, activation.beta)
    algorithm = activation.algorithm
    direction = _TRAINING if backward else _INFERENCE
    with threads(count):
        try:
            found = describe(
                "eltwise_forward", engine(), direction, algorithm, md, md, *parameters, attribute
            )
            if backward:
                ends = (engine(), algorithm, md, md, md, *parameters)
                found = describe("eltwise_backward", *ends, found.address, attribute)
        except UnsupportedError:
            return None
        primitive = compile_primitive("eltwise", found)
    return None if "ref" in primitive.implementation else primitive


@variant(
    (
        *_FIXED,
        *_GRADIENTS,
        # Not leaky_relu_grad: oneDNN takes the slope at NaN for 1.
        *("leaky_relu", "gelu", "gelu_grad", "affine", "power"),
    ),
    "onednn",
)
def eltwise(call: Call) -> Entry | None:
    """Return the entry of one elementwise function on arrays that share one dense layout."""
    (out,) = call.outputs
    if not float32(call) or any(array.shape != out.shape for array in call.inputs):
        return None
    if out.size == 0:
        return empty()
    order = dense_order(out)
    layouts = [Layout.of(array, order) for array in (*call.inputs, out)]
    if not all(layout.is_dense(order) for layout in layouts):
        return None
    found = _function(call)
    if found is None:
        return None
    activation, second = found
    flat = Layout.dense((out.size,))
    backward = len(call.inputs) > 1
    primitive = _primitive(activation, flat, backward, call.threads)
    if primitive is None:
        return None
    program = Program(call.threads)
    source = program.source(call.inputs[0], flat)
    target = program.source(out, flat)
    if backward:
        other = program.source(call.inputs[1], flat)
        program.step(primitive, {ARG_DIFF_DST: source, second: other, ARG_DIFF_SRC: target})
    else:
        program.step(primitive, {ARG_SRC: source, ARG_DST: target})
    return program.entry()
