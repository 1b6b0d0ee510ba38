"""`matmul`, `linear` and the gradients of `linear` by OpenBLAS."""

from __future__ import annotations

import numpy as np

from soapstone.kernels.cpu.elementwise.machine import bind_program
from soapstone.kernels.cpu.elementwise.programs import compile_program
from soapstone.kernels.cpu.openblas.products import product
from soapstone.kernels.cpu.substrate.layout import overlaps
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant
from soapstone.native.copies import copy
from soapstone.native.entries import sequence
from soapstone.native.memory import aligned_array


def real(call: Call) -> bool:
    """Return whether all operands are float32, or all float64, and outputs are plain memory."""
    arrays = (*call.inputs, *call.outputs)
    kinds = {array.dtype for array in arrays}
    return (
        kinds in ({np.dtype(np.float32)}, {np.dtype(np.float64)})
        and all(array.flags.aligned for array in arrays)
        and not any(overlaps(array) for array in call.outputs)
    )


def activated(y: Array, activation: str | None, threads: int) -> list[Entry | None]:
    """Return the entries that apply an activation in place: one, or none without any."""
    if activation is None:
        return []
    program = compile_program(1, [(activation, (0,), _defaults(activation))], (1,))
    return [None if program is None else bind_program(program, [y], [y], threads)]


def _defaults(name: str) -> dict[str, object]:
    from soapstone.ir.spec import operator

    return dict(operator(name).normalise({}))


@variant("matmul", "openblas")
def matmul(call: Call) -> Entry | None:
    """Return the entry of y = a @ b with the attributes' transposes."""
    (a, b), (y,) = call.inputs, call.outputs
    if not real(call) or min(a.ndim, b.ndim, y.ndim) < 2:
        return None
    a = a.swapaxes(-1, -2) if call.attributes.get("transpose_a", False) else a
    b = b.swapaxes(-1, -2) if call.attributes.get("transpose_b", False) else b
    a, b = (array[(None,) * (y.ndim - array.ndim)] for array in (a, b))
    return product(a, b, y, call.threads)


@variant("linear", "openblas")
def linear(call: Call) -> Entry | None:
    """Return the entry of y = activation(x @ w + b) over x's last axis."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    activation = call.attributes.get("activation")
    if not real(call) or (activation and y.dtype != np.float32):
        return None
    ends = [array[None] if array.ndim == 1 else array for array in (x, y)]
    entries: list[Entry | None] = []
    if rest:
        entries.append(copy(y, np.broadcast_to(rest[0], y.shape), call.threads))
    spread = w[(None,) * (ends[1].ndim - 2)]
    entries.append(product(ends[0], spread, ends[1], call.threads, more=bool(rest)))
    return sequence([*entries, *activated(y, activation, call.threads)])


@variant("linear_grad_input", "openblas")
def linear_grad_input(call: Call) -> Entry | None:
    """Return the entry of dx = dy @ w.T over dy's last axis."""
    (dy, w), (dx,) = call.inputs, call.outputs
    if not real(call):
        return None
    ends = [array[None] if array.ndim == 1 else array for array in (dy, dx)]
    turned = w.swapaxes(0, 1)[(None,) * (ends[1].ndim - 2)]
    return product(ends[0], turned, ends[1], call.threads)


@variant("linear_grad_weight", "openblas")
def linear_grad_weight(call: Call) -> Entry | None:
    """Return the entry of dw = x.T @ dy, summed over all leading dims."""
    (x, dy), (dw,) = call.inputs, call.outputs
    if not real(call):
        return None
    entries: list[Entry | None] = []
    flat = []
    for array in (x, dy):
        try:
            matrix = np.reshape(array, (-1, array.shape[-1]), copy=False)
        except ValueError:  # rows that are not at equal steps
            if array.size == 0:
                matrix = np.empty((0, array.shape[-1]), array.dtype)
            else:
                dense = aligned_array(array.shape, array.dtype)
                entries.append(copy(dense, array, call.threads))
                matrix = dense.reshape(-1, array.shape[-1])
        flat.append(matrix)
    entries.append(product(flat[0].T, flat[1], dw, call.threads))
    return sequence(entries)
