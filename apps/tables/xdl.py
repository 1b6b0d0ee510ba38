"""An XDL-like click model on synthetic events: bags of categories, then dense layers.

With SOAPSTONE_DATA set, on the folder `xdl` in it: train and test npz files of `ids`, (n, tables *
bag) integers below the vocabularies, table by table, and `y`, (n, 1) float32, 0 or 1.

Source: Jiang et al., XDL: an industrial deep learning framework for high-dimensional sparse data,
2019; tables and widths as in FlexFlow's XDL application (Unger et al., Unity, 2022), but with
biases and one logit for its two squared outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import SGD, Model, run_app
from soapstone.apps._shared.dense import dense_layers
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import clicks
from soapstone.ir.graph import Initial

OPTIONS = {
    "optimizer": SGD(0.1),
    "loss": "bce_with_logits",
    "metrics": [],
    "epochs": 3,
    "batch_size": 256,
}
VOCABULARIES = (1_000_000,) * 4


def build(
    batch_size: int = 256,
    vocabularies: Sequence[int] = VOCABULARIES,
    bag: int = 1,
    width: int = 64,
    top: Sequence[int] = (256, 256, 256, 1),
) -> Model:
    """Return the network for `bag` ids of each table, whose rows are added up."""
    model = Model("xdl")
    ids = model.input("ids", (batch_size, len(vocabularies) * bag), "int32")
    bags = model.split(ids, (bag,) * len(vocabularies), axis=1)
    sums = []
    for number, (part, rows) in enumerate(zip(bags, vocabularies), 1):
        table = model.parameter(f"table{number}", (rows, width), Initial("uniform", rows**-0.5))
        sums.append(model.apply("embedding_bag", part, table, reduction="sum"))
    x = model.concat(sums, axis=1, name="features")
    model.output(dense_layers(model, x, top, "top", last=None))
    return model


def data(vocabularies: Sequence[int] = VOCABULARIES, bag: int = 1, count: int = 5120) -> Splits:
    """Return 4,096 synthetic events and 1,024 held out, or the folder's."""
    return clicks("xdl", count, vocabularies, bag=bag)


if __name__ == "__main__":
    run_app(__file__)
