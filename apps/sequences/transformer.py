"""Transformer, encoder and decoder, that translates synthetic sentences.

With SOAPSTONE_DATA set, on the folder `transformer` in it: train and test npz files of `source` and
`target`, (n, 64) integers, and `y`, (n, 64) integers, the word after each of the target.

Source: Vaswani et al., Attention Is All You Need, 2017 (base, with trained positions). TENSOROPT
has the 9.7 GB of parameters of Cai et al., TensorOpt, 2020, table 1: the paper varies the hidden
size and gives no other, so that it follows from the bytes.
"""

from __future__ import annotations

from soapstone import Adam, Model, Tensor, run_app
from soapstone.apps._shared.attention import Blocks
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import translations
from soapstone.ir.graph import Initial

OPTIONS = {
    "optimizer": Adam(1e-4, beta2=0.98, epsilon=1e-9),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 2,
    "batch_size": 8,
}
TENSOROPT = {"hidden": 3840, "heads": 30, "inner": 15_360, "vocabulary": 32_000}


def build(
    batch_size: int = 8,
    layers: int = 6,
    hidden: int = 512,
    heads: int = 8,
    inner: int = 2048,
    length: int = 64,
    vocabulary: int = 37_000,
    dropout: float = 0.1,
) -> Model:
    """Return the network for sentence pairs (batch_size, length); a logit for each next word.

    Encoder and decoder have `layers` blocks each. One table holds the words of both and,
    transposed, the weights of the logits.
    """
    model = Model("transformer")
    source = model.input("source", (batch_size, length), "int32")
    target = model.input("target", (batch_size, length), "int32")
    table = model.parameter("words", (vocabulary, hidden), Initial("normal", hidden**-0.5))
    places = model.parameter("positions", (length, hidden), Initial("normal", 0.02))

    def embedded(ids: Tensor) -> Tensor:
        return model.dropout(model.apply("embedding", ids, table) * hidden**0.5 + places, dropout)

    blocks = Blocks(model, heads, inner, dropout=dropout)
    memory = embedded(source)
    for number in range(1, layers + 1):
        memory = blocks.encoder(memory, f"encoder{number}")
    x = embedded(target)
    for number in range(1, layers + 1):
        x = blocks.decoder(x, memory, f"decoder{number}")
    weights = model.transpose(table, (1, 0), name="output.weights")
    model.output(model.apply("linear", x, weights, bias=False, name="output"))
    return model


def data(length: int = 64, vocabulary: int = 37_000, count: int = 160) -> Splits:
    """Return 128 synthetic sentence pairs and 32 held out, or the folder's."""
    return translations("transformer", count, length, vocabulary)


if __name__ == "__main__":
    run_app(__file__)
