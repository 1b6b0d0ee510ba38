"""Training graphs: a search over the forward graph and its gradient, then over the whole.

Any rewrite of the forward graph is valid for training too, since equal functions have equal
gradients; the new graph is differentiated again, and its gradient needs no rules of its own. Then
rules are applied to the whole, including the backward part, in operators that they know
(`gradient_forms.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from soapstone.deadline import Deadline
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Arrays
from soapstone.ir.training.autodiff import gradients, pulled_back
from soapstone.search.cost import Cost, CostModel, Objective
from soapstone.search.cost.cost import NO_LAYOUTS, UNKNOWN, Wrapped
from soapstone.search.optimize import normal
from soapstone.search.optimize.backtracking import ENDS
from soapstone.search.optimize.gradient_forms import in_forms, in_order_of, restored
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.search import Options, Progress, Searched, Spent, search
from soapstone.search.rules.rulebook import Rulebook


def search_step(
    graph: Graph,
    book: Rulebook,
    model: CostModel,
    objective: Objective | None = None,
    options: Options | None = None,
    progress: Progress | None = None,
    deadline: Deadline | None = None,
) -> Searched:
    """Return the cheapest equivalent of a training graph that was found.

    Its weights are values, so rules that need constants do not apply.
    """
    options, objective = options or Options(), objective or Objective()
    clock = Spent(model)
    deadline = model.deadline = deadline or Deadline(options.seconds)
    book = book.without_constants()
    best = Searched(graph, {}, UNKNOWN, UNKNOWN, complete=False)
    try:
        best.before = best.after = model.cost(graph, {})
        best.complete = True
        _both(graph, book, model, objective, options, progress, deadline, best)
    except ENDS:
        best.complete = False
    best.seconds, best.measuring_seconds = clock.seconds
    return best


def _both(
    graph: Graph,
    book: Rulebook,
    model: CostModel,
    objective: Objective,
    options: Options,
    progress: Progress | None,
    deadline: Deadline,
    best: Searched,
) -> None:
    """Search over the forward graph with its gradient, then over the whole; return the better."""

    def consider(searched: Searched, new: Graph) -> None:
        cost = model.cost(new, {})
        best.candidates += searched.candidates
        best.complete &= searched.complete
        if objective.value(cost) < objective.value(best.after):
            best.graph, best.after = new, cost
            best.substitutions += searched.substitutions
            best.solved += searched.solved

    def say(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"forward, {what}", done, total)

    step = taken_apart(graph)
    if step is not None:
        priced = GradientCost(model, step)
        half = deadline.part(1 / 2)
        found = search(step.forward, {}, book, priced, objective, options, say, half)
        consider(found, step.of(restored(found.graph, graph)))
    model.deadline = deadline
    base = best.graph
    whole = StepCost(model, base)
    found = search(in_forms(base), {}, book, whole, objective, options, progress, deadline)
    consider(found, in_order_of(restored(found.graph, base), base))


@dataclass(frozen=True)
class Step:
    """A training graph in two parts: `forward`, and what updates parameters by their gradients."""

    graph: Graph
    forward: Graph
    updates: tuple[Node, ...]

    def of(self, forward: Graph) -> Graph:
        """Return the training graph of another forward graph with the same inputs and outputs."""
        builder = GraphBuilder(base=forward)
        trained = [_parameter(node) for node in self.updates]
        grads = gradients(builder, forward.outputs[0], trained)
        for node in self.updates:
            grad = node.inputs[_grad_position(node)]
            inputs = [grads[_parameter(node)] if name == grad else name for name in node.inputs]
            made = builder.add(replace(node, inputs=tuple(inputs), origin=None, rename=()))
            for old, new in zip(node.outputs, made):
                builder.update(node.overwrites[old], new)
        return builder.build().pruned()


def taken_apart(graph: Graph) -> Step | None:
    """Return a training graph in parts; None if it is not a forward graph with its gradient.

    It is differentiated again, which must give the same graph.
    """
    made = [graph.producers.get(value) for value in graph.updates.values()]
    updates = tuple(
        node for node in dict.fromkeys(made) if node is not None and "g" in node.spec.inputs
    )
    by_them = {output for node in updates for output in node.outputs}
    rest = {name: value for name, value in graph.updates.items() if value not in by_them}
    step = Step(graph, replace(graph, updates=rest).pruned(), updates)
    if not updates or not graph.outputs or by_them.intersection(step.forward.tensors):
        return None
    try:
        return step if _same(graph, step.of(step.forward)) else None
    except GraphError:
        return None


def _parameter(update: Node) -> str:
    """Return the value whose gradient an update reads."""
    return update.inputs[0]


def _grad_position(update: Node) -> int:
    return update.spec.inputs.index("g")


def _same(one: Graph, other: Graph) -> bool:
    pool = Pool()
    values = [dict(zip(_kept(g), normal.read(g, pool, {})[1])) for g in (one, other)]
    return values[0] == values[1]


def _kept(graph: Graph) -> list[tuple[str, str]]:
    """Return what names the outputs and the updates of a graph, in the order of `normal.read`."""
    return [("output", name) for name in graph.outputs] + [("next", name) for name in graph.updates]


class StepCost(Wrapped):
    """Prices training graphs in forms of rules as what they are put together to."""

    def __init__(self, model: CostModel, original: Graph) -> None:
        super().__init__(model)
        self._original = original

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return the cost of a graph, put together; see `CostModel`."""
        return self._model.cost(restored(graph, self._original), constants, layouts)


class GradientCost(Wrapped):
    """Prices forward graphs, and pieces of them, with their gradients."""

    def __init__(self, model: CostModel, step: Step) -> None:
        super().__init__(model)
        self._step = step

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return the cost of a training step, or of its part; see `CostModel`."""
        graph = restored(graph, self._step.graph)
        try:
            if graph.roles.keys() >= self._step.forward.roles.keys():
                return self._model.cost(self._step.of(graph), constants, layouts)
            graph, orders = _with_gradient(graph, layouts)
        except GraphError:  # an operator without a gradient
            return Cost(math.inf, math.inf, math.inf)
        return self._model.cost(graph, constants, orders)


def _with_gradient(graph: Graph, layouts: Layouts) -> tuple[Graph, Layouts]:
    """Return a piece with the gradients of its inputs, given those of its outputs, and layouts."""
    orders = dict(layouts)
    builder = GraphBuilder(base=graph)
    seeds = {}
    for name in graph.outputs:
        spec = graph.tensors[name]
        if spec.is_float:
            seeds[name] = builder.input(builder.unique(f"{name}.seed"), spec.shape, spec.dtype)
            if name in layouts:
                orders[seeds[name]] = layouts[name]
    wanted = [name for name in graph.roles if graph.tensors[name].is_float]
    for name, grad in pulled_back(builder, seeds, wanted).items():
        builder.output(grad)
        if name in layouts and builder.maker(grad) is not None:
            orders[grad] = layouts[name]
    return builder.build(), orders
