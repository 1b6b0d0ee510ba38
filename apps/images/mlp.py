"""A multilayer perceptron, 784-1024-10, on synthetic samples of ten classes.

With SOAPSTONE_DATA set, on the folder `mlp` in it: train and test npz files of `x`, (n, 784)
float32, and `y`, (n,) integers.
"""

from __future__ import annotations

from soapstone import SGD, Model, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": SGD(0.01),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 3,
    "batch_size": 128,
}


def build(batch_size: int = 128) -> Model:
    """Return the network for samples (batch_size, 784)."""
    model = Model("mlp")
    x = model.input("sample", (batch_size, 784))
    x = model.dense(x, 1024, activation="relu", name="fc1")
    model.output(model.dense(x, 10, name="fc2"))
    return model


def data() -> Splits:
    """Return 8,000 synthetic samples and 2,000 held out, or the folder's."""
    return images("mlp", (784,), classes=10, count=10_000)


if __name__ == "__main__":
    run_app(__file__)
