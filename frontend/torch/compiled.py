"""`torch.compile(model, backend="soapstone")`: graphs of PyTorch, run by sessions of soapstone.

PyTorch hands over a graph of a model's operators. When it first runs with inputs of some shapes it
is written in ATen's core operators, without mutations. Those that have a rule (`aten.py`) and
follow each other become one graph of soapstone, bound in an inference session with the model's
parameters as weights. What has no rule stays PyTorch's, and `report` says what and why.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner

from soapstone.frontend.precision import check_precision
from soapstone.frontend.torch.parts import Part, Support, computes, part_of
from soapstone.frontend.torch.trace import name_of, traced
from soapstone.ir.errors import GraphError
from soapstone.ir.training.precision import SINGLE
from soapstone.runtime import Machine

_BOUND = 8  # shapes of inputs of a graph that stay bound; the least recently used one goes
_CHANGES = 3  # of a weight, after which it is an input: each binds all shapes anew
_NUMBERS = (  # of `item`: Dynamo does so where a second model of a class has another number
    "a number is read from a tensor; where it is an attribute of the model,"
    " torch._dynamo.config.specialize_float = True before the first run keeps it one"
)


@dataclass(frozen=True)
class GraphReport:
    """How one graph runs for inputs of certain shapes.

    Attributes:
        inputs: the inputs' types and shapes, without parameters.
        parts: how many sessions run parts of the graph.
        weights: how many parameters and buffers are weights of these sessions.
        converted: how many nodes of each operator run in sessions, by name.
        left: how many nodes of each operator PyTorch runs, by name and reason; or the whole graph.
    """

    inputs: tuple[str, ...]
    parts: int
    weights: int
    converted: Mapping[str, int]
    left: Mapping[str, int]

    def __str__(self) -> str:
        count, left = sum(self.converted.values()), sum(self.left.values())
        found = f"graph of {', '.join(self.inputs) or 'no inputs'}: {count} operators in"
        lines = [f"{found} {self.parts} sessions, {left} left to PyTorch"]
        return "\n".join([*lines, *(f"  {n} x {why}" for why, n in self.left.items())])


@dataclass(frozen=True)
class CompileReport:
    """How the graphs of a compiled model have run so far.

    Attributes:
        graphs: a report for each graph and shapes of inputs.
        plain: how often PyTorch ran a whole graph, by reason.
    """

    graphs: tuple[GraphReport, ...] = ()
    plain: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"plainly: {n} runs, {why}" for why, n in self.plain.items()]
        none = "no graph came: nothing ran yet, or PyTorch runs all by itself"
        return "\n".join([*map(str, self.graphs), *lines]) or none


class _Bound:
    """A graph that is bound for certain shapes of inputs and contents of weights.

    stamp: equal as long as the weights are unchanged. report: how the graph runs. changed: the
    places of the inputs that it changes.
    """

    def __init__(self, program: Program, args: Sequence[Any]) -> None:
        self.stamp = program.stamp(args)
        graph, self.aliases = traced(program.module, args)
        support = Support(graph)
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        weights = {holders[place].name: args[place].detach() for place in program.weights}
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                weights[node.name] = getattr(graph, node.target).detach()
        left = Counter(why for why in support.left.values() if why)
        converted: Counter[str] = Counter()
        partitioner = CapabilityBasedPartitioner(graph, support, allows_single_node_partition=True)
        parts = [p for p in partitioner.propose_partitions() if any(map(computes, p.nodes))]
        for part in parts:
            converted.update(name_of(n) for n in part.nodes if n.target is not operator.getitem)
        fused = partitioner.fuse_partitions(parts)
        made: list[Part] = []
        for node in list(fused.graph.nodes):
            if node.op == "call_module" and node.target.startswith("fused_"):
                segment = getattr(fused, node.target)
                part = part_of(segment, node.args, weights, program.options)
                made.append(part)
                setattr(fused, node.target, part)
        *_, last = fused.graph.nodes
        targets = set()
        for node in list(fused.graph.nodes):
            if node.op == "call_function" and name_of(node) == "copy_":
                last.prepend(node)  # inputs change when all that reads them has run
                targets.add(node.args[0].name)
        self.changed = frozenset(p for p, each in enumerate(holders) if each.name in targets)
        fused.recompile()
        self._fused = fused
        shown, held = _shown(args, program.weights), sum(p.names.count(None) for p in made)
        self.report = GraphReport(shown, len(made), held, dict(converted), dict(left))

    def run(self, *args: Any) -> Any:
        """Return the graph's results."""
        made = self._fused(*args)
        if not self.aliases:
            return made
        made = list(made)
        for each in self.aliases:
            made[each.place] = each.of((args if each.of_input else made)[each.source])
        return tuple(made)


