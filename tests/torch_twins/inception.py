"""Inception-v3 in plain torch: the same layers as the app's, made in the same order."""

from __future__ import annotations

from torch import Tensor, nn
from torch_twins.cnn import ConvNorm, Join, Kernel, pooled_head


class Inception(nn.Module):
    """The network; `auxiliary` is the kernel of the side classifier's convolution, if there is one.

    In evaluation mode `forward` returns the class scores alone, as it does without the side.
    """

    def __init__(self, narrow: int, classes: int, auxiliary: int | None = None) -> None:
        super().__init__()
        self.narrow = narrow
        self.channels = 3
        layers = [
            self.conv(32, 3, 2, 0),
            self.conv(32, 3, 1, 0),
            self.conv(64, 3),
            nn.MaxPool2d(3, 2),
            self.conv(80, 1),
            self.conv(192, 3, 1, 0),
            nn.MaxPool2d(3, 2),
            *(self.a(pooled) for pooled in (32, 64, 64)),
            self.b(),
            *(self.c(width) for width in (128, 160, 160, 192)),
        ]
        self.early = nn.Sequential(*layers)
        self.side: nn.Module | None = None
        if auxiliary is not None:
            middle = self.channels
            self.side = nn.Sequential(
                nn.AvgPool2d(5, 3),
                self.conv(128, 1),
                self.conv(768, auxiliary, 1, 0),
                *pooled_head(768 // narrow, classes),
            )
            self.channels = middle
        modules = [self.d(), self.e(), self.e()]
        self.late = nn.Sequential(*modules, *pooled_head(self.channels, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.late(self.early(x))

    def conv(
        self, channels: int, kernel: Kernel, stride: int = 1, padding: int | None = None
    ) -> ConvNorm:
        """Return a convolution of what the last one made; a stride means no padding."""
        given, self.channels = self.channels, channels // self.narrow
        border = 0 if stride > 1 else padding
        return ConvNorm(given, self.channels, kernel, stride, border, epsilon=1e-3)

    def chain(self, *steps: tuple[int, Kernel], stride: int = 1) -> nn.Sequential:
        """Return convolutions one after the other, the last at a stride."""
        last = len(steps) - 1
        made = [self.conv(*step, stride if i == last else 1) for i, step in enumerate(steps)]
        return nn.Sequential(*made)

    def join(self, *branches: object) -> Join:
        """Return branches of one input: chains as lists, a number for the averaging branch."""
        given, total = self.channels, 0
        made: list[nn.Module] = []
        for branch in branches:
            self.channels = given
            if isinstance(branch, int):
                mean = nn.AvgPool2d(3, 1, 1)
                made.append(nn.Sequential(mean, self.conv(branch, 1)))
            elif isinstance(branch, nn.Module):
                made.append(branch)
            else:
                steps, stride = branch  # type: ignore[misc]
                made.append(self.chain(*steps, stride=stride))
            total += self.channels
        self.channels = total
        return Join(*made)

    def a(self, pooled: int) -> Join:
        double = [(64, 1), (96, 3), (96, 3)]
        return self.join(([(64, 1)], 1), ([(48, 1), (64, 5)], 1), (double, 1), pooled)

    def b(self) -> Join:
        double = [(64, 1), (96, 3), (96, 3)]
        return self.join(([(384, 3)], 2), (double, 2), nn.MaxPool2d(3, 2))

    def c(self, width: int) -> Join:
        row, column = (1, 7), (7, 1)
        seven = [(width, 1), (width, row), (192, column)]
        double = [(width, 1), (width, column), (width, row), (width, column), (192, row)]
        return self.join(([(192, 1)], 1), (seven, 1), (double, 1), 192)

    def d(self) -> Join:
        three = [(192, 1), (320, 3)]
        seven = [(192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3)]
        return self.join((three, 2), (seven, 2), nn.MaxPool2d(3, 2))

    def e(self) -> Join:
        given = self.channels
        first = self.chain((320, 1))
        made: list[nn.Module] = [first]
        total = self.channels
        for steps in ([(384, 1)], [(448, 1), (384, 3)]):
            self.channels = given
            before = self.chain(*steps)
            middle, sides = self.channels, []
            for kernel in ((1, 3), (3, 1)):
                self.channels = middle
                sides.append(self.conv(384, kernel))
                total += self.channels
            made.append(nn.Sequential(before, Join(*sides)))
        self.channels = given
        made.append(nn.Sequential(nn.AvgPool2d(3, 1, 1), self.conv(192, 1)))
        self.channels += total
        return Join(*made)


def module(channels: int, narrow: int) -> nn.Module:
    """Return the last kind of module alone."""
    net = Inception(narrow, 1)
    net.channels = channels
    return net.e()
