"""Optimised models: the search over substitutions, checked and measured before it is believed.

The found graph is run on random inputs beside the original, and both are timed in turns on the
target, each in a process of its own; what is not faster there is not returned. What ends a run
early, its budget or an interrupt, and what speaks against a found graph gives the original.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.deadline import Deadline
from soapstone.engine.lower import channels_last, fold_weights, merge_parts, stored
from soapstone.engine.lower.rebuild import called, narrow
from soapstone.engine.prepare import evaluated, folded
from soapstone.engine.session import NOTHING
from soapstone.errors import DataError
from soapstone.files import write
from soapstone.frontend.inference import Source
from soapstone.frontend.optimization.runners import Side, exported
from soapstone.frontend.optimization.training import Ground
from soapstone.frontend.optimization.trial import Outcome, trial
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts, Order
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.search.cost import Cost, CostModel, ExecutorCost, Objective, Weights
from soapstone.search.cost.cost import NO_LAYOUTS, UNKNOWN, PricingError, Wrapped

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.search.optimize.chain import Chain
    from soapstone.search.optimize.search import Searched
    from soapstone.search.rules.rulebook import Floats, Rulebook

TARGETS = ("soapstone", "onnxruntime")
_FASTER = 0.98  # of the original's time: what gains less cannot be told from noise
_TRIAL_SHARE, _TRIAL_S = 0.4, 30.0  # of a budget, kept for checking and timing what is found
Progress = Callable[[str, int, int], None]


_OTHER_SIZES = "another size needs a search of its own"


@dataclass(frozen=True)
class OptimizeResult:
    """An optimised model, what was predicted and measured of it, and how it came about.

    Attributes:
        graph, weights: the model; the original where the search found nothing faster.
        before, after: predicted costs; not numbers where the budget ended before anything was.
        measured_before_us, measured_after_us: medians of runs in processes of their own, taken in
            turns on the target; None where it is only described, or the budget ended before.
        substitutions: how often each rule was applied, by its identity.
        equations: the rules that were applied, as mathematics.
        candidates: how many graphs were priced. complete: whether the search ended by itself,
            before its budget did.
        seconds: of everything. measuring_seconds: of these, what measuring costs took.
        max_abs_error: the largest difference of an output from the original's on random inputs.
        kept: whether the optimised graph is the one returned. reason: why not, or what of it is
            not known.
        explanation: where the gain comes from, for people.
        dims: the extents that symbolic dims of the inputs were given: the graph is for them alone.
        layouts: axis orders of the graph's values, where others than the rule's were chosen.
        chain: the substitutions, in the form in which they can be applied again; None for training
            graphs, and where layouts were chosen or all graphs were looked at.
        original: the model as it was given.
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
    reason: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    original: Original | None = field(default=None, repr=False)

    @property
    def speedup(self) -> float:
        """Measured time before over after, predicted where nothing was measured."""
        if self.measured_before_us is not None and self.measured_after_us:
            return self.measured_before_us / self.measured_after_us
        return self.predicted_speedup

    @property
    def predicted_speedup(self) -> float:
        """Predicted time before over after; 1 where there is none."""
        found = self.before.time_us / self.after.time_us if self.after.time_us else 1.0
        return found if math.isfinite(found) else 1.0

    def save(self, path: str | Path) -> str:
        """Write the model: an ONNX file by its suffix, else a graph file and its weights.

        An original that is kept, with symbolic dims, is written as its file has it.

        Returns "", or where what was found cannot be written, why the original was.

        Raises:
            GraphError: the original cannot be written either: an operator has no counterpart in
                ONNX.
        """
        if not self.kept and self.dims and self.original and self.original.copy(path):
            return ""
        try:
            _save(self.graph, self.weights, path, self.layouts)
            return ""
        except GraphError as error:
            if self.original is None or not self.original.save(path, self.graph):
                raise
            return f"what was found cannot be written: {error}"

    def save_chain(self, path: str | Path) -> None:
        """Write the substitutions to a file, to be applied again without a search.

        Raises:
            GraphError: the result is of a kind that has no chain.
        """
        if self.chain is None:
            raise GraphError("no chain: inference without layouts or exhaustive search needed")
        self.chain.save(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON; what is not known is None."""
        found = {
            "cost_before_us": self.before.time_us,
            "cost_after_us": self.after.time_us,
            "estimated": self.after.estimated,
            "measured_before_us": self.measured_before_us,
            "measured_after_us": self.measured_after_us,
            "speedup": self.speedup,
            "predicted_speedup": self.predicted_speedup,
            **{
                f"{name}_{when}": getattr(cost, name)
                for name in ("launches", "bytes", "flops")
                for when, cost in (("before", self.before), ("after", self.after))
            },
            "substitutions": dict(self.substitutions),
            "candidates": self.candidates,
            "complete": self.complete,
            "seconds": self.seconds,
            "measuring_seconds": self.measuring_seconds,
            "max_abs_error": self.max_abs_error,
            "kept": self.kept,
            "reason": self.reason,
            "dims": dict(self.dims),
            "layouts": None if self.layouts is None else len(self.layouts),
        }
        unknown = {n for n, v in found.items() if isinstance(v, float) and not math.isfinite(v)}
        return {**found, **dict.fromkeys(unknown)}

    def metrics(self) -> list[tuple[str, float, float]]:
        """Return what was measured and predicted: a name, before and after."""
        before, after = self.before, self.after
        measured = []
        if self.measured_before_us is not None and self.measured_after_us is not None:
            measured = [("measured us", self.measured_before_us, self.measured_after_us)]
        estimated = " (estimated)" if after.estimated else ""
        return [
            *measured,
            (f"predicted us{estimated}", before.time_us, after.time_us),
            ("launches", before.launches, after.launches),
            ("bytes moved", before.bytes, after.bytes),
            ("operations", before.flops, after.flops),
            ("peak bytes", before.peak_bytes, after.peak_bytes),
        ]

    def __str__(self) -> str:
        lines = [f"{self.graph.name}: {len(self.graph.nodes)} operators"]
        if math.isnan(self.before.time_us):
            return f"{lines[0]}\n  {self.reason}"
        if self.dims:
            given = ", ".join(f"{name} = {extent}" for name, extent in self.dims.items())
            lines.append(f"  {'' if self.kept else 'searched '}for {given} alone; {_OTHER_SIZES}")
        rows = self.metrics()
        lines += [f"  {name:<24} {one:>14,.0f} -> {two:>14,.0f}" for name, one, two in rows]
        if self.measured_after_us is not None:
            gains = f"{self.speedup:.2f}x where {self.predicted_speedup:.2f}x was predicted"
            lines.append(f"  measured {gains}")
        lines.append(
            f"  {self.speedup:.2f}x, found in {self.seconds:.1f} s among {self.candidates} graphs"
            + ("" if self.complete else " (not searched to the end)")
        )
        if self.reason:
            lines.append(f"  {'' if self.kept else 'the original is kept: '}{self.reason}")
        for name, count in sorted(self.substitutions.items(), key=lambda item: -item[1]):
            lines.append(f"  {count:4d} x {name}  {self.equations[name]}")
        if self.max_abs_error:
            lines.append(f"  outputs differ by at most {self.max_abs_error:.2g}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Original:
    """The model that was given, to be written where what was found of it cannot be."""

    graph: Graph
    weights: Mapping[str, Array]
    file: Path | None = None

    def save(self, path: str | Path, graph: Graph) -> bool:
        """Write it, as it is in its own file if that is of the same format; return whether so."""
        if graph is not self.graph:
            try:
                _save(self.graph, self.weights, path)
                return True
            except GraphError:
                pass
        return self.copy(path)

    def copy(self, path: str | Path) -> bool:
        """Write its file again, if both are ONNX files that stand alone; return whether so."""
        suffixes = {Path(name).suffix.lower() for name in (path, self.file or "")}
        if self.file is None or suffixes != {".onnx"} or _has_data(self.file):
            return False
        write(path, self.file.read_bytes())
        return True


def _has_data(file: Path) -> bool:
    """Return whether an ONNX file has weights in other files, which are found from its folder."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    return any(tensor.external_data for tensor in model.graph.initializer)


def _save(
    graph: Graph, weights: Mapping[str, Array], path: str | Path, layouts: Layouts | None = None
) -> None:
    if str(path).lower().endswith(".onnx"):
        from soapstone.frontend.onnx import to_onnx

        to_onnx(graph, weights, path, layouts=layouts)
    else:
        from soapstone.ir.files.graphs import save_graph

        save_graph(graph, path, dict(weights) or None, layouts)


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
    seconds: float = 120.0,
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
    deadline: Deadline | None = None,
) -> OptimizeResult:
    """Return a faster equivalent of a model, for the executor that will run it.

    The budget is of everything: of what is searched, measured, checked and timed. When it is over,
    or at an interrupt, what was found by then counts if it could be checked; else the original.

    Args:
        model: a Model, an OnnxModel or its file, or a Graph; one with updates is a training graph,
            whose weights are values like others.
        weights: those of a Graph.
        batch_size, dims: the extents that the graph is for; the first axis of an input is the
            batch's if it is symbolic.
        target: `soapstone` or `onnxruntime`, whose measured times are used.
        machine: a described device instead, by name or file; times are then estimated.
        objective: `time`, `memory`, `flops`, `bytes`, `launches`, a weighted sum, or with limits:
            `time subject to memory<2e8`.
        alpha: how much worse than the best a graph may be and still be searched from; 1 is greedy.
        seconds, candidates: when to stop: after so many seconds in all, and after so many graphs a
            piece.
        method: `backtracking`, or `saturation`, which keeps every graph in one e-graph, or
            `exhaustive`, which looks at every graph: feasible for few rules, such as `metaflow`.
        rules: a rule file instead of the shipped one, or `metaflow`: that paper's substitutions.
            Each proof of a file is replayed before it is used.
        max_rule_size: the most operators of a rule.
        threads: how many compute, here and where the model is to run; all cores by default.
        progress: called with a stage, what is done of it and how much it has in all, or None.
        ground: of a training graph: the machine and mapper that will run it; by default one
            processor a thread, as `Model.compile` has it.
        layouts: choose axis orders of values too, for soapstone's executor on this computer.
        chain: a file of substitutions, from `OptimizeResult.save_chain`: they are applied, and
            nothing is searched.
        floats: what floating-point tensors hold, so that nothing becomes NaN: `zeros`, finite
            numbers; `infinities`, those and NaN too; `reals` also allows rules of which one side is
            undefined at some zeros, as `1/rsqrt(x) = x rsqrt(x)`.
        deadline: in place of the seconds.

    Raises:
        DataError, GraphError: a model, target, objective or rule file that does not fit, or a rule
            whose proof fails, by name.

    Source: backtracking by MetaFlow (Jia et al. 2019) and TASO (Jia et al. 2019), saturation by
        TENSAT (Yang et al. 2021); docs/optimize.md says where it differs.
    """
    from soapstone.search.optimize.chain import Chain
    from soapstone.search.optimize.search import Options, Searched, search
    from soapstone.search.optimize.steps import search_step

    deadline = deadline or Deadline(seconds)
    graph, held, frozen = taken(model, weights, batch_size, dims or {})
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
    kept_s = min(_TRIAL_S, _TRIAL_SHARE * deadline.left)
    searching = deadline.keeping(kept_s) if math.isfinite(kept_s) else deadline
    try:
        if ground is not None:
            found = search_step(graph, book, pricing, wanted, options, progress, searching)
        else:
            found = search(graph, held, book, pricing, wanted, options, progress, searching)
    except PricingError as error:
        found = Searched(graph, held, UNKNOWN, UNKNOWN, complete=False)
        unpriced = str(error)
    else:
        unpriced = ""
    side = Side(graph, held, None, target, threads, ground)
    new = side if found.graph is graph else _made(side, found)
    outcome = Outcome(0.0, problem=unpriced)
    if new is not side:
        outcome = trial(side, new, machine is None, deadline)
    kept, reason = _judged(found, outcome, new is not side, machine is None, wanted)
    counts, equations = _applied(found, book)
    return OptimizeResult(
        new.graph if kept else graph,
        new.weights if kept else held,
        found.before,
        found.after,
        outcome.before_us,
        outcome.after_us,
        counts,
        equations,
        found.candidates,
        found.complete,
        found.seconds,
        found.measuring_seconds,
        outcome.error or 0.0,
        kept,
        explanation(found, book),
        new.layouts if kept else None,
        Chain(graph.structural_hash, where, tuple(found.passes)) if repeatable else None,
        reason,
        frozen,
        Original(graph, held, Path(model) if isinstance(model, str | Path) else None),
    )