def _meet(args: Sequence[Any], changed: frozenset[int]) -> bool:
    """Return whether an argument that is changed may share memory with another."""
    extents = []
    for place, a in enumerate(args if changed else ()):
        if _tensor(a) and a.numel():
            last = sum((n - 1) * stride for n, stride in zip(a.shape, a.stride()))
            start = a.data_ptr()
            extents.append((start, start + (last + 1) * a.element_size(), place in changed))
    end = end_of_changed = 0
    for start, stop, changes in sorted(extents):
        if start < (end if changes else end_of_changed):
            return True
        end = max(end, stop)
        end_of_changed = max(end_of_changed, stop if changes else 0)
    return False


def _shown(args: Sequence[Any], weights: frozenset[int]) -> tuple[str, ...]:
    return tuple(
        f"{str(a.dtype).removeprefix('torch.')}{list(a.shape)}" if _tensor(a) else repr(a)
        for place, a in enumerate(args)
        if place not in weights
    )


def _tensor(given: Any) -> bool:
    return isinstance(given, torch.Tensor)


class Program:
    """A graph that PyTorch handed over, with what is bound of it by shapes of inputs.

    module: the graph. options: of the sessions of its segments.
    """

    def __init__(self, module: Any, options: Mapping[str, Any]) -> None:
        self.module = module
        self.options = options
        holders = [node for node in module.graph.nodes if node.op == "placeholder"]
        self.weights = frozenset(place for place, node in enumerate(holders) if _static(node))
        self.held: Sequence[Any] = ()  # weak references to the weights, by which it is found
        self.plain: Counter[str] = Counter()
        self.reports: dict[Any, GraphReport] = {}
        self._bounds: OrderedDict[Any, _Bound] = OrderedDict()
        self._changes: Counter[int] = Counter()  # how often a weight was another, by its place
        self._failed: dict[Any, str] = {}
        self._lock = threading.Lock()

    def stamp(self, args: Sequence[Any]) -> tuple[Any, ...]:
        """Return a value that is equal as long as the weights among the arguments are unchanged."""
        return tuple((args[p].data_ptr(), args[p]._version) for p in sorted(self.weights))

    def __call__(self, *args: Any) -> Any:
        """Run the graph in sessions, or by PyTorch where it needs to see the operators."""
        why = ""
        self.held = self.held or [weakref.ref(args[place]) for place in self.weights]
        if torch.is_grad_enabled() and any(_tensor(a) and a.requires_grad for a in args):
            why = "gradients are recorded; torch.no_grad() needed"
        elif torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            why = "autocast"
        elif any(_tensor(args[place]) and args[place].is_inference() for place in self.weights):
            why = "weights made in inference mode, whose changes are not counted"
        key = tuple((tuple(a.shape), a.dtype, a.device.type) if _tensor(a) else a for a in args)
        if not why:
            with self._lock:
                why = self._failed.get(key, "")
                bound = None if why else self._found(key, args)
            if bound is not None and not _meet(args, bound.changed):
                with torch.no_grad():
                    return bound.run(*args)
            shared = "an input that is changed shares memory with another"
            why = self._failed.get(key, "") if bound is None else shared
        self.plain[why] += 1
        return self.module(*args)

    def _found(self, key: Any, args: Sequence[Any]) -> _Bound | None:
        """Return the graph bound for a key of shapes; None if sessions can run none of it."""
        bound = self._bounds.pop(key, None)
        if bound is not None and bound.stamp != self.stamp(args):
            self._changed(bound, args)
            bound = None
        if bound is None:
            try:
                bound = _Bound(self, args)
            except Exception as error:  # what PyTorch cannot trace, it still runs
                said = " ".join(str(error).split())[:200]
                if "_local_scalar_dense" in said:
                    said += f"; {_NUMBERS}"
                self._failed[key] = f"no graph: {type(error).__name__}: {said}"
                return None
            self.reports[key] = bound.report
        self._bounds[key] = bound
        if len(self._bounds) > _BOUND:
            self._bounds.popitem(last=False)  # its sessions end when no thread runs them
        return bound

    def _changed(self, bound: _Bound, args: Sequence[Any]) -> None:
        """Drop a graph whose weights changed; a weight that keeps changing becomes an input."""
        places = sorted(self.weights)
        for place, before, now in zip(places, bound.stamp, self.stamp(args)):
            self._changes[place] += before != now
        self.weights = frozenset(p for p in places if self._changes[p] < _CHANGES)
        if len(self.weights) < len(places):
            self._bounds.clear()  # they have other inputs


