"""Whether a model can fit a machine's memories at all."""

from __future__ import annotations

import math

import numpy as np

from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.search.parallel.problem.operators import Operator, ParallelError
from soapstone.search.parallel.problem.prepare import Model

SHOWN = 4  # tensors that an error names


def check_capacity(model: Model) -> None:
    """Raise ParallelError, naming tensors and bytes, if no configuration of a model can fit.

    Parameters and states stay for good, spread over all devices at best; a point of an operator
    needs its operands on one device, cut as finely as its dims and the devices allow.
    """
    devices = model.problem.devices
    capacity = devices["capacity"]
    graph = model.graph
    lasting = [name for name, role in graph.roles.items() if role in (Role.PARAMETER, Role.STATE)]
    _, first = np.unique(devices["memory"], return_index=True)
    needed, there = sum(graph.tensors[name].nbytes for name in lasting), int(capacity[first].sum())
    if needed > there:
        raise ParallelError(
            f"graph {graph.name!r}: parameters and states of {_size(needed)} found, the"
            f" {len(capacity)} devices of {model.machine.name!r} hold {_size(there)},"
            f" {_size(needed - there)} are missing; the largest: {_largest(graph, lasting)}"
        )
    most = int(capacity.max())
    for item in model.operators:
        least = _least(model, item)
        if least > most:
            names = list(dict.fromkeys((*item.node.inputs, *item.node.outputs)))
            raise ParallelError(
                f"{item.node.label}: {_size(least)} needed by its smallest point task, a device of"
                f" {model.machine.name!r} holds {_size(most)}, {_size(least - most)} are missing;"
                f" the largest: {_largest(graph, names)}"
            )


def _least(model: Model, item: Operator) -> int:
    """Return fewer bytes than any point task of an operator needs at once."""
    graph, devices = model.graph, len(model.machine.processors)
    signature = graph.signature(item.node)
    total = 0
    for name, operand in (
        *zip(item.node.inputs, signature.inputs),
        *zip(item.node.outputs, signature.outputs),
    ):
        extents = [max(signature.by_name[dim].extent, 1) for dim in operand.dims]
        gathered = any(getattr(axis, "gathered", False) for axis in operand.axes)
        if not gathered:
            total += graph.tensors[name].nbytes // min(devices, math.prod(extents))
    return total


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _largest(graph: Graph, names: list[str]) -> str:
    found = sorted(names, key=lambda name: -graph.tensors[name].nbytes)[:SHOWN]
    return ", ".join(f"{name} {_size(graph.tensors[name].nbytes)}" for name in found)
