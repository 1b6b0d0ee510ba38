"""A model on the runtime against its twin in torch: output, loss, every gradient and statistic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from helpers.session_runs import ran
from torch import nn

from soapstone import GraphBuilder, Machine, Model
from soapstone.frontend.data.npz import LABELS
from soapstone.frontend.training.losses.loss import add_loss
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.autodiff import gradients

LOSSES = {
    "cross_entropy": lambda y, labels: nn.functional.cross_entropy(
        y.flatten(0, -2), labels.flatten().long()
    ),
    "mse": nn.functional.mse_loss,
    "bce_with_logits": nn.functional.binary_cross_entropy_with_logits,
}


def trained(twin: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """Yield the twin's trained parameters as they were made, and whether ours are transposed."""
    seen = set()
    for module in twin.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                linear = isinstance(module, nn.Linear | nn.RNNBase | nn.RNNCellBase)
                yield parameter, linear and parameter.dim() == 2


def shapes(twin: nn.Module) -> list[tuple[int, ...]]:
    """Return the shapes that the twin's parameters have in a model, in order."""
    return [tuple(p.shape[::-1] if flip else p.shape) for p, flip in trained(twin)]


def weights_for(model: Model, twin: nn.Module) -> dict[str, Array]:
    """Return the twin's parameters under the model's names, matched by order.

    Raises:
        ValueError: another number of parameters, or another shape; names the parameter.
    """
    ours, theirs = model.parameters(), list(trained(twin))
    if len(ours) != len(theirs):
        raise ValueError(f"model has {len(ours)} parameters, its twin {len(theirs)}")
    found = {}
    for (name, shape), (parameter, transposed) in zip(ours.items(), theirs):
        value = parameter.detach().numpy()
        found[name] = np.ascontiguousarray(value.T if transposed else value, np.float32)
        if found[name].shape != shape:
            raise ValueError(f"parameter {name!r}: {found[name].shape} found, {shape} needed")
    return found


def statistics_for(model: Model, twin: nn.Module) -> dict[str, Array]:
    """Return the twin's running means and variances under the model's names, matched by order."""
    names = model.graph.inputs(Role.STATE)
    found = [buffer for name, buffer in twin.named_buffers() if "running" in name]
    return {name: buffer.numpy().astype(np.float32) for name, buffer in zip(names, found)}


def run(
    model: Model,
    values: Mapping[str, Array],
    inputs: Mapping[str, Array],
    labels: Array,
    loss: str,
    states: Mapping[str, Array] | None = None,
) -> tuple[Array, float, dict[str, Array], dict[str, Array]]:
    """Return output, loss, gradients and next states of the training graph on two processors."""
    builder = GraphBuilder(base=model.build(training=True))
    output = model.build(training=True).outputs[0]
    value = add_loss(builder, output, loss)
    grads = gradients(builder, value, list(values))
    builder.output(value, *grads.values())
    graph = builder.build().pruned()
    given = {**inputs, LABELS: labels, **values, **(states or {})}
    found, state = ran(graph, given, None, Machine.local(cpus=2), "data_parallel")
    after = {name: state[name] for name in states or ()}
    return found[output], float(found[value]), {n: found[g] for n, g in grads.items()}, after


def check(
    model: Model,
    twin: nn.Module,
    inputs: Mapping[str, Array],
    labels: Array,
    loss: str,
    tolerance: float = 1e-4,
) -> None:
    """Compare a model with its twin, whose weights it takes, and which computes in float64.

    A difference is taken relative to the largest element of its tensor. Gradients that are zero but
    for rounding, as those of biases before a softmax, count against the largest of all gradients.
    """
    assert set(inputs) == set(model.graph.inputs(Role.INPUT))
    twin = twin.double()
    values, states = weights_for(model, twin), statistics_for(model, twin)
    output, found, grads, after = run(model, values, inputs, labels, loss, states)
    fed = [torch.from_numpy(np.array(x)) for x in inputs.values()]
    expected = twin(*(x.double() if x.is_floating_point() else x for x in fed))
    target = torch.from_numpy(np.array(labels))
    expected_loss = LOSSES[loss](
        expected, target.double() if target.is_floating_point() else target
    )
    expected_loss.backward()
    _near("output", output, expected.detach().numpy(), tolerance)
    _near("loss", np.asarray(found), expected_loss.detach().numpy(), tolerance)
    for name, statistic in statistics_for(model, twin).items():
        _near(f"statistic {name}", after[name], statistic, tolerance)
    wanted = {}
    for name, (parameter, transposed) in zip(values, trained(twin)):
        assert parameter.grad is not None, name
        grad = parameter.grad.numpy()
        wanted[name] = grad.T if transposed else grad
    floor = 1e-3 * max(float(np.abs(grad).max()) for grad in wanted.values())
    for name, grad in wanted.items():
        _near(f"gradient of {name}", grads[name], grad, tolerance, floor)


def _near(what: str, found: Array, wanted: Array, tolerance: float, floor: float = 0.0) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {found.shape}, {wanted.shape} needed"
    worst = float(np.abs(found - wanted).max())
    scale = max(float(np.abs(wanted).max()), floor)
    assert scale > 0, f"{what}: all zero"
    assert worst <= tolerance * scale, f"{what}: off by {worst / scale:.1e} of its largest element"
