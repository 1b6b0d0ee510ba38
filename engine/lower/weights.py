"""Passes for graphs whose weights never change: what weights alone determine is computed once.

Batch norm with fixed statistics is folded into the weights before it; a product with constant
columns becomes `linear`, which also takes a bias. Both leave operators on weights alone, which
`split_constants` moves to a graph of their own, run when the weights are bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from soapstone.engine.lower.constant_vectors import vector_over
from soapstone.engine.lower.fold import CHANNELS, Fold, Site, fold
from soapstone.engine.lower.idioms.attention import joined, with_shared_heads
from soapstone.engine.lower.idioms.branches import grouped
from soapstone.engine.lower.idioms.gathers import gathered_in_order
from soapstone.engine.lower.idioms.norms import grouped as _group_norm, named as _norm
from soapstone.engine.lower.idioms.rotary import rotated
from soapstone.engine.lower.idioms.windows import windowed
from soapstone.ir.analysis.activations import Made, Recogniser, is_exact_factor
from soapstone.ir.graph import Graph, Node
from soapstone.ir.ops.products.matmul import ACTIVATIONS, is_of_result
from soapstone.ir.tensor import Role


def fold_biases(graph: Graph, weights: Set[str]) -> Graph:
    """Return the graph with biases, and activations after them, folded into products.

    weights: inputs that may change between runs, so their contents are not used.
    """
    for each in _PRODUCTS:
        graph = fold(each, graph, {}, weights)
    return graph.pruned()


def split_constants(graph: Graph, constants: Set[str]) -> tuple[Graph, Graph]:
    """Return the graph of what constants alone determine, and the rest, which reads its outputs."""
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


def _line(site: Site, node: Node) -> tuple[str, float, float] | None:
    """Return x, a scale and a shift of which a node is x * scale + shift, or None."""
    if node.operator == "affine":
        return node.inputs[0], node.attributes["scale"], node.attributes["shift"]
    if node.operator not in ("add", "sub", "mul", "div"):
        return None
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
    return x, scale, shift


def _number(site: Site, node: Node) -> str | None:
    """Replace arithmetic with one constant number by `affine`, if that rounds no differently."""
    found = _line(site, node)
    if found is None:
        return None
    x, scale, shift = found
    if node.operator == "div" and not is_exact_factor(scale):
        return None
    return site.emit("affine", x, name=node.name, scale=scale, shift=shift)


# Activations that files write out as arithmetic, by the names that `Recogniser` gives.
_SPELLED: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gelu": ("gelu", {}),
    "gelu_tanh": ("gelu", {"approximate": "tanh"}),
    "silu": ("silu", {}),
}


def _named(site: Site, node: Node) -> str | None:
    """Replace GELU and SiLU written as arithmetic by one operator, which can join a product."""

    def made(value: str) -> Made[str]:
        maker = site.builder.maker(value) if value else node  # whose outputs are not named yet
        if maker is None or len(maker.outputs) > 1:
            return "", ("",), 0.0, 0.0
        line = _line(site, maker) if maker.operator == "div" else None
        if line is not None:
            return "affine", line[:1], *line[1:]
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
    """Replace `matmul` with a constant matrix on the right by `linear`."""
    if node.attributes["transpose_a"]:
        return None
    x, weights = node.inputs
    if weights not in site.fixed or x in site.fixed or site.builder.spec(weights).rank != 2:
        return None
    if node.attributes["transpose_b"]:
        weights = site.emit("transpose", weights, permutation=(1, 0))
    return site.emit("linear", x, weights, name=node.name, bias=False)


def _plain_product(site: Site, node: Node) -> str | None:
    """As `_product`, if nothing is transposed, which would cost time in every run."""
    return None if node.attributes["transpose_b"] else _product(site, node)


def _reshaped(site: Site, node: Node) -> str | None:
    """Reshape the rows of a product's operand before the product instead of its result after it."""
    host = site.only(node.inputs[0], "linear")
    if host is None:
        return None
    shape, width = node.attributes["shape"], site.builder.spec(host.inputs[0]).shape[-1]
    if shape[-1:] != site.builder.spec(node.inputs[0]).shape[-1:]:
        return None
    x = site.emit("reshape", host.inputs[0], shape=(*shape[:-1], width))
    return site.changed(host, (x, *host.inputs[1:]))


def _batch_norm(site: Site, node: Node) -> str | None:
    """Fold fixed statistics into the product before, or into one multiplication and addition."""
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


def _channel_vector(site: Site, host: Node, value: str) -> str | None:
    """Return a constant that varies only over a product's channels as a vector, or None."""
    if value not in site.fixed:
        return None
    shape = site.builder.spec(host.outputs[0]).shape
    return vector_over(site, value, shape, CHANNELS[host.operator][1] % len(shape))


def _operands(site: Site, node: Node) -> tuple[Node, str] | None:
    """Return the product and the vector over its channels that a node combines, or None."""
    for value, other in (node.inputs, node.inputs[::-1]):
        host = site.host(value)
        if host is not None and site.builder.spec(node.inputs[0]).is_float:
            vector = _channel_vector(site, host, other)
            if vector is not None:
                return host, vector
    return None


def _scale(site: Site, node: Node) -> str | None:
    line = _line(site, node)
    if line is not None:
        return _scale_seen(site, *line)
    found = _operands(site, node) if node.operator == "mul" else None
    return None if found is None else site.scaled(*found, None)


def _scale_seen(site: Site, value: str, factor: float, term: float) -> str | None:
    """Fold a line over a product, or over a reshape or transpose of one, into the product."""
    views: list[Node] = []
    while True:
        host = site.host(value)
        view = site.builder.maker(value)
        if host is not None:
            break
        if view is None or view.spec.view not in ("reshape", "transpose"):
            return None
        if site.readers.get(value) != 1:
            return None
        views.append(view)
        value = view.inputs[0]
    channels = site.builder.spec(value).shape[CHANNELS[host.operator][1]]
    dtype = site.builder.spec(value).dtype
    scale, shift = (
        site.emit("full", shape=(channels,), value=each, dtype=dtype) for each in (factor, term)
    )
    made = site.scaled(host, scale, shift if term else None)
    for view in reversed(views):
        made = site.changed(view, [made])
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
    Fold("name_group_norms", ("reshape", "mul", "add"), _group_norm),
    Fold("fold_products", ("matmul",), _product),
    Fold("group_branches", ("concat",), grouped),
    Fold("fold_gathers", ("gather",), gathered_in_order),
)
MOVE_RESHAPES = Fold("move_reshapes", ("reshape",), _reshaped)
FOLDS = (
    MOVE_RESHAPES,
    Fold("fold_batch_norms", ("batch_norm_inference",), _batch_norm),
    Fold("fold_scales", ("mul", "div", "affine"), _scale),
    Fold("fold_biases", ("add",), _bias),
)
JOINS_OF_CPUS = (  # which have kernels of these
    Fold("join_windows", ("reshape", "concat"), windowed),
    Fold("join_rotations", ("add", "concat", "reshape"), rotated),
)
JOINS = (
    Fold("join_attention", ("matmul",), joined),
    Fold("share_heads", ("attention",), with_shared_heads),
)

_PRODUCTS = (
    Fold("fold_products", ("matmul",), _plain_product),
    Fold("fold_biases", ("add",), _bias),
    Fold("fold_activations", tuple(filter(is_of_result, ACTIVATIONS)), _activation),
)
