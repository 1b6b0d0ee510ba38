"""Inputs at which a twin's gradient is continuous, so that rounding cannot change it.

A rectifier's gradient jumps at zero, and that of a maximum where its two largest values meet.
An input within rounding of such a place has two right gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

MARGIN = 1e-5  # what is left of float32 after some tens of layers
TRIES = 400


def margin(twin: nn.Module, x: np.ndarray) -> float:
    """Return the smallest distance to a jump of any rectifier and any maximum, in training mode.

    Distances are in standard deviations of the layer's input.
    """
    found = [np.inf]

    def rectifier(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        found.append(float(inputs[0].abs().min() / inputs[0].std()))

    def maximum(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        assert isinstance(module, nn.MaxPool2d)
        size, stride, border = (int(v) for v in (module.kernel_size, module.stride, module.padding))
        n, c = inputs[0].shape[:2]
        more = size if module.ceil_mode else border
        padded = F.pad(inputs[0], (border, more, border, more), value=-torch.inf)
        windows = F.unfold(padded, size, stride=stride).view(n, c, size * size, -1)
        first, second = windows.topk(2, dim=2).values.unbind(2)
        # Equal values come of a rectifier's zeros, whose gradient is zero whichever is chosen.
        apart = (first - second)[torch.isfinite(second) & (first > second)]
        found.append(float(apart.min() / inputs[0].std()) if apart.numel() else np.inf)

    twin = copy.deepcopy(twin).double()  # batch norm changes its statistics
    for module in twin.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(rectifier)
        elif isinstance(module, nn.MaxPool2d):
            module.register_forward_hook(maximum)
    with torch.no_grad():
        twin(torch.from_numpy(x).double())
    return min(found)


def apart(twin: nn.Module, make: Callable[[int], np.ndarray]) -> np.ndarray:
    """Return the first input of a series that is farther than rounding from every jump.

    Raises:
        ValueError: none of them is.
    """
    for seed in range(TRIES):
        x = make(seed)
        if margin(twin, x) > MARGIN:
            return x
    raise ValueError(f"no input of {TRIES} is farther than {MARGIN} from the jumps of its gradient")
