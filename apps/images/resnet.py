"""ResNet-18, 34, 50, 101 or 152 on synthetic images; by default ResNet-50 at 224x224.

With SOAPSTONE_DATA set, on the folder `resnet` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: He, Zhang, Ren and Sun, Deep residual learning for image recognition, CVPR 2016; a
bottleneck's stride is at its 3x3 convolution, as in most implementations. Grouped and wide
bottlenecks: see the apps resnext and wide_resnet.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import SGD, GraphError, Model, Tensor, run_app
from soapstone.frontend.data.sets import Splits, images

OPTIONS = {
    "optimizer": SGD(0.05, momentum=0.9, weight_decay=1e-4),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 5,
    "batch_size": 32,
}
BLOCKS = {  # blocks of each stage; from 50 layers on they are bottlenecks
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}


def build(
    batch_size: int = 32,
    image_size: int = 224,
    classes: int = 1000,
    depth: int = 50,
    width: int = 64,
    groups: int = 1,
    group_width: int = 64,
    branches: bool = False,
    blocks: Sequence[int] | None = None,
    name: str = "resnet",
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size).

    Args:
        depth: 18, 34, 50, 101 or 152 layers.
        width: channels of the first stage; each further stage has twice as many.
        groups, group_width: of a bottleneck's 3x3 convolution, which has groups * group_width
            channels for every 64 of the stage.
        branches: write a grouped convolution as split, one convolution for each group, and concat.
        blocks: the blocks of each stage, in place of the depth's.

    Raises:
        GraphError: an unknown depth.
    """
    if depth not in BLOCKS:
        raise GraphError(f"resnet: depth {depth} found, one of {tuple(BLOCKS)} needed")
    model = Model(name)
    x = model.input("image", (batch_size, 3, image_size, image_size))
    x = _conv(model, x, width, 7, "conv1", stride=2)
    x = model.max_pool2d(model.relu(x), 3, stride=2, padding=1, name="pool1")
    for stage, count in enumerate(blocks or BLOCKS[depth]):
        channels = width << stage
        for index in range(count):
            stride = 2 if stage and not index else 1
            label = f"layer{stage + 1}.{index}"
            if depth < 50:
                x = _basic(model, x, channels, stride, label)
            else:
                inner = channels * group_width // 64 * groups
                split = groups if branches else 1
                x = _bottleneck(model, x, channels, inner, groups, split, stride, label)
    model.output(model.dense(model.global_avg_pool(x), classes, name="fc"))
    return model


def _conv(
    model: Model,
    x: Tensor,
    channels: int,
    kernel: int,
    name: str,
    *,
    stride: int = 1,
    groups: int = 1,
) -> Tensor:
    x = model.conv2d(
        x,
        channels,
        kernel=kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
        initial="he",
        name=name,
    )
    return model.batch_norm(x, name=f"{name}.norm")


def _basic(model: Model, x: Tensor, channels: int, stride: int, name: str) -> Tensor:
    y = model.relu(_conv(model, x, channels, 3, f"{name}.conv1", stride=stride))
    y = _conv(model, y, channels, 3, f"{name}.conv2")
    return _add(model, x, y, stride, name)


def _bottleneck(
    model: Model,
    x: Tensor,
    channels: int,
    inner: int,
    groups: int,
    branches: int,
    stride: int,
    name: str,
) -> Tensor:
    y = model.relu(_conv(model, x, inner, 1, f"{name}.conv1"))
    if branches > 1:
        y = _branches(model, y, inner, branches, stride, f"{name}.conv2")
    else:
        y = _conv(model, y, inner, 3, f"{name}.conv2", stride=stride, groups=groups)
    y = _conv(model, model.relu(y), 4 * channels, 1, f"{name}.conv3")
    return _add(model, x, y, stride, name)


def _branches(
    model: Model, x: Tensor, channels: int, branches: int, stride: int, name: str
) -> Tensor:
    """Return the grouped 3x3 convolution as one convolution for each group."""
    width = channels // branches
    made = [
        model.conv2d(
            part,
            width,
            kernel=3,
            stride=stride,
            padding=1,
            bias=False,
            initial="he",
            name=f"{name}.branch{index}",
        )
        for index, part in enumerate(model.split(x, (width,) * branches, name=f"{name}.split"))
    ]
    return model.batch_norm(model.concat(made, name=f"{name}.concat"), name=f"{name}.norm")


def _add(model: Model, x: Tensor, y: Tensor, stride: int, name: str) -> Tensor:
    if x.shape != y.shape:
        x = _conv(model, x, y.shape[1], 1, f"{name}.shortcut", stride=stride)
    return model.relu(model.add(y, x, name=f"{name}.add"), name=f"{name}.relu")


def data() -> Splits:
    """Return 256 synthetic images and 64 held out, or the folder's."""
    return images("resnet", (3, 224, 224), classes=10, count=320)


if __name__ == "__main__":
    run_app(__file__)
