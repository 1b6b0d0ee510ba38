"""What is known of a launch without running it: its key, its work, its operands as arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.engine.expand import NodeLaunch
from soapstone.engine.lower import in_place
from soapstone.engine.prepare import Prepared
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Arrays, TensorSpec
from soapstone.kernels.entry import Call
from soapstone.native.arrays import strided
from soapstone.native.memory import aligned
from soapstone.native.walks import in_places

Key = tuple[Any, ...]
Make = Callable[[TensorSpec, tuple[int, ...]], Array]  # an array of a spec in an axis order


def keys(prepared: Prepared) -> list[Key]:
    """Return for each launched node what its time depends on, names left out."""
    tensors, layouts = prepared.graph.tensors, prepared.strategy.layouts
    places: dict[str, Key] = {}

    def place(name: str) -> Key:
        if name in prepared.constants:
            return ("constant", tensors[name])
        view = prepared.seen.get(name)
        if view is None:
            return (tensors[name], layouts.get(name))
        return (tensors[view.root], layouts.get(view.root), replace(view, root=""))

    found = []
    for node in prepared.nodes:
        operands = (*node.inputs, *node.outputs)
        for name in operands:
            if name not in places:
                places[name] = place(name)
        inputs = node.inputs
        same = () if len(set(inputs)) == len(inputs) else tuple(map(inputs.index, inputs))
        where = tuple([places[name] for name in operands])
        found.append((node.operator, node.items, len(inputs), same, where))
    return found


def work(graph: Graph, node: Node) -> tuple[float, float]:
    """Return a launch's arithmetic operations, and the bytes that it reads and writes."""
    operands = dict.fromkeys((*node.inputs, *node.outputs))
    nbytes = float(sum(graph.tensors[name].nbytes for name in operands))
    return graph.flops(node), nbytes


def call(
    prepared: Prepared, launch: NodeLaunch, threads: int, make: Make, constants: Arrays
) -> Call:
    """Return a launch as a call on arrays that `make` makes, where the executor has its own.

    constants: contents of those constants that a kernel may have to look at.
    """
    tensors, layouts = prepared.graph.tensors, prepared.strategy.layouts
    roots: dict[str, Array] = {}

    def root(name: str) -> Array:
        if name not in roots:
            spec = tensors[name]
            roots[name] = make(spec, layouts.get(name) or tuple(range(spec.rank)))
        return roots[name]

    arrays = []
    for argument in launch.arguments:
        box: tuple[Any, ...] = tuple(slice(a, b) for a, b in zip(argument.lo[0], argument.hi[0]))
        arrays.append(root(argument.region)[(*box, ...)])
    fixed = {}
    for operand in launch.inputs:
        name = operand.constant
        if name is not None:
            spec = tensors[name]
            known = constants.get(name) if not spec.is_float else None
            fixed[name] = known if known is not None else make(spec, tuple(range(spec.rank)))
    inputs, outputs = (
        tuple(operand.array(0, arrays, fixed) for operand in side)
        for side in (launch.inputs, launch.outputs)
    )
    numbers = frozenset(i for i, o in enumerate(launch.inputs) if o.constant is not None)
    return Call(launch.node.operator, launch.attributes(0), inputs, outputs, threads, numbers)


def hollow(spec: TensorSpec, order: tuple[int, ...]) -> Array:
    """Return an array with a value's shape and strides and one element of memory."""
    dtype = np.dtype(spec.dtype)
    strides, step = [0] * spec.rank, dtype.itemsize
    for axis in reversed(order):
        strides[axis] = step
        step *= max(spec.shape[axis], 1)
    return strided(np.empty(1, dtype), spec.shape, strides)


def filled(spec: TensorSpec, order: tuple[int, ...]) -> Array:
    """Return an array of numbers in [0.1, 1.1), zeros for integers, on a cache line's bound."""
    dtype = np.dtype(spec.dtype)
    flat = aligned(spec.nbytes, zero=True).view(dtype)
    if spec.is_float:
        flat[:] = np.resize(_NUMBERS, flat.shape)
    elif kind_of(dtype) == "b":
        flat[:] = True
    return in_places(flat.reshape([spec.shape[axis] for axis in order]), order)


_NUMBERS = np.random.default_rng(0).random(10_007, np.float32) + np.float32(0.1)


def peak_bytes(prepared: Prepared) -> int:
    """Return the most bytes of values alive at once; inputs and outputs of the graph always are."""
    graph, nodes = prepared.graph, prepared.nodes
    aliases = in_place(graph)

    def root(name: str) -> str:
        view = prepared.seen.get(name)
        return aliases.get(view.root if view else name, view.root if view else name)

    stored = {root(name) for name in (*graph.roles, *graph.outputs)} - prepared.constants
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for step, node in enumerate(nodes):
        for name in map(root, (*node.inputs, *node.outputs)):
            if name not in prepared.constants and name not in stored:
                first.setdefault(name, step)
                last[name] = step
    changes = [0] * (len(nodes) + 1)
    for name, step in first.items():
        nbytes = graph.tensors[name].nbytes
        changes[step] += nbytes
        changes[last[name] + 1] -= nbytes
    peak = alive = 0
    for change in changes:
        alive += change
        peak = max(peak, alive)
    return peak + sum(graph.tensors[name].nbytes for name in stored)
