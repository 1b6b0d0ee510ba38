"""Composites that have no kernel of their own: the primitives they are lowered to, in order.

Views are not launched, and what goes into a concatenation is written there. Element-wise
primitives are computed where they are read, all that lie between two launches of others by one
kernel (`elementwise.joined`): a step of a recurrent layer is a product and such a kernel. What is
made on the way has memory that the entry holds, and that serves again after its last reader.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.graph import Node
from soapstone.ir.ops.movement.slicing import slices
from soapstone.ir.spec import operator, operators
from soapstone.kernels.cuda.elementwise.joined import Change, Element, Joined, Operand
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.substrate.arrays import View, array_of, room, views
from soapstone.kernels.entry import Call, Declined
from soapstone.kernels.registry import variant, variants
from soapstone.native.memory import NO_STATUSES, Statuses

LOWERED = "lowered"  # the variant's name


def _lowered(name: str, call: Call) -> DeviceEntry | None:
    """Return the entry of a composite's primitives; None where one of them has no kernel."""
    spec = operator(name)
    assert spec.lower is not None
    builder = GraphBuilder("lowered")
    operands = [
        builder.input(f"in{n}", tuple(map(int, x.shape)), np.dtype(x.dtype).name)
        for n, x in enumerate(call.inputs)
    ]
    given = {key: value for key, value in call.attributes.items() if key in spec.attributes}
    builder.apply(name, *operands, name="whole", **given)
    node = builder.nodes[-1]
    signature = spec.bind([builder.spec(value) for value in operands], node.attributes)
    if not any(dim.kind is Kind.LOWERED for dim in signature.dims):
        return None  # with these attributes it is a primitive
    results = spec.lower(Emitter(builder, node, "lowered."), node)
    return _Composite(call, builder, results).entry(operands)


