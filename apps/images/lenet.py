"""LeNet-5 on synthetic 28x28 images of ten classes.

With SOAPSTONE_DATA set, on the folder `lenet` in it: train and test npz files of `x`,
(n, 1, 28, 28) float32, and `y`, (n,) integers.

Source: LeCun, Bottou, Bengio and Haffner, Gradient-based learning applied to document recognition,
1998; with rectifiers and maximum pooling, as it is trained today.
"""

from __future__ import annotations

from soapstone import SGD, Model, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": SGD(0.01, momentum=0.9),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 3,
    "batch_size": 64,
}


def build(batch_size: int = 64) -> Model:
    """Return the network for images (batch_size, 1, 28, 28)."""
    model = Model("lenet")
    x = model.input("image", (batch_size, 1, 28, 28))
    x = model.conv2d(x, 6, kernel=5, padding=2, activation="relu", name="conv1")
    x = model.max_pool2d(x, 2, name="pool1")
    x = model.conv2d(x, 16, kernel=5, activation="relu", name="conv2")
    x = model.max_pool2d(x, 2, name="pool2")
    x = model.dense(model.flatten(x), 120, activation="relu", name="fc1")
    x = model.dense(x, 84, activation="relu", name="fc2")
    model.output(model.dense(x, 10, name="fc3"))
    return model


def data() -> Splits:
    """Return 4,000 synthetic images and 1,000 held out, or the folder's."""
    return images("lenet", (1, 28, 28), classes=10, count=5_000)


if __name__ == "__main__":
    run_app(__file__)
