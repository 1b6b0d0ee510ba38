"""Passes for graphs whose weights never change: what can be computed from weights alone, once.

Batch norm with fixed statistics goes into the weights before it; a product with constant columns
becomes `linear`, which takes the bias too. Both leave operators on weights alone, which
`split_constants` puts in a graph of their own, to be run when the weights are bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import field, replace
from typing import Any

from soapstone.engine.lower.attention import joined
from soapstone.engine.lower.branches import grouped
from soapstone.engine.lower.constant_vectors import vector_over
from soapstone.engine.lower.norms import named as _norm
from soapstone.engine.lower.rebuild import kept, rebuild
from soapstone.ir.activations import Made, Recogniser
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.products.matmul import ACTIVATIONS, is_of_result
from soapstone.ir.ops.windows.convolution import CONVOLUTIONS
from soapstone.ir.tensor import Array, Role
from soapstone.records import dataclass

# The axis of the weights, operand 1, that runs over the result's channels; and the result's.
CHANNELS = dict.fromkeys(CONVOLUTIONS, (0, 1)) | {"linear": (1, -1)}


def fold_biases(graph: Graph, weights: Set[str]) -> Graph:
    """Return the graph with biases, and activations behind them, in the products of weights.

    weights: inputs that may change between runs, so nothing is made of their contents.
    """
    for each in _PRODUCTS:
        graph = fold(each, graph, {}, weights)
    return graph.pruned()


def split_constants(graph: Graph, constants: Set[str]) -> tuple[Graph, Graph]:
    """Return the graph of what constants alone determine, and the rest, which takes its outputs."""
    known = set(constants)
    first: list[Node] = []
    rest: list[Node] = []
    for node in graph.nodes:
        fixed = known.issuperset(node.inputs) and not node.spec.updates
        (first if fixed else rest).append(node)
        known.update(node.outputs if fixed else ())
    read = {*graph.outputs, *(name for node in rest for name in node.inputs)}
    crossing = tuple(name for node in first for name in node.outputs if name in read)
    sources = {name: role for name, role in graph.roles.items() if name in constants}
    prologue = replace(graph, nodes=tuple(first), roles=sources, outputs=crossing, updates={})
    roles = {n: role for n, role in graph.roles.items() if n in read or role is Role.INPUT}
    roles |= dict.fromkeys(crossing, Role.PARAMETER)
    return prologue.pruned(), replace(graph, nodes=tuple(rest), roles=roles).pruned()


@dataclass
class Site:
    """A graph being rebuilt, for a rule that may replace the next node."""

    builder: GraphBuilder = field(init=False)
    constants: Mapping[str, Array]
    fixed: set[str]  # values that constants alone determine
    readers: dict[str, int]  # of values with no other use, how many read them

    def host(self, value: str) -> Node | None:
        """Return the product with constant weights that makes a value nobody else reads."""
        node = self.builder.maker(value)
        if (
            node is None
            or node.operator not in CHANNELS
            or self.readers.get(value) != 1
            or not self.fixed.issuperset(node.inputs[1:])
            or node.attributes["activation"] is not None
        ):
            return None
        return node

    def add(self, graph: Graph, node: Node, outputs: Sequence[str]) -> None:
        """Take note of the values that a node's are now. graph: that of the node."""
        if self.fixed.issuperset(node.inputs):
            self.fixed.update(outputs)
        for old, new in zip(node.outputs, outputs):
            self.readers[new] = len(graph.only_readers(old))

    def only(self, value: str, *operators: str, readers: int = 1) -> Node | None:
        """Return the node that makes a value with so many readers, if it is of these operators."""
        node = self.builder.maker(value)
        read = self.readers.get(value) == readers
        return node if node is not None and node.operator in operators and read else None

    def emit(self, operator: str, *values: str, **attributes: Any) -> str:
        """Emit an operator, whose result is known to be a constant where all its operands are."""
        made = self.builder.apply(operator, *values, **attributes)[0]
        if self.fixed.issuperset(values):
            self.fixed.add(made)
        return made

    def along(self, vector: str, axis: int, rank: int) -> str:
        """Emit a vector as what has so many axes, and runs along one that may be negative."""
        spread = [1] * rank
        spread[axis] = self.builder.spec(vector).size
        return self.emit("reshape", vector, shape=tuple(spread))

    def channel_vector(self, node: Node, value: str) -> str | None:
        """Return a constant that varies over a product's channels only, as a vector; or None."""
        shape = self.builder.spec(node.outputs[0]).shape
        if value not in self.fixed:
            return None
        return vector_over(self, value, shape, CHANNELS[node.operator][1] % len(shape))

    def with_weights(self, node: Node, weights: str, bias: str | None) -> str:
        """Emit a product with other weights and bias."""
        inputs = (node.inputs[0], weights, *((bias,) if bias else ()))
        return self.changed(node, inputs, bias=bias is not None)

    def changed(self, node: Node, inputs: Sequence[str], **attributes: Any) -> str:
        """Emit an earlier node with other inputs and attributes, which does its work too."""
        at = {**node.attributes, **attributes}
        sources = node.work_of
        return self.builder.apply(node.operator, *inputs, name=node.name, sources=sources, **at)[0]

    def scaled(self, node: Node, scale: str, shift: str | None) -> str:
        """Emit a product whose result is scaled by, then shifted by, vectors over its channels."""
        rank = self.builder.spec(node.inputs[1]).rank
        column = self.along(scale, CHANNELS[node.operator][0], rank)
        weights = self.emit("mul", node.inputs[1], column)
        bias = self.emit("mul", node.inputs[2], scale) if node.attributes["bias"] else None
        if bias and shift:
            bias = self.emit("add", bias, shift)
        return self.with_weights(node, weights, bias or shift)


