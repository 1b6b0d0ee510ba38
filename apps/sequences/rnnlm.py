"""RNNLM, a language model of two LSTM layers, on synthetic sentences.

With SOAPSTONE_DATA set, on the folder `rnnlm` in it: train and test npz files of `ids`, (n, 40)
integers, and `y`, (n, 40) integers, the word after each.

Source: Zaremba, Sutskever and Vinyals, Recurrent Neural Network Regularization, 2014; sizes as in
FlexFlow: Jia, Automated Discovery of Machine Learning Optimizations, 2020, section 3.7.1, and the
vocabulary of Penn Treebank.
"""

from __future__ import annotations

from soapstone import Adam, Model, run_app
from soapstone.apps._shared.recurrent import (
    dense_steps,
    joined,
    lstm,
    lstm_cells,
    stacked,
    steps_of,
    time_major,
)
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import sentences

OPTIONS = {
    "optimizer": Adam(1e-3),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 2,
    "batch_size": 16,
}


def build(
    batch_size: int = 16,
    layers: int = 2,
    hidden: int = 2048,
    length: int = 40,
    vocabulary: int = 10_000,
    unrolled: bool = False,
) -> Model:
    """Return the network for `length` words of `batch_size` sentences; a logit for each next.

    Args:
        unrolled: an operator a step, so that each can be placed by itself.
    """
    model = Model("rnnlm")
    ids = model.input("ids", (batch_size, length), "int32")
    x = model.embedding(ids, vocabulary, hidden, name="words")
    if unrolled:
        steps = steps_of(model, x)
        steps, _ = stacked(lstm_cells, model, steps, hidden, "lstm", [None] * layers)
        model.output(joined(model, dense_steps(model, steps, vocabulary, "output")))
        return model
    x, _ = stacked(lstm, model, time_major(model, x), hidden, "lstm", [None] * layers)
    model.output(model.dense(time_major(model, x), vocabulary, name="output"))
    return model


def data(length: int = 40, vocabulary: int = 10_000, count: int = 320) -> Splits:
    """Return 256 synthetic sentences and 64 held out, or the folder's."""
    return sentences("rnnlm", count, length, vocabulary)


if __name__ == "__main__":
    run_app(__file__)
