"""NASNet-A in plain torch: the same layers as the app's, made in the same order."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def norm(channels: int) -> nn.BatchNorm2d:
    """Return batch norm with the network's epsilon."""
    return nn.BatchNorm2d(channels, 1e-3)


class Squeeze(nn.Sequential):
    """Rectifier, 1x1 convolution and batch norm."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__(nn.ReLU(), nn.Conv2d(channels, made, 1, bias=False), norm(made))


class Halve(nn.Module):
    """Half the extent: two 1x1 convolutions, of the even and of the odd positions."""

    def __init__(self, channels: int, made: int) -> None:
        super().__init__()
        self.left = nn.Conv2d(channels, made // 2, 1, bias=False)
        self.right = nn.Conv2d(channels, made // 2, 1, bias=False)
        self.norm = norm(made // 2 * 2)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        odd = F.pad(x, (0, 1, 0, 1))[:, :, 1::2, 1::2]
        return self.norm(torch.cat([self.left(x[:, :, ::2, ::2]), self.right(odd)], 1))


class Separable(nn.Sequential):
    """Rectifier, depthwise and pointwise convolution and batch norm, twice."""

    def __init__(self, channels: int, made: int, kernel: int, stride: int = 1) -> None:
        layers: list[nn.Module] = []
        for given, step in ((channels, stride), (made, 1)):
            depth = nn.Conv2d(given, given, kernel, step, kernel // 2, groups=given, bias=False)
            layers += [nn.ReLU(), depth, nn.Conv2d(given, made, 1, bias=False), norm(made)]
        super().__init__(*layers)


def average(x: Tensor, stride: int = 1) -> Tensor:
    """Return the mean of 3x3 windows, of positions inside the image."""
    return F.avg_pool2d(x, 3, stride, 1, count_include_pad=False)


class Cell(nn.Module):
    """What both cells begin with: the last two values, squeezed to the cell's channels."""

    def __init__(self, now: int, before: int | None, channels: int, halve: bool) -> None:
        super().__init__()
        self.before: nn.Module = nn.Identity()
        if before is not None:
            self.before = Halve(before, channels) if halve else Squeeze(before, channels)
        self.now = Squeeze(now, channels)


class Normal(Cell):
    """The normal cell."""

    def __init__(self, now: int, before: int, channels: int, halve: bool) -> None:
        super().__init__(now, before, channels, halve)
        kernels = (5, 3, 5, 3, 3)
        self.parts = nn.ModuleList(Separable(channels, channels, k) for k in kernels)

    def forward(self, now: Tensor, before: Tensor) -> Tensor:
        before, now = self.before(before), self.now(now)
        a, b, c, d, e = self.parts
        sums = [
            a(now) + b(before),
            c(before) + d(before),
            average(now) + before,
            average(before) + average(before),
            e(now) + now,
        ]
        return torch.cat([before, *sums], 1)


class Reduction(Cell):
    """The reduction cell; `before` None is a first cell, which uses its input twice."""

    def __init__(self, now: int, before: int | None, channels: int, halve: bool) -> None:
        super().__init__(now, before, channels, halve)
        given = now if before is None else channels
        self.parts = nn.ModuleList(
            [
                Separable(channels, channels, 5, 2),
                *(Separable(given, channels, kernel, 2) for kernel in (7, 7, 5)),
                Separable(channels, channels, 3),
            ]
        )
        self.pool = nn.MaxPool2d(3, 2, 1)

    def forward(self, now: Tensor, before: Tensor) -> Tensor:
        before, now = self.before(before), self.now(now)
        a, b, c, d, e = self.parts
        pooled = self.pool(now)
        first = a(now) + b(before)
        second = pooled + c(before)
        third = average(now, 2) + d(before)
        return torch.cat([second, third, average(first) + second, e(first) + pooled], 1)


class NasNet(nn.Module):
    """The network for ImageNet."""

    def __init__(self, cells: int, channels: int, stem: int, classes: int) -> None:
        super().__init__()
        width = channels // 24
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, 2, bias=False), norm(stem))
        made: list[Cell] = [
            Reduction(stem, None, width // 4, False),
            Reduction(width, stem, width // 2, True),
        ]
        before, now, shrunk = width // 4 * 4, width // 2 * 4, True
        for stage in range(3):
            if stage:
                made.append(Reduction(now, before, width << stage, shrunk))
                before, now, shrunk = now, 4 * (width << stage), True
            for _ in range(cells):
                made.append(Normal(now, before, width << stage, shrunk))
                before, now, shrunk = now, 6 * (width << stage), False
        self.cells = nn.ModuleList(made)
        self.relu = nn.ReLU()
        self.head = nn.Linear(now, classes)

    def forward(self, x: Tensor) -> Tensor:
        now = before = self.stem(x)
        for cell in self.cells:
            before, now = now, cell(now, before)
        return self.head(self.relu(now).mean((2, 3)))
