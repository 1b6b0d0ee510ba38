"""RNNTC, text classification by LSTM or SRU layers, on synthetic texts of two classes.

With SOAPSTONE_DATA set, on the folder `rnntc` in it: train and test npz files of `ids`, (n, 40)
integers, and `y`, (n,) integers.

Source: sizes as in FlexFlow: Jia, Automated Discovery of Machine Learning Optimizations, 2020,
section 3.7.1, with the vocabulary of Movie Reviews; METAFLOW is the form of Jia et al., Optimizing
DNN Computation with Relaxed Graph Substitutions, 2019, with the cells of Lei et al., Simple
Recurrent Units for Highly Parallelizable Recurrence, 2018.
"""

from __future__ import annotations

from soapstone import Adam, Model, run_app
from soapstone.apps._shared.recurrent import lstm, lstm_cells, sru, stacked, steps_of, time_major
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import texts

OPTIONS = {
    "optimizer": Adam(1e-3),
    "loss": "cross_entropy",
    "metrics": ["accuracy"],
    "epochs": 3,
    "batch_size": 16,
}
METAFLOW = {"layers": 1, "length": 20, "cell": "sru"}


def build(
    batch_size: int = 16,
    layers: int = 4,
    hidden: int = 1024,
    length: int = 40,
    vocabulary: int = 18_765,
    classes: int = 2,
    cell: str = "lstm",
    unrolled: bool = False,
) -> Model:
    """Return the network for `length` words of `batch_size` texts; logits of the last step.

    Args:
        cell: lstm or sru.
        unrolled: an operator a step of each lstm layer, so that each can be placed by itself.
    """
    if cell not in ("lstm", "sru"):
        raise ValueError(f"rnntc: cell {cell!r} found, lstm or sru needed")
    if unrolled and cell != "lstm":
        raise ValueError(f"rnntc: cell {cell!r} found, lstm needed to unroll it")
    model = Model("rnntc")
    ids = model.input("ids", (batch_size, length), "int32")
    x = model.embedding(ids, vocabulary, hidden, name="words")
    if unrolled:
        steps = steps_of(model, x)
        steps, _ = stacked(lstm_cells, model, steps, hidden, "lstm", [None] * layers)
        model.output(model.dense(steps[-1], classes, name="classifier"))
        return model
    x = time_major(model, x)
    if cell == "lstm":
        x, _ = stacked(lstm, model, x, hidden, "lstm", [None] * layers)
    for number in range(1, layers + 1) if cell == "sru" else ():
        x = sru(model, x, f"sru{number}")
    last = model.split(x, (length - 1, 1), axis=0)[1] if length > 1 else x
    model.output(model.dense(model.reshape(last, (-1, hidden)), classes, name="classifier"))
    return model


def data(length: int = 40, vocabulary: int = 18_765, classes: int = 2, count: int = 320) -> Splits:
    """Return 256 synthetic texts and 64 held out, or the folder's."""
    return texts("rnntc", count, length, vocabulary, classes)


if __name__ == "__main__":
    run_app(__file__)
