"""cuDNN through NVIDIA's frontend: a graph is planned once for a form of call, then enqueued.

None of this has run on a device yet. That cuDNN has plans for the graphs is tested without one,
for a GPU that is only described.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol

from soapstone.kernels.cuda.entry import DeviceEntry, Expected
from soapstone.kernels.cuda.libraries.device import (
    address,
    alignment,
    attempted,
    current,
    imported,
    is_described,
    number,
    workspace,
)
from soapstone.kernels.cuda.libraries.images import Convolution, Tensor
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.entry import TF32

MOST_ELEMENTS = 2**31 - 1  # from a tensor's first to its last: not all of cuDNN counts further
ALIGNED_BYTES = 16  # what cuDNN takes addresses to be multiples of
_INSTEAD = "kernels of soapstone's own compute convolutions and attention"
_TYPES = {"float16": "HALF", "bfloat16": "BFLOAT16", "float32": "FLOAT", "float64": "DOUBLE"}


@cache
def bindings() -> Any:
    """Return the module `cudnn`, or None: it is not installed, or cannot be used."""
    return imported("cudnn", "backend_version", "cuDNN", _INSTEAD)


@cache
def handle(device: int) -> Any:
    """Return what calls are made with on the GPU that is current, by its number, or None."""
    return attempted(bindings().create_handle, f"cuDNN on GPU {device}", _INSTEAD)


@dataclass(frozen=True)
class Graph:
    """A graph of cuDNN's. operands, results: the numbers of its tensors, in order."""

    graph: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def plan(self, kind: str, precision: str) -> None:
        """Let cuDNN find how it is run: exactly, unless precision is TF32, and always alike.

        kind: the element type of operands.

        Raises:
            Exception: there is no way.
        """
        modes, notes = bindings().heur_mode, bindings().numerical_note
        graph = self.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        unwanted = [notes.NONDETERMINISTIC, notes.DOWN_CONVERT_INPUTS]
        unwanted.append(notes.REDUCED_PRECISION_REDUCTION)
        if kind == "float32" and precision != TF32:
            unwanted.append(notes.TENSOR_CORE)
        graph.deselect_numeric_notes(unwanted)
        graph.build_plans()


def started(kind: str, **where: Any) -> Any:
    """Return an empty graph of tensors of an element type, computed in single precision or double.

    where: the handle that it is for, or `device_property` of a GPU that is only described.
    """
    types = bindings().data_type
    own = getattr(types, _TYPES[kind])
    compute = types.DOUBLE if kind == "float64" else types.FLOAT
    return bindings().pygraph(
        io_data_type=own, intermediate_data_type=compute, compute_data_type=compute, **where
    )


def convolving(of: Convolution, kind: str, **where: Any) -> Graph:
    """Return the graph of a convolution or a gradient, not planned yet; see `started`."""
    graph = started(kind, **where)
    operands = [tensor(graph, each, kind) for each in of.operands]
    made = getattr(graph, of.kind)(
        *operands,
        pre_padding=list(of.pre_padding),
        post_padding=list(of.post_padding),
        stride=list(of.stride),
        dilation=list(of.dilation),
    )
    return Graph(graph, uids(operands), (result(made, of.result, kind),))


def tensor(graph: Any, of: Tensor, kind: str) -> Any:
    """Return an operand of a graph."""
    own = getattr(bindings().data_type, _TYPES[kind])
    return graph.tensor(dim=list(of.dim), stride=list(of.stride), data_type=own)


def result(made: Any, of: Tensor, kind: str) -> int:
    """Say where and as what a graph's result is stored, and return its number."""
    made.set_output(True).set_data_type(getattr(bindings().data_type, _TYPES[kind]))
    made.set_dim(list(of.dim)).set_stride(list(of.stride))
    return int(made.get_uid())


def uids(tensors: list[Any]) -> tuple[int, ...]:
    """Return the numbers of a graph's tensors."""
    return tuple(int(each.get_uid()) for each in tensors)


Make = Callable[..., Graph]


class Extents(Hashable, Protocol):
    """What is described: as products, see `Expected.extents`."""

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """How many, rows, columns, and terms of a sum."""


@lru_cache(maxsize=1024)
def planned(make: Make, of: Hashable, kind: str, precision: str, device: int) -> Graph | None:
    """Return the planned graph of what is described, or None: cuDNN has no way to compute it.

    make: the function of a description, an element type and a handle that returns its graph.
    device: the number of the GPU that is current, which it is planned for.
    """
    lacks = bindings().cudnnGraphNotSupportedError, NotImplementedError, RuntimeError, ValueError
    if handle(device) is None:
        return None
    try:
        found = make(of, kind, handle=handle(device))
        found.plan(kind, precision)
    except lacks:
        return None
    return found


@dataclass(frozen=True)
class Executed:
    """A graph on the addresses of its tensors, by number. `keep`: what has to live as long."""

    graph: Any
    handle: Any
    addresses: Mapping[int, int]
    workspace: int
    keep: tuple[Any, ...]

    def enqueue(self, stream: Any = 0) -> None:
        """Put the graph on a stream, and return."""
        bindings().set_stream(self.handle, number(stream))
        self.graph.execute(dict(self.addresses), self.workspace, handle=self.handle)


def executed(
    make: Make,
    of: Extents,
    precision: str,
    operands: Sequence[View],
    results: Sequence[View],
    singles: Sequence[View] = (),
) -> DeviceEntry | None:
    """Return the entry of what is described, or None where cuDNN does not serve it.

    make: see `planned`. operands, and the first of the results: of one element type. singles:
    operands after these, of float32.
    """
    views, kind = (*operands, *singles, *results), operands[0].dtype
    if kind not in _TYPES or any(view.dtype != kind for view in (*operands, results[0])):
        return None
    if any(view.reach > MOST_ELEMENTS for view in views):
        return None
    if any(map(is_described, views)):
        spans = tuple(view.span for view in views)
        return DeviceEntry((Expected("cudnn", of.extents, kind, spans),))
    addresses = [address(view) for view in views]
    if alignment(*addresses) < ALIGNED_BYTES:
        return None
    device = current()
    found = planned(make, of, kind, precision, device)
    if found is None:
        return None
    room, held = workspace(int(found.graph.get_workspace_size()), operands[0])
    given = dict(zip((*found.operands, *found.results), addresses, strict=True))
    keep = (*(view.span for view in views), held)
    return DeviceEntry((Executed(found.graph, handle(device), given, room, keep),))