@dataclass(frozen=True)
class Fold:
    """A rule by which nodes of some operators go into others, or become others.

    Attributes:
        rule: the value that takes the place of a node's, or those of several; None where it does
            not apply.
    """

    name: str
    operators: tuple[str, ...]
    rule: Callable[[Site, Node], str | Sequence[str] | None]


def fold(
    by: Fold, graph: Graph, constants: Mapping[str, Array], weights: Set[str] = frozenset()
) -> Graph:
    """Return the graph with each node replaced where the rule has another value for it."""
    if not _applies(by, graph, constants, weights):
        return graph
    site = Site(constants, {*constants, *weights}, {})

    def emit(builder: GraphBuilder, node: Node) -> Sequence[str]:
        site.builder = builder
        made = by.rule(site, node) if node.operator in by.operators else None
        outputs = (made,) if isinstance(made, str) else made or kept(builder, node, graph)
        site.add(graph, node, outputs)
        return outputs

    return rebuild(graph, emit)


def _applies(by: Fold, graph: Graph, constants: Mapping[str, Array], weights: Set[str]) -> bool:
    """Return whether a rule has another value for any node: else nothing need be rebuilt."""
    if not any(node.operator in by.operators for node in graph.nodes):
        return False
    site = Site(constants, {*constants, *weights}, {})
    site.builder = GraphBuilder(base=graph)  # what the rule emits there is of no use
    for node in graph.nodes:
        if node.operator in by.operators and by.rule(site, node):
            return True
        site.add(graph, node, node.outputs)
    return False


def _number(site: Site, node: Node) -> str | None:
    """Arithmetic with one constant number is `affine`."""
    x, other = node.inputs
    if x in site.constants and node.operator in ("add", "mul"):
        x, other = other, x
    spec, size = site.builder.spec(x), site.builder.spec(other)
    if other not in site.constants or x in site.fixed or size.size != 1 or size.rank > spec.rank:
        return None
    number = float(site.constants[other].reshape(()))
    if not spec.is_float or not math.isfinite(number) or (node.operator == "div" and not number):
        return None
    scale, shift = {
        "add": (1.0, number),
        "sub": (1.0, -number),
        "mul": (number, 0.0),
        "div": (1 / number if number else 0.0, 0.0),
    }[node.operator]
    return site.emit("affine", x, name=node.name, scale=scale, shift=shift)


# Activations that files write out as arithmetic, by the names that `Recogniser` gives.
_SPELLED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
}


def _named(site: Site, node: Node) -> str | None:
    """GELU and SiLU written out as arithmetic are one operator, which can join a product."""

    def made(value: str) -> Made[str]:
        maker = site.builder.maker(value) if value else node  # whose outputs are not named yet
        if maker is None or len(maker.outputs) > 1:
            return "", ("",), 0.0, 0.0
        at = maker.attributes
        first = at.get("scale", at.get("exponent", 0.0))
        return maker.operator, maker.inputs, first, at.get("shift", 0.0)

    found = Recogniser(made).activation("")
    if found is None:
        return None
    (name, (x,), slope, _), scale = found
    if slope not in (0.0, 1.0) or name not in _SPELLED:
        return None
    if not math.isclose(scale, 1.0, rel_tol=1e-5):
        return None
    operator, attributes = _SPELLED[name]
    return site.emit(operator, x, name=node.name, **attributes)


def _product(site: Site, node: Node) -> str | None:
    """`matmul` with a constant matrix on the right is `linear`."""
    if node.attributes["transpose_a"]:
        return None
    x, weights = node.inputs
    if weights not in site.fixed or x in site.fixed or site.builder.spec(weights).rank != 2:
        return None
    if node.attributes["transpose_b"]:
        weights = site.emit("transpose", weights, permutation=(1, 0))
    return site.emit("linear", x, weights, name=node.name, bias=False)


