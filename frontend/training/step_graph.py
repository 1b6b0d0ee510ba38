"""The graphs of training: a step (forward, backward and updates), its parts, and an evaluation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from soapstone.frontend.training.loss_scale import STATES, adapted, scale, unscaled
from soapstone.frontend.training.objective import Metrics, Objective, objective
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Initial, Node
from soapstone.ir.tensor import Role
from soapstone.ir.training.autodiff import pulled_back
from soapstone.ir.training.guard import LEARNING_RATE, guarded, step_number

KEEP = "keep"  # 0 in the first part of a batch, 1 in the others: what is kept of its gradients
GRADIENTS = ".gradients"  # of a parameter, summed over the parts of a batch so far


def training_graph(
    forward: Graph,
    loss: str | Objective,
    chosen: Optimizer,
    metrics: Metrics = (),
    *,
    frozen: Collection[str] = (),
    part: bool | None = None,
    scaled: bool = False,
) -> Graph:
    """Return forward, backward and update operators; outputs are loss, finiteness and metrics.

    Args:
        forward: the graph of the model. loss: what it is trained for, or a loss of its first output
            by name, with metrics. frozen: parameters that stay as they are.
        part: of a step in parts, whether it is one that keeps gradients for the last one's update.
        scaled: whether gradients are computed times a scale, which follows their range
            (`loss_scale.py`).

    Raises:
        GraphError: no output, a loss or metric that does not fit, or a parameter without a part in
            the loss.
    """
    aim = loss if isinstance(loss, Objective) else objective(loss, forward.outputs, metrics)
    builder = GraphBuilder(base=replace(forward, outputs=()))
    value, counts = aim.emit(builder, forward.outputs, shared=part is not None)
    if not part:
        builder.input(LEARNING_RATE, (), role=Role.SCALAR)
    step_number(builder)
    finite = steady = builder.apply("is_finite", value, name="finite")[0]
    trained = [name for name in forward.inputs(Role.PARAMETER) if name not in frozen]
    if trained:
        grads = _gradients(builder, forward, aim, value, trained, scaled)
        if part is not None:
            builder.input(KEEP, (), role=Role.SCALAR)
            (zero,) = builder.apply("full", name=f"{KEEP}.zero", shape=(), value=0.0)
            (later,) = builder.apply("greater", KEEP, zero, name=f"{KEEP}.flag")
            grads = {name: _kept(builder, name, grad, later, zero) for name, grad in grads.items()}
        if part:
            for name, grad in grads.items():
                builder.update(name + GRADIENTS, grad)
        else:
            if scaled:
                steady = adapted(builder, value, grads)
            grads = chosen.clipped(builder, grads)
            for name in reversed(trained):
                chosen.emit(builder, name, grads[name], steady)
    builder.output(value, finite, *counts)
    return guarded(builder.build(), steady, STATES).pruned()


def gradient_graph(
    forward: Graph, aim: Objective, frozen: Collection[str], scaled: bool = False
) -> tuple[Graph, dict[str, str]]:
    """Return a graph of loss and gradients, and the value of each parameter's gradient.

    scaled: as of `training_graph`.
    """
    builder = GraphBuilder(base=replace(forward, outputs=(), updates={}))
    value, _ = aim.emit(builder, forward.outputs)
    trained = [name for name in forward.inputs(Role.PARAMETER) if name not in frozen]
    grads = _gradients(builder, forward, aim, value, trained, scaled)
    builder.output(value, *grads.values())
    return builder.build().pruned(), grads


def evaluation_graph(forward: Graph, aim: Objective) -> Graph:
    """Return forward operators, loss and metrics."""
    builder = GraphBuilder(base=replace(forward, outputs=()))
    value, counts = aim.emit(builder, forward.outputs)
    builder.output(value, *counts)
    return builder.build().pruned()


def _gradients(
    builder: GraphBuilder,
    forward: Graph,
    aim: Objective,
    loss: str,
    trained: list[str],
    scaled: bool,
) -> dict[str, str]:
    """Return the gradient of each trained parameter.

    Raises:
        GraphError: the loss does not depend on one; says which output has no loss.
    """
    dtype = builder.spec(loss).dtype
    one = builder.apply("full", name="one", shape=(), value=1.0, dtype=dtype)[0]
    grads = pulled_back(builder, {loss: scale(builder) if scaled else one}, trained)
    missing = next((name for name in trained if name not in grads), None)
    if missing is None:
        return unscaled(builder, grads) if scaled else grads
    ends = _stops(builder, forward, loss, one, missing)
    if ends is not None:
        raise GraphError(
            f"{ends.label}: no gradient passes through it to {missing!r}; freeze that:"
            f" model.freeze({missing!r})"
        )
    used = {term.place for term in aim.terms}
    without = [name for place, name in enumerate(forward.outputs) if place not in used]
    hint = f"output {without[0]!r} has no loss; loss={{…}} gives each its own" if without else ""
    raise GraphError(
        f"loss does not depend on {missing!r}; {hint or 'leave its layer out'}, or freeze it:"
        f" model.freeze({missing!r})"
    )


def _stops(builder: GraphBuilder, forward: Graph, loss: str, one: str, missing: str) -> Node | None:
    """Return where the way of a gradient from the loss to a parameter ends, if there is a way."""
    made = {missing}
    for node in forward.nodes:
        if made.intersection(node.inputs):
            made.update(node.outputs)
    known = pulled_back(builder, {loss: one}, list(made))
    for node in reversed(forward.nodes):
        ends = made.intersection(node.inputs) - known.keys()
        if ends and known.keys() & set(node.outputs):
            return node
    return None


def _kept(builder: GraphBuilder, name: str, grad: str, later: str, zero: str) -> str:
    """Return a gradient with those of the earlier parts of the batch.

    later: whether there are some; zero: what counts else.
    """
    spec = builder.spec(grad)
    state = builder.input(name + GRADIENTS, spec.shape, spec.dtype, Role.STATE, Initial())
    # Not times 0: gradients of a step that was refused may be infinite.
    before = builder.apply("where", later, state, zero, name=f"{name}.before")[0]
    return builder.apply("accumulate", before, grad, name=f"{name}.together")[0]
