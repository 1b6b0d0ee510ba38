"""The normal form of graphs, in the operators that rules know, and the way back.

Rules know convolutions and products without bias, concatenations of two, and element-wise operators
on equal shapes. So a bias becomes the addition of a broadcast value, and a concatenation or split
of many parts becomes nested ones of two. Lowering fuses all of it again (`engine/lower/`), so the
form costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from soapstone.ir.graph import Graph, Initial, Node
from soapstone.ir.tensor import Array, Arrays, Role, TensorSpec
from soapstone.search.optimize.pool import Leaf, Pool

# Products with a bias: what they are without it, and the axis of the result that it runs over.
_BIASED = {"conv2d": ("conv2d", 1), "linear": ("matmul", -1)}


@dataclass(frozen=True)
class Frame:
    """The parts of a graph besides its nodes, which rewriting does not change."""

    name: str
    outputs: tuple[str, ...]
    updates: tuple[tuple[str, str], ...]
    initials: Mapping[str, Initial]
    inputs: Mapping[str, int]  # every input, used or not


def read(graph: Graph, pool: Pool, constants: Arrays) -> tuple[Frame, tuple[int, ...]]:
    """Return a graph as values of a pool, in normal form: its outputs, then its updates.

    constants: inputs whose contents never change; if there are none, weights cost like other
    values.
    """
    values: dict[str, int] = {}
    for name, role in graph.roles.items():
        values[name] = pool.leaf(name, graph.tensors[name], role, name in constants)
    inputs = dict(values)
    for node in graph.nodes:
        made = _normal(pool, node, [values[name] for name in node.inputs])
        values.update(zip(node.outputs, made))
    updates = tuple(graph.updates.items())
    kept = (*graph.outputs, *(value for _, value in updates))
    frame = Frame(graph.name, graph.outputs, updates, graph.initials, inputs)
    return frame, tuple(values[name] for name in kept)


def _normal(pool: Pool, node: Node, inputs: Sequence[int]) -> tuple[int, ...]:
    attributes = dict(node.attributes)
    if node.operator == "concat" and len(inputs) > 2:
        return (_joined(pool, node, inputs),)
    if node.operator == "split" and len(attributes["sizes"]) > 2:
        return _parts(pool, node, inputs[0], attributes["sizes"])
    if node.operator in _BIASED and attributes["bias"]:
        return (_biased(pool, node, inputs),)
    if node.operator == "linear" and attributes["activation"] is None:
        return pool.apply("matmul", inputs, {}, node.name)
    return pool.apply_normal(node.operator, node.items, tuple(inputs), node.name)


def _joined(pool: Pool, node: Node, parts: Sequence[int]) -> int:
    """Return the concatenation of parts, by halves: pairs of pairs are joined level by level."""
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    sides = [_joined(pool, node, side) for side in (parts[:half], parts[half:])]
    return pool.apply("concat", sides, node.attributes, node.name)[0]


def _parts(pool: Pool, node: Node, whole: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the parts of a value, split by halves as `_joined` joins them."""
    if len(sizes) == 1:
        return (whole,)
    half = (len(sizes) + 1) // 2
    sides = sizes[:half], sizes[half:]
    given = {**node.attributes, "sizes": tuple(map(sum, sides))}
    made = pool.apply("split", (whole,), given, node.name)
    return tuple(
        part for side, value in zip(sides, made) for part in _parts(pool, node, value, side)
    )


def _biased(pool: Pool, node: Node, inputs: Sequence[int]) -> int:
    name, axis = _BIASED[node.operator]
    x, weights, bias = inputs
    attributes = {**node.attributes, "bias": False, "activation": None}
    if name != node.operator:
        attributes = {}
    (product,) = pool.apply(name, (x, weights), attributes, node.name)
    shape = pool.specs[product].shape
    channels = [1] * len(shape)
    channels[axis] = shape[axis]
    (column,) = pool.apply("reshape", (bias,), {"shape": tuple(channels)}, f"{node.name}.bias")
    (wide,) = pool.apply("broadcast", (column,), {"shape": shape}, f"{node.name}.bias")
    (made,) = pool.apply("add", (product, wide), {}, f"{node.name}.add")
    activation = node.attributes["activation"]
    return made if activation is None else pool.apply(activation, (made,), {}, activation)[0]


@dataclass(frozen=True)
class Written:
    """A graph built from values, with their names, and the contents of rules' constants."""

    graph: Graph
    values: Mapping[str, int]
    contents: Mapping[str, Array]


def write(pool: Pool, frame: Frame, outputs: Sequence[int]) -> Written:
    """Return the graph of a pool's values, with the names that a frame keeps."""
    names: dict[int, str] = {}
    copies: list[tuple[str, int]] = []  # an output that is an input, or another output too
    for name, value in zip(frame.outputs, outputs):
        if isinstance(pool.makers[value], Leaf) or names.setdefault(value, name) != name:
            copies.append((name, value))
    return _written(pool, outputs, names, copies, frame)


def piece(pool: Pool, outputs: Sequence[int]) -> Written:
    """Return the graph that computes some values from the leaves that they depend on."""
    frame = Frame("piece", (), (), {}, {})
    return _written(pool, outputs, {}, [], frame)


def _written(
    pool: Pool,
    outputs: Sequence[int],
    names: dict[int, str],
    copies: Sequence[tuple[str, int]],
    frame: Frame,
) -> Written:
    taken = {*frame.inputs, *frame.outputs}
    tensors: dict[str, TensorSpec] = {}
    roles: dict[str, Role] = {}
    nodes: dict[str, Node] = {}
    contents: dict[str, Array] = {}
    emitted: set[tuple[int, ...]] = set()

    counts: dict[str, int] = {}

    def unique(base: str) -> str:
        name, count = base, counts.get(base, 0)
        while name in taken:
            count += 1
            name = f"{base}_{count}"
        counts[base] = count
        taken.add(name)
        return name

    for name, value in frame.inputs.items():
        maker = pool.makers[value]
        assert isinstance(maker, Leaf)
        names[value], roles[name], tensors[name] = name, maker.role, pool.specs[value]
    for value in pool.order(outputs):
        maker = pool.makers[value]
        if isinstance(maker, Leaf):
            if value not in names:
                name = names[value] = unique(maker.name)
                roles[name], tensors[name] = maker.role, pool.specs[value]
                if maker.contents is not None:
                    contents[name] = maker.contents
            continue
        if maker.outputs in emitted:
            continue
        emitted.add(maker.outputs)
        called = unique(maker.name)
        made = []
        for position, output in enumerate(maker.outputs):
            if output not in names:
                base = called if len(maker.outputs) == 1 else f"{called}.{position}"
                names[output] = base if base == called else unique(base)
            made.append(names[output])
            tensors[names[output]] = pool.specs[output]
        inputs = tuple(names[i] for i in maker.inputs)
        nodes[called] = Node(called, maker.operator, inputs, tuple(made), maker.items)
    for name, value in copies:
        items = (("shape", pool.specs[value].shape),)
        nodes[name] = Node(name, "broadcast", (names[value],), (name,), items)
        tensors[name] = pool.specs[value]
    count = len(frame.outputs)
    graph = Graph(
        frame.name,
        MappingProxyType(tensors),
        MappingProxyType(roles),
        tuple(nodes.values()),
        frame.outputs or tuple(names[value] for value in dict.fromkeys(outputs)),
        MappingProxyType(
            {name: names[value] for (name, _), value in zip(frame.updates, outputs[count:])}
        ),
        frame.initials,
    )
    return Written(graph, {name: value for value, name in names.items()}, contents)
