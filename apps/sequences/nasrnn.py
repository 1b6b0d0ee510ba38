"""NasRNN, a recurrent cell of eight gates found by search, on synthetic signals.

With SOAPSTONE_DATA set, on the folder `nasrnn` in it: train and test npz files of `x`, (n, 5, 512),
and `y`, (n, 512), float32.

Source: Zoph and Le, Neural Architecture Search with Reinforcement Learning, 2017; sizes and cell as
in TASO (Jia et al., 2019), where each step has weights of its own.
"""

from __future__ import annotations

from soapstone import Adam, Model, Tensor, run_app
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import signals
from soapstone.ir.graph import Initial

OPTIONS = {
    "optimizer": Adam(1e-3),
    "loss": "mse",
    "metrics": [],
    "epochs": 5,
    "batch_size": 16,
}
GATES = 8


def build(batch_size: int = 16, hidden: int = 512, length: int = 5, shared: bool = False) -> Model:
    """Return the network for signals (batch_size, length, hidden); its output is the last state.

    Args:
        shared: use one cell's weights at all steps.
    """
    model = Model("nasrnn")
    signal = model.input("x", (batch_size, length, hidden))
    steps = model.split(model.flatten(signal), (hidden,) * length, axis=1)
    state = model.parameter("state", (1, hidden))
    cells = [_weights(model, f"cell{n}", hidden) for n in range(1, 2 if shared else length + 1)]
    for number, step in enumerate(steps):
        state = _cell(model, step, state, cells[number % len(cells)])
    model.output(state)
    return model


def _weights(model: Model, name: str, hidden: int) -> list[Tensor]:
    """Return each gate's weights of the input, and of the state."""
    initial = Initial("uniform", hidden**-0.5)
    return [
        model.parameter(f"{name}.gate{gate}.{of}", (hidden, hidden), initial)
        for gate in range(1, GATES + 1)
        for of in ("input", "state")
    ]


def _cell(model: Model, x: Tensor, state: Tensor, weights: list[Tensor]) -> Tensor:
    """Return the state after a step: a tree of the eight gates, two by two."""
    t = [
        model.matmul(x, weights[2 * gate]) + model.matmul(state, weights[2 * gate + 1])
        for gate in range(GATES)
    ]
    first = model.relu(t[0]) + model.sigmoid(t[3])
    second = model.sigmoid(t[1]) + model.tanh(t[2])
    third = model.sigmoid(t[4]) * model.tanh(t[5])
    fourth = model.sigmoid(t[6]) * model.relu(t[7])
    left = model.tanh(model.sigmoid(second) + model.tanh(third))
    right = model.tanh(model.tanh(first) * model.tanh(fourth))
    return model.tanh(left * right)


def data(hidden: int = 512, length: int = 5, count: int = 320) -> Splits:
    """Return 256 synthetic signals and 64 held out, or the folder's."""
    return signals("nasrnn", count, length, hidden)


if __name__ == "__main__":
    run_app(__file__)
