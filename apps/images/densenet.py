"""DenseNet-121, 169 or 201 on synthetic images; by default DenseNet-121 at 224x224.

With SOAPSTONE_DATA set, on the folder `densenet` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Huang, Liu, van der Maaten and Weinberger, Densely connected convolutional networks, CVPR
2017 (DenseNet-BC).
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import SGD, GraphError, Model, Tensor, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": SGD(0.05, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 5,
    "batch_size": 32,
}
BLOCKS = {121: (6, 12, 24, 16), 169: (6, 12, 32, 32), 201: (6, 12, 48, 32)}


def build(
    batch_size: int = 32,
    image_size: int = 224,
    classes: int = 1000,
    depth: int = 121,
    growth: int = 32,
    blocks: Sequence[int] | None = None,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 32 or larger.

    Args:
        depth: 121, 169 or 201 layers.
        growth: channels that each layer adds; the first convolution makes twice as many.
        blocks: the layers of each dense block, in place of the depth's.

    Raises:
        GraphError: an unknown depth.
    """
    if depth not in BLOCKS:
        raise GraphError(f"densenet: depth {depth} found, one of {tuple(BLOCKS)} needed")
    model = Model("densenet")
    x = model.input("image", (batch_size, 3, image_size, image_size))
    x = model.conv2d(x, 2 * growth, kernel=7, stride=2, padding=3, bias=False, name="conv0")
    x = _norm_relu(model, x, "norm0")
    x = model.max_pool2d(x, 3, stride=2, padding=1, name="pool0")
    counts = tuple(blocks or BLOCKS[depth])
    for block, count in enumerate(counts, 1):
        for index in range(1, count + 1):
            x = _layer(model, x, growth, f"block{block}.{index}")
        if block < len(counts):
            x = _transition(model, x, f"transition{block}")
    x = _norm_relu(model, x, "norm5")
    model.output(model.dense(model.global_avg_pool(x), classes, name="classifier"))
    return model


def _norm_relu(model: Model, x: Tensor, name: str) -> Tensor:
    return model.relu(model.batch_norm(x, name=name))


def _layer(model: Model, x: Tensor, growth: int, name: str) -> Tensor:
    """Return x joined with `growth` channels made of all of it."""
    y = _norm_relu(model, x, f"{name}.norm1")
    y = model.conv2d(y, 4 * growth, kernel=1, bias=False, name=f"{name}.conv1")
    y = _norm_relu(model, y, f"{name}.norm2")
    y = model.conv2d(y, growth, kernel=3, padding=1, bias=False, name=f"{name}.conv2")
    return model.concat([x, y], name=f"{name}.concat")


def _transition(model: Model, x: Tensor, name: str) -> Tensor:
    """Return half the channels at half the extent."""
    x = _norm_relu(model, x, f"{name}.norm")
    x = model.conv2d(x, x.shape[1] // 2, kernel=1, bias=False, name=f"{name}.conv")
    return model.avg_pool2d(x, 2, name=f"{name}.pool")


def data() -> Splits:
    """Return 256 synthetic images and 64 held out, or the folder's."""
    return images("densenet", (3, 224, 224), classes=10, count=320)


if __name__ == "__main__":
    run_app(__file__)