def _plain_product(site: Site, node: Node) -> str | None:
    """As `_product`, but nothing is transposed: that costs where it is done in every run."""
    return None if node.attributes["transpose_b"] else _product(site, node)


def _reshaped(site: Site, node: Node) -> str | None:
    """Rows that a product makes and that are then counted otherwise are so before the product."""
    host = site.only(node.inputs[0], "linear")
    if host is None:
        return None
    shape, width = node.attributes["shape"], site.builder.spec(host.inputs[0]).shape[-1]
    if shape[-1:] != site.builder.spec(node.inputs[0]).shape[-1:]:
        return None
    x = site.emit("reshape", host.inputs[0], shape=(*shape[:-1], width))
    return site.changed(host, (x, *host.inputs[1:]))


def _batch_norm(site: Site, node: Node) -> str | None:
    """Fixed statistics scale and shift: in the product before, or as one multiply and add."""
    if not site.fixed.issuperset(node.inputs[1:]):
        return None
    x, gamma, beta, mean, var = node.inputs
    spread = site.emit("affine", var, shift=node.attributes["epsilon"])
    scale = site.emit("mul", gamma, site.emit("power", spread, exponent=-0.5))
    shift = site.emit("sub", beta, site.emit("mul", mean, scale))
    host = site.host(x)
    spec = site.builder.spec(x)
    if host is not None and CHANNELS[host.operator][1] % spec.rank == 1:
        return site.scaled(host, scale, shift)
    scale, shift = (site.along(value, 0, spec.rank - 1) for value in (scale, shift))
    product = site.emit("mul", x, scale, name=f"{node.name}.scale")
    return site.emit("add", product, shift, name=node.name)


def _operands(site: Site, node: Node) -> tuple[Node, str] | None:
    """Return the product and the vector over its channels that a node combines, or None."""
    for value, other in (node.inputs, node.inputs[::-1]):
        host = site.host(value)
        if host is not None and site.builder.spec(node.inputs[0]).is_float:
            vector = site.channel_vector(host, other)
            if vector is not None:
                return host, vector
    return None


def _scale(site: Site, node: Node) -> str | None:
    if node.operator == "affine":
        return _scale_seen(site, node)
    found = _operands(site, node)
    return None if found is None else site.scaled(*found, None)


def _scale_seen(site: Site, node: Node) -> str | None:
    """A number times a product, or times a reshaped or transposed look at one."""
    looks: list[Node] = []
    value = node.inputs[0]
    while True:
        host = site.host(value)
        look = site.builder.maker(value)
        if host is not None:
            break
        if look is None or look.spec.view not in ("reshape", "transpose"):
            return None
        if site.readers.get(value) != 1:
            return None
        looks.append(look)
        value = look.inputs[0]
    channels = site.builder.spec(value).shape[CHANNELS[host.operator][1]]
    scale, shift = (
        site.emit(
            "full",
            shape=(channels,),
            value=node.attributes[name],
            dtype=site.builder.spec(value).dtype,
        )
        for name in ("scale", "shift")
    )
    made = site.scaled(host, scale, shift if node.attributes["shift"] else None)
    for look in reversed(looks):
        made = site.changed(look, [made])
    return made


def _bias(site: Site, node: Node) -> str | None:
    found = _operands(site, node)
    if found is None:
        return None
    host, vector = found
    if host.attributes["bias"]:
        vector = site.emit("add", host.inputs[2], vector)
    return site.with_weights(host, host.inputs[1], vector)


def _activation(site: Site, node: Node) -> str | None:
    host = site.host(node.inputs[0])
    if host is None or not host.attributes["bias"]:
        return None
    return site.changed(host, host.inputs, activation=node.operator)


NAMING = (  # before what products of bytes and of few bits are is found
    Fold("fold_numbers", ("add", "sub", "mul", "div"), _number),
    Fold("name_activations", ("mul", "affine"), _named),
    Fold("name_norms", ("mul",), _norm),
    Fold("fold_products", ("matmul",), _product),
    Fold("group_branches", ("concat",), grouped),
)
FOLDS = (
    Fold("move_reshapes", ("reshape",), _reshaped),
    Fold("fold_batch_norms", ("batch_norm_inference",), _batch_norm),
    Fold("fold_scales", ("mul", "affine"), _scale),
    Fold("fold_biases", ("add",), _bias),
)
ATTENTION = Fold("join_attention", ("matmul",), joined)

_PRODUCTS = (
    Fold("fold_products", ("matmul",), _plain_product),
    Fold("fold_biases", ("add",), _bias),
    Fold("fold_activations", tuple(filter(is_of_result, ACTIVATIONS)), _activation),
)