def _judged(
    searched: Searched, outcome: Outcome, changed: bool, timed: bool, wanted: Objective
) -> tuple[bool, str]:
    """Return whether what was found is kept, and why not, or what of it is not known."""
    if outcome.problem:
        return False, outcome.problem
    if not changed:
        if math.isnan(searched.before.time_us):
            return False, "the budget ended before the model was priced"
        return False, "nothing cheaper was found"
    if outcome.before_us is None or outcome.after_us is None:
        return True, "the budget ended before it was timed" if timed else ""
    if outcome.after_us <= _FASTER * outcome.before_us or "time" not in wanted.weights:
        return True, ""
    return False, "what was found is not faster when measured"


def _rules(rules: str | Path | None, max_size: int | None, floats: Floats) -> Rulebook:
    """Return the rules of a file, of the shipped one, or those of a name."""
    from soapstone.rules.file_checks import trusted
    from soapstone.search.rules import rulefile
    from soapstone.search.rules.metaflow import metaflow
    from soapstone.search.rules.rulebook import FLOATS, rulebook

    if floats not in FLOATS:
        raise GraphError(f"floats {floats!r} found; {', '.join(FLOATS)} needed")
    if str(rules) == "metaflow":
        return metaflow(rulefile.load(), floats)
    file = rulefile.load() if rules is None else trusted(rules)
    return rulebook(file, max_size, floats=floats)