class _Composite:
    """The launches of a composite under construction.

    Args:
        builder: has the composite as its first node, and then its primitives. results: of them.
    """

    def __init__(self, call: Call, builder: GraphBuilder, results: Sequence[str]) -> None:
        self._call, self._builder, self._results = call, builder, results
        self._nodes = builder.nodes[1:]
        self._read_last = {v: n for n, node in enumerate(self._nodes) for v in node.inputs}
        self._read_last |= dict.fromkeys(results, len(self._nodes))
        self._values: dict[str, Operand] = {}
        self._status: Any = None
        self._statuses: Statuses = NO_STATUSES
        self._used: dict[int, View] = {}  # memory on the way, by its span
        self._until: dict[int, int] = {}
        self._free: list[View] = []
        self._joined = Joined(self._room, lambda view: id(view.span) in self._used)
        self._inputs, self._outputs = views(call)
        self._homes = self._placed()

    def entry(self, operands: Sequence[str]) -> DeviceEntry | None:
        """Return the entry; None where a primitive has no kernel. operands: of the composite."""
        for name, view in zip(operands, self._inputs):
            self._define(name, view)
        for number, node in enumerate(self._nodes):
            self._joined.now = number
            if not self._step(node):
                return None
            self._release(number)
        self._joined.now = len(self._nodes)
        for name, output in zip(self._results, self._outputs):
            value = self._values[name]
            if not _there(value, output):
                self._copy(value, output)
        self._joined.flush()
        return DeviceEntry(tuple(self._joined.launches), self._status, self._statuses)

    def _room(self, shape: Sequence[int], dtype: str, until: int) -> View:
        """Return memory that nobody reads any more, or new one; until: its last reader's step."""
        size = math.prod(shape)
        for number, view in enumerate(self._free):
            if (view.size, view.dtype) == (size, dtype):
                made = self._free.pop(number).reshaped(shape)
                break
        else:
            made = room(shape, dtype, self._call.outputs[0])
        if size:
            self._used[id(made.span)] = made
            self._until[id(made.span)] = until
        return made

    def _release(self, number: int) -> None:
        """Let memory be used again that nothing reads after a step."""
        held = self._joined.holds()
        for span in [s for s in self._used if self._until[s] <= number and s not in held]:
            self._free.append(self._used.pop(span))

    def _placed(self) -> dict[str, View]:
        """Return where values are to be written: as results, as parts of a concatenation, or as
        what is reshaped to one of these."""
        homes = dict(zip(self._results, self._outputs))
        makers = {value: node for node in self._nodes for value in node.outputs}
        free = {v for v, node in makers.items() if node.spec.view in (None, "concat")} - {*homes}
        for node in reversed(self._nodes):
            if node.spec.view == "concat":
                whole = node.outputs[0]
                if whole not in homes:
                    last = self._read_last.get(whole, -1)
                    homes[whole] = self._room(*_form(self._builder, whole), last)
                for value, change in self._parts(node):
                    if value in free:
                        homes[value] = homes[whole].through(change)
                        free.remove(value)
            elif node.spec.view == "reshape" and {node.outputs[0]} <= homes.keys():
                (value,) = {*node.inputs}
                try:
                    seen = homes[node.outputs[0]].reshaped(self._builder.spec(value).shape)
                except Declined:
                    continue
                if value in free:
                    homes[value] = seen
                    free.remove(value)
        return {value: home for value, home in homes.items() if value in makers}

    def _parts(self, node: Node) -> Iterator[tuple[str, Change]]:
        """Yield the parts of a concatenation or a split, and what view of the whole each is."""
        names = node.inputs if node.spec.view == "concat" else node.outputs
        axis = node.attributes["axis"]
        extents = [self._builder.spec(name).shape[axis] for name in names]
        ends = itertools.pairwise(itertools.accumulate(extents, initial=0))
        for name, (begin, end) in zip(names, ends):
            cut = (*(slice(None),) * axis, slice(begin, end), ...)
            yield name, partial(_cut, cut)

    def _define(self, name: str, value: Operand) -> None:
        last = self._read_last.get(name, -1)
        if isinstance(value, Element):
            value.last = max(value.last, last)
        else:
            self._until[id(value.span)] = max(self._until.get(id(value.span), -1), last)
        self._values[name] = value

    def _step(self, node: Node) -> bool:
        """Add a primitive; False where it has no kernel."""
        operands = [self._values[name] for name in node.inputs]
        if node.spec.view == "concat":
            self._concatenate(node)
        elif node.spec.view is not None:
            for name, change in self._changes(node):
                key = node.operator, node.items, name
                self._define(name, self._viewed(operands[0], key, change))
        elif node.spec.elementwise or not (operands or node.spec.inputs):
            (name,) = node.outputs
            shape, dtype = _form(self._builder, name)
            one = Element(node.operator, node.attributes, operands, shape, dtype, self._each(node))
            one.home = self._homes.get(name)
            self._define(name, self._joined.add(one))
        else:
            return self._launch(node, operands)
        return True

    def _changes(self, node: Node) -> Iterator[tuple[str, Change]]:
        """Yield the results of a view, and what view of its operand each is."""
        at = node.attributes
        if node.spec.view == "split":
            yield from self._parts(node)
            return
        changes: dict[str, Change] = {
            "transpose": lambda array: array.transpose(at["permutation"]),
            "slice": lambda array: array[(*slices(at), ...)],
            "reshape": lambda array: array.reshape(at["shape"]),
        }
        assert node.spec.view is not None
        yield node.outputs[0], changes[node.spec.view]

    def _viewed(self, value: Operand, key: Any, change: Change) -> Operand:
        """Return a view of a value; of what is computed where it is read, that of its operands,
        but where these would have to be reshaped, or read across their rows."""
        if not isinstance(value, Element):
            return self._reshaped(value, key, change)
        whole = np.broadcast_to(np.empty((), np.uint8), value.shape)
        long = [extent for extent in value.shape if extent != 1]
        same = [extent for extent in change(whole).shape if extent != 1] == long
        if key[0] in ("split", "slice") or (key[0] == "reshape" and same):
            return self._joined.moved(value, key, change)
        return self._reshaped(self._joined.read(value), key, change)

    def _reshaped(self, view: View, key: Any, change: Change) -> View:
        """Return a view of a view, or of a copy where strides do not allow it."""
        if key[0] != "reshape":
            return view.through(change)
        shape = dict(key[1])["shape"]
        try:
            return view.reshaped(shape)
        except Declined:
            made = self._room(view.shape, view.dtype, self._joined.now)
            return self._joined.read(self._copy(view, made)).reshaped(shape)

    def _copy(self, value: Operand, to: View) -> Element:
        return self._joined.add(Element(None, {}, [value], to.shape, to.dtype, home=to))

    def _concatenate(self, node: Node) -> None:
        """Copy those parts of a concatenation that are not written there; neighbours as one."""
        (name,) = node.outputs
        whole, axis = self._homes[name], node.attributes["axis"]
        parts: list[tuple[Operand, View]] = []
        for each, change in self._parts(node):
            value, to = self._values[each], whole.through(change)
            if _there(value, to) or to.size == 0:
                continue
            if parts and (joined := _beside(parts[-1], (value, to), axis)):
                parts[-1] = joined
            else:
                parts.append((value, to))
        for value, to in parts:
            self._copy(value, to)
        self._define(name, whole)

    def _launch(self, node: Node, operands: Sequence[Operand]) -> bool:
        inputs = [self._joined.read(value) for value in operands]
        for name in node.outputs:
            home = self._homes.get(name)
            form = _form(self._builder, name)
            self._define(name, home or self._room(*form, self._joined.now))
        beside = self._call.outputs[0]
        given = [array_of(view, beside) for view in inputs]
        outputs = [array_of(self._joined.read(self._values[v]), beside) for v in node.outputs]
        precision = self._call.precision
        own = Call(node.operator, node.attributes, (*given,), (*outputs,), precision=precision)
        entry = _first(own, self._builder.nodes[0].operator)
        if entry is None or (self._status is not None and entry.status is not None):
            return False
        if entry.status is not None:
            self._status, self._statuses = entry.status, entry.statuses
        self._joined.launches += entry.counted(self._each(node, whole=True)).launches
        return True

    def _each(self, node: Node, whole: bool = False) -> float:
        """Return the operations of a node, or for one element of what it makes."""
        inputs = [self._builder.spec(value) for value in node.inputs]
        signature = node.spec.bind(inputs, node.attributes)
        flops = node.spec.flops(signature, inputs, node.attributes)
        return flops if whole else flops / max(self._builder.spec(node.outputs[0]).size, 1)


