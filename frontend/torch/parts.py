"""Parts of a graph of PyTorch that run in sessions: their nodes, and a session for each."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx.passes.operator_support import OperatorSupportBase

from soapstone.errors import DataError
from soapstone.frontend.exchange import as_array, as_tensor
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.torch.aten import MOVES, RULES
from soapstone.frontend.torch.emit import DTYPES, Emit, Value
from soapstone.frontend.torch.operators import NoRule
from soapstone.frontend.torch.trace import name_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array, Role, TensorSpec

_KNOWN = {"full", "scalar_tensor", "arange", "eye", "zeros", "ones"}  # that read no tensor
_MOST_KNOWN = 1 << 16  # elements of their results
_REFUSED = (NoRule, GraphError, DataError, TypeError, ValueError, AttributeError, LookupError)


class Part(torch.nn.Module):  # type: ignore[misc]
    """A part of a graph, run by one session.

    session: the session. names: for each argument the name of the session's input, or None if it is
    a weight. outputs: the names of the results, which may repeat. single: whether one tensor is
    returned instead of a tuple.
    """

    def __init__(
        self,
        session: InferenceSession,
        names: Sequence[str | None],
        outputs: Sequence[str],
        single: bool,
    ) -> None:
        super().__init__()
        self.session = session
        self.names = names
        self.outputs = outputs
        self.single = single

    def forward(self, *tensors: Any) -> Any:
        """Return the part's results for the graph's tensors."""
        given = {n: as_array(t.detach(), n) for n, t in zip(self.names, tensors) if n}
        found = self.session.run(given)
        made = tuple(
            as_tensor(found[name].copy() if name in self.outputs[:place] else found[name])
            for place, name in enumerate(self.outputs)
        )
        return made[0] if self.single else made


def _specs(node: Any) -> tuple[TensorSpec, ...]:
    """Return the types of what a node of a graph of PyTorch makes.

    Raises:
        NoRule: something that is no tensor here.
    """
    found = node.meta.get("val")
    specs = []
    for each in found if isinstance(found, (tuple, list)) else (found,):
        if not isinstance(each, torch.Tensor):
            raise NoRule(f"{type(each).__name__} found, tensors needed")
        if each.dtype not in DTYPES:
            raise NoRule(f"type {str(each.dtype).removeprefix('torch.')}")
        if each.device.type != "cpu" or each.layout != torch.strided:
            raise NoRule(f"a tensor on {each.device}, {each.layout}")
        specs.append(TensorSpec(tuple(each.shape), DTYPES[each.dtype]))
    return tuple(specs)


def _emitted(e: Emit, node: Any, made: Mapping[Any, Any]) -> Any:
    """Return the values of a node, whose inputs are emitted already.

    Raises:
        NoRule, GraphError, …: it is none of soapstone's.
    """
    given = torch.fx.map_arg((node.args, node.kwargs), lambda each: made[each])
    args, kwargs = given
    if node.target is operator.getitem:
        found = args[0][args[1]]
        if found is None:
            raise NoRule("a result that its rule does not make")
        return found
    name = name_of(node)
    e.wanted = _specs(node)
    if name in _KNOWN:
        if np.prod(e.out.shape) > _MOST_KNOWN:
            raise NoRule("few elements needed")
        return e.known(as_array(node.target(*args, **kwargs), name), e.out.dtype)
    if name not in RULES:
        raise NoRule("no rule")
    if isinstance(node.meta["val"], (tuple, list)):
        looked = [u for u in node.users if u.target is operator.getitem and u.users]
        e.used = frozenset(u.args[1] for u in looked)
    else:
        e.used = frozenset((0,))
    result = RULES[name](e, *args, **kwargs)
    several = result if isinstance(result, tuple) else (result,)
    for found, needed in zip(several, e.wanted, strict=True):
        if found is not None and (found.shape, found.dtype) != (needed.shape, needed.dtype):
            raise NoRule(f"its rule would give {found.dtype}{list(found.shape)}")
    return several if isinstance(node.meta["val"], (tuple, list)) else several[0]


class Support(OperatorSupportBase):  # type: ignore[misc]
    """Tells which nodes of a graph soapstone runs, by trying to emit each alone."""

    def __init__(self, module: Any) -> None:
        self.left: dict[Any, str] = {}
        for node in module.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target is operator.getitem:
                if node.args[0] in self.left:
                    self.left[node] = ""  # goes with what it is a result of
                continue
            try:
                _tried(node)
            except _REFUSED as error:
                said = " ".join(str(error).split())
                self.left[node] = f"{name_of(node)}: {said or type(error).__name__}"

    def is_node_supported(self, submodules: Any, node: Any) -> bool:
        """Return whether soapstone runs a node."""
        return node.op == "call_function" and node not in self.left


def _tried(node: Any) -> None:
    """Emit a node by itself, over inputs of the types that it reads."""
    builder = GraphBuilder("tried")
    e = Emit(builder, {})
    made = {}
    for number, source in enumerate(node.all_input_nodes):
        values = [
            e.value(builder.input(f"x{number}.{n}", spec.shape, spec.dtype))
            for n, spec in enumerate(_specs(source))
        ]
        made[source] = values if isinstance(source.meta["val"], (tuple, list)) else values[0]
    _emitted(e, node, made)


def computes(node: Any) -> bool:
    """Return whether a node is more than a constant, or another view of what it reads."""
    return node.target is not operator.getitem and name_of(node) not in MOVES | _KNOWN


def part_of(
    segment: Any, given: Sequence[Any], weights: Mapping[str, Any], options: Mapping[str, Any]
) -> Part:
    """Return a segment of a graph as a part with a session of its own.

    given: the nodes outside of it that are its inputs. weights: the tensors that never change, by
    the node's name. options: of the session.
    """
    builder = GraphBuilder("torch")
    held: dict[str, Array] = {}
    e = Emit(builder, held)
    names: list[str | None] = []
    made: dict[Any, Any] = {}
    outer = iter(given)
    for node in segment.graph.nodes:
        if node.op == "placeholder":
            source = next(outer)
            (spec,) = _specs(source)
            weight = weights.get(source.name)
            role = Role.INPUT
            if weight is not None:
                role = Role.PARAMETER if spec.is_float else Role.STATE
                held[node.name] = as_array(weight, node.name)
            builder.input(node.name, spec.shape, spec.dtype, role)
            made[node] = e.value(node.name)
            names.append(None if weight is not None else node.name)
        elif node.op == "call_function":
            made[node] = _emitted(e, node, made)
        elif node.op == "output":
            result = node.args[0]
    several = result if isinstance(result, (tuple, list)) else (result,)
    outputs: list[Value] = [made[each] for each in several]
    builder.output(*dict.fromkeys(value.name for value in outputs))
    session = InferenceSession(builder.build(), held, **options)
    single = not isinstance(result, (tuple, list))
    return Part(session, names, [value.name for value in outputs], single)
