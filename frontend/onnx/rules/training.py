"""Steps of optimisers, as ONNX's operators have them (`ai.onnx.preview.training`)."""

from __future__ import annotations

from collections.abc import Callable

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.values import Value, rule

DOMAIN = "ai.onnx.preview.training"
_Step = Callable[[Call, Value, Value, tuple[Value, ...]], tuple[Value, ...]]


def _each(n: Call, kinds: int, step: _Step) -> list[Value]:
    """Return the new values of all parameters, then of all their states, one kind after another.

    kinds: how many kinds of tensors come after the rate and the count of steps. step: makes a
    parameter and its states of the gradient, which has what pulls parameters to zero in it.

    Raises:
        OnnxError: there are not as many of each kind.
    """
    _, _, *tensors = n.values()
    if not tensors or len(tensors) % kinds:
        raise OnnxError(f"{len(tensors)} tensors found, as many of each of {kinds} kinds needed")
    count = len(tensors) // kinds
    made = []
    for i in range(count):
        x, g, *states = tensors[i::count]
        pull = n.attribute("norm_coefficient", 0.0)
        made.append(step(n, x, n("add", n("affine", x, scale=pull), g), tuple(states)))
    return [row[kind] for kind in range(kinds - 1) for row in made]


def _mixed(n: Call, old: Value, share: float, new: Value, rest: float) -> Value:
    """Return share * old + rest * new."""
    return n("add", n("affine", old, scale=share), n("affine", new, scale=rest))


def _scalar(n: Call, position: int, x: Value) -> Value:
    return n.cast(n.reshape(n.value(position), ()), x.dtype)


def _after_the_first(n: Call, then: Value, first: Value) -> Value:
    """Return one of two values, by whether a step was made before."""
    steps = n.reshape(n.value(1), ())
    return n("where", n("greater", steps, n.like(0, steps)), then, first)


@rule("Adagrad", domain=DOMAIN)
def adagrad(n: Call) -> list[Value]:
    decay, least = n.attribute("decay_factor", 0.0), n.attribute("epsilon", 1e-6)

    def step(n: Call, x: Value, g: Value, states: tuple[Value, ...]) -> tuple[Value, ...]:
        slower = n("affine", _scalar(n, 1, x), scale=decay, shift=1.0)
        rate = n("div", _scalar(n, 0, x), slower)
        total = n("add", states[0], n("mul", g, g))
        size = n("affine", n("sqrt", total), shift=least)
        return n("sub", x, n("mul", rate, n("div", g, size))), total

    return _each(n, 3, step)


@rule("Adam", domain=DOMAIN)
def adam(n: Call) -> list[Value]:
    alpha, beta = n.attribute("alpha", 0.9), n.attribute("beta", 0.999)
    least, pull = n.attribute("epsilon", 1e-6), n.attribute("norm_coefficient_post", 0.0)

    def step(n: Call, x: Value, g: Value, states: tuple[Value, ...]) -> tuple[Value, ...]:
        rate, steps = _scalar(n, 0, x), _scalar(n, 1, x)
        first = _mixed(n, states[0], alpha, g, 1 - alpha)
        second = _mixed(n, states[1], beta, n("mul", g, g), 1 - beta)
        left, right = (
            n("affine", n("pow", n.like(share, x), steps), scale=-1.0, shift=1.0)
            for share in (alpha, beta)
        )
        rate = _after_the_first(n, n("div", n("mul", rate, n("sqrt", right)), left), rate)
        size = n("affine", n("sqrt", second), shift=least)
        made = n("sub", x, n("div", n("mul", rate, first), size))
        return n("affine", made, scale=1 - pull), first, second

    return _each(n, 4, step)


@rule("Momentum", domain=DOMAIN)
def momentum(n: Call) -> list[Value]:
    alpha, beta = n.attribute("alpha"), n.attribute("beta")
    nesterov = n.text("mode", "standard", ("standard", "nesterov")) == "nesterov"

    def step(n: Call, x: Value, g: Value, states: tuple[Value, ...]) -> tuple[Value, ...]:
        share = _after_the_first(n, n.like(beta, x), n.like(1, x))
        speed = n("add", n("affine", states[0], scale=alpha), n("mul", share, g))
        move = n("add", g, n("affine", speed, scale=alpha)) if nesterov else speed
        return n("sub", x, n("mul", _scalar(n, 0, x), move)), speed

    return _each(n, 3, step)
