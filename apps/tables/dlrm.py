"""DLRM on synthetic clicks: tables of categories, dense features, and their dot products.

With SOAPSTONE_DATA set, on the folder `dlrm` in it: train and test npz files of `dense`, (n, 13)
float32, `ids`, (n, 26) integers below the vocabularies, and `y`, (n, 1) float32, 0 or 1.

Source: Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation
Systems, 2019; widths and tables (Criteo Ad Kaggle) as in FlexFlow: Jia, Automated Discovery of
Machine Learning Optimizations, 2020, section 3.7.3.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone import SGD, Model, Tensor, run_app
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
DENSE = 13
VOCABULARIES = (
    *(1396, 550, 1_761_917, 507_795, 290, 21, 11_948, 608, 3, 58_176, 5237, 1_497_287, 3127),
    *(26, 12_153, 1_068_715, 10, 4836, 2085, 4, 1_312_273, 17, 15, 110_946, 91, 72_655),
)


def build(
    batch_size: int = 256,
    vocabularies: Sequence[int] = VOCABULARIES,
    width: int = 64,
    bottom: Sequence[int] = (512, 512, 64),
    top: Sequence[int] = (1024, 1024, 1024, 1),
    dense: int = DENSE,
    interaction: str = "dot",
) -> Model:
    """Return the network for features (batch_size, dense) and one id for each table.

    Args:
        bottom: widths of the layers that the dense features go through; the last is `width`.
        interaction: dot, the products of all pairs of features; or cat, the features themselves.
    """
    if interaction not in ("dot", "cat"):
        raise ValueError(f"dlrm: interaction {interaction!r} found, dot or cat needed")
    model = Model("dlrm")
    features = model.input("dense", (batch_size, dense))
    ids = model.input("ids", (batch_size, len(vocabularies)), "int32")
    x = dense_layers(model, features, (*bottom[:-1], width), "bottom")
    columns = model.split(ids, (1,) * len(vocabularies), axis=1)
    rows = []
    for number, (column, vocabulary) in enumerate(zip(columns, vocabularies), 1):
        initial = Initial("uniform", vocabulary**-0.5)
        table = model.parameter(f"table{number}", (vocabulary, width), initial)
        rows.append(model.apply("embedding", column, table, name=f"rows{number}"))
    every = model.concat([model.reshape(x, (-1, 1, width)), *rows], axis=1, name="features")
    joined = model.flatten(every) if interaction == "cat" else _pairs(model, x, every)
    model.output(dense_layers(model, joined, top, "top", last=None))
    return model


def _pairs(model: Model, x: Tensor, features: Tensor) -> Tensor:
    """Return x beside the products of all pairs of features: rows of the triangle below."""
    count = features.shape[1]
    products = model.apply("matmul", features, features, name="products", transpose_b=True)
    sizes = [count]  # the first row has nothing below the diagonal
    for row in range(1, count):
        sizes += (row, count - row)
    strips = model.split(model.flatten(products), sizes, axis=1, name="strips")
    return model.concat([x, *strips[1::2]], axis=1, name="interaction")


def data(
    vocabularies: Sequence[int] = VOCABULARIES, dense: int = DENSE, count: int = 5120
) -> Splits:
    """Return 4,096 synthetic events and 1,024 held out, or the folder's."""
    return clicks("dlrm", count, vocabularies, dense)


if __name__ == "__main__":
    run_app(__file__)
