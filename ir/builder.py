"""Construction of graphs node by node, and of nodes that follow the configuration of another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.graph import Graph, Initial, Node, inferred
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Role, TensorSpec
from soapstone.records import replace


class GraphBuilder:
    """Builds a graph node by node; every value is checked as it is made.

    Args:
        name: of the graph. base: a graph to continue, whose name is taken instead.

    Example:
        >>> builder = GraphBuilder("net")
        >>> x = builder.input("x", (32, 64))
        >>> w = builder.input("w", (64, 10), role=Role.PARAMETER, initial=Initial("uniform", 0.125))
        >>> builder.output(*builder.apply("matmul", x, w))
        >>> graph = builder.build()
    """

    def __init__(self, name: str = "graph", base: Graph | None = None) -> None:
        self.name = base.name if base else name
        self._tensors: dict[str, TensorSpec] = dict(base.tensors) if base else {}
        self._roles: dict[str, Role] = dict(base.roles) if base else {}
        self._nodes: dict[str, Node] = dict(base.by_name) if base else {}
        self._makers: dict[str, Node] = dict(base.producers) if base else {}
        self._updates: dict[str, str] = dict(base.updates) if base else {}
        self._initials: dict[str, Initial] = dict(base.initials) if base else {}
        self._outputs: list[str] = list(base.outputs) if base else []
        self._counts: dict[str, int] = {}
        self.sources: tuple[str, ...] = ()  # of nodes that are added, beside their own
        self.late = False  # whether nodes that are added are late, whatever they were
        self.shared: tuple[Role, ...] = ()  # roles of inputs that may be declared several times
        self._states: dict[str, str] = {}  # by the contents that an earlier call gives them

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes so far, in the order in which they were added."""
        return tuple(self._nodes.values())

    def spec(self, name: str) -> TensorSpec:
        """Return a value's shape and type, by its name.

        Raises:
            GraphError: there is no such value.
        """
        try:
            return self._tensors[name]
        except KeyError:
            raise GraphError(f"value {name!r} does not exist in graph {self.name!r}") from None

    def has(self, name: str) -> bool:
        """Return whether a value of this name exists."""
        return name in self._tensors

    def maker(self, name: str) -> Node | None:
        """Return the node that makes a value, or None for an input."""
        return self._makers.get(name)

    def unique(self, base: str) -> str:
        """Return `base`, with a number if a node or value has that name already."""
        if base not in self._tensors and base not in self._nodes:
            return base
        count = self._counts.get(base, 1)
        while f"{base}_{count}" in self._tensors or f"{base}_{count}" in self._nodes:
            count += 1
        self._counts[base] = count  # the first that may be free
        return f"{base}_{count}"

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Forget what was added inside the block if the block raises."""
        added: tuple[dict[str, Any], ...] = (
            *(self._tensors, self._roles, self._nodes, self._makers),
            *(self._updates, self._initials),
        )
        sizes = [len(each) for each in added]
        updates = dict(self._updates)  # of shared states, later ones took the place of earlier ones
        try:
            yield
        except BaseException:
            for each, size in zip(added, sizes):
                while len(each) > size:
                    each.popitem()
            self._updates.update(updates)
            self._counts.clear()
            raise

    @contextmanager
    def repeated(self) -> Iterator[None]:
        """Let the block declare existing parameters and states again, as the same values.

        A state that has an update denotes its updated value, and a further update replaces it.
        """
        before, self.shared = self.shared, (Role.PARAMETER, Role.STATE)
        try:
            yield
        finally:
            self.shared = before

    def input(
        self,
        name: str,
        shape: Sequence[int],
        dtype: str = "float32",
        role: Role = Role.INPUT,
        initial: Initial | None = None,
    ) -> str:
        """Declare a value that no node makes, and return its name.

        Args:
            shape, dtype: of the value. role: where its contents come from, and whether it outlives
                a step (`Role`).
            initial: the initial contents of a parameter or state; zeros by default.

        Raises:
            GraphError: the name is taken.
            ShapeError: a negative extent, an unknown dtype, or a shared input with another shape
                than before.
        """
        if name in self._tensors and role in self.shared and self._roles.get(name) is role:
            known, spec = self._tensors[name], TensorSpec(tuple(shape), dtype)
            if known != spec:
                raise ShapeError(
                    f"parameter {name!r}: shape {spec.shape} found, {known.shape} needed as before"
                )
            latest = self._updates.get(name, name)
            if latest != name:
                self._states[latest] = name
            return latest
        if name in self._tensors:
            raise GraphError(f"value {name!r} exists already")
        self._tensors[name] = TensorSpec(tuple(shape), dtype)
        self._roles[name] = role
        if initial is not None:
            self._initials[name] = initial
        return name

    def apply(
        self,
        operator_name: str,
        *inputs: str,
        name: str | None = None,
        origin: str | None = None,
        rename: Mapping[str, str] | None = None,
        sources: tuple[str, ...] = (),
        **attributes: Any,
    ) -> tuple[str, ...]:
        """Add a node and return the names of its outputs.

        Args:
            operator_name: of a declared operator. inputs: the names of its operands, in order.
            name: of the node, to which a number is added if it is taken; the operator's by default.
            origin, rename, sources: those of `Node`.
            attributes: the operator's, where they differ from their defaults.

        Raises:
            GraphError: unknown operator, attribute or value.
            ShapeError: the inputs do not fit; names the operator, the node and the dim.
        """
        spec = operator(operator_name)
        node_name = self.unique(name or operator_name)
        label = f"{operator_name} {node_name!r}"
        try:
            items = tuple(sorted(spec.normalise(attributes).items()))
        except GraphError as error:
            raise GraphError(f"{label}: {error}") from None
        renamed = tuple(sorted((rename or {}).items()))
        node = Node(node_name, operator_name, inputs, (), items, origin, renamed, sources)
        return self.add(node)

    def add(self, node: Node, made: Sequence[TensorSpec] = ()) -> tuple[str, ...]:
        """Add a node whose attributes are in their frozen form, and return its outputs.

        Its name and those of its outputs are made unique.

        made: the types of its outputs if they are known, as in a graph that had this node.

        Raises:
            GraphError: unknown value.
            ShapeError: the inputs do not fit; names the operator, the node and the dim.
        """
        name = self.unique(node.name)
        made = made or inferred(node, map(self.spec, node.inputs))
        self._nodes[name] = node  # reserves the name
        outputs = [name if len(made) == 1 else f"{name}.{i}" for i in range(len(made))]
        outputs = [o if o not in self._tensors else self.unique(o) for o in outputs]
        sources = node.sources
        if self.sources and self.sources != (name,):
            sources = tuple(dict.fromkeys((*sources, *self.sources)))
        late = node.late or self.late
        changed = sources != node.sources or late != node.late
        if changed or name != node.name or node.outputs != tuple(outputs):
            node = replace(node, name=name, outputs=tuple(outputs), sources=sources, late=late)
        self._nodes[name] = node
        self._makers.update(dict.fromkeys(outputs, node))
        self._tensors.update(zip(outputs, made))
        return node.outputs

    def carry(self, node: Node, made: Sequence[TensorSpec]) -> bool:
        """Add a node of an earlier graph unchanged; return False if a name of it is taken.

        made: the types of its outputs.
        """
        for name in (node.name, *node.outputs):
            if name in self._tensors or name in self._nodes:
                return False
        self._nodes[node.name] = node
        for name, spec in zip(node.outputs, made):
            self._tensors[name] = spec
            self._makers[name] = node
        return True

    def output(self, *names: str) -> None:
        """Mark values as outputs of the graph, by their names.

        Raises:
            GraphError: there is no such value.
        """
        for name in names:
            self.spec(name)
            self._outputs.append(name)

    def update(self, name: str, value: str) -> None:
        """Declare that `value` is the contents of input `name` in the next step.

        Raises:
            GraphError: `name` is not an input, or its spec differs from the value's.
        """
        name = self._states.get(name, name)
        if name not in self._roles:
            raise GraphError(f"update of {name!r}: not an input of the graph")
        if self.spec(name) != self.spec(value):
            raise ShapeError(
                f"update of {name!r}: {self.spec(value)} found, {self.spec(name)} needed"
            )
        self._updates[name] = value

    def build(self) -> Graph:
        """Return the graph."""
        return Graph(
            self.name,
            MappingProxyType(dict(self._tensors)),
            MappingProxyType(dict(self._roles)),
            tuple(self._nodes.values()),
            tuple(self._outputs),
            MappingProxyType(dict(self._updates)),
            MappingProxyType(dict(self._initials)),
        )


class Emitter:
    """Emits nodes that follow one node's configuration: its gradient, or its lowering.

    Args:
        builder: receives the nodes. origin: the node that they follow.
        suffix: stands between the origin's name and an operator's in their names.
        rename: the origin's names for the dims of operators that name them differently (own dim,
            origin's dim).
    """

    def __init__(
        self,
        builder: GraphBuilder,
        origin: Node,
        suffix: str,
        rename: Mapping[str, str] | None = None,
    ) -> None:
        self._builder = builder
        self._origin = origin
        self._suffix = suffix
        self._rename = dict(rename or {})

    def renamed(self, rename: Mapping[str, str]) -> Emitter:
        """Return an emitter with another renaming of dims; see `rename` of the class."""
        return Emitter(self._builder, self._origin, self._suffix, rename)

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and type of a value, by its name."""
        return self._builder.spec(name)

    def __call__(
        self,
        operator_name: str,
        *inputs: str,
        rename: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> str:
        """Add a node and return its only (or first) output."""
        return self.all(operator_name, *inputs, rename=rename, **attributes)[0]

    def all(
        self,
        operator_name: str,
        *inputs: str,
        rename: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> tuple[str, ...]:
        """Add a node and return all its outputs.

        operator_name, inputs and attributes are those of `GraphBuilder.apply`. `rename` maps the
        new node's dims to the origin's, where their names differ.

        Raises:
            GraphError, ShapeError: as of `GraphBuilder.apply`.
        """
        origin = self._origin
        if rename is None and operator_name != origin.operator:
            rename = self._rename
        own, chain = dict(rename or {}), dict(origin.rename)
        # Follow through to the node that owns the configuration.
        follow = {dim: chain.get(own.get(dim, dim), own.get(dim, dim)) for dim in (*chain, *own)}
        return self._builder.apply(
            operator_name,
            *inputs,
            name=f"{origin.name}.{self._suffix}{operator_name}",
            origin=origin.origin or origin.name,
            rename=follow,
            **attributes,
        )
