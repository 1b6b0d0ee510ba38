"""Products with constant weights whose operands are rounded to bfloat16, where a call allows that.

Sums, biases, steps and results are in float32. The weights are rounded as they are packed, and the
other operand on each run, which is copied for it: oneDNN's float32 primitives do not round by
themselves here, whatever mode of arithmetic their attributes allow (3.2, AVX-512). Two numbers are
multiplied and added by one instruction, so there are no such kernels where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soapstone.kernels.cpu.onednn import convolution, matmul
from soapstone.kernels.cpu.onednn.descriptors import Step
from soapstone.kernels.cpu.onednn.library import multiplies_bfloat16
from soapstone.kernels.cpu.onednn.sequences import as_image
from soapstone.kernels.entry import BFLOAT16, Call, Entry
from soapstone.kernels.registry import variant

NAME = "onednn_bfloat16"
EXPECTED = 0.5  # of the time of the same kernel in float32
_Bind = Callable[..., Entry | None]


def _allowed(call: Call) -> bool:
    return call.precision == BFLOAT16 and 1 in call.constants


def conv(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of a convolution, then the steps; one of single channels gains nothing."""
    if not _allowed(call) or call.inputs[1].shape[1] == 1:
        return None
    return convolution.convolution(call, steps, BFLOAT16)


def linear(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of y = activation(x @ w + b), then the steps."""
    return matmul.linear(call, BFLOAT16, steps) if _allowed(call) else None


def product(call: Call, steps: Sequence[Step] = ()) -> Entry | None:
    """Return the entry of y = a @ b, then the steps."""
    return matmul.matmul(call, BFLOAT16, steps) if _allowed(call) else None


# Those that may have steps on their results.
BINDS: dict[str, _Bind] = {"conv2d": conv, "linear": linear, "matmul": product}

if multiplies_bfloat16():
    for _operator, _bind in {**BINDS, "conv1d": as_image(conv), "conv3d": conv}.items():
        variant(_operator, NAME, expected=EXPECTED, promises=True)(_bind)
