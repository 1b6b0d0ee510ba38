"""SqueezeNet 1.0 or 1.1 on synthetic 224x224 images.

With SOAPSTONE_DATA set, on the folder `squeezenet` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Iandola, Han, Moskewicz, Ashraf, Dally and Keutzer, SqueezeNet: AlexNet-level accuracy with
50x fewer parameters and <0.5 MB model size, 2016; 1.1 is the authors' later release.
"""

from __future__ import annotations

from dataclasses import dataclass

from soapstone import Adam, GraphError, Model, Tensor, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": Adam(1e-3),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 10,
    "batch_size": 32,
}


@dataclass(frozen=True)
class Version:
    """A release: channels and kernel of the first convolution, and what pools stand before.

    pools: the numbers of the fire modules before which a pooling is.
    """

    channels: int
    kernel: int
    pools: tuple[int, ...]


VERSIONS = {"1.0": Version(96, 7, (0, 3, 7)), "1.1": Version(64, 3, (0, 2, 4))}
SQUEEZE = (16, 16, 32, 32, 48, 48, 64, 64)  # of the eight fire modules; expanding makes 8 of each


def build(
    batch_size: int = 32,
    image_size: int = 224,
    classes: int = 1000,
    version: str = "1.0",
    narrow: int = 1,
    dropout: float = 0.5,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 32 or larger.

    Args:
        version: "1.0" or "1.1".
        narrow: divisor of all inner channels, 1 or a power of two up to 16.

    Raises:
        GraphError: an unknown version.
    """
    if version not in VERSIONS:
        raise GraphError(f"squeezenet: version {version!r} found, {' or '.join(VERSIONS)} needed")
    chosen = VERSIONS[version]
    model = Model("squeezenet")
    x = model.input("image", (batch_size, 3, image_size, image_size))
    x = model.conv2d(
        x,
        chosen.channels // narrow,
        kernel=chosen.kernel,
        stride=2,
        activation="relu",
        name="conv1",
    )
    for index, squeeze in enumerate(SQUEEZE):
        if index in chosen.pools:
            x = model.max_pool2d(x, 3, stride=2, ceil_mode=True, name=f"pool{index + 1}")
        x = _fire(model, x, squeeze // narrow, f"fire{index + 2}")
    x = model.dropout(x, dropout, name="drop9")
    x = _conv(model, x, classes, 1, "conv10")
    model.output(model.global_avg_pool(x))
    return model


def module(
    batch_size: int = 1, channels: int = 128, squeeze: int = 32, image_size: int = 55
) -> Model:
    """Return one fire module alone, of an input (batch_size, channels, image_size, image_size)."""
    model = Model("fire_module")
    x = model.input("image", (batch_size, channels, image_size, image_size))
    model.output(_fire(model, x, squeeze, "fire"))
    return model


def _conv(model: Model, x: Tensor, channels: int, kernel: int, name: str) -> Tensor:
    padding = kernel // 2
    return model.conv2d(
        x, channels, kernel=kernel, padding=padding, activation="relu", initial="he", name=name
    )


def _fire(model: Model, x: Tensor, squeeze: int, name: str) -> Tensor:
    width = 4 * squeeze
    x = _conv(model, x, squeeze, 1, f"{name}.squeeze")
    small = _conv(model, x, width, 1, f"{name}.expand1x1")
    large = _conv(model, x, width, 3, f"{name}.expand3x3")
    return model.concat([small, large], name=f"{name}.concat")


def data() -> Splits:
    """Return 256 synthetic images and 64 held out, or the folder's."""
    return images("squeezenet", (3, 224, 224), classes=10, count=320)


if __name__ == "__main__":
    run_app(__file__)
