"""NASNet-A, mobile (4 @ 1056) or large (6 @ 4032), on synthetic images; by default mobile, 224x224.

With SOAPSTONE_DATA set, on the folder `nasnet` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Zoph, Vasudevan, Shlens and Le, Learning transferable architectures for scalable image
recognition, CVPR 2018: the cells of figure 4, the ImageNet network of figure 2 with two reduction
cells as its stem. Windows at stride 2 are padded evenly on both sides.
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
SIZES = {"mobile": (4, 1056, 32), "large": (6, 4032, 96)}  # cells, last channels, stem channels


def build(
    batch_size: int = 16,
    image_size: int | None = None,
    classes: int = 1000,
    size: str = "mobile",
    cells: int | None = None,
    channels: int | None = None,
    stem: int | None = None,
    dropout: float = 0.5,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size), 32 or larger.

    Args:
        image_size: by default 224 for mobile and 331 for large.
        size: "mobile" or "large"; sets what of the following is not given.
        cells: N of the paper, the normal cells of each of the three stages.
        channels: of the last cell, a multiple of 96.
        stem: channels of the first convolution.

    Raises:
        GraphError: an unknown size.
    """
    if size not in SIZES:
        raise GraphError(f"nasnet: size {size!r} found, {' or '.join(SIZES)} needed")
    chosen = SIZES[size]
    cells, channels, stem = cells or chosen[0], channels or chosen[1], stem or chosen[2]
    image_size = image_size or (224 if size == "mobile" else 331)
    width = channels // 24  # of a cell of the first stage, which joins six values; later 2, 4 times
    net = _Net(Model("nasnet"))
    model = net.model
    x = model.input("image", (batch_size, 3, image_size, image_size))
    x = model.conv2d(x, stem, kernel=3, stride=2, bias=False, name="stem")
    x = net.norm(x, "stem.norm")
    before, now = x, net.reduction(x, None, width // 4, "stem1")
    before, now = now, net.reduction(now, before, width // 2, "stem2")
    for stage in range(3):
        if stage:
            made = net.reduction(now, before, width << stage, f"reduce{stage}")
            before, now = now, made
        for index in range(cells):
            made = net.normal(now, before, width << stage, f"cell{stage + 1}.{index + 1}")
            before, now = now, made
    x = model.dropout(model.global_avg_pool(model.relu(now)), dropout, name="drop")
    model.output(model.dense(x, classes, name="fc"))
    return model


class _Net:
    """The cells; each joins the sums of five pairs of operations on the last two cells' values."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.model.batch_norm(x, epsilon=1e-3, name=name)

    def squeeze(self, x: Tensor, channels: int, name: str) -> Tensor:
        """Return rectifier, 1x1 convolution and batch norm."""
        y = self.model.relu(x)
        y = self.model.conv2d(y, channels, kernel=1, bias=False, name=name)
        return self.norm(y, f"{name}.norm")

    def halve(self, x: Tensor, channels: int, name: str) -> Tensor:
        """Return half the extent without a loss of positions: two 1x1 convolutions, one shifted."""
        model = self.model
        y = model.relu(x)
        even = model.avg_pool2d(y, 1, stride=2, name=f"{name}.even")
        border = model.pad(y, (0, 0, 0, 0), (0, 0, 1, 1), name=f"{name}.pad")
        height, width = border.shape[2:]
        odd = model.slice(border, 2, 1, height, 2, name=f"{name}.odd_rows")
        odd = model.slice(odd, 3, 1, width, 2, name=f"{name}.odd")
        halves = [
            model.conv2d(even, channels // 2, kernel=1, bias=False, name=f"{name}.left"),
            model.conv2d(odd, channels // 2, kernel=1, bias=False, name=f"{name}.right"),
        ]
        return self.norm(model.concat(halves), f"{name}.norm")

    def fit(self, before: Tensor, now: Tensor, channels: int, name: str) -> Tensor:
        """Return the earlier value at the extent of the later one."""
        if before.shape[2:] != now.shape[2:]:
            return self.halve(before, channels, name)
        return self.squeeze(before, channels, name)

    def separable(
        self, x: Tensor, channels: int, kernel: int, name: str, stride: int = 1
    ) -> Tensor:
        """Return rectifier, depthwise and pointwise convolution and batch norm, twice."""
        for index, step in ((1, stride), (2, 1)):
            label = f"{name}.{index}"
            x = self.model.conv2d(
                self.model.relu(x),
                x.shape[1],
                kernel=kernel,
                stride=step,
                padding=kernel // 2,
                groups=x.shape[1],
                bias=False,
                name=f"{label}.depth",
            )
            x = self.model.conv2d(x, channels, kernel=1, bias=False, name=f"{label}.point")
            x = self.norm(x, f"{label}.norm")
        return x

    def average(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        return self.model.avg_pool2d(
            x, 3, stride=stride, padding=1, include_pad=False, name=f"{name}.average"
        )

    def normal(self, now: Tensor, before: Tensor, channels: int, name: str) -> Tensor:
        """Return the normal cell, left of figure 4; before: the value before `now`."""
        before = self.fit(before, now, channels, f"{name}.before")
        now = self.squeeze(now, channels, f"{name}.now")
        sums = [
            self.separable(now, channels, 5, f"{name}.1a")
            + self.separable(before, channels, 3, f"{name}.1b"),
            self.separable(before, channels, 5, f"{name}.2a")
            + self.separable(before, channels, 3, f"{name}.2b"),
            self.average(now, f"{name}.3") + before,
            self.average(before, f"{name}.4a") + self.average(before, f"{name}.4b"),
            self.separable(now, channels, 3, f"{name}.5") + now,
        ]
        return self.model.concat([before, *sums], name=f"{name}.concat")

    def reduction(self, now: Tensor, before: Tensor | None, channels: int, name: str) -> Tensor:
        """Return the reduction cell, right of figure 4; the first has no value before its own."""
        earlier = now if before is None else self.fit(before, now, channels, f"{name}.before")
        now = self.squeeze(now, channels, f"{name}.now")
        first = self.separable(now, channels, 5, f"{name}.1a", 2) + self.separable(
            earlier, channels, 7, f"{name}.1b", 2
        )
        pooled = self.model.max_pool2d(now, 3, stride=2, padding=1, name=f"{name}.max")
        second = pooled + self.separable(earlier, channels, 7, f"{name}.2", 2)
        third = self.average(now, f"{name}.3a", 2) + self.separable(
            earlier, channels, 5, f"{name}.3b", 2
        )
        fourth = self.average(first, f"{name}.4") + second
        fifth = self.separable(first, channels, 3, f"{name}.5") + pooled
        return self.model.concat([second, third, fourth, fifth], name=f"{name}.concat")


def data() -> Splits:
    """Return 128 synthetic images and 32 held out, or the folder's."""
    return images("nasnet", (3, 224, 224), classes=10, count=160)


if __name__ == "__main__":
    run_app(__file__)
