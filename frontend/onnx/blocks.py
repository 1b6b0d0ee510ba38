"""Values and nodes of an ONNX model between its pieces (`pieces.py`)."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.file.tensors import dtype_of
from soapstone.frontend.onnx.nodes import read_by, title
from soapstone.frontend.onnx.texts import TEXT, contents_of, described
from soapstone.frontend.onnx.values import Absent, Scope, Slot, Value, domain_of
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, eq=False)
class Known:
    """A value that is no input of a piece: a weight, or a constant; `key` tells its contents."""

    value: Value
    key: Hashable

    @staticmethod
    def of(value: Value) -> Known:
        """Return a weight or constant."""
        if value.weight:
            return Known(value, value.label)
        assert value.array is not None
        digest = hashlib.blake2b(contents_of(value.array), digest_size=16).digest()
        return Known(value, (value.spec, digest))


# A value between pieces; a sequence is a tuple.
Held = Array | Known | Absent | tuple["Held", ...]


@dataclass(frozen=True, eq=False)
class Looked:
    """Texts of a table, whose places a piece's graph has under a name."""

    name: str
    table: Array


# The same within a piece, by names in the graph.
Recipe = str | Known | Looked | Absent | tuple["Recipe", ...]


@dataclass
class Env:
    """The values that nodes see by name between pieces, and all else that their `Scope` says."""

    scope: Scope
    values: dict[str, Held] = field(default_factory=dict)
    outer: Env | None = None

    def find(self, name: str) -> Held | None:
        """Return what a name stands for here, or None."""
        env: Env | None = self
        while env is not None:
            if name in env.values:
                return env.values[name]
            env = env.outer
        return None

    def inside(self, label: str, values: dict[str, Held]) -> Env:
        """Return the environment of a subgraph."""
        scope = self.scope
        return Env(
            replace(scope, depth=scope.depth + 1, prefix=f"{scope.prefix}{label}: "), values, self
        )


class Step(NamedTuple):
    """A node, its place in its graph, and the names of the values that it reads."""

    node: onnx.NodeProto
    position: int
    reads: frozenset[str]

    @property
    def made(self) -> list[str]:
        return [name for name in self.node.output if name]

    @property
    def key(self) -> tuple[str, str]:
        """The operator's domain and name."""
        return domain_of(self.node.domain), self.node.op_type

    def __str__(self) -> str:
        return title(self.node, self.position)


class Block:
    """Nodes to be run in order of what they need; `path` says whose they are.

    Attributes:
        used: names of values on whose shapes its first piece depends.
        needed_contents: names of values on whose contents it depends.
    """

    def __init__(
        self, path: tuple[Hashable, ...], steps: tuple[Step, ...], outputs: tuple[str, ...]
    ) -> None:
        self.path = path
        self.steps = steps
        self.outputs = outputs
        self.key = (path, *(step.position for step in steps))
        self.used: set[str] = set()
        self.needed_contents: set[str] = set()

    @staticmethod
    def of(
        path: tuple[Hashable, ...], nodes: Iterable[onnx.NodeProto], outputs: Iterable[str]
    ) -> Block:
        """Return the block of a graph or a body."""
        steps = (Step(n, at, frozenset(read_by(n) - {""})) for at, n in enumerate(nodes))
        return Block(path, tuple(steps), tuple(outputs))


@dataclass(frozen=True, eq=False)
class Body:
    """A subgraph or function: its nodes, inputs, declared outputs and constants.

    singles: of a loop's body, the shapes of the number of a trip and of the condition.
    """

    block: Block
    inputs: tuple[str, ...]
    singles: tuple[tuple[int, ...], ...]
    outputs: tuple[onnx.ValueInfoProto, ...]
    initials: Mapping[str, Held]


@dataclass(frozen=True, eq=False)
class Piece:
    """What is run of a block at once, and what comes after it.

    Attributes:
        number: no other piece's. graph: None where nothing is computed. constants: that it reads.
        feeds: the name of a value, and its place in a sequence, for each of its inputs.
        made: what later nodes need of it. steps: the nodes to carry out then. rest: those after.
    """

    number: int
    graph: Graph | None
    constants: Mapping[str, Array]
    feeds: Mapping[str, tuple[str, int]]
    made: Mapping[str, Recipe]
    steps: tuple[Step, ...]
    rest: Block | None


