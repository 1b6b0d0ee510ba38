"""BERT that tells classes of text apart, on synthetic texts of two classes.

With SOAPSTONE_DATA set, on the folder `bert` in it: train and test npz files of `ids` and `types`,
(n, 128) integers, and `y`, (n,) integers.

Source: Devlin et al., BERT: Pre-training of Deep Bidirectional Transformers, 2019 (base). PAPERS is
the size that TASO and FlexFlow measure, on hidden states instead of words.
"""

from __future__ import annotations

from soapstone import AdamW, Model, Tensor, run_app
from soapstone.apps._shared.attention import Blocks
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import texts
from soapstone.ir.graph import Initial

OPTIONS = {
    "optimizer": AdamW(1e-4),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 3,
    "batch_size": 8,
}
EPSILON = 1e-12
PAPERS = {
    "layers": 8,
    "hidden": 1024,
    "heads": 16,
    "length": 64,
    "vocabulary": None,
    "classes": None,
}


def build(
    batch_size: int = 8,
    layers: int = 12,
    hidden: int = 768,
    heads: int = 12,
    length: int = 128,
    inner: int | None = None,
    vocabulary: int | None = 30_522,
    positions: int = 512,
    classes: int | None = 2,
    dropout: float = 0.1,
    mask: bool = False,
) -> Model:
    """Return the network for `length` words of `batch_size` texts.

    Args:
        inner: width between the two dense layers of a block, 4 `hidden` by default.
        vocabulary: None for an input of hidden states (batch_size, length, hidden) and no tables.
        positions: rows of the table of positions, of which the first `length` are used.
        classes: None for an output of hidden states.
        mask: take a further input (batch_size, length), 1 at words and 0 at padding.
    """
    model = Model("bert")
    if vocabulary is None:
        x = model.input("hidden", (batch_size, length, hidden))
    else:
        x = _embedded(model, batch_size, length, hidden, vocabulary, positions)
        x = model.dropout(model.layer_norm(x, epsilon=EPSILON, name="embedding.norm"), dropout)
    hide = None
    if mask:
        kept = model.input("mask", (batch_size, length))
        hide = model.reshape((kept - 1.0) * 10_000.0, (-1, 1, 1, length), name="hide")
    blocks = Blocks(model, heads, inner or 4 * hidden, "gelu", dropout, EPSILON)
    for number in range(1, layers + 1):
        x = blocks.encoder(x, f"block{number}", hide)
    if classes is not None:
        first = model.flatten(model.slice(x, 1, 0, 1, name="first"))
        pooled = model.dense(first, hidden, activation="tanh", name="pooler")
        x = model.dense(model.dropout(pooled, dropout), classes, name="classifier")
    model.output(x)
    return model


def _embedded(
    model: Model, batch_size: int, length: int, hidden: int, vocabulary: int, positions: int
) -> Tensor:
    """Return the sum of each word's row, its type's and its position's."""
    ids = model.input("ids", (batch_size, length), "int32")
    types = model.input("types", (batch_size, length), "int32")
    tables = [
        model.parameter(name, (rows, hidden), Initial("normal", 0.02))
        for name, rows in (("words", vocabulary), ("places", positions), ("kinds", 2))
    ]
    words, places, kinds = tables
    if length < positions:
        stops = (length, hidden)
        places = model.apply("slice", places, starts=(0, 0), stops=stops, steps=(1, 1))
    return model.apply("embedding", ids, words) + places + model.apply("embedding", types, kinds)


def data(length: int = 128, vocabulary: int = 30_522, classes: int = 2, count: int = 320) -> Splits:
    """Return 256 synthetic texts, each of two parts, and 64 held out, or the folder's."""
    return texts("bert", count, length, vocabulary, classes, pairs=True)


if __name__ == "__main__":
    run_app(__file__)
