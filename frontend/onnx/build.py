"""Builds a graph of an ONNX model for given extents of its symbolic dims.

Nodes are taken in the file's order. Functions are expanded where they are called, branches of a
known condition are taken and loops of a known count unrolled, all under limits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.declared import entry_of
from soapstone.frontend.onnx.emit import Emitter
from soapstone.frontend.onnx.errors import OnnxError, UnboundError, UnsupportedError
from soapstone.frontend.onnx.extent_notes import UNEVEN, Note, marked
from soapstone.frontend.onnx.file.read import Declared, Source
from soapstone.frontend.onnx.file.schema import (
    check_call,
    default_attributes,
    function_of,
    remember,
    schema,
)
from soapstone.frontend.onnx.file.tensors import array_of
from soapstone.frontend.onnx.nodes import needed, placed, without
from soapstone.frontend.onnx.support import INSTEAD, operator_name, unsupported
from soapstone.frontend.onnx.texts import described, is_text, spec_as
from soapstone.frontend.onnx.values import (
    MICROSOFT,
    RULES,
    Scope,
    Slot,
    Value,
    Wanted,
    domain_of,
    sized,
)
from soapstone.ir.graph import Graph
from soapstone.ir.spec import operator_of_onnx
from soapstone.ir.tensor import Array
from soapstone.turns import give_way

if TYPE_CHECKING:
    import onnx

    from soapstone.frontend.purpose import Purpose

MOST_STEPS = 50_000  # nodes, once functions are expanded and loops unrolled
MOST_DEPTH = 24  # of functions and subgraphs inside one another


class Importer:
    """Builds one graph.

    Args:
        source: the file. dims: extents of symbolic dims. contents: of inputs that shapes depend on.
        keep: gives a folded constant the name of a weight, given what is taken.
        wanted: what is built for training; by default the file's outputs, of weights that stay.
        generators: of random numbers, by node, where one is carried out between pieces: then all
            operators of known operands are run at once, not the small ones only.
        purpose: see `frontend/purpose.py`.
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
        purpose: Purpose = "run",
    ) -> None:
        self.source = source
        self._dims = dims
        self._contents = contents
        self._wanted = wanted
        self.generators = generators
        self.emitter = Emitter(source, keep, wanted, folds_all=generators is not None)
        symbolic = any(each.symbolic for each in source.inputs)
        self._lasting = purpose == "lasting" and symbolic
        self.purpose = purpose
        self._steps = 0
        self.notes: list[Note] = []  # of what is done with extents

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
        return self.emitter.graph(outputs)

    def uneven(self) -> None:
        """Take note that the node at hand goes by contents that may differ for others."""
        self.notes.append(UNEVEN)

    def _input(self, declared: Declared) -> Value:
        _check_tensor("input", declared)
        declared = declared.with_rank(self._dims)
        if (rank := declared.open_rank) is not None:
            raise UnboundError(
                f"input {declared.name!r}: its rank is not known; it is needed in dims as {rank!r}",
                dims=(rank,),
            )
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
            varies = any(not isinstance(extent, int) for extent in declared.shape)
            return self.emitter.offered(spec, declared.name, declared.name, varies)
        if described(given) != spec:
            raise OnnxError(
                f"contents of input {declared.name!r}: {described(given)} found, {spec}"
            )
        if not is_text(given):
            self.emitter.builder.input(declared.name, spec.shape, spec.dtype)
        return self.emitter.known(given, declared.name)

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
        give_way()
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
        self.emitter.shaped = self._lasting and any(
            isinstance(each, Value) and each.of_extents for each in inputs
        )
        held = self.source.constants.get(id(node))
        results = held[1] if held else self._call(node, tuple(inputs), scope)
        if node.op_type == "Constant" and not (scope.depth or held):  # its attribute is its own
            self.source.constants[id(node)] = node, results
        if (domain_of(node.domain), node.op_type) not in self.source.functions:
            results, note = marked(node, inputs, results)
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
        # ONNX Runtime's own domains are there without an import, and its tools leave it out.
        version = scope.opsets.get(key[0], 1 if key[0].startswith(MICROSOFT) else None)
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
                    if not known:
                        call.check_read()
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
        others = [name for name in unsupported(self.source) if name != operator_name(node)]
        nor = f", nor are {', '.join(others)}" if others else ""
        how = INSTEAD.get(
            (domain_of(node.domain), node.op_type),
            "a function of the model may define it, or an operator of a package of your own"
            " (docs/onnx.md)",
        )
        return UnsupportedError(f"{label} is not supported{nor}; {how}")

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
        return body.node if not absent else [without(n, absent) for n in body.node], inner

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
            inner.values[tensor.name] = self.emitter.known(array_of(tensor), tensor.name)
        self.run(graph.node, inner)
        outputs = []
        for output in graph.output:
            slot = inner.find(output.name)
            if slot is None:
                raise OnnxError(f"{label}: output {output.name!r} is made by no node")
            outputs.append(slot)
        return outputs


def _check_tensor(what: str, declared: Declared) -> None:
    if declared.holds:
        raise UnboundError(
            f"{what} {declared.name!r}: {' '.join(declared.holds)} found, and a graph has tensors"
            " alone (an InferenceSession runs such a model in pieces)",
            value=declared.name,
            apart=True,
        )
