"""Recurrent layers over steps (t, n, k), as the recurrent apps use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from soapstone import GraphBuilder, Model, Tensor
from soapstone.frontend.layers.base import declare
from soapstone.ir.graph import Initial

State = tuple[Tensor, Tensor]


def time_major(model: Model, x: Tensor, name: str | None = None) -> Tensor:
    """Return samples (n, t, k) as steps (t, n, k), or the other way round."""
    return model.transpose(x, (1, 0, 2), name=name)


def _lstm_weights(builder: GraphBuilder, width: int, hidden: int, name: str) -> list[str]:
    shapes = {"input": (width, 4 * hidden), "state": (hidden, 4 * hidden), "bias": (4 * hidden,)}
    initial = Initial("uniform", hidden**-0.5)
    return declare(builder, name, {part: (shape, initial) for part, shape in shapes.items()})


def lstm(
    model: Model, x: Tensor, hidden: int, name: str, state: State | None = None
) -> tuple[Tensor, State]:
    """Return all states (t, n, hidden) and the last one; the first is zero by default."""

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        steps, *first = values
        _, samples, width = builder.spec(steps).shape
        weights = _lstm_weights(builder, width, hidden, name)
        if not first:
            first = [*builder.apply("full", shape=(samples, hidden), name=f"{name}.zero")] * 2
        return builder.apply("lstm", steps, *weights, *first, name=name)[:3]

    y, h, c = model.record(emit, (x, *(state or ())))
    return y, (h, c)


def sru(model: Model, x: Tensor, name: str) -> Tensor:
    """Return all states (t, n, k) of a simple recurrent unit as wide as its input."""

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        _, samples, width = builder.spec(values[0]).shape
        parameters = {"input": ((width, 3 * width), initial), "bias": ((2 * width,), Initial())}
        weights = declare(builder, name, parameters)
        zero = builder.apply("full", shape=(samples, width), name=f"{name}.zero")
        return builder.apply("sru", *values, *weights, *zero, name=name)[:1]

    initial = Initial("uniform", x.shape[-1] ** -0.5)
    return model.record(emit, (x,))[0]


def steps_of(model: Model, x: Tensor) -> list[Tensor]:
    """Return the steps (n, k) of samples (n, t, k)."""
    length, width = x.shape[1:]
    parts = model.split(x, (1,) * length, axis=1)
    return [model.reshape(part, (-1, width)) for part in parts]


def joined(model: Model, steps: Sequence[Tensor], name: str | None = None) -> Tensor:
    """Return samples (n, t, k) of steps (n, k)."""
    width = steps[0].shape[-1]
    return model.concat([model.reshape(x, (-1, 1, width)) for x in steps], axis=1, name=name)


def lstm_cells(
    model: Model, steps: Sequence[Tensor], hidden: int, name: str, state: State | None = None
) -> tuple[list[Tensor], State]:
    """Return the states (n, hidden) of all steps and the last one, an operator a step.

    The parameters are those of `lstm`. A search for a strategy can place each step by itself.
    """
    count = len(steps)

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        samples, width = builder.spec(values[0]).shape
        weights = _lstm_weights(builder, width, hidden, name)
        h, c = (
            values[count:]
            or [*builder.apply("full", shape=(samples, hidden), name=f"{name}.zero")] * 2
        )
        made = []
        for number, x in enumerate(values[:count]):
            h, c = builder.apply("lstm_cell", x, h, c, *weights, name=f"{name}.{number}")[:2]
            made.append(h)
        return (*made, c)

    found = model.record(emit, (*steps, *(state or ())))
    return list(found[:count]), (found[count - 1], found[count])


def stacked(
    layer: Callable[..., tuple[Any, State]],
    model: Model,
    x: Tensor | Sequence[Tensor],
    hidden: int,
    name: str,
    states: Sequence[State | None],
) -> tuple[Any, list[State]]:
    """Return what layers on top of each other make of x, `lstm` or `lstm_cells`, and their states.

    states: the first of each layer, which is called `name` and its number.
    """
    lasts = []
    for number, state in enumerate(states, 1):
        x, last = layer(model, x, hidden, f"{name}{number}", state)
        lasts.append(last)
    return x, lasts


def dense_steps(
    model: Model,
    steps: Sequence[Tensor],
    width: int,
    name: str,
    *,
    bias: bool = True,
    activation: str | None = None,
) -> list[Tensor]:
    """Return activation(x w + b) of each step (n, k), an operator a step, as `Model.dense`."""

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        k = builder.spec(values[0]).shape[-1]
        shapes = {"weight": (k, width), "bias": (width,)} if bias else {"weight": (k, width)}
        parameters = {part: (shape, initial) for part, shape in shapes.items()}
        weights = declare(builder, name, parameters)
        return tuple(
            builder.apply(
                "linear", x, *weights, bias=bias, activation=activation, name=f"{name}.{number}"
            )[0]
            for number, x in enumerate(values)
        )

    initial = Initial("uniform", steps[0].shape[-1] ** -0.5)
    return list(model.record(emit, tuple(steps)))
