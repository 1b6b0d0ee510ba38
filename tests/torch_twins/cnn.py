"""The convolutional apps in plain torch: the same layers, made in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

Kernel = int | tuple[int, int]


class ConvNorm(nn.Sequential):
    """Convolution without bias, batch norm and, unless told not to, a rectifier."""

    def __init__(
        self,
        channels: int,
        made: int,
        kernel: Kernel,
        stride: int = 1,
        padding: Kernel | None = None,
        groups: int = 1,
        epsilon: float = 1e-5,
        relu: bool = True,
    ) -> None:
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        border = (sizes[0] // 2, sizes[1] // 2) if padding is None else padding
        conv = nn.Conv2d(channels, made, sizes, stride, border, groups=groups, bias=False)
        layers: list[nn.Module] = [conv, nn.BatchNorm2d(made, epsilon)]
        super().__init__(*layers, *([nn.ReLU()] if relu else []))


class Join(nn.Module):
    """Branches of one input, joined by channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def pooled_head(channels: int, classes: int) -> list[nn.Module]:
    """Return the mean over positions and the classifier."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def relu_conv(*arguments: int, padding: int = 0, stride: int = 1) -> list[nn.Module]:
    """Return a convolution and a rectifier."""
    return [nn.Conv2d(*arguments, stride=stride, padding=padding), nn.ReLU()]


def alexnet(features: int, width: int, hidden: int, classes: int) -> nn.Module:
    """AlexNet for images below 128x128; `features` positions remain after the last pooling."""
    pool = nn.MaxPool2d(3, 2)
    return nn.Sequential(
        *relu_conv(3, width, 11, padding=2, stride=2),
        pool,
        *relu_conv(width, 3 * width, 5, padding=2),
        pool,
        *relu_conv(3 * width, 6 * width, 3, padding=1),
        *relu_conv(6 * width, 4 * width, 3, padding=1),
        *relu_conv(4 * width, 4 * width, 3, padding=1),
        pool,
        nn.Flatten(),
        nn.Linear(4 * width * features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def vgg(counts: Sequence[int], width: int, hidden: int, classes: int) -> nn.Module:
    """VGG for images 32x32, of which one position remains."""
    layers: list[nn.Module] = []
    channels = 3
    for stage, count in enumerate(counts):
        for _ in range(count):
            layers += relu_conv(channels, width * min(2**stage, 8), 3, padding=1)
            channels = width * min(2**stage, 8)
        layers.append(nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class Branches(nn.Module):
    """A grouped 3x3 convolution, written as one convolution for each group."""

    def __init__(self, channels: int, groups: int, stride: int) -> None:
        super().__init__()
        width = channels // groups
        self.branches = nn.ModuleList(
            nn.Conv2d(width, width, 3, stride, 1, bias=False) for _ in range(groups)
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = x.chunk(len(self.branches), 1)
        return torch.cat([branch(part) for branch, part in zip(self.branches, parts)], 1)


class Residual(nn.Module):
    """A block of layers, added to its input or to a projection of it."""

    def __init__(self, block: nn.Module, channels: int, made: int, stride: int) -> None:
        super().__init__()
        self.block = block
        same = channels == made and stride == 1
        shortcut = ConvNorm(channels, made, 1, stride, relu=False)
        self.shortcut: nn.Module = nn.Identity() if same else shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.block(x) + self.shortcut(x))


def resnet(
    blocks: Sequence[int],
    width: int,
    classes: int,
    basic: bool = False,
    groups: int = 1,
    group_width: int = 64,
    branches: bool = False,
) -> nn.Module:
    """ResNet, ResNeXt and wide ResNet."""
    layers: list[nn.Module] = [ConvNorm(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        planes = width * 2**stage
        made = planes if basic else 4 * planes
        for index in range(count):
            stride = 2 if stage and not index else 1
            inner = planes * group_width // 64 * groups
            if basic:
                parts = [
                    ConvNorm(channels, planes, 3, stride),
                    ConvNorm(planes, planes, 3, relu=False),
                ]
            else:
                middle: nn.Module = ConvNorm(inner, inner, 3, stride, groups=groups)
                if branches:
                    split = Branches(inner, groups, stride)
                    middle = nn.Sequential(split, nn.BatchNorm2d(inner), nn.ReLU())
                first, last = ConvNorm(channels, inner, 1), ConvNorm(inner, made, 1, relu=False)
                parts = [first, middle, last]
            layers.append(Residual(nn.Sequential(*parts), channels, made, stride))
            channels = made
    return nn.Sequential(*layers, *pooled_head(channels, classes))


def squeezenet(version: str, narrow: int, classes: int) -> nn.Module:
    """SqueezeNet 1.0 or 1.1."""
    channels = {"1.0": 96, "1.1": 64}[version] // narrow
    pools = {"1.0": (0, 3, 7), "1.1": (0, 2, 4)}[version]
    layers = relu_conv(3, channels, {"1.0": 7, "1.1": 3}[version], stride=2)
    for index, width in enumerate((16, 16, 32, 32, 48, 48, 64, 64)):
        if index in pools:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        squeeze = width // narrow
        layers += relu_conv(channels, squeeze, 1)
        channels = 8 * squeeze
        layers.append(
            Join(
                nn.Sequential(*relu_conv(squeeze, channels // 2, 1)),
                nn.Sequential(*relu_conv(squeeze, channels // 2, 3, padding=1)),
            )
        )
    layers += relu_conv(channels, classes, 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def norm_relu(channels: int) -> list[nn.Module]:
    """Return batch norm and a rectifier."""
    return [nn.BatchNorm2d(channels), nn.ReLU()]


def densenet(blocks: Sequence[int], growth: int, classes: int) -> nn.Module:
    """DenseNet-BC."""
    channels = 2 * growth
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 7, 2, 3, bias=False), *norm_relu(channels)]
    layers.append(nn.MaxPool2d(3, 2, 1))
    for block, count in enumerate(blocks):
        for _ in range(count):
            added = nn.Sequential(
                *norm_relu(channels),
                nn.Conv2d(channels, 4 * growth, 1, bias=False),
                *norm_relu(4 * growth),
                nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
            )
            layers.append(Join(nn.Identity(), added))
            channels += growth
        if block + 1 < len(blocks):
            halved = nn.Conv2d(channels, channels // 2, 1, bias=False)
            layers += [*norm_relu(channels), halved, nn.AvgPool2d(2)]
            channels //= 2
    return nn.Sequential(*layers, *norm_relu(channels), *pooled_head(channels, classes))
