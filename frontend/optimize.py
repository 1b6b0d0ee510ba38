"""Optimised models: the search over substitutions, checked and measured before it is believed.

The found graph is run on random inputs beside the original, and both are timed in turns on the
target; what is not faster there is not returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.inference import NOTHING, Source
from soapstone.frontend.npz import DataError
from soapstone.frontend.optimize_check import exported, measured, verified
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.layouts import Layouts, Order
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.runtime.lower import (
    channels_last,
    fold_weights,
    merge_parts,
    split_constants,
    stored,
)
from soapstone.runtime.lower.rebuild import names_for, renamed
from soapstone.search.cost import Cost, CostModel, ExecutorCost, Objective
from soapstone.search.cost.cost import NO_LAYOUTS, Wrapped

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.frontend.optimize_training import Ground
    from soapstone.search.optimize.chain import Chain
    from soapstone.search.optimize.rulebook import Floats, Rulebook
    from soapstone.search.optimize.search import Searched

TARGETS = ("soapstone", "onnxruntime")
_FASTER = 0.98  # of the original's time: what gains less cannot be told from noise
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class OptimizeResult:
    """An optimised model, what was predicted and measured of it, and how it came about.

    Attributes:
        graph, weights: the model; the original where the search found nothing faster.
        before, after: predicted costs.
        measured_before_us, measured_after_us: medians of runs taken in turns on the target; None
            where it is only described.
        substitutions: how often each rule was applied, by its identity.
        equations: the rules that were applied, as mathematics.
        max_abs_error: the largest difference of an output from the original's on random inputs.
        kept: whether the optimised graph is the one returned.
        layouts: axis orders of the graph's values, where others than the rule's were chosen.
        chain: the substitutions, in the form in which they can be applied again; None for training
            graphs, and where layouts were chosen or all graphs were looked at.
    """

    graph: Graph
    weights: Mapping[str, Array]
    before: Cost
    after: Cost
    measured_before_us: float | None
    measured_after_us: float | None
    substitutions: Mapping[str, int]
    equations: Mapping[str, str]
    candidates: int
    complete: bool
    seconds: float
    measuring_seconds: float
    max_abs_error: float
    kept: bool
    explanation: str = field(default="", repr=False)
    layouts: Layouts | None = None
    chain: Chain | None = field(default=None, repr=False)

    @property
    def speedup(self) -> float:
        """Measured time before over after, predicted where nothing was measured."""
        if self.measured_before_us is not None and self.measured_after_us:
            return self.measured_before_us / self.measured_after_us
        return self.before.time_us / self.after.time_us if self.after.time_us else 1.0

    def save(self, path: str | Path) -> None:
        """Write the model: an ONNX file by its suffix, else a graph file and its weights.

        Raises:
            GraphError: an operator has no counterpart in ONNX.
        """
        if str(path).lower().endswith(".onnx"):
            from soapstone.frontend.onnx import to_onnx

            to_onnx(self.graph, self.weights, path, layouts=self.layouts)
        else:
            from soapstone.ir.files import save_graph

            save_graph(self.graph, path, dict(self.weights) or None, self.layouts)

    def save_chain(self, path: str | Path) -> None:
        """Write the substitutions, to be applied again without a search.

        Raises:
            GraphError: the result is of a kind that has no chain.
        """
        if self.chain is None:
            raise GraphError("no chain: inference without layouts or exhaustive search needed")
        self.chain.save(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "cost_before_us": self.before.time_us,
            "cost_after_us": self.after.time_us,
            "estimated": self.after.estimated,
            "measured_before_us": self.measured_before_us,
            "measured_after_us": self.measured_after_us,
            "speedup": self.speedup,
            "launches_before": self.before.launches,
            "launches_after": self.after.launches,
            "bytes_before": self.before.bytes,
            "bytes_after": self.after.bytes,
            "flops_before": self.before.flops,
            "flops_after": self.after.flops,
            "substitutions": dict(self.substitutions),
            "candidates": self.candidates,
            "complete": self.complete,
            "seconds": self.seconds,
            "measuring_seconds": self.measuring_seconds,
            "max_abs_error": self.max_abs_error,
            "kept": self.kept,
            "layouts": None if self.layouts is None else len(self.layouts),
        }

    def __str__(self) -> str:
        estimated = " (estimated)" if self.after.estimated else ""

        def row(name: str, before: float, after: float, form: str = ",.0f") -> str:
            return f"  {name:<16} {before:>14{form}} -> {after:>14{form}}"

        lines = [f"{self.graph.name}: {len(self.graph.nodes)} operators"]
        if self.measured_before_us is not None and self.measured_after_us is not None:
            lines.append(row("measured us", self.measured_before_us, self.measured_after_us))
        lines += [
            row(f"predicted us{estimated}", self.before.time_us, self.after.time_us),
            row("launches", self.before.launches, self.after.launches),
            row("bytes moved", self.before.bytes, self.after.bytes),
            row("operations", self.before.flops, self.after.flops),
            f"  {self.speedup:.2f}x, found in {self.seconds:.1f} s among {self.candidates} graphs"
            + ("" if self.complete else " (not searched to the end)"),
        ]
        if not self.kept:
            found = self.after is not self.before
            what = "not faster when measured" if found else "nothing cheaper"
            lines.append(f"  the original is kept: what was found is {what}")
        for name, count in sorted(self.substitutions.items(), key=lambda item: -item[1]):
            lines.append(f"  {count:4d} x {name}  {self.equations[name]}")
        if self.max_abs_error:
            lines.append(f"  outputs differ by at most {self.max_abs_error:.2g}")
        return "\n".join(lines)

    __repr__ = __str__


def optimize(
    model: Model | OnnxModel | Graph | str | Path,
    weights: Mapping[str, Array] = NOTHING,
    *,
    batch_size: int = 1,
    dims: Mapping[str, int] | None = None,
    target: str = "soapstone",
    machine: str | Path | None = None,
    objective: str = "time",
    alpha: float = 1.05,
    seconds: float = 45.0,
    candidates: int = 300,
    method: str = "backtracking",
    rules: str | Path | None = None,
    max_rule_size: int | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    ground: Ground | None = None,
    layouts: bool = False,
    chain: str | Path | None = None,
    floats: Floats = "zeros",
) -> OptimizeResult:
    """Return a faster equivalent of a model, for the executor that will run it.

    Args:
        model: a Model, an OnnxModel or its file, or a Graph; one with updates is a training graph,
            whose weights are values like others.
        weights: those of a Graph.
        batch_size, dims: the extents that the graph is for.
        target: `soapstone` or `onnxruntime`, whose measured times are used.
        machine: a described device instead, by name or file; times are then estimated.
        objective: `time`, `memory`, `flops`, `bytes`, `launches`, a weighted sum, or with limits:
            `time subject to memory<2e8`.
        alpha: how much worse than the best a graph may be and still be searched from; 1 is greedy.
        seconds, candidates: when to stop: after so many seconds of search, those of measuring left
            out, and after so many graphs a piece.
        method: `backtracking`, or `saturation`, which keeps every graph in one e-graph, or
            `exhaustive`, which looks at every graph: feasible for few rules, such as `metaflow`.
        rules: a rule file instead of the shipped one, or `metaflow`: that paper's substitutions.
            Each proof of a file is replayed before it is used.
        max_rule_size: the most operators of a rule.
        ground: of a training graph: the machine and mapper that will run it; by default one
            processor a thread, as `Model.compile` has it.
        layouts: choose axis orders of values too, for soapstone's executor on this computer.
        chain: a file of substitutions, from `OptimizeResult.save_chain`: they are applied, and
            nothing is searched.
        floats: what floating-point tensors hold, so that nothing becomes NaN: `zeros`, finite
            numbers; `infinities`, those and NaN too; `reals` also allows rules of which one side is
            undefined at some zeros, as `1/rsqrt(x) = x rsqrt(x)`.

    Raises:
        DataError, GraphError: a model, target, objective or rule file that does not fit, or a rule
            whose proof fails, by name.
    """
    from soapstone.frontend.optimize_training import Ground
    from soapstone.search.optimize.chain import Chain
    from soapstone.search.optimize.search import Options, search
    from soapstone.search.optimize.steps import search_step

    graph, held = _taken(model, weights, batch_size, dims or {})
    training = bool(graph.updates)
    if alpha < 1:
        raise GraphError(f"alpha {alpha} found; 1 or more needed")
    if layouts and (training or machine is not None or target != "soapstone"):
        what = "a training graph" if training else f"target {machine or target!r}"
        raise GraphError(f"layouts found for {what}; target soapstone and inference needed")
    repeatable = not (training or layouts or method == "exhaustive")
    if chain is not None and not repeatable:
        raise GraphError("chain found; inference without layouts or exhaustive search needed")
    if training:
        ground = ground or Ground.local(threads)
        threads = ground.threads
    pricing = cost_model(target, machine, graph, held, threads, training)
    wanted = Objective.parse(objective)
    where = target if machine is None else str(machine)
    known = None if chain is None else Chain.load(chain).checked(graph, where)
    options = Options(
        alpha, candidates, seconds=seconds, method=method, layouts=layouts, chain=known
    )
    book = _rules(rules, max_rule_size, floats)
    if ground is not None:
        found = search_step(graph, book, pricing, wanted, options, progress)
    else:
        found = search(graph, held, book, pricing, wanted, options, progress)
    timed = machine is None and found.graph is not graph
    if ground is not None:
        tried = _step((graph, held), found, ground, timed)
    else:
        tried = _inference((graph, held), found, target, threads, timed)
    kept = found.graph is not graph
    if tried.before_us is not None and tried.after_us is not None:
        faster = tried.after_us <= _FASTER * tried.before_us
        kept = faster or "time" not in wanted.weights
    counts, equations = _applied(found, book)
    return OptimizeResult(
        tried.graph if kept else graph,
        tried.weights if kept else held,
        found.before,
        found.after,
        tried.before_us,
        tried.after_us,
        counts,
        equations,
        found.candidates,
        found.complete,
        found.seconds,
        found.measuring_seconds,
        tried.error,
        kept,
        explanation(found, book),
        tried.layouts if kept else None,
        Chain(graph.structural_hash, where, tuple(found.passes)) if repeatable else None,
    )


def _rules(rules: str | Path | None, max_size: int | None, floats: Floats) -> Rulebook:
    """Return the rules of a file, of the shipped one, or those of a name."""
    from soapstone.search.optimize.metaflow import metaflow
    from soapstone.search.optimize.rulebook import FLOATS, rulebook
    from soapstone.search.substitution import rulefile
    from soapstone.search.substitution.verify import trusted

    if floats not in FLOATS:
        raise GraphError(f"floats {floats!r} found; {', '.join(FLOATS)} needed")
    if str(rules) == "metaflow":
        return metaflow(rulefile.load(), floats)
    file = rulefile.load() if rules is None else trusted(rules)
    return rulebook(file, max_size, floats=floats)


@dataclass(frozen=True)
class _Tried:
    """What was found, ready to run: checked against the original, and timed beside it."""

    graph: Graph
    weights: Mapping[str, Array]
    layouts: Layouts | None
    error: float
    before_us: float | None = None
    after_us: float | None = None


def _inference(
    given: tuple[Graph, Mapping[str, Array]],
    found: Searched,
    target: str,
    threads: int | None,
    timed: bool,
) -> _Tried:
    new, weights = settled(found.graph, found.constants)
    layouts = all_orders(new, weights, found.layouts) if found.layouts else None
    error = verified(*given, new, weights, layouts)
    times = measured(target, given, (new, weights), threads, layouts) if timed else (None, None)
    return _Tried(new, weights, layouts, error, *times)


def _step(
    given: tuple[Graph, Mapping[str, Array]], found: Searched, ground: Ground, timed: bool
) -> _Tried:
    from soapstone.frontend.optimize_training import measured_steps, verified_step

    graph, values = given
    error = verified_step(graph, found.graph, ground)
    times = measured_steps(graph, found.graph, ground) if timed else (None, None)
    return _Tried(found.graph, values, None, error, *times)


def _applied(found: Searched, book: Rulebook) -> tuple[dict[str, int], dict[str, str]]:
    """Return how often each rule was applied, either way round, and what it says."""
    counts: Counter[str] = Counter()
    equations: dict[str, str] = {}
    for name, count in found.substitutions.items():
        counts[name.rstrip("'")] += count
        equations[name.rstrip("'")] = str(book.by_name[name])
    return dict(counts), equations


def cost_model(
    target: str,
    machine: str | Path | None,
    graph: Graph,
    weights: Mapping[str, Array],
    threads: int | None = None,
    training: bool = False,
) -> CostModel:
    """Return what prices graphs for a target, or for a described machine.

    Raises:
        DataError: there is no such target, or it runs no training graphs.
    """
    if machine is not None:
        from soapstone.search.cost.machine import RooflineCost

        return RooflineCost(machine, training=training)
    if target == "soapstone":
        if training:
            return ExecutorCost(threads, training=True)
        return ExecutorCost.for_weights(weights, threads)
    if target == "onnxruntime" and not training:
        from soapstone.search.cost.onnxruntime import OnnxRuntimeCost

        return _Exported(OnnxRuntimeCost.for_weights(exported, weights, threads))
    if target not in TARGETS:
        raise DataError(f"target {target!r} found; {' or '.join(TARGETS)} needed")
    raise DataError(f"target {target!r} found for a training graph; soapstone needed")


def training_graph_of(app: str | Path, batch_size: int) -> Graph:
    """Return the training graph of an app, by its name or script, with its own options.

    Raises:
        AppError: there is no such app.
    """
    from soapstone.frontend.app import load_app
    from soapstone.frontend.optimizers import optimizer
    from soapstone.frontend.training import training_graph

    found = load_app(app)
    forward = found.build(batch_size).build(batch_size, training=True)
    options = found.options
    chosen = optimizer(options["optimizer"])
    return training_graph(forward, options["loss"], chosen, tuple(options["metrics"]))


def _taken(
    model: Model | OnnxModel | Graph | str | Path,
    weights: Mapping[str, Array],
    batch_size: int,
    dims: Mapping[str, int],
) -> tuple[Graph, dict[str, Array]]:
    """Return a model as a graph for some extents, with its weights."""
    if isinstance(model, str | Path) and not str(model).lower().endswith(".onnx"):
        from soapstone.ir.files import load_graph

        graph, held = load_graph(model)
        return graph, dict(weights) or held
    if isinstance(model, Graph):
        return model, dict(weights)
    source = Source.of(model, weights)
    extents = {"batch": batch_size, **dims}
    shapes = {}
    for each in source.inputs:
        shape = [extents.get(dim, dim) if isinstance(dim, str) else dim for dim in each.shape]
        for axis, dim in enumerate(shape):
            if not isinstance(dim, int):
                what = f"axis {axis} is {dim or 'unknown'}"
                raise DataError(f"input {each.name!r}: {what}; a number needed, from dims")
        shapes[each.name] = np.zeros(
            [int(dim) for dim in shape if isinstance(dim, int)], each.dtype
        )
    graph, _ = source.graph(shapes)
    known = source.weights()
    return graph, {name: known[name] for name in graph.roles if name in known}


class _Exported(Wrapped):
    """Prices graphs as they are written to a file: out of the form in which rules see them."""

    def cost(
        self,
        graph: Graph,
        constants: Mapping[str, Array],
        layouts: Mapping[str, tuple[int, ...]] = NO_LAYOUTS,
    ) -> Cost:
        """Return the cost of the exported graph; see `CostModel`."""
        graph, names = joined(graph, constants)
        constants = {names.get(name, name): array for name, array in constants.items()}
        return self._model.cost(graph, constants, layouts)


def joined(graph: Graph, weights: Mapping[str, Array]) -> tuple[Graph, dict[str, str]]:
    """Return a graph with biases back in products and nested joins as one, and its new names.

    Outputs keep their names; weights whose name an output takes have another.
    """
    outputs = graph.outputs
    graph = merge_parts(fold_weights(graph, weights), Strategy({DEFAULT: Configuration()}))
    names = names_for(graph, outputs)
    return renamed(graph, names), names


def settled(graph: Graph, weights: Mapping[str, Array]) -> tuple[Graph, dict[str, Array]]:
    """Return a graph out of its normal form, with what weights alone determine as weights.

    Biases go back into products, nested joins become one, and merged kernels become arrays.
    """
    graph, names = joined(graph, weights)
    weights = {names.get(name, name): array for name, array in weights.items()}
    fixed = {name for name, role in graph.roles.items() if role is not Role.INPUT}
    first, rest = split_constants(graph, fixed)
    made = interpret(first, {name: weights[name] for name in first.roles}) if first.nodes else {}
    held = {**weights, **made}
    return rest, {n: held[n] for n, role in rest.roles.items() if role is not Role.INPUT}


def all_orders(graph: Graph, weights: Mapping[str, Array], chosen: Layouts) -> dict[str, Order]:
    """Return the axis orders of a graph's values when it runs: those chosen, the rule's for others.

    The rule is asked about the graph as sessions have it, its weights folded.
    """
    fixed = {name for name, role in graph.roles.items() if role is not Role.INPUT}
    run = split_constants(fold_weights(graph, weights), fixed)[1]
    held = stored(run)
    orders = channels_last(run, {name: o for name, o in chosen.items() if name not in held})
    return {name: order for name, order in orders.items() if name in graph.tensors}


def explanation(found: Searched, book: Any) -> str:
    """Return every step of every piece, with the rule, its guard, and the laws that prove it."""
    lines = []
    for number, solved in enumerate(found.solved, 1):
        if not solved.found.steps:
            continue
        lines.append(
            f"piece {number}, {solved.times} times:"
            f" {solved.before:,.1f} -> {solved.found.cost:,.1f}"
        )
        for step in solved.found.steps:
            rule = book.by_name[step.rule]
            laws = dict.fromkeys(part.law for chain in rule.rule.proof for part in chain)
            where = "everywhere" if step.match is None else f"match {step.match}"
            lines.append(f"  {step.rule} at {where}, {step.count} times: {rule}")
            if rule.rule.guard:
                lines.append(f"    where {' and '.join(rule.rule.guard)}")
            lines.append(f"    by {', '.join(laws)}")
    return "\n".join(lines)