def _made(side: Side, searched: Searched) -> Side:
    """Return what was found, ready to run."""
    if side.ground is not None:
        return replace(side, graph=searched.graph)
    new, weights = settled(searched.graph, searched.constants)
    layouts = all_orders(new, weights, searched.layouts) if searched.layouts else None
    return replace(side, graph=new, weights=weights, layouts=layouts)


def _applied(searched: Searched, book: Rulebook) -> tuple[dict[str, int], dict[str, str]]:
    """Return how often each rule was applied, either way round, and what it says."""
    counts: Counter[str] = Counter()
    equations: dict[str, str] = {}
    for name, count in searched.substitutions.items():
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
        return ExecutorCost(threads, weights=Weights.of(weights))
    if target == "onnxruntime" and not training:
        from soapstone.search.cost.onnxruntime import OnnxRuntimeCost

        return _Exported(OnnxRuntimeCost(exported, threads, weights=Weights.of(weights)))
    if target not in TARGETS:
        raise DataError(f"target {target!r} found; {' or '.join(TARGETS)} needed")
    raise DataError(f"target {target!r} found for a training graph; soapstone needed")


def training_graph_of(app: str | Path, batch_size: int) -> Graph:
    """Return the training graph of an app, by its name or script, with its own options.

    Raises:
        AppError: there is no such app.
    """
    from soapstone.frontend.app import load_app
    from soapstone.frontend.training.optimizers import optimizer
    from soapstone.frontend.training.step_graph import training_graph

    found = load_app(app)
    forward = found.build(batch_size).build(batch_size, training=True)
    options = found.options
    chosen = optimizer(options["optimizer"])
    return training_graph(forward, options["loss"], chosen, tuple(options["metrics"]))


