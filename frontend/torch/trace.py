"""Graphs of ATen's core operators, recorded as PyTorch runs a graph on tensors without contents.

`make_fx` would do, but it changes what calls of modules do in all threads while it works, and here
graphs are traced when they first run, maybe beside other threads that run theirs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from soapstone.frontend.torch.aten import RULES
from soapstone.frontend.torch.decompositions import DECOMPOSITIONS
from soapstone.frontend.torch.operators import NoRule


def name_of(node: Any) -> str:
    """Return the name of what a node calls; of ATen's operators without the namespace."""
    if not hasattr(node.target, "_schema"):
        return str(getattr(node.target, "__name__", node.target))
    return _short(node.target)


def _short(func: Any) -> str:
    return str(func._schema.name).removeprefix("aten::")


@dataclass(frozen=True)
class Alias:
    """A result that shares its memory with an input, or with another result.

    place: among results. of_input: whether it is an input's. source: the place of that.
    views: the nodes that make the one of the other, in order.
    """

    place: int
    of_input: bool
    source: int
    views: tuple[Any, ...]

    def of(self, tensor: Any) -> Any:
        """Return the result. tensor: what it shares its memory with."""
        for node in self.views:
            # What is given now may have other strides: `view` would refuse what `reshape` copies.
            call = torch.reshape if name_of(node) == "view" else node.target
            tensor = call(tensor, *node.args[1:], **node.kwargs)
        return tensor


def _aliases(graph: Any) -> tuple[Alias, ...]:
    """Return which results of a graph that has its views share memory."""
    *_, last = graph.nodes
    results = list(last.args[0]) if isinstance(last.args[0], (tuple, list)) else []
    paths = {place: _path(node) for place, node in enumerate(results) if _is_tensor(node)}
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    sources = {path[0]: (False, place) for place, path in paths.items() if len(path) == 1}
    sources |= {node: (True, place) for place, node in enumerate(holders)}
    return tuple(
        Alias(place, *sources[path[0]], tuple(path[1:]))
        for place, path in paths.items()
        if path[0] in sources and sources[path[0]] != (False, place)
    )


def _path(node: Any) -> list[Any]:
    """Return the node whose memory a result shares, and the views from there to the result."""
    path: list[Any] = []
    while node.op == "call_function":
        made = node.args[0] if node.target is operator.getitem else node
        formals = made.target._schema.arguments
        of = formals[0].alias_info if formals else None
        source = made.args[0] if of is not None else None
        if of is None or not _is_tensor(source) or _memory(source) != _memory(node):
            break
        if not of.is_write:  # a view; others are what they changed
            path += [node] if made is node else [node, made]
        node = source
    return [node, *reversed(path)]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _memory(node: Any) -> int:
    return int(node.meta["val"].untyped_storage()._cdata)


@cache
def _decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Return what operators without a rule are made of, by operator: PyTorch's and this package's.

    An operator that is registered later and is made of others says so when it is called.
    """
    core = core_aten_decompositions().items()
    return {**{op: of for op, of in core if _short(op) not in RULES}, **DECOMPOSITIONS}


def traced(module: Any, args: Sequence[Any]) -> tuple[Any, tuple[Alias, ...]]:
    """Return a graph in core operators for inputs of these shapes, without mutations, and aliases.

    Operators that have a rule are core. Inputs that the graph changes are copied to in the end.
    Results that share memory with others are None in the graph.

    Raises:
        NoRule: it changes values in place all the same. And whatever PyTorch raises.
    """
    with FakeTensorMode(allow_non_fake_inputs=True) as fakes, torch.no_grad():
        given = [fakes.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        smaller = _recorded(module, given, _decompositions())
        aliases = _aliases(smaller.graph)
        # Only now: what operators are made of changes values in place, too.
        given = [fakes.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        pure = torch.func.functionalize(smaller, remove="mutations_and_views")
        found = _recorded(pure, given, {})
    for node in found.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable and name_of(node) != "copy_":
            raise NoRule(f"{name_of(node)} changes a value in place")
    if aliases:
        *_, last = found.graph.nodes
        shared = {each.place for each in aliases}
        last.args = (tuple(None if p in shared else n for p, n in enumerate(last.args[0])),)
    found.graph.eliminate_dead_code()
    found.recompile()
    return found, aliases


class _Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the operators that run under it as nodes of a graph."""

    def __init__(self, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.table = table
        self.graph = torch.fx.Graph()
        self.constants: dict[str, Any] = {}
        self._nodes: dict[int, Any] = {}
        self._kept: list[Any] = []  # so that no other tensor gets the id of one that is known

    def know(self, tensor: Any, node: Any) -> None:
        """Say which node makes a tensor."""
        node.meta["val"] = tensor
        if isinstance(tensor, torch.Tensor):
            self._nodes[id(tensor)] = node
            self._kept.append(tensor)

    def node(self, value: Any) -> Any:
        """Return the node that makes a tensor; other values are themselves."""
        if not isinstance(value, torch.Tensor):
            return value
        node = self._nodes.get(id(value))
        if node is None:
            if isinstance(value, FakeTensor):
                raise NoRule("a tensor that no operator made")
            name = f"constant{len(self.constants)}"
            self.constants[name] = value
            node = self.graph.get_attr(name)
            self.know(value, node)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.table:
            with self:
                made = self.table[func](*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func.namespace == "prim":  # what is asked of tensors, such as their devices
            return func(*args, **kwargs)
        if _short(func) not in RULES:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        parts, _ = tree_flatten(made)
        if not any(isinstance(part, torch.Tensor) for part in parts):
            return made
        given = tree_map(self.node, (tuple(args), dict(kwargs)))
        node = self.graph.call_function(func, *given)
        if isinstance(made, torch.Tensor):
            self.know(made, node)
        else:
            node.meta["val"] = made
            for number, part in enumerate(made):
                if isinstance(part, torch.Tensor):
                    self.know(part, self.graph.call_function(operator.getitem, (node, number)))
        return made


def _recorded(module: Any, given: Sequence[Any], table: Mapping[Any, Callable[..., Any]]) -> Any:
    recorder = _Recorder(table)
    for number, value in enumerate(given):
        recorder.know(value, recorder.graph.placeholder(f"arg{number}_1"))
    with recorder:
        made = module(*given)
    recorder.graph.output(tree_map(recorder.node, made))
    return torch.fx.GraphModule(recorder.constants, recorder.graph)
