"""ResNeXt-50 (32x4d) on synthetic 224x224 images.

With SOAPSTONE_DATA set, on the folder `resnext` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Xie, Girshick, Dollar, Tu and He, Aggregated residual transformations for deep neural
networks, CVPR 2017.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import Model, run_app
from soapstone.apps.images import resnet
from soapstone.frontend.data.sets import Splits, images

OPTIONS = resnet.OPTIONS


def build(
    batch_size: int = 32,
    image_size: int = 224,
    classes: int = 1000,
    depth: int = 50,
    width: int = 64,
    groups: int = 32,
    group_width: int = 4,
    branches: bool = False,
    blocks: Sequence[int] | None = None,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size).

    Args:
        branches: write each grouped convolution as `groups` convolutions between a split and a
            concat (figure 3b of the paper) in place of one grouped convolution (figure 3c).
        depth, width, groups, group_width, blocks: see `resnet.build`.
    """
    return resnet.build(
        batch_size,
        image_size,
        classes,
        depth=depth,
        width=width,
        groups=groups,
        group_width=group_width,
        branches=branches,
        blocks=blocks,
        name="resnext",
    )


def data() -> Splits:
    """Return 256 synthetic images and 64 held out, or the folder's."""
    return images("resnext", (3, 224, 224), classes=10, count=320)


if __name__ == "__main__":
    run_app(__file__)