def taken(
    model: Model | OnnxModel | Graph | str | Path,
    weights: Mapping[str, Array],
    batch_size: int,
    dims: Mapping[str, int],
) -> tuple[Graph, dict[str, Array], dict[str, int]]:
    """Return a model as a graph for some extents, its weights, and what symbolic dims were given.

    Raises:
        DataError: a symbolic dim that has no extent, and is not the first of an input.
    """
    if isinstance(model, str | Path) and not str(model).lower().endswith(".onnx"):
        from soapstone.ir.files.graphs import load_graph

        graph, held = load_graph(model)
        return graph, dict(weights) or held, {}
    if isinstance(model, Graph):
        return model, dict(weights), {}
    source = Source.of(model, weights)
    batch = {dim: batch_size for each in source.inputs for dim in each.shape[:1]}
    extents: dict[Any, int] = {**batch, **dims}
    known_dims = [dim for each in source.inputs for dim in each.shape if isinstance(dim, str)]
    if unknown := sorted(dims.keys() - set(known_dims)):
        have = ", ".join(dict.fromkeys(known_dims)) or "none"
        raise DataError(f"dims: {unknown[0]!r} found; symbolic dims are {have}")
    shapes: dict[str, Array] = {}
    frozen: dict[str, int] = {}
    for each in source.inputs:
        shape: list[int] = []
        for axis, dim in enumerate(each.shape):
            extent = dim if isinstance(dim, int) else extents.get(dim)
            if extent is None:
                what = f"axis {axis} is {dim or 'unknown'}"
                raise DataError(f"input {each.name!r}: {what}; a number needed, from dims")
            if not isinstance(dim, int):
                frozen[dim or f"{each.name}[{axis}]"] = extent
            shape.append(extent)
        shapes[each.name] = np.zeros(shape, each.dtype)
    graph, _ = source.graph(shapes)
    known = source.weights()
    return graph, {name: known[name] for name in graph.roles if name in known}, frozen


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
    graph = narrow(graph)
    return called(graph, outputs)


