"""VGG16 on synthetic 224x224 images.

With SOAPSTONE_DATA set, on the folder `vgg` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Simonyan and Zisserman, Very deep convolutional networks for large-scale image recognition,
ICLR 2015 (configuration D; A, B and E are 11, 13 and 19 layers).
"""

from __future__ import annotations

from soapstone import SGD, GraphError, Model, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": SGD(0.01, momentum=0.9, weight_decay=5e-4),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 5,
    "batch_size": 16,
}
CONVOLUTIONS = {  # of each of the five stages, by depth
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


def build(
    batch_size: int = 16,
    image_size: int = 224,
    classes: int = 1000,
    depth: int = 16,
    width: int = 64,
    hidden: int = 4096,
    dropout: float = 0.5,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 32 or larger.

    Args:
        depth: 11, 13, 16 or 19 layers.
        width: channels of the first stage; later ones have 2, 4, 8 and 8 times as many.
        hidden: width of the two hidden dense layers.

    Raises:
        GraphError: an unknown depth.
    """
    if depth not in CONVOLUTIONS:
        raise GraphError(f"vgg: depth {depth} found, one of {tuple(CONVOLUTIONS)} needed")
    model = Model(f"vgg{depth}")
    x = model.input("image", (batch_size, 3, image_size, image_size))
    for stage, count in enumerate(CONVOLUTIONS[depth]):
        channels = width * min(1 << stage, 8)
        for index in range(count):
            name = f"conv{stage + 1}_{index + 1}"
            x = model.conv2d(
                x, channels, kernel=3, padding=1, activation="relu", initial="he", name=name
            )
        x = model.max_pool2d(x, 2, name=f"pool{stage + 1}")
    x = model.dense(model.flatten(x), hidden, activation="relu", initial="he", name="fc1")
    x = model.dropout(x, dropout, name="drop1")
    x = model.dense(x, hidden, activation="relu", initial="he", name="fc2")
    x = model.dropout(x, dropout, name="drop2")
    model.output(model.dense(x, classes, name="fc3"))
    return model


def data() -> Splits:
    """Return 128 synthetic images and 32 held out, or the folder's."""
    return images("vgg", (3, 224, 224), classes=10, count=160)


if __name__ == "__main__":
    run_app(__file__)