def _static(node: Any) -> bool:
    """Return whether an input is a parameter or buffer of a module, by what Dynamo says of it."""
    return "_dynamo_static_input_type" in (node.meta.get("tensor_dict") or {}) or isinstance(
        node.meta.get("example_value"), torch.nn.Parameter
    )


class Backend:
    """The backend that `torch.compile` calls with each graph.

    Args:
        threads, precision: as of `InferenceSession`.
    """

    def __init__(self, threads: int | None = None, precision: str = SINGLE) -> None:
        check_precision(precision, "cpu", streamed=False)
        if threads is not None:
            Machine.local(cpus=1, threads=threads)
        self.options = {"threads": threads, "precision": precision}
        self.programs: list[Program] = []

    def __call__(self, module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs a graph. module: the graph. example_inputs: fake ones; not looked at."""
        program = Program(module, self.options)
        self.programs.append(program)
        return program.__call__


class _Weak(Backend):
    """The backend by its name, which must not keep graphs that PyTorch has forgotten."""

    def __call__(self, module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        run = super().__call__(module, example_inputs)
        program = self.programs.pop()
        _named.add(program)
        return run


_named: weakref.WeakSet[Program] = weakref.WeakSet()
_by_name = _Weak()


def backend(module: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return what runs a graph of PyTorch: the backend "soapstone" of `torch.compile`.

    module: the graph. example_inputs: fake ones; not looked at.
    """
    return _by_name(module, example_inputs)


def compile(
    model: Any, *, threads: int | None = None, precision: str = SINGLE, **options: Any
) -> Any:
    """Return `torch.compile(model, backend="soapstone")`, for inference.

    Graphs run in soapstone where gradients are not recorded (`torch.no_grad`), on the CPU; what has
    no rule there stays PyTorch's, which `report` tells. A parameter that is changed in place is
    seen by PyTorch's count of its changes; changes through `.data` are not.

    Args:
        model: a module or function. threads: how many threads compute; all cores by default.
        precision: "float32", "bfloat16", "int4" or "int8": see `InferenceSession`.
        options: others of `torch.compile`: fullgraph, dynamic.

    Raises:
        GraphError: another precision, or one that products cannot be computed in here.
        MachineError: no threads, or too many.
    """
    made = Backend(threads, precision)
    compiled = torch.compile(model, backend=made, **options)
    _set_apart(compiled)
    with suppress(AttributeError):
        object.__setattr__(compiled, "_soapstone", made)  # PyTorch's own would write to the model
    return compiled


def _set_apart(compiled: Any) -> None:
    """Give each layer of PyTorch's own a copy of the code by which its graphs are kept.

    PyTorch keeps at most eight graphs for the same code, and runs all others itself. Its own layers
    share their code, so that without copies their graphs would count together.
    """
    forward = getattr(compiled, "forward", compiled)
    called: Any = getattr(forward, "_torchdynamo_orig_callable", None)
    code = getattr(called, "__code__", None)
    if (
        called is not None
        and code is not None
        and code.co_filename == torch._dynamo.external_utils.__file__
    ):
        called.__code__ = code.replace(co_name=f"{code.co_name}_of_soapstone")


def report(compiled: Any) -> CompileReport:
    """Return how the graphs of a compiled model have run so far.

    compiled: what `compile` returned, or a module that was compiled by the backend's name; the
    graphs of a module are those that read its parameters.

    Raises:
        GraphError: neither.
    """
    own = getattr(compiled, "__dict__", {}).get("_soapstone")
    if own is not None:
        programs = list(own.programs)
    elif isinstance(compiled, torch.nn.Module):
        weights = {id(each) for each in (*compiled.parameters(), *compiled.buffers())}
        programs = [p for p in _named if any(id(of()) in weights for of in p.held)]
    else:
        raise GraphError(
            f"report: {type(compiled).__name__} found; what soapstone.torch.compile returned, or a"
            " compiled module, needed"
        )
    plain: Counter[str] = Counter()
    for program in programs:
        plain.update(program.plain)
    reports = [each for program in programs for each in program.reports.values()]
    return CompileReport(tuple(reports), dict(plain))
