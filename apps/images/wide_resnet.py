"""Wide ResNet-101 with 7.3 GB of parameters, on synthetic 224x224 images.

With SOAPSTONE_DATA set, on the folder `wide_resnet` in it: train and test npz files of `x`,
(n, 3, 224, 224) float32, and `y`, (n,) integers below 1,000.

Source: Zagoruyko and Komodakis, Wide residual networks, BMVC 2016: a bottleneck's 3x3 convolution
is widened by a factor, 2 in the published WRN-50-2 and WRN-101-2. TensorOpt (Cai, Yan, Ma, Wu,
Huang, Cheng, Su and Yu, TPDS 2021, table 1) gives only the size of its widened network, 7.3 GB of
parameters; a factor of 8.8 makes this one as large.
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
    depth: int = 101,
    width: int = 64,
    group_width: int = 564,
    blocks: Sequence[int] | None = None,
) -> Model:
    """Return the network for images (batch_size, 3, image_size, image_size).

    Args:
        group_width: channels of a bottleneck's 3x3 convolution for every 64 of the stage; 128 for
            the published WRN-50-2 and WRN-101-2.
        depth, width, blocks: see `resnet.build`.
    """
    return resnet.build(
        batch_size,
        image_size,
        classes,
        depth=depth,
        width=width,
        group_width=group_width,
        blocks=blocks,
        name="wide_resnet",
    )


def data() -> Splits:
    """Return 256 synthetic images and 64 held out, or the folder's."""
    return images("wide_resnet", (3, 224, 224), classes=10, count=320)


if __name__ == "__main__":
    run_app(__file__)