def key_of(block: Block, env: Env) -> tuple[Hashable, ...]:
    """Return what the first piece of a block depends on."""

    def part(held: Held | None, contents: bool) -> Hashable:
        if isinstance(held, tuple):
            return tuple(part(each, contents) for each in held)
        if held is None or isinstance(held, Known | Absent):
            return held.key if isinstance(held, Known) else held
        return held.shape, held.dtype.name, contents_of(held) if contents else b""

    needed = block.needed_contents
    return (block.key, *(part(env.find(name), name in needed) for name in sorted(block.used)))


def recipe_of(slot: Slot) -> Recipe:
    if isinstance(slot, tuple):
        return tuple(map(recipe_of, slot))
    if isinstance(slot, Absent):
        return slot
    if slot.name is None:
        return Known.of(slot)
    return slot.name if slot.table is None else Looked(slot.name, slot.table)


def names_in(recipe: Recipe) -> Iterator[str]:
    """Yield the names of a graph's values that a value is made of."""
    if isinstance(recipe, Looked):
        yield recipe.name
    elif isinstance(recipe, tuple):
        for each in recipe:
            yield from names_in(each)
    elif isinstance(recipe, str):
        yield recipe


def filled(recipe: Recipe, values: Mapping[str, Array]) -> Held:
    if isinstance(recipe, Looked):
        return np.asarray(recipe.table[values[recipe.name]], object)
    if isinstance(recipe, tuple):
        return tuple(filled(each, values) for each in recipe)
    return values[recipe] if isinstance(recipe, str) else recipe


def array_in(held: Held | None) -> Array:
    """Return the contents of a value.

    Raises:
        OnnxError: it is a sequence, or an optional that is empty.
    """
    if isinstance(held, tuple | Absent | None):
        found = "a sequence" if isinstance(held, tuple) else held
        raise OnnxError(f"{found} found, a tensor needed")
    if not isinstance(held, Known):
        return held
    assert held.value.array is not None
    return held.value.array


def held_in(env: Env, name: str) -> Held:
    held = env.find(name)
    if held is None:
        raise OnnxError(f"input {name!r} is not made before it is used")
    return held


def number_in(env: Env, name: str) -> int:
    """Return the one number or truth value that an input holds."""
    array = array_in(held_in(env, name))
    if array.size != 1:
        raise OnnxError(f"input {name!r} has shape {array.shape}; one number needed")
    return int(array.reshape(()).item())


def outputs_of(block: Block, env: Env) -> list[Held]:
    """Return the outputs of a block that has been run."""
    return [held_in(env, name) for name in block.outputs]


def as_slot(name: str, held: Held) -> Slot:
    """Return a value as the importer knows it, its contents known."""
    if isinstance(held, tuple):
        return tuple(cast(Value, as_slot(name, each)) for each in held)
    if isinstance(held, Known):
        return held.value
    if isinstance(held, Absent):
        return held
    return Value(described(held), name, None, held)


def as_held(slot: Slot) -> Held:
    if isinstance(slot, tuple):
        return tuple(map(as_held, slot))
    if isinstance(slot, Absent):
        return slot
    if slot.array is None:
        raise OnnxError(f"value {slot.label!r}: {slot.spec} is too large to be made between pieces")
    return slot.array


def stacked(parts: list[Array], declared: onnx.ValueInfoProto) -> Array:
    """Return what the trips of a loop collected, of which the body declares one."""
    if not parts:
        tensor = declared.type.tensor_type
        shape = (0, *(max(0, int(dim.dim_value)) for dim in tensor.shape.dim))
        dtype = dtype_of(tensor.elem_type, f"output {declared.name!r}")
        return np.zeros(shape, object if dtype == TEXT else dtype)
    if len({part.shape for part in parts}) > 1:
        raise OnnxError("body: what is collected differs in shape from trip to trip")
    return np.stack(parts)
