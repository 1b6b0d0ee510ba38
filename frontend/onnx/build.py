"""Builds a graph of an ONNX model for given extents of its symbolic dims.

Nodes are taken in the file's order. A value is known (a weight, or folded) or made by the graph; an
operator whose operands are all known and small is run at once by its reference, so chains that
compute shapes leave nothing behind. Functions are expanded where they are called, branches of a
known condition are taken and loops of a known count unrolled, all under limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.declared import entry_of
from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
from soapstone.frontend.onnx.even import Note, followed
from soapstone.frontend.onnx.read import Declared, Source
from soapstone.frontend.onnx.schema import (
    check_call,
    default_attributes,
    function_of,
    remember,
    schema,
)
from soapstone.frontend.onnx.support import name_of, unsupported
from soapstone.frontend.onnx.tensors import array_of, frozen
from soapstone.frontend.onnx.texts import PLACE, TextSpec, described, is_text, spec_as, tabled
from soapstone.frontend.onnx.values import RULES, Scope, Slot, Value, Wanted, domain_of, sized
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.spec import operator, operator_of_onnx
from soapstone.ir.tensor import Array, Role, TensorSpec

if TYPE_CHECKING:
    import onnx

FOLD_BYTES = 1 << 18  # of the results of a folded operator, and of each of its operands
FOLD_POINTS = 1 << 20  # of a folded operator's iteration space
MOST_CONSTANT_BYTES = 1 << 28  # of all that is folded
MOST_STEPS = 50_000  # nodes, once functions are expanded and loops unrolled
MOST_DEPTH = 24  # of functions and subgraphs inside one another

_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError)


class Importer:
    """Builds one graph.

    Args:
        source: the file. dims: extents of symbolic dims. contents: of inputs that shapes depend on.
        keep: gives a folded constant the name of a weight, given what is taken.
        wanted: what is built for training; by default the file's outputs, of weights that stay.
        generators: of random numbers, by node, where one is carried out between pieces: then all
            operators of known operands are run at once, not the small ones only.
    """

    def __init__(
        self,
        source: Source,
        dims: Mapping[str, int],
        contents: Mapping[str, Array],
        keep: Callable[[str, Array, Callable[[str], bool]], str],
        wanted: Wanted | None = None,
        *,
        generators: dict[Hashable, np.random.RandomState] | None = None,
    ) -> None:
        self.source = source
        self.builder = GraphBuilder(source.name)
        self._dims = dims
        self._contents = contents
        self._keep = keep
        self._wanted = wanted
        self.generators = generators
        self._folds_all = generators is not None
        self._placed: dict[int, tuple[Value, str]] = {}
        self._scalars: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._reserved = {*source.weights, *(declared.name for declared in source.inputs)}
        self._made: set[str] = set()
        self._outputs = {declared.name for declared in source.outputs}
        self._folded_bytes = 0
        self._steps = 0
        self.notes: list[Note] = []  # of what is done with extents
        self._once: dict[tuple[object, ...], Value] = {}  # what several nodes need, by their key

    def build(self) -> Graph:
        """Return the graph.

        Raises:
            UnboundError: a symbolic dim has no extent, or a shape depends on an input's contents.
            OnnxError: a node is not legal or not supported; names it.
        """
        scope = Scope(opsets=self.source.opsets)
        for declared in self.source.inputs:
            scope.values[declared.name] = self._input(declared)
        wanted = self._wanted
        for name, array in self.source.weights.items():
            trained = wanted is not None and name in wanted.roles
            scope.values[name] = Value(described(array), name, None, array, True, trained)
        nodes = self.source.graph.node
        self.run(nodes if wanted is None else needed(nodes, wanted.outputs), scope)
        types = {declared.name: declared.dtype for declared in self.source.outputs}
        for declared in self.source.outputs if wanted is None else ():
            _check_tensor("output", declared)
        outputs: list[tuple[str, Value]] = []
        for name in types if wanted is None else wanted.outputs:
            slot = scope.find(name)
            if not isinstance(slot, Value):
                raise OnnxError(f"output {name!r} is made by no node")
            if slot.dtype != types.get(name, slot.dtype):
                raise OnnxError(f"output {name!r}: {slot.dtype} found, {types[name]} declared")
            outputs.append((name, slot))
        remember()
        return self._finish(outputs)

    def _input(self, declared: Declared) -> Value:
        _check_tensor("input", declared)
        shape = []
        for axis, extent in enumerate(declared.shape):
            if isinstance(extent, str):
                if extent not in self._dims:
                    raise UnboundError(
                        f"input {declared.name!r}: axis {axis} is the symbolic dim {extent!r};"
                        " its extent is needed in dims",
                        dims=(extent,),
                    )
                extent = int(self._dims[extent])
                if extent < 0:
                    raise OnnxError(f"dims: {extent} found for {declared.shape[axis]!r}")
            shape.append(extent)
        spec = sized(spec_as(shape, declared.dtype), f"input {declared.name!r}")
        given = self._contents.get(declared.name)
        if given is None:
            return self.offered(spec, declared.name, declared.name)
        if described(given) != spec:
            raise OnnxError(
                f"contents of input {declared.name!r}: {described(given)} found, {spec}"
            )
        if not is_text(given):
            self.builder.input(declared.name, spec.shape, spec.dtype)
        return self.known(given, declared.name)

    # Values

    def offered(self, spec: TensorSpec, label: str, name: str) -> Value:
        """Return an input of the graph; of texts, which the graph does not have, a value alone."""
        follows = tuple(frozenset([(name, *each, False)]) for each in enumerate(spec.shape))
        made = Value(spec, label, name, follows=follows)
        return (
            made
            if made.is_text
            else replace(made, name=self.builder.input(name, spec.shape, spec.dtype))
        )

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
        """Return a number of elements of 8 bytes that a rule is about to make.

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
        """Return a value that no gradient changes: of a parameter a constant of its contents."""
        parameter = value.trained and self._role(value) is Role.PARAMETER
        return self.known(value.array, value.label) if parameter else value

    def label(self, node: onnx.NodeProto) -> str:
        """Return what operators of a node are called: as its output, or for training as itself."""
        if self._wanted is not None and node.name:
            return str(node.name)
        return next((str(name) for name in node.output if name), str(node.op_type))

    def once(self, key: tuple[object, ...], make: Callable[[], Value]) -> Value:
        """Return what `make` makes, or has made for an equal key of the same values before."""
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
        """Apply an operator, or run it at once where its operands are known and small.

        fold: whether it may be run; what is to be recognised in the graph is not.

        Raises:
            UnsupportedError: soapstone has no such operator.
        """
        try:
            spec = operator(name)
        except GraphError:
            raise UnsupportedError(f"soapstone has no operator {name!r}") from None
        if any(value.is_text for value in inputs):
            return self._emit_places(name, inputs, attributes, label)
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
                return tuple(self.known(r, label, s.dtype) for r, s in zip(results, made))
        base = label
        while base in self._reserved:
            base += "_"
        names = self.builder.apply(
            name, *(self.place(value) for value in inputs), name=base, **attributes
        )
        self._made.update(names)
        specs = [sized(self.builder.spec(name), f"value {label!r}") for name in names]
        return tuple(Value(spec, label, name) for spec, name in zip(specs, names))

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

    # Nodes

    def run(self, nodes: Iterable[onnx.NodeProto], scope: Scope) -> None:
        """Translate nodes in order; their results stand in the scope afterwards."""
        if scope.depth > MOST_DEPTH:
            raise OnnxError(
                f"functions and subgraphs {scope.depth} deep found, {MOST_DEPTH} at most"
            )
        for position, node in enumerate(nodes):
            self.step(node, position, scope)

    def step(self, node: onnx.NodeProto, position: int, scope: Scope) -> None:
        """Translate one node, the `position`-th of its graph; errors name it."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise OnnxError(f"more than {MOST_STEPS} nodes, once expanded")
        with placed(node, position, scope.prefix):
            self._node(node, scope)

    def _node(self, node: onnx.NodeProto, scope: Scope) -> None:
        inputs: list[Slot | None] = []
        for name in node.input:
            slot = scope.find(name) if name else None
            if name and slot is None:
                if name in self.source.unsupported:
                    raise UnsupportedError(str(self.source.unsupported[name]))
                raise OnnxError(
                    f"input {name!r} is not made before it is used: it is missing, or in a cycle"
                )
            inputs.append(slot)
        while inputs and inputs[-1] is None:
            inputs.pop()
        held = self.source.constants.get(id(node))
        results = held[1] if held else self._call(node, tuple(inputs), scope)
        if node.op_type == "Constant" and not (scope.depth or held):  # its attribute is its own
            self.source.constants[id(node)] = node, results
        if (domain_of(node.domain), node.op_type) not in self.source.functions:
            results, note = followed(node, inputs, results)
            if note is not None:
                self.notes.append(note)
        for name, result in zip(node.output, results):
            if not name:
                continue
            if result is None:
                raise UnsupportedError(f"output {name!r} is not supported")
            if name in scope.values:
                raise OnnxError(f"output {name!r} exists already")
            scope.values[name] = result
        for name in node.output[len(results) :]:
            if name:
                raise UnsupportedError(f"output {name!r} is not supported")

    def _call(
        self, node: onnx.NodeProto, inputs: tuple[Slot | None, ...], scope: Scope
    ) -> Sequence[Slot | None]:
        key = (domain_of(node.domain), node.op_type)
        local = self.source.functions.get(key)
        if local is not None:
            opsets = {domain_of(o.domain): int(o.version) for o in local.opset_import}
            return self.expand(local, node, inputs, scope, opsets or scope.opsets)
        version = scope.opsets.get(key[0])
        if version is None:
            raise OnnxError(f"domain {node.domain!r} is not imported by the model")
        spec, known = operator_of_onnx(key[1], key[0]), schema(*key, version) is not None
        declared_here = spec is not None and key[0] and entry_of(spec).version == version
        if not known and key not in RULES and not declared_here:
            domain = repr(node.domain or "ai.onnx")
            label = f"operator {node.op_type!r} of domain {domain}, opset {version}"
            raise self._lacking(node, label)
        call = Call(self, node, inputs, scope, version)
        if known:
            check_call(key[0], key[1], version, call.attributes, inputs, node)
        translate = RULES.get(key)
        failure: UnsupportedError | None = None
        if translate is not None or spec is not None:
            try:
                result = translate(call) if translate is not None else call.declared()
                if result is not NotImplemented:
                    return [result] if isinstance(result, Value) else result
            except UnsupportedError as error:
                failure = error
        if not known:  # a rule of an operator that ONNX does not declare
            raise failure or self._lacking(node)
        types = [None if slot is None else call.value(at).spec for at, slot in enumerate(inputs)]
        body = function_of(key[0], key[1], version, call.bound(), types)
        if body is not None:
            opsets = {domain_of(o.domain): int(o.version) for o in body.opset_import}
            defaults = default_attributes(*key, version)
            return self.expand(body, node, inputs, scope, {**scope.opsets, **opsets}, defaults)
        raise failure or self._lacking(node)

    def _lacking(self, node: onnx.NodeProto, label: str = "this operator") -> UnsupportedError:
        """Return the error that names all operators of the file that are not supported."""
        others = [name for name in unsupported(self.source) if name != name_of(node)]
        nor = f", nor are {', '.join(others)}" if others else ""
        return UnsupportedError(
            f"{label} is not supported{nor}; a function of the model may define it, or an operator"
            " of a package of your own (docs/onnx.md)"
        )

    def expand(
        self,
        body: onnx.FunctionProto,
        node: onnx.NodeProto,
        inputs: tuple[Slot | None, ...],
        scope: Scope,
        opsets: Mapping[str, int],
        defaults: Mapping[str, onnx.AttributeProto] = MappingProxyType({}),
    ) -> Sequence[Slot | None]:
        """Return what a function's body makes of these inputs."""
        nodes, inner = self.entered(body, node, inputs, scope, opsets, defaults)
        inner.values.update((n, slot) for n, slot in zip(body.input, inputs) if slot is not None)
        self.run(nodes, inner)
        return [inner.find(name) for name in body.output[: len(node.output)]]

    def entered(
        self,
        body: onnx.FunctionProto,
        node: onnx.NodeProto,
        inputs: Sequence[object | None],
        scope: Scope,
        opsets: Mapping[str, int],
        defaults: Mapping[str, onnx.AttributeProto] = MappingProxyType({}),
    ) -> tuple[Sequence[onnx.NodeProto], Scope]:
        """Return the nodes of a function's body as a node calls it, and their scope, still empty.

        inputs: of the node; it matters here which of them are None.
        """
        key = (domain_of(body.domain), body.name)
        if key in scope.calls:
            raise OnnxError(f"function {body.name!r} calls itself")
        given = dict(defaults) | {a.name: a for a in body.attribute_proto}
        given |= Call(self, node, (), scope, 0).attributes
        inner = Scope(
            opsets=opsets,
            attributes=given,
            calls=(*scope.calls, key),
            depth=scope.depth + 1,
            prefix=f"{scope.prefix}function {body.name!r}: ",
        )
        # Inputs that are left out are empty names inside.
        absent = set(body.input) - {n for n, each in zip(body.input, inputs) if each is not None}
        return body.node if not absent else [_without(n, absent) for n in body.node], inner

    def subgraph(
        self, graph: onnx.GraphProto, scope: Scope, arguments: Sequence[Slot], label: str
    ) -> list[Slot]:
        """Return the outputs of a subgraph for these arguments."""
        if len(arguments) != len(graph.input):
            raise OnnxError(f"{label}: {len(arguments)} inputs given, {len(graph.input)} needed")
        inner = Scope(
            values=dict(zip((v.name for v in graph.input), arguments)),
            outer=scope,
            opsets=scope.opsets,
            attributes=scope.attributes,
            calls=scope.calls,
            depth=scope.depth + 1,
            prefix=f"{scope.prefix}{label}: ",
        )
        for tensor in graph.initializer:
            inner.values[tensor.name] = self.known(array_of(tensor), tensor.name)
        self.run(graph.node, inner)
        outputs = []
        for output in graph.output:
            slot = inner.find(output.name)
            if slot is None:
                raise OnnxError(f"{label}: output {output.name!r} is made by no node")
            outputs.append(slot)
        return outputs

    # The end

    def _finish(self, outputs: Sequence[tuple[str, Value]]) -> Graph:
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


