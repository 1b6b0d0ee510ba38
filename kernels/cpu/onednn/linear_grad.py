"""The gradients of `linear`, as matrix products over the rows of all leading dims."""

from __future__ import annotations

from soapstone.kernels.cpu.onednn.execute import Program, empty, float32
from soapstone.kernels.cpu.onednn.matmul import product, product_variants
from soapstone.kernels.cpu.substrate.layout import rows
from soapstone.kernels.entry import Array, Call, Entry


def _matrices(program: Program, arrays: tuple[Array, ...]) -> list[Array]:
    """Return each operand as one matrix of its rows; copied first where strides forbid a view."""
    found = []
    for array in arrays:
        view = rows(array)
        if view is None:
            view = program.dense_source(array).reshape(-1, array.shape[-1])
        found.append(view)
    return found


@product_variants("linear_grad_input")
def linear_grad_input(call: Call, form: str = "first") -> Entry | None:
    """Return the entry of dx = dy @ w.T over dy's last axis."""
    dy, w = call.inputs
    (dx,) = call.outputs
    if not float32(call) or dy.ndim < 2:
        return None
    if dx.size == 0:
        return empty()
    if dy.size == 0:
        return None
    program = Program(call.threads)
    (left,), out = _matrices(program, (dy,)), rows(dx)
    if out is None:
        out = program.dense_target(dx).reshape(-1, dx.shape[-1])
    return product(program, (left, w.swapaxes(0, 1), out), None, (), form)


@product_variants("linear_grad_weight")
def linear_grad_weight(call: Call, form: str = "first") -> Entry | None:
    """Return the entry of dw = x.T @ dy, summed over all leading dims."""
    x, dy = call.inputs
    (dw,) = call.outputs
    if not float32(call) or x.ndim < 2:
        return None
    if dw.size == 0:
        return empty()
    if x.size == 0 or dy.size == 0:
        return None
    program = Program(call.threads)
    left, right = _matrices(program, (x, dy))
    return product(program, (left.swapaxes(0, 1), right, dw), None, (), form)
