"""Recurrent layers over steps (t, n, k), as the recurrent apps use them."""

from __future__ import annotations

from soapstone import GraphBuilder, Model, Tensor
from soapstone.ir.graph import Initial
from soapstone.ir.tensor import Role

State = tuple[Tensor, Tensor]


def time_major(model: Model, x: Tensor, name: str | None = None) -> Tensor:
    """Return samples (n, t, k) as steps (t, n, k), or the other way round."""
    return model.transpose(x, (1, 0, 2), name=name)


def lstm(
    model: Model, x: Tensor, hidden: int, name: str, state: State | None = None
) -> tuple[Tensor, State]:
    """Return all states (t, n, hidden) and the last one; the first is zero by default."""

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        steps, *first = values
        _, samples, width = builder.spec(steps).shape
        shapes = {
            "input": (width, 4 * hidden),
            "state": (hidden, 4 * hidden),
            "bias": (4 * hidden,),
        }
        weights = [
            builder.input(f"{name}.{part}", shape, role=Role.PARAMETER, initial=initial)
            for part, shape in shapes.items()
        ]
        if not first:
            first = [*builder.apply("full", shape=(samples, hidden), name=f"{name}.zero")] * 2
        return builder.apply("lstm", steps, *weights, *first, name=name)[:3]

    initial = Initial("uniform", hidden**-0.5)
    y, h, c = model.record(emit, (x, *(state or ())))
    return y, (h, c)


def sru(model: Model, x: Tensor, name: str) -> Tensor:
    """Return all states (t, n, k) of a simple recurrent unit as wide as its input."""

    def emit(builder: GraphBuilder, training: bool, values: tuple[str, ...]) -> tuple[str, ...]:
        _, samples, width = builder.spec(values[0]).shape
        weight = builder.input(
            f"{name}.input", (width, 3 * width), role=Role.PARAMETER, initial=initial
        )
        bias = builder.input(f"{name}.bias", (2 * width,), role=Role.PARAMETER, initial=Initial())
        zero = builder.apply("full", shape=(samples, width), name=f"{name}.zero")
        return builder.apply("sru", *values, weight, bias, *zero, name=name)[:1]

    initial = Initial("uniform", x.shape[-1] ** -0.5)
    return model.record(emit, (x,))[0]