def _check_tensor(what: str, declared: Declared) -> None:
    if declared.holds:
        raise UnboundError(
            f"{what} {declared.name!r}: {' '.join(declared.holds)} found, and a graph has tensors"
            " alone (an InferenceSession runs such a model in pieces)",
            value=declared.name,
            apart=True,
        )


def needed(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that make some values, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= read_by(node)
    return found[::-1]


def read_by(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node reads, its subgraphs among them."""
    graphs = [graph for a in node.attribute for graph in a.graphs]
    graphs += [a.g for a in node.attribute if a.HasField("g")]
    inner = (read_by(each) for graph in graphs for each in graph.node)
    ends = (value.name for graph in graphs for value in graph.output)
    return set(node.input).union(ends, *inner)


def _without_unread(graph: Graph, *kept: Role) -> Graph:
    """Return the graph without what no node makes or reads, but for some roles."""
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    roles = {n: r for n, r in graph.roles.items() if r in kept or n in read}
    unread = graph.roles.keys() - roles.keys()
    tensors = {name: spec for name, spec in graph.tensors.items() if name not in unread}
    return replace(graph, roles=roles, tensors=tensors)


@contextmanager
def placed(node: onnx.NodeProto, position: int, prefix: str) -> Iterator[None]:
    """Let errors inside be `OnnxError`s that name a node, the `position`-th of its graph."""
    label = f"{prefix}{title(node, position)}"
    try:
        yield
    except OnnxError as error:
        if not getattr(error, "placed", False):
            error.args = (f"{label}: {error}",)
            error.placed = True  # type: ignore[attr-defined]
        raise
    except GraphError as error:
        raise _placed(label, str(error)) from None
    except RecursionError:
        raise _placed(label, "nested too deeply") from None
    except _MALFORMED as error:  # an attribute or operand that no check foresaw
        raise _placed(label, f"malformed: {error}") from error


def title(node: onnx.NodeProto, position: int) -> str:
    """Return how errors call a node, the `position`-th of its graph."""
    name = f"node {node.name!r}" if node.name else f"node {position}"
    return f"{name} ({node.op_type})"


def _placed(label: str, text: str) -> OnnxError:
    """Return an error that says which node it is of."""
    error = OnnxError(f"{label}: {text}")
    error.placed = True  # type: ignore[attr-defined]
    return error


def _without(node: onnx.NodeProto, absent: set[str]) -> onnx.NodeProto:
    if not absent.intersection(node.input):
        return node
    copy = type(node)()
    copy.CopyFrom(node)
    copy.input[:] = ["" if name in absent else name for name in node.input]
    return copy