def settled(graph: Graph, weights: Mapping[str, Array]) -> tuple[Graph, dict[str, Array]]:
    """Return a graph out of its normal form, with what weights alone determine as weights.

    Biases go back into products, nested joins become one, and merged kernels become arrays.
    """
    outputs = graph.outputs
    graph, names = joined(graph, weights)
    weights = {names.get(name, name): array for name, array in weights.items()}
    graph, held = evaluated(graph, weights, outputs)
    return graph, {n: held[n] for n, role in graph.roles.items() if role is not Role.INPUT}


def all_orders(graph: Graph, weights: Mapping[str, Array], chosen: Layouts) -> dict[str, Order]:
    """Return the axis orders of a graph's values when it runs: those chosen, the rule's for others.

    The rule is asked about the graph as sessions have it, its weights folded.
    """
    run = folded(graph, weights)[1]
    held = stored(run)
    orders = channels_last(run, {name: o for name, o in chosen.items() if name not in held})
    return {name: order for name, order in orders.items() if name in graph.tensors}


def explanation(searched: Searched, book: Any) -> str:
    """Return every step of every piece, with the rule, its guard, and the laws that prove it."""
    lines = []
    for number, solved in enumerate(searched.solved, 1):
        if not solved.cheapest.steps:
            continue
        lines.append(
            f"piece {number}, {solved.times} times:"
            f" {solved.before:,.1f} -> {solved.cheapest.cost:,.1f}"
        )
        for step in solved.cheapest.steps:
            rule = book.by_name[step.rule]
            laws = dict.fromkeys(part.law for chain in rule.rule.proof for part in chain)
            where = "everywhere" if step.match is None else f"match {step.match}"
            lines.append(f"  {step.rule} at {where}, {step.count} times: {rule}")
            if rule.rule.guard:
                lines.append(f"    where {' and '.join(rule.rule.guard)}")
            lines.append(f"    by {', '.join(laws)}")
    return "\n".join(lines)
