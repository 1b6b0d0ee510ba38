"""The values of a graph that is built from an ONNX file: known constants, and results of operators.

An operator whose operands are all known and small is run at once by its reference (constant
folding), so that chains which compute shapes leave no nodes in the graph. A value whose shape
follows from extents of inputs, such as a mask, is a node of the graph as well if that is wanted,
however small it is. So graphs for different extents have the same nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
from soapstone.frontend.onnx.file.read import Source
from soapstone.frontend.onnx.file.tensors import frozen
from soapstone.frontend.onnx.texts import PLACE, TextSpec, described, tabled
from soapstone.frontend.onnx.values import Extent, Value, Wanted, sized
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array, Role, TensorSpec

if TYPE_CHECKING:
    import onnx

FOLD_BYTES = 1 << 18  # of the results of a folded operator, and of each of its operands
FOLD_POINTS = 1 << 20  # of a folded operator's iteration space
MOST_CONSTANT_BYTES = 1 << 28  # of all that is folded


class Emitter:
    """Makes the values of one graph.

    Args:
        source: the ONNX file.
        keep: returns the name of the weight that a folded constant becomes, given the names taken.
        wanted: what to build for training; by default the file's outputs, with constant weights.
        folds_all: whether operators of known operands are run at once whatever their size.
    """

    def __init__(
        self,
        source: Source,
        keep: Callable[[str, Array, Callable[[str], bool]], str],
        wanted: Wanted | None,
        *,
        folds_all: bool,
    ) -> None:
        self.builder = GraphBuilder(source.name)
        self._keep = keep
        self._wanted = wanted
        self._folds_all = folds_all
        self._placed: dict[int, tuple[Value, str]] = {}
        self._scalars: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._reserved = {*source.weights, *(declared.name for declared in source.inputs)}
        self._made: set[str] = set()
        self._outputs = {declared.name for declared in source.outputs}
        self._folded_bytes = 0
        self._once: dict[tuple[object, ...], Value] = {}  # what several nodes need, by their key
        self.shaped = False  # whether the node at hand is given a number made of extents

    def offered(self, spec: TensorSpec, label: str, name: str, varies: bool = True) -> Value:
        """Return an input of the graph. Texts, which graphs do not have, become a value only.

        varies: whether the model is for other extents of it too, of which notes are taken.
        """
        follows = tuple(
            frozenset([Extent(name, axis, extent, frozenset([(name, axis)]))])
            for axis, extent in enumerate(spec.shape if varies else ())
        )
        made = Value(spec, label, name, follows=follows)
        if not made.is_text:
            made = replace(made, name=self.builder.input(name, spec.shape, spec.dtype))
        return made

    def unknown(self, value: Value, *, apart: bool) -> UnboundError:
        """Return the error that contents of a value have to be known; apart: of `Call.array`."""
        sources = self.sources(value)
        names = ", ".join(map(repr, sources))
        if value.is_text:
            why = "they are text, which no graph holds"
        elif sources:
            why = f"shapes are fixed when a graph is built; they depend on input {names}"
        else:
            why = "shapes are fixed when a graph is built; they depend on values too large to fold"
        return UnboundError(
            f"the contents of {value.label!r} must be known, since {why} (an InferenceSession runs"
            " such a model in pieces)",
            inputs=sources,
            value=value.name,
            apart=apart,
        )

    def known(self, array: Any, label: str, dtype: str | None = None) -> Value:
        """Return a known value.

        Raises:
            OnnxError: all known values together are too large.
        """
        made = frozen(array, dtype)
        self._folded_bytes += made.nbytes
        if self._folded_bytes > MOST_CONSTANT_BYTES:
            raise OnnxError(
                f"value {label!r}: folding found more than {MOST_CONSTANT_BYTES} bytes of constants"
            )
        return Value(described(made), label, None, made)

    def room(self, elements: int, label: str) -> int:
        """Return `elements` if a rule may make so many elements, of 8 bytes each.

        Raises:
            OnnxError: with all known values they are too large.
        """
        if self._folded_bytes + 8 * elements > MOST_CONSTANT_BYTES:
            raise OnnxError(
                f"value {label!r}: {elements} constants of 8 bytes needed;"
                f" {MOST_CONSTANT_BYTES} bytes of constants at most"
            )
        return elements

    def place(self, value: Value) -> str:
        """Return the value's name in the graph; a known value becomes a weight."""
        if value.is_text:
            raise self.unknown(value, apart=True)
        if value.name is not None:
            return value.name
        found = self._placed.get(id(value))
        if found is not None:
            return found[1]
        array = value.array
        if array is None:
            raise OnnxError(f"value {value.label!r} is neither known nor made")
        key = (value.dtype, value.shape, array.tobytes()) if array.nbytes <= 4096 else None
        name = self._scalars.get(key) if key and not value.weight else None
        if name is None:
            name = value.label if value.weight else self._keep(value.label, array, self._taken)
            if not self.builder.has(name):
                self.builder.input(name, value.shape, value.dtype, self._role(value))
            if key and not value.trained:
                self._scalars.setdefault(key, name)
        self._placed[id(value)] = (value, name)
        return name

    def _role(self, value: Value) -> Role:
        """Return the role of a known value that the graph reads."""
        if self._wanted is None:
            return Role.PARAMETER if value.spec.is_float else Role.STATE
        return self._wanted.roles[value.label] if value.trained else Role.CONSTANT

    def untrained(self, value: Value) -> Value:
        """Return a value that is not trained: for a parameter, a constant of its contents."""
        parameter = value.trained and self._role(value) is Role.PARAMETER
        return self.known(value.array, value.label) if parameter else value

    def label(self, node: onnx.NodeProto) -> str:
        """Return the name of a node's operators: that of its output, or in training its own."""
        if self._wanted is not None and node.name:
            return str(node.name)
        return next((str(name) for name in node.output if name), str(node.op_type))

    def once(self, key: tuple[object, ...], make: Callable[[], Value]) -> Value:
        """Return what `make` returns, or returned before for an equal key."""
        if key not in self._once:
            self._once[key] = make()
        return self._once[key]

    def _taken(self, name: str) -> bool:
        return name in self._reserved or name in self._made or name in self._outputs

    def emit(
        self,
        name: str,
        inputs: Sequence[Value],
        attributes: Mapping[str, Any],
        label: str,
        fold: bool = True,
    ) -> tuple[Value, ...]:
        """Return an operator's results: emit it, or run it if its operands are known and small.

        What depends on the extents of inputs is emitted, and also known if it is small.

        Args:
            name: the operator. inputs, attributes: what it is applied to.
            label: the name of its node.
            fold: whether it may be run at once; not if a pass is to recognise it in the graph.

        Raises:
            UnsupportedError: soapstone has no such operator.
        """
        try:
            spec = operator(name)
        except GraphError:
            raise UnsupportedError(f"soapstone has no operator {name!r}") from None
        if any(value.is_text for value in inputs):
            return self._emit_places(name, inputs, attributes, label)
        known: tuple[Value, ...] = ()
        if fold and all(value.array is not None and not value.trained for value in inputs):
            items = spec.normalise(attributes)
            signature = spec.bind([value.spec for value in inputs], items)
            made = signature.output_specs
            points = math.prod(max(dim.extent, 1) for dim in signature.dims)
            most = max([s.nbytes for s in made] + [v.spec.nbytes for v in inputs], default=0)
            if self._folds_all or (most <= FOLD_BYTES and points <= FOLD_POINTS):
                arrays = [value.array for value in inputs if value.array is not None]
                with np.errstate(all="ignore"):
                    results = spec.run(items, *arrays)
                known = tuple(self.known(r, label, s.dtype) for r, s in zip(results, made))
                if not self._along_extents(inputs):
                    return known
        base = label
        while base in self._reserved:
            base += "_"
        names = self.builder.apply(
            name, *(self.place(value) for value in inputs), name=base, **attributes
        )
        self._made.update(names)
        if known:
            return tuple(replace(value, name=name) for value, name in zip(known, names))
        specs = [sized(self.builder.spec(name), f"value {label!r}") for name in names]
        return tuple(Value(spec, label, name) for spec, name in zip(specs, names))

    def _along_extents(self, inputs: Sequence[Value]) -> bool:
        """Return whether what known operands make may go along extents of inputs.

        Numbers that are made of these do not, whose results are numbers too.
        """
        if self._folds_all or any(value.of_extents for value in inputs):
            return False
        return self.shaped or any(value.name is not None for value in inputs)

    def _emit_places(
        self, name: str, inputs: Sequence[Value], attributes: Mapping[str, Any], label: str
    ) -> tuple[Value, ...]:
        """Apply an operator that moves or compares texts to their places in a table of all."""
        texts = [value for value in inputs if value.is_text]
        parts = []
        for value in texts:
            held = value.array if value.table is None else value.table
            if held is None:
                raise self.unknown(value, apart=True)
            parts.append(held)
        table, places = tabled(parts)
        operands = list(inputs)
        for value, place in zip(texts, places):
            known = self.known(place, label)
            if value.table is not None:
                at = replace(value, spec=TensorSpec(value.shape, PLACE), table=None)
                (known,) = self.emit("gather", (known, at), {"axis": 0}, label)
            operands[operands.index(value)] = known
        folds_all = self._folds_all
        self._folds_all = folds_all or all(value.array is not None for value in operands)
        try:
            made = self.emit(name, operands, attributes, label)
        finally:
            self._folds_all = folds_all
        return tuple(self._text(each, table) if each.dtype == PLACE else each for each in made)

    def _text(self, places: Value, table: Array) -> Value:
        if places.array is not None:
            return self.known(table[places.array], places.label)
        return replace(places, spec=TextSpec(places.shape), table=table)

    def sources(self, value: Value) -> tuple[str, ...]:
        """Return the graph inputs that a value depends on."""
        graph = self.builder.build()
        inputs = set(graph.inputs(Role.INPUT))
        seen: set[str] = set()
        todo = [value.name] if value.name else []
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                if name in graph.producers:
                    todo += graph.producers[name].inputs
        return tuple(name for name in graph.roles if name in seen & inputs)

    def graph(self, outputs: Sequence[tuple[str, Value]]) -> Graph:
        """Return the graph with its outputs under the names of the file, without unused parts."""
        renamed: dict[str, str] = {}
        for name, value in outputs:
            made = self.place(value)
            kept = value.name is None or made in renamed or made in self._reserved
            if made in renamed or (made != name and kept):
                made = self.builder.apply("reshape", made, shape=value.shape)[0]
            renamed[made] = name
        self.builder.output(*renamed)
        taken = set(renamed.values())
        for other in self.builder.build().tensors:
            if other in taken and other not in renamed:
                renamed[other] = self.builder.unique(f"{other}.inner")
        return _without_unread(self.builder.build().pruned(), Role.INPUT).renamed(renamed)

    def piece(self, outputs: Iterable[str]) -> Graph:
        """Return the graph of some of the values made, with those inputs that they need."""
        self.builder.output(*outputs)
        return _without_unread(self.builder.build().pruned())


def _without_unread(graph: Graph, *kept: Role) -> Graph:
    """Return the graph without what no node makes or reads, but for some roles."""
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    roles = {n: r for n, r in graph.roles.items() if r in kept or n in read}
    unread = graph.roles.keys() - roles.keys()
    tensors = {name: spec for name, spec in graph.tensors.items() if name not in unread}
    return replace(graph, roles=roles, tensors=tensors)
