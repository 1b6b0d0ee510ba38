"""Graphs: operators over named values, immutable once built.

A graph has fixed shapes. A value that no node makes is an input; its role says whether it is given
in each step, trained, or carried from step to step. For a trained or carried input, updates name
the value that is its contents in the next step. Forward, backward and update operators are nodes of
the same graph and are not distinguished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

from soapstone.ir.dims import Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.spec import OpSpec, operator
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.records import dataclass, replace

Items = tuple[tuple[str, Any], ...]
KINDS = ("uniform", "normal", "constant")  # of first contents


@dataclass(frozen=True)
class Initial:
    """The initial contents of a parameter or state.

    Attributes:
        kind: "constant", whose value is the scale; "uniform" in [-scale, scale); or "normal", with
            that standard deviation.
        scale: a number.

    Raises:
        GraphError: another kind.
    """

    kind: str = field(default="constant", metadata={"choices": KINDS})
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GraphError(
                f"initial value {self.kind!r} found; uniform, normal or constant needed"
            )


@dataclass(frozen=True)
class Node:
    """One operator applied to values.

    Attributes:
        name: unique in its graph. operator: the name of its declaration.
        inputs, outputs: the names of values.
        items: the operator's attributes, sorted by name, in their frozen form.
        origin: the node whose configuration this one follows: a gradient or a lowered primitive
            follows its forward operator, dim by dim, through `rename` (own dim, origin's dim).
        sources: the nodes of the graph before lowering whose work this one does: those of its parts
            for a fused node, the composite for a primitive. Without any, a node does its own work.
        apart: whether its results count as having other readers, so that no pass fuses it into its
            reader.
        late: whether it is a clone that recomputes a value when the backward pass needs it.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    items: Items = ()
    origin: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)
    apart: bool = False
    late: bool = False

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """The operator's attributes by name, defaults included."""
        return MappingProxyType(dict(self.items))

    @cached_property
    def spec(self) -> OpSpec:
        """The operator's declaration."""
        return operator(self.operator)

    def saying(self, items: Items) -> Node:
        """Return the node with other attributes; `replace` takes four times as long."""
        where = self.name, self.operator, self.inputs, self.outputs
        return Node(*where, items, self.origin, self.rename, self.sources, self.apart, self.late)

    @property
    def overwrites(self) -> Mapping[str, str]:
        """The input that each output is the next value of; without states that are absent."""
        pairs = self.spec.updates
        return {self.outputs[o]: self.inputs[i] for o, i in pairs if o < len(self.outputs)}

    @property
    def work_of(self) -> tuple[str, ...]:
        """The nodes whose work this one does: its sources, or itself."""
        return self.sources or (self.name,)

    @property
    def label(self) -> str:
        """The operator and the node, as errors name it: `matmul 'fc1'`."""
        return f"{self.operator} {self.name!r}"

    def __str__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.items if value is not None]
        operands = ", ".join([*self.inputs, *shown])
        return f"{', '.join(self.outputs)} = {self.operator}({operands})"


@lru_cache(maxsize=1 << 10)
def signature_of(name: str, items: Items, inputs: tuple[TensorSpec, ...]) -> Signature:
    """Return the dims and operands of an operator; kept, since passes ask for the same again.

    items: its attributes as a node has them.

    Raises:
        ShapeError: the inputs do not fit.
    """
    return operator(name).bind(inputs, MappingProxyType(dict(items)))