def _form(builder: GraphBuilder, value: str) -> tuple[tuple[int, ...], str]:
    spec = builder.spec(value)
    return spec.shape, spec.dtype


def _cut(place: Any, array: Any) -> Any:
    return array[place]


def _place(view: View) -> Any:
    return id(view.span), view.offset, view.shape, view.strides


def _there(value: Operand, place: View) -> bool:
    """Return whether a value is, or is to be, at a place in memory."""
    home = value.home if isinstance(value, Element) else value
    return home is not None and _place(home) == _place(place)


def _beside(
    one: tuple[Operand, View], other: tuple[Operand, View], axis: int
) -> tuple[Operand, View] | None:
    """Return two copies as one, where both what is copied and its places lie side by side."""
    (value, to), (more, after) = one, other
    if not (isinstance(value, View) and isinstance(more, View) and value.span is more.span):
        return None
    joined = []
    for first, second in ((value, more), (to, after)):
        step = first.strides[axis]
        shapes = [(*v.shape[:axis], *v.shape[axis + 1 :]) for v in (first, second)]
        if second.offset != first.offset + first.shape[axis] * step:
            return None
        if first.strides != second.strides or shapes[0] != shapes[1]:
            return None
        extent = first.shape[axis] + second.shape[axis]
        shape = (*first.shape[:axis], extent, *first.shape[axis + 1 :])
        joined.append(View(first.span, shape, first.strides, first.dtype, first.offset))
    return joined[0], joined[1]


def _first(call: Call, within: str) -> DeviceEntry | None:
    """Return the entry of the first kernel that serves, which is not `within` lowered again."""
    for each in variants(call.operator, "cuda"):
        if call.operator == within and each.name == LOWERED:
            continue
        entry: DeviceEntry | None = each.bind(call)
        if entry is not None:
            return entry
    return None


for _spec in operators():
    if _spec.lower is not None:
        variant(_spec.name, LOWERED, processor="cuda")(partial(_lowered, _spec.name))
