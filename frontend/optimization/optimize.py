"""Optimised models: found by a search over substitutions, then checked and measured.

The graph found is run on random inputs besides the original, and both are timed in turns on the
target, each in a process of its own; the result is returned only if it is faster there. If the
budget or an interrupt ends the run early, or a check fails, the original is returned.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.deadline import Deadline
from soapstone.engine.lower import channels_last, fold_weights, merge_parts, stored
from soapstone.engine.lower.rebuild import called, narrow
from soapstone.engine.prepare import evaluated, folded
from soapstone.errors import DataError
from soapstone.frontend.inference.sources import Source
from soapstone.frontend.onnx.texts import blank
from soapstone.frontend.optimization.result import OptimizeResult, Original
from soapstone.frontend.optimization.runners import Side, exported
from soapstone.frontend.optimization.training import Ground
from soapstone.frontend.optimization.trial import Outcome, trial
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts, Order
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import NOTHING, Array, Arrays, Role
from soapstone.search.cost import Cost, CostModel, ExecutorCost, Objective, Weights
from soapstone.search.cost.cost import NO_LAYOUTS, UNKNOWN, PricingError, Wrapped

if TYPE_CHECKING:
    from soapstone.frontend.model import Model
    from soapstone.frontend.onnx import OnnxModel
    from soapstone.search.optimize.search import Searched
    from soapstone.search.rules.rulebook import Floats, Rulebook

TARGETS = ("soapstone", "onnxruntime")
_FASTER = 0.98  # of the original's time: what gains less cannot be told from noise
_TRIAL_SHARE, _TRIAL_S = 0.4, 30.0  # of a budget, kept for checking and timing what is found
Progress = Callable[[str, int, int], None]


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

    The budget covers searching, measuring, checking and timing, and begins when the model and the
    rules have been read. When it is over, or at an interrupt, the best result so far is returned if
    it could be checked, otherwise the original.

    Args:
        model: a Model, an OnnxModel or its file, or a Graph. A Graph with updates is a training
            graph, whose weights are values like others.
        weights: those of a Graph; of a training graph, the contents of its constants.
        batch_size, dims: the extents that the graph is for; the first axis of an input is the
            batch's if it is symbolic.
        target: `soapstone` or `onnxruntime`, whose measured times are used.
        machine: a described device instead, by name or file; times are then estimated. `gpu` is a
            GPU of this computer, on which launches are measured.
        objective: `time`, `memory`, `flops`, `bytes`, `launches`, a weighted sum, or with limits:
            `time subject to memory<2e8`.
        alpha: graphs that cost up to this times the best are searched from; 1 is greedy.
        seconds, candidates: the limits of all time, and of the graphs priced for each piece.
        method: `backtracking`; `saturation`, which keeps every graph in one e-graph; or
            `exhaustive`, which considers every graph and is feasible for few rules, such as
            `metaflow`.
        rules: a rule file instead of the shipped one, or `metaflow`: that paper's substitutions.
            Each proof of a file is replayed before the rule is used.
        max_rule_size: the largest number of operators of a rule.
        threads: the number that computes, here and where the model will run; by default all cores.
        progress: called with a stage, how much of it is done, and its total or None.
        ground: for a training graph, the machine and mapper that will run it; by default one
            processor for each thread, as in `Model.compile`.
        layouts: whether axis orders of values are chosen too, for soapstone's executor on this
            computer.
        chain: a file of substitutions, from `OptimizeResult.save_chain`, which are applied instead
            of a search.
        floats: the contents of floating-point tensors, so that nothing becomes NaN: `zeros`: finite
            numbers; `infinities`: those and NaN too; `reals` also allows rules with a side that is
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
        ground = replace(ground or Ground.local(threads), constants=held)
        threads, held = ground.threads, {}
    pricing = cost_model(target, machine, held, threads, training)
    wanted = Objective.parse(objective)
    where = target if machine is None else str(machine)
    known = None if chain is None else Chain.load(chain).checked(graph, where)
    options = Options(
        alpha, candidates, seconds=seconds, method=method, layouts=layouts, chain=known
    )
    book = _rules(rules, max_rule_size, floats)
    deadline = deadline or Deadline(seconds)  # to read models and rules takes nothing of it
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
        graph=new.graph if kept else graph,
        weights=new.weights if kept else held,
        before=found.before,
        after=found.after,
        measured_before_us=outcome.before_us,
        measured_after_us=outcome.after_us,
        substitutions=counts,
        equations=equations,
        candidates=found.candidates,
        complete=found.complete,
        seconds=found.seconds,
        measuring_seconds=found.measuring_seconds,
        max_abs_error=outcome.error or 0.0,
        kept=kept,
        explanation=explanation(found, book),
        layouts=new.layouts if kept else None,
        chain=Chain(graph.structural_hash, where, tuple(found.passes)) if repeatable else None,
        reason=reason,
        dims=frozen,
        original=Original(graph, held, Path(model) if isinstance(model, str | Path) else None),
    )


def _judged(
    searched: Searched, outcome: Outcome, changed: bool, timed: bool, wanted: Objective
) -> tuple[bool, str]:
    """Return whether the result is kept, and the reason if not, or what is not known of it."""
    ended = "it ended, by its budget or an interrupt, before"
    if outcome.problem:
        return False, outcome.problem
    if not changed:
        if math.isnan(searched.before.time_us):
            again = "what was measured by then is kept: more time needed, or the same again"
            return False, f"{ended} the model was priced; {again}"
        return False, "nothing cheaper was found"
    if outcome.before_us is None or outcome.after_us is None:
        return True, f"{ended} it was timed" if timed else ""
    if outcome.after_us <= _FASTER * outcome.before_us or "time" not in wanted.weights:
        return True, ""
    return False, "what was found is not faster when measured"


def _rules(rules: str | Path | None, max_size: int | None, floats: Floats) -> Rulebook:
    """Return the rules of a file, of the shipped one, or those with a name."""
    from soapstone.rules.file_checks import trusted
    from soapstone.search.rules import rulefile
    from soapstone.search.rules.metaflow import metaflow
    from soapstone.search.rules.rulebook import FLOATS, rulebook, shipped

    if floats not in FLOATS:
        raise GraphError(f"floats {floats!r} found; {', '.join(FLOATS)} needed")
    if str(rules) == "metaflow":
        return metaflow(rulefile.load(), floats)
    if rules is None:
        return shipped(max_size, floats)
    return rulebook(trusted(rules), max_size, floats)


def _made(side: Side, searched: Searched) -> Side:
    """Return the result of a search, ready to run."""
    if side.ground is not None:
        return replace(side, graph=searched.graph)
    new, weights = settled(searched.graph, searched.constants)
    layouts = all_orders(new, weights, searched.layouts) if searched.layouts else None
    return replace(side, graph=new, weights=weights, layouts=layouts)


def _applied(searched: Searched, book: Rulebook) -> tuple[dict[str, int], dict[str, str]]:
    """Return how often each rule was applied, in either direction, and its equation."""
    counts: Counter[str] = Counter()
    equations: dict[str, str] = {}
    for name, count in searched.substitutions.items():
        counts[name.rstrip("'")] += count
        equations[name.rstrip("'")] = str(book.by_name[name])
    return dict(counts), equations


def cost_model(
    target: str,
    machine: str | Path | None,
    weights: Mapping[str, Array],
    threads: int | None,
    training: bool = False,
) -> CostModel:
    """Return the cost model for a target, a described machine, or a GPU of this computer.

    Raises:
        DataError: an unknown target, one that runs no training graphs, or there is no GPU.
    """
    if str(machine) == "gpu":
        from soapstone.native.cuda.device import NoDevice
        from soapstone.search.cost.gpu_executor import GpuCost

        try:
            return GpuCost(training=training)
        except NoDevice as error:
            raise DataError(f"machine 'gpu': {error}") from error
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


def taken(
    model: Model | OnnxModel | Graph | str | Path,
    weights: Mapping[str, Array],
    batch_size: int,
    dims: Mapping[str, int],
) -> tuple[Graph, dict[str, Array], dict[str, int]]:
    """Return a model as a graph for some extents, its weights, and the extents of symbolic dims.

    Raises:
        DataError: a symbolic dim without an extent that is not the first of an input; a batch size
            of a model that has its own.
    """
    if isinstance(model, str | Path) and not str(model).lower().endswith(".onnx"):
        from soapstone.ir.files.graphs import load_graph

        if batch_size != 1:
            raise DataError(f"batch size {batch_size:,} found; graph file {model!r} has its own")
        graph, held = load_graph(model)
        return graph, dict(weights) or held, {}
    if isinstance(model, Graph):
        return model, dict(weights), {}
    source = Source.of(model, weights)
    inputs = [each.with_rank(dims) for each in source.inputs]
    batch = {dim: batch_size for each in inputs for dim in each.shape[:1]}
    if batch_size != 1 and all(isinstance(dim, int) and dim != batch_size for dim in batch):
        have = ", ".join(f"{each.name!r} of shape {each.shape}" for each in inputs) or "none"
        raise DataError(f"batch size {batch_size:,} found; the model has inputs {have}")
    extents: dict[Any, int] = {**batch, **dims}
    known_dims = [dim for each in (*source.inputs, *inputs) for dim in each.symbolic]
    if unknown := sorted(dims.keys() - set(known_dims)):
        have = ", ".join(dict.fromkeys(known_dims)) or "none"
        raise DataError(f"dims: {unknown[0]!r} found; symbolic dims are {have}")
    shapes: dict[str, Array] = {}
    frozen: dict[str, int] = {}
    for each in inputs:
        if each.open_rank is not None:
            raise DataError(
                f"input {each}: its rank is needed, from dims (--dim {each.open_rank}=N)"
            )
        shape: list[int] = []
        for axis, dim in enumerate(each.shape):
            extent = dim if isinstance(dim, int) else extents.get(dim)
            if extent is None:
                what = f"axis {axis} is {dim or 'unknown'}"
                how = f" (--dim {dim}=N)" if dim else ""
                raise DataError(f"input {each.name!r}: {what}; a number needed, from dims{how}")
            if not isinstance(dim, int):
                frozen[dim or f"{each.name}[{axis}]"] = extent
            shape.append(extent)
        shapes[each.name] = blank(shape, each.dtype)
    graph, _ = source.graph(shapes)
    known = source.weights()
    return graph, {name: known[name] for name in graph.roles if name in known}, frozen


class _Exported(Wrapped):
    """Prices graphs as they are exported to a file, which is not in the normal form of rules."""

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return the cost of the exported graph; see `CostModel`."""
        graph, names = joined(graph, constants)
        constants = {names.get(name, name): array for name, array in constants.items()}
        return self._model.cost(graph, constants, layouts)


