"""Inception-v3 on synthetic 299x299 images.

With SOAPSTONE_DATA set, on the folder `inception` in it: train and test npz files of `x`,
(n, 3, 299, 299) float32, and `y`, (n,) integers below 1,000.

Source: Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, Rethinking the Inception architecture for
computer vision, CVPR 2016. `module` builds one of its modules alone, as MetaFlow's and TASO's
measurements do (Jia, Thomas, Warszawski, Gao, Zaharia and Aiken, Optimizing DNN computation with
relaxed graph substitutions, MLSys 2019).
"""

from __future__ import annotations

from soapstone import Adam, GraphError, Model, Tensor, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": Adam(1e-3),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 5,
    "batch_size": 16,
}
Kernel = int | tuple[int, int]


def build(
    batch_size: int = 16,
    image_size: int = 299,
    classes: int = 1000,
    narrow: int = 1,
    dropout: float = 0.5,
    auxiliary: bool = False,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 75 or larger.

    Args:
        narrow: divisor of all inner channels: 1, 2, 4, 8 or 16.
        auxiliary: a second output, the classifier after the middle modules. A loss of the first
            output alone does not reach its parameters.
    """
    net = _Net(Model("inception"), narrow)
    model = net.model
    x = model.input("image", (batch_size, 3, image_size, image_size))
    x = net.conv(x, 32, 3, "conv1", stride=2, valid=True)
    x = net.conv(x, 32, 3, "conv2", valid=True)
    x = net.conv(x, 64, 3, "conv3")
    x = model.max_pool2d(x, 3, stride=2, name="pool1")
    x = net.conv(x, 80, 1, "conv4")
    x = net.conv(x, 192, 3, "conv5", valid=True)
    x = model.max_pool2d(x, 3, stride=2, name="pool2")
    for letter, pooled in (("b", 32), ("c", 64), ("d", 64)):
        x = net.a(x, pooled, f"mixed5{letter}")
    x = net.b(x, "mixed6a")
    for letter, width in (("b", 128), ("c", 160), ("d", 160), ("e", 192)):
        x = net.c(x, width, f"mixed6{letter}")
    side = net.auxiliary(x, classes) if auxiliary else None
    x = net.d(x, "mixed7a")
    for letter in "bc":
        x = net.e(x, f"mixed7{letter}")
    x = model.dropout(model.global_avg_pool(x), dropout, name="drop")
    model.output(model.dense(x, classes, name="fc"))
    if side is not None:
        model.output(side)
    return model


MODULES = {  # the channels and extent of each kind's input at 299x299, and what its name asks for
    "a": (192, 35, (32,)),
    "b": (288, 35, ()),
    "c": (768, 17, (128,)),
    "d": (768, 17, ()),
    "e": (2048, 8, ()),
}


def module(
    batch_size: int = 1,
    channels: int | None = None,
    image_size: int | None = None,
    narrow: int = 1,
    kind: str = "e",
) -> Model:
    """Return one kind of module alone, of an input (batch_size, channels, size, size).

    Args:
        channels, image_size: of the input; by default as they are in the network.
        kind: a to e, in their order; e is that of MetaFlow's figure 7.

    Raises:
        GraphError: an unknown kind.
    """
    if kind not in MODULES:
        raise GraphError(f"inception: module {kind!r} found, one of {tuple(MODULES)} needed")
    wide, size, given = MODULES[kind]
    net = _Net(Model("inception_module"), narrow)
    shape = (batch_size, channels or wide, image_size or size, image_size or size)
    x = net.model.input("image", shape)
    net.model.output(getattr(net, kind)(x, *given, "mixed"))
    return net.model


class _Net:
    """The modules, each a function of its input; `narrow` divides the channels of all."""

    def __init__(self, model: Model, narrow: int) -> None:
        self.model = model
        self.narrow = narrow

    def conv(
        self,
        x: Tensor,
        channels: int,
        kernel: Kernel,
        name: str,
        stride: int = 1,
        valid: bool = False,
    ) -> Tensor:
        """Return convolution, batch norm and rectifier."""
        padding = 0 if valid or stride > 1 else "same"
        x = self.model.conv2d(
            x,
            channels // self.narrow,
            kernel=kernel,
            stride=stride,
            padding=padding,
            bias=False,
            name=name,
        )
        return self.model.relu(self.model.batch_norm(x, epsilon=1e-3, name=f"{name}.norm"))

    def chain(self, x: Tensor, name: str, *steps: tuple[int, Kernel], stride: int = 1) -> Tensor:
        """Return convolutions one after the other, the last of them at a stride."""
        for index, (channels, kernel) in enumerate(steps, 1):
            step = stride if index == len(steps) else 1
            x = self.conv(x, channels, kernel, f"{name}_{index}", stride=step)
        return x

    def average(self, x: Tensor, channels: int, name: str) -> Tensor:
        """Return the mean of 3x3 windows, then a 1x1 convolution."""
        x = self.model.avg_pool2d(x, 3, stride=1, padding=1, name=f"{name}.pool")
        return self.conv(x, channels, 1, f"{name}.project")

    def a(self, x: Tensor, pooled: int, name: str) -> Tensor:
        """Return figure 5 of the paper: factorised 5x5 windows."""
        parts = [
            self.conv(x, 64, 1, f"{name}.1x1"),
            self.chain(x, f"{name}.5x5", (48, 1), (64, 5)),
            self.chain(x, f"{name}.double", (64, 1), (96, 3), (96, 3)),
            self.average(x, pooled, name),
        ]
        return self.model.concat(parts, name=f"{name}.concat")

    def b(self, x: Tensor, name: str) -> Tensor:
        """Return half the extent."""
        parts = [
            self.conv(x, 384, 3, f"{name}.3x3", stride=2),
            self.chain(x, f"{name}.double", (64, 1), (96, 3), (96, 3), stride=2),
            self.model.max_pool2d(x, 3, stride=2, name=f"{name}.pool"),
        ]
        return self.model.concat(parts, name=f"{name}.concat")

    def c(self, x: Tensor, width: int, name: str) -> Tensor:
        """Return figure 6: 7x7 windows as rows and columns."""
        row, column = (1, 7), (7, 1)
        twice = ((width, 1), (width, column), (width, row), (width, column), (192, row))
        parts = [
            self.conv(x, 192, 1, f"{name}.1x1"),
            self.chain(x, f"{name}.7x7", (width, 1), (width, row), (192, column)),
            self.chain(x, f"{name}.double", *twice),
            self.average(x, 192, name),
        ]
        return self.model.concat(parts, name=f"{name}.concat")

    def d(self, x: Tensor, name: str) -> Tensor:
        """Return half the extent, after rows and columns."""
        parts = [
            self.chain(x, f"{name}.3x3", (192, 1), (320, 3), stride=2),
            self.chain(
                x, f"{name}.7x7", (192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3), stride=2
            ),
            self.model.max_pool2d(x, 3, stride=2, name=f"{name}.pool"),
        ]
        return self.model.concat(parts, name=f"{name}.concat")

    def e(self, x: Tensor, name: str) -> Tensor:
        """Return figure 7: a wide bank of rows and columns side by side."""
        first = self.conv(x, 320, 1, f"{name}.1x1")
        single = self.chain(x, f"{name}.3x3", (384, 1))
        sides = [
            self.conv(single, 384, (1, 3), f"{name}.3x3_row"),
            self.conv(single, 384, (3, 1), f"{name}.3x3_column"),
        ]
        double = self.chain(x, f"{name}.double", (448, 1), (384, 3))
        sides += [
            self.conv(double, 384, (1, 3), f"{name}.double_row"),
            self.conv(double, 384, (3, 1), f"{name}.double_column"),
        ]
        parts = [first, *sides, self.average(x, 192, name)]
        return self.model.concat(parts, name=f"{name}.concat")

    def auxiliary(self, x: Tensor, classes: int) -> Tensor:
        """Return the auxiliary classifier."""
        x = self.model.avg_pool2d(x, 5, stride=3, name="auxiliary.pool")
        x = self.conv(x, 128, 1, "auxiliary.project")
        kernel = min(5, x.shape[2])  # 5 at the paper's size
        x = self.conv(x, 768, kernel, "auxiliary.conv", valid=True)
        return self.model.dense(self.model.global_avg_pool(x), classes, name="auxiliary.fc")


def data() -> Splits:
    """Return 128 synthetic images and 32 held out, or the folder's."""
    return images("inception", (3, 299, 299), classes=10, count=160)


if __name__ == "__main__":
    run_app(__file__)
