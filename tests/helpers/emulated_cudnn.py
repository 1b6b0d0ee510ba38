"""cuDNN's frontend as NVIDIA documents it, by PyTorch: graphs of one convolution or of attention.

It has the names of the module `cudnn` that soapstone uses, and takes addresses of host memory.
"""

from __future__ import annotations

import ctypes
import math
import sys
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from soapstone.dtypes import learn

data_type = IntEnum("data_type", ["HALF", "BFLOAT16", "FLOAT", "DOUBLE"])
heur_mode = IntEnum("heur_mode", ["A", "FALLBACK"])
numerical_note = IntEnum(
    "numerical_note",
    ["TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC"],
)
_TYPES = {
    data_type.HALF: "float16",
    data_type.BFLOAT16: learn("bfloat16"),
    data_type.FLOAT: "float32",
    data_type.DOUBLE: "float64",
}
WORKSPACE_BYTES = 80


class cudnnGraphNotSupportedError(Exception):
    """What the library raises for a graph that it has no plan for."""


def backend_version() -> int:
    """Return a number."""
    return 92801


def create_handle() -> dict[str, int]:
    """Return what remembers a stream."""
    return {"stream": -1}


def set_stream(handle: dict[str, int], stream: int) -> None:
    """Let what is executed with a handle be on a stream."""
    handle["stream"] = stream


class Tensor:
    """A tensor of a graph, by its number."""

    def __init__(self, uid: int) -> None:
        self.uid = uid
        self.dim: list[int] = []
        self.stride: list[int] = []
        self.kind = data_type.FLOAT
        self.output = False

    def get_uid(self) -> int:
        """Return the number."""
        return self.uid

    def set_output(self, value: bool) -> Tensor:
        """Let it be stored."""
        self.output = value
        return self

    def set_data_type(self, kind: data_type) -> Tensor:
        """Say its element type."""
        self.kind = kind
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        """Say its extents."""
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        """Say its strides, in elements."""
        self.stride = stride
        return self

    def at(self, address: int) -> np.ndarray[Any, Any]:
        """Return its elements at an address."""
        kind = np.dtype(_TYPES[self.kind])
        assert address % 16 == 0 and min(self.stride) > 0
        count = 1 + sum((e - 1) * s for e, s in zip(self.dim, self.stride))
        flat = np.ctypeslib.as_array(
            (ctypes.c_uint8 * (count * kind.itemsize)).from_address(address)
        )
        strides = [step * kind.itemsize for step in self.stride]
        return np.lib.stride_tricks.as_strided(flat.view(kind), self.dim, strides)