def joined(graph: Graph, weights: Mapping[str, Array]) -> tuple[Graph, dict[str, str]]:
    """Return a graph with biases in products and nested concatenations joined, and its new names.

    Outputs keep their names; a weight whose name an output takes is renamed.
    """
    outputs = graph.outputs
    graph = merge_parts(fold_weights(graph, weights), Strategy({DEFAULT: Configuration()}))
    graph = narrow(graph)
    return called(graph, outputs)


def settled(graph: Graph, weights: Mapping[str, Array]) -> tuple[Graph, dict[str, Array]]:
    """Return a graph out of normal form, with what weights alone determine as weights.

    Biases go back into products, nested concatenations are joined, and merged kernels become
    arrays.
    """
    outputs = graph.outputs
    graph, names = joined(graph, weights)
    weights = {names.get(name, name): array for name, array in weights.items()}
    graph, held = evaluated(graph, weights, outputs)
    return graph, {n: held[n] for n, role in graph.roles.items() if role is not Role.INPUT}


def all_orders(graph: Graph, weights: Mapping[str, Array], chosen: Layouts) -> dict[str, Order]:
    """Return the axis orders of a graph's values when it runs: those chosen, else the rule's.

    The rule is applied to the graph with its weights folded, as sessions have it.
    """
    run = folded(graph, weights)[1]
    held = stored(run)
    orders = channels_last(run, {name: o for name, o in chosen.items() if name not in held})
    return {name: order for name, order in orders.items() if name in graph.tensors}


def explanation(searched: Searched, book: Any) -> str:
    """Return every step of every piece with the rule, its guard, and the laws that prove it."""
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
