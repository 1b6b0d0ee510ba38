"""AlexNet on synthetic 64x64 images of ten classes.

With SOAPSTONE_DATA set, on the folder `alexnet` in it: train and test npz files of `x`,
(n, 3, 64, 64) float32, and `y`, (n,) integers below 1,000.

Source: Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014 (the
single-tower network); its images are 224x224. Below 128x128 the first convolution has stride 2.
"""

from __future__ import annotations

from soapstone import Adam, Model, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": Adam(2e-4),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 10,
    "batch_size": 64,
}


def build(
    batch_size: int = 64,
    image_size: int = 64,
    classes: int = 1000,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.0,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 48 or larger.

    Args:
        width: channels of the first convolution; the others have 3, 6, 4 and 4 times as many.
        hidden: width of the two hidden dense layers.
        dropout: rate before each of them; the paper's is 0.5.
    """
    model = Model("alexnet")
    x = model.input("image", (batch_size, 3, image_size, image_size))
    stride = 2 if image_size < 128 else 4
    x = model.conv2d(x, width, kernel=11, stride=stride, padding=2, activation="relu", name="conv1")
    x = model.max_pool2d(x, 3, stride=2, name="pool1")
    x = model.conv2d(x, 3 * width, kernel=5, padding=2, activation="relu", name="conv2")
    x = model.max_pool2d(x, 3, stride=2, name="pool2")
    x = model.conv2d(x, 6 * width, kernel=3, padding=1, activation="relu", name="conv3")
    x = model.conv2d(x, 4 * width, kernel=3, padding=1, activation="relu", name="conv4")
    x = model.conv2d(x, 4 * width, kernel=3, padding=1, activation="relu", name="conv5")
    x = model.flatten(model.max_pool2d(x, 3, stride=2, name="pool3"))
    for name in ("fc1", "fc2"):
        if dropout:
            x = model.dropout(x, dropout, name=f"{name}.drop")
        x = model.dense(x, hidden, activation="relu", name=name)
    model.output(model.dense(x, classes, name="fc3"))
    return model


def data() -> Splits:
    """Return 512 synthetic images and 128 held out, or the folder's."""
    return images("alexnet", (3, 64, 64), classes=10, count=640)


if __name__ == "__main__":
    run_app(__file__)