class pygraph:
    """A graph of one operation."""

    def __init__(self, *, handle: dict[str, int], **types: data_type) -> None:
        self._handle, self._types = handle, types
        self._tensors: list[Tensor] = []
        self._operation: Any = None
        self._done: list[str] = []

    def tensor(self, *, dim: list[int], stride: list[int], data_type: data_type) -> Tensor:
        """Return an operand."""
        assert len(dim) == len(stride) >= 4
        return self._new().set_dim(dim).set_stride(stride).set_data_type(data_type)

    def _new(self) -> Tensor:
        self._tensors.append(Tensor(len(self._tensors) + 1))
        return self._tensors[-1]

    def __getattr__(self, name: str) -> Any:
        if name not in ("conv_fprop", "conv_dgrad", "conv_wgrad"):
            raise AttributeError(name)

        def add(first: Tensor, second: Tensor, **window: list[int]) -> Tensor:
            made = self._new()
            self._operation = lambda at: _convolved(name, at(first), at(second), at(made), **window)
            return made

        return add

    def sdpa(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        attn_scale: float,
        use_causal_mask: bool,
        generate_stats: bool,
    ) -> tuple[Tensor, Tensor]:
        """Add attention, of halves and with the sums of rows."""
        assert generate_stats
        y, sums = self._new(), self._new()

        def run(at: Any) -> None:
            given = [torch.from_numpy(at(x).astype(np.float32)) for x in (q, k, v)]
            scores = self._scores(at, *given[:2], bias, attn_scale, use_causal_mask)
            at(y)[...] = (scores.softmax(-1) @ given[2]).numpy()
            at(sums)[...] = scores.logsumexp(-1, keepdim=True).numpy()

        self._operation = run
        return y, sums

    def _scores(
        self, at: Any, q: Any, k: Any, bias: Tensor | None, scale: float, causal: bool
    ) -> Any:
        assert self._types["io_data_type"] in (data_type.HALF, data_type.BFLOAT16)
        scores = q @ k.transpose(2, 3) * scale
        if bias is not None:
            assert tuple(bias.dim[2:]) == tuple(scores.shape[2:])
            scores = scores + torch.from_numpy(at(bias).astype(np.float32))
        if causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        assert bool((scores > -math.inf).any(-1).all()), "a row of which every key is hidden"
        return scores

    def sdpa_backward(
        self,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        dO: Tensor,
        stats: Tensor,
        bias: Tensor | None,
        attn_scale: float,
        use_causal_mask: bool,
        use_deterministic_algorithm: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add attention's gradients, from its result and the sums of rows."""
        assert use_deterministic_algorithm and stats.kind == data_type.FLOAT
        made = self._new(), self._new(), self._new()

        def run(at: Any) -> None:
            queries, keys, values, y, dy, sums = (
                torch.from_numpy(at(x).astype(np.float32)) for x in (q, k, v, o, dO, stats)
            )
            weights = self._scores(at, queries, keys, bias, attn_scale, use_causal_mask)
            weights = (weights - sums).exp()
            inner = dy @ values.transpose(2, 3) - (dy * y).sum(-1, keepdim=True)
            scores = weights * inner * attn_scale
            found = scores @ keys, scores.transpose(2, 3) @ queries, weights.transpose(2, 3) @ dy
            for tensor, value in zip(made, found):
                at(tensor)[...] = value.numpy()

        self._operation = run
        return made

    def validate(self) -> None:
        """Check that there is a result."""
        assert self._operation is not None and any(x.output for x in self._tensors)
        self._done.append("validate")

    def build_operation_graph(self) -> None:
        """Follow `validate`."""
        assert self._done == ["validate"]
        self._done.append("build_operation_graph")

    def create_execution_plans(self, modes: list[heur_mode]) -> None:
        """Follow `build_operation_graph`."""
        assert self._done == ["validate", "build_operation_graph"] and modes
        self._done.append("create_execution_plans")

    def deselect_numeric_notes(self, notes: list[numerical_note]) -> None:
        """Leave out plans, of those that there are."""
        assert self._done[-1] == "create_execution_plans"
        assert numerical_note.NONDETERMINISTIC in notes

    def build_plans(self) -> None:
        """Follow `create_execution_plans`."""
        assert self._done[-1] == "create_execution_plans"
        self._done.append("build_plans")

    def get_workspace_size(self) -> int:
        """Return bytes."""
        return WORKSPACE_BYTES

    def execute(self, addresses: dict[int, int], workspace: int, *, handle: dict[str, int]) -> None:
        """Compute."""
        assert self._done[-1] == "build_plans" and handle is self._handle and handle["stream"] >= 0
        assert set(addresses) == {x.uid for x in self._tensors}
        (ctypes.c_uint8 * WORKSPACE_BYTES).from_address(workspace)[:] = [255] * WORKSPACE_BYTES
        self._operation(lambda x: x.at(addresses[x.uid]))


def _convolved(
    kind: str,
    first: np.ndarray[Any, Any],
    second: np.ndarray[Any, Any],
    result: np.ndarray[Any, Any],
    *,
    pre_padding: list[int],
    post_padding: list[int],
    stride: list[int],
    dilation: list[int],
) -> None:
    """Compute one of x, w, y from the two others; gradients are PyTorch's."""
    wide = np.float64 if first.dtype == np.float64 else np.float32
    given = [torch.from_numpy(np.ascontiguousarray(x, wide)) for x in (first, second)]
    unknown = torch.zeros(result.shape, dtype=given[0].dtype, requires_grad=True)
    x, w = {
        "conv_fprop": (given[0], given[1]),
        "conv_dgrad": (unknown, given[1]),
        "conv_wgrad": (given[0], unknown),
    }[kind]
    # After the image there may be more than the last window reads.
    around = [n for pair in reversed(list(zip(pre_padding, post_padding))) for n in pair]
    padded = torch.nn.functional.pad(x, around)
    function = {2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}[len(stride)]
    y = function(padded, w, None, stride, 0, dilation, x.shape[1] // w.shape[1])
    if kind == "conv_fprop":
        result[...] = y.numpy()
    else:
        dy = given[0] if kind == "conv_dgrad" else given[1]
        assert y.shape == dy.shape
        (found,) = torch.autograd.grad(y, unknown, dy)
        result[...] = found.numpy()


def install() -> None:
    """Stand in for the package `cudnn`."""
    sys.modules["cudnn"] = sys.modules[__name__]