def inferred(node: Node, inputs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the types of a node's outputs, which follow from those of its inputs.

    Raises:
        ShapeError: the inputs do not fit; names the operator, the node and the dim.
    """
    return bound(node, inputs).output_specs


def bound(node: Node, inputs: Iterable[TensorSpec]) -> Signature:
    """Return a node's dims and operands, bound to inputs of these types.

    Raises:
        ShapeError: as `inferred`.
    """
    try:
        return signature_of(node.operator, node.items, tuple(inputs))
    except GraphError as error:
        raise type(error)(f"{node.label}: {error}") from None


@dataclass(frozen=True, repr=False)
class Graph:
    """An immutable program over tensors, its nodes in topological order.

    Attributes:
        name: of the graph. tensors: shape and type of every value, by name.
        roles: for each value that no node makes: an input, a parameter, a state, a scalar or a
            constant.
        nodes: the operators. outputs: the names of the values that a run returns.
        updates: for parameters and states, the value that is their next contents.
        initials: the initial contents of parameters and states; zeros where there is none.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    roles: Mapping[str, Role]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    updates: Mapping[str, str] = field(default_factory=dict)
    initials: Mapping[str, Initial] = field(default_factory=dict)

    def inputs(self, role: Role | None = None) -> tuple[str, ...]:
        """Return the values that no node makes, of one role or of all."""
        return tuple(name for name, kind in self.roles.items() if role is None or kind is role)

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each value, except inputs."""
        return {output: node for node in self.nodes for output in node.outputs}

    @cached_property
    def consumers(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that read each value, without repeats, in order."""
        readers: dict[str, list[Node]] = {name: [] for name in self.tensors}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                readers[name].append(node)
        return {name: tuple(nodes) for name, nodes in readers.items()}

    @cached_property
    def results(self) -> frozenset[str]:
        """The values that outlive a run: outputs, and next values of inputs."""
        return frozenset((*self.outputs, *self.updates.values()))

    def only_reader(self, value: str) -> Node | None:
        """Return the only reader of a value; None if it has several, or other uses.

        The results of a node that is `apart` count as having other uses.
        """
        readers = self.only_readers(value)
        return readers[0] if len(readers) == 1 else None

    def only_readers(self, value: str) -> Sequence[Node]:
        """Return the readers of a value without other uses; none if it has other uses."""
        maker = self.producers.get(value)
        used = value in self.results or (maker is not None and maker.apart)
        return () if used else self.consumers[value]

    @cached_property
    def reader_counts(self) -> Mapping[str, int]:
        """How many `only_readers` each value has that a node makes."""
        results, readers = self.results, self.consumers
        return {
            value: 0 if maker.apart or value in results else len(readers[value])
            for value, maker in self.producers.items()
        }

    @cached_property
    def _following(self) -> dict[frozenset[str], frozenset[str]]:
        return {}

    def following(self, values: frozenset[str]) -> frozenset[str]:
        """Return the values, and those that nodes make of nothing else."""
        if values not in self._following:
            found = set(values)
            for node in self.nodes:
                if found.issuperset(node.inputs):
                    found.update(node.outputs)
            self._following[values] = frozenset(found)
        return self._following[values]

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """The nodes by their names."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The places of the nodes in the order, by their names."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def sample_dims(self) -> Mapping[str, str]:
        """The sample dim of each node that has one (`ir/analysis/samples.py`)."""
        from soapstone.ir.analysis.samples import sample_dims  # it imports this module

        return sample_dims(self)

    @cached_property
    def _signatures(self) -> dict[str, Signature]:
        return {}

    def signature(self, node: Node) -> Signature:
        """Return the node's dims and operands, bound to its shapes."""
        signature = self._signatures.get(node.name)
        if signature is None:
            specs = tuple(self.tensors[i] for i in node.inputs)
            signature = signature_of(node.operator, node.items, specs)
            self._signatures[node.name] = signature
        return signature

    def know(self, signatures: Iterable[tuple[str, Signature]]) -> None:
        """Record the signatures of nodes, each with the node's name."""
        self._signatures.update(signatures)

    def flops(self, node: Node | None = None) -> float:
        """Return the arithmetic operations of one execution, of a node or of all."""
        if node is None:
            return sum(map(self.flops, self.nodes))
        inputs = [self.tensors[name] for name in node.inputs]
        return node.spec.flops(self.signature(node), inputs, node.attributes)

    def nbytes(self, role: Role) -> int:
        """Return the bytes of all inputs of a role."""
        return sum(self.tensors[name].nbytes for name in self.inputs(role))

    def pruned(self) -> Graph:
        """Return the graph without nodes that no output or update needs."""
        needed = set(self.results)
        kept: list[Node] = []
        for node in reversed(self.nodes):
            if needed.intersection(node.outputs):
                kept.append(node)
                needed.update(node.inputs)
        values = len(self.roles) + sum(len(node.outputs) for node in kept)
        if len(kept) == len(self.nodes) and values == len(self.tensors):
            return self
        return self.with_nodes(reversed(kept))

    def with_nodes(
        self, nodes: Iterable[Node], made: Mapping[str, TensorSpec] = MappingProxyType({})
    ) -> Graph:
        """Return the graph with other nodes. made: the types of values that are new."""
        nodes = tuple(nodes)
        values = {*self.roles, *(o for node in nodes for o in node.outputs)}
        known = {**self.tensors, **made} if made else self.tensors
        tensors = {name: spec for name, spec in known.items() if name in values}
        return replace(self, nodes=nodes, tensors=tensors)

    def renamed(self, names: Mapping[str, str]) -> Graph:
        """Return the graph with other names for some of its values."""
        if not names:
            return self

        def new(values: Iterable[str]) -> tuple[str, ...]:
            return tuple(names.get(value, value) for value in values)

        return replace(
            self,
            nodes=tuple(
                n
                if names.keys().isdisjoint(n.inputs) and names.keys().isdisjoint(n.outputs)
                else replace(n, inputs=new(n.inputs), outputs=new(n.outputs))
                for n in self.nodes
            ),
            tensors=dict(zip(new(self.tensors), self.tensors.values())),
            roles=dict(zip(new(self.roles), self.roles.values())),
            outputs=new(self.outputs),
            updates=dict(zip(new(self.updates), new(self.updates.values()))),
            initials=dict(zip(new(self.initials), self.initials.values())),
        )

    @cached_property
    def structural_hash(self) -> str:
        """A digest of everything but names: equal for graphs that differ only in names."""
        number = {name: i for i, name in enumerate(self.roles)}
        lines: list[Any] = [
            [str(role), str(self.tensors[name]), list(vars(self.initials[name]).values())]
            if name in self.initials
            else [str(role), str(self.tensors[name])]
            for name, role in self.roles.items()
        ]
        for node in self.nodes:
            lines.append([node.operator, [number[name] for name in node.inputs], node.items])
            for output in node.outputs:
                number[output] = len(number)
        lines.append([number[name] for name in self.outputs])
        lines.append(sorted((number[a], number[b]) for a, b in self.updates.items()))
        text = json.dumps(lines, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def __repr__(self) -> str:
        return (
            f"Graph({self.name!r}: {len(self.nodes)} operators, {len(self.roles)} inputs,"
            f" {len(self.outputs)} outputs)"
        )

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        """The graph as program text, one node a line with the types of its results."""
        lines = [f"graph {self.name} {{"]
        for name, role in self.roles.items():
            lines.append(f"  {role} {name}: {self.tensors[name]}")
        for node in self.nodes:
            types = ", ".join(str(self.tensors[name]) for name in node.outputs)
            lines.append(f"  {node}  # {types}")
        for name, value in self.updates.items():
            lines.append(f"  next {name} = {value}")
        lines.append(f"  return {', '.join(self.outputs)}")
        return "\n".join([*lines, "}"])


def topological(nodes: Iterable[Node], available: Iterable[str]) -> tuple[Node, ...]:
    """Return the nodes in an order in which every value is made before it is read.

    available: the names of the values that no node makes.

    Raises:
        GraphError: a value is missing or the nodes form a cycle; names them.
    """
    known = set(available)
    pending = list(nodes)
    ordered: list[Node] = []
    while pending:
        rest = []
        for node in pending:
            if known.issuperset(node.inputs):
                known.update(node.outputs)
                ordered.append(node)
            else:
                rest.append(node)
        if len(rest) == len(pending):
            node = rest[0]
            missing = [name for name in node.inputs if name not in known]
            raise GraphError(f"{node.label}: input {missing[0]!r} is never made, or in a cycle")
        pending = rest
    return tuple(ordered)
