"""Neural machine translation, LSTM layers with attention, on synthetic sentence pairs.

With SOAPSTONE_DATA set, on the folder `nmt` in it: train and test npz files of `source` and
`target`, (n, 40) integers, and `y`, (n, 40) integers, the word after each of the target.

Source: Wu et al., Google's Neural Machine Translation System, 2016, with the attention of Luong,
Pham and Manning, 2015; sizes as in FlexFlow: Jia, Automated Discovery of Machine Learning
Optimizations, 2020, section 3.7.1.
"""

from __future__ import annotations

from soapstone import Adam, Model, Tensor, run_app
from soapstone.apps._shared.recurrent import (
    State,
    dense_steps,
    joined,
    lstm,
    lstm_cells,
    stacked,
    steps_of,
    time_major,
)
from soapstone.frontend.data.sets import Splits
from soapstone.frontend.data.synthetic import translations

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
    hidden: int = 1024,
    length: int = 40,
    vocabulary: int = 32_000,
    unrolled: bool = False,
) -> Model:
    """Return the network for sentence pairs (batch_size, length); a logit for each next word.

    Encoder and decoder have `layers` each; the decoder begins with the encoder's last states.

    Args:
        unrolled: operators of their own for each step, so that each can be placed by itself.
    """
    model = Model("nmt")
    source = model.input("source", (batch_size, length), "int32")
    target = model.input("target", (batch_size, length), "int32")
    if unrolled:
        model.output(_unrolled(model, source, target, layers, hidden, vocabulary))
        return model
    memory, states = _encoded(model, source, layers, hidden, vocabulary)
    model.output(_decoded(model, target, states, memory, vocabulary)[0])
    return model


def build_encoder(
    batch_size: int = 1,
    layers: int = 2,
    hidden: int = 1024,
    length: int = 40,
    vocabulary: int = 32_000,
) -> Model:
    """Return the encoder: words in; the memory and each layer's last states out.

    Outputs are what `build_step` takes. Parameters are named as in `build`.
    """
    model = Model("nmt_encoder")
    source = model.input("source", (batch_size, length), "int32")
    memory, states = _encoded(model, source, layers, hidden, vocabulary)
    model.output(memory, *(value for state in states for value in state))
    return model


def build_step(
    batch_size: int = 1,
    layers: int = 2,
    hidden: int = 1024,
    length: int = 40,
    vocabulary: int = 32_000,
) -> Model:
    """Return one step of the decoder: a word in, logits of the next one and new states out.

    Inputs are `ids` (batch_size), `memory` (batch_size, length, hidden), which is what the encoder
    made, and `h1`, `c1`, `h2`, … (batch_size, hidden), the states. Parameters are named as in
    `build`.
    """
    model = Model("nmt_step")
    ids = model.input("ids", (batch_size,), "int32")
    memory = model.input("memory", (batch_size, length, hidden))
    states = [
        (
            model.input(f"h{number}", (batch_size, hidden)),
            model.input(f"c{number}", (batch_size, hidden)),
        )
        for number in range(1, layers + 1)
    ]
    word = model.reshape(ids, (-1, 1))
    logits, after = _decoded(model, word, states, memory, vocabulary)
    model.output(model.flatten(logits), *(value for state in after for value in state))
    return model


def _encoded(
    model: Model, source: Tensor, layers: int, hidden: int, vocabulary: int
) -> tuple[Tensor, list[State]]:
    """Return the states of the last layer (n, t, hidden), and the last states of each."""
    x = time_major(model, model.embedding(source, vocabulary, hidden, name="encoder.words"))
    x, states = stacked(lstm, model, x, hidden, "encoder.lstm", [None] * layers)
    return time_major(model, x, "memory"), states


def _decoded(
    model: Model, target: Tensor, states: list[State], memory: Tensor, vocabulary: int
) -> tuple[Tensor, list[State]]:
    """Return logits (n, t, vocabulary) of the words after the target's, and the last states."""
    hidden = memory.shape[-1]
    x = time_major(model, model.embedding(target, vocabulary, hidden, name="decoder.words"))
    x, after = stacked(lstm, model, x, hidden, "decoder.lstm", states)
    x = time_major(model, x)
    query = model.dense(x, hidden, bias=False, name="attention.query")
    weights = model.softmax(model.apply("matmul", query, memory, transpose_b=True))
    context = model.matmul(weights, memory, name="attention.context")
    mixed = model.concat([context, x], axis=2)
    mixed = model.dense(mixed, hidden, activation="tanh", bias=False, name="attention.mix")
    return model.dense(mixed, vocabulary, name="output"), after


def _unrolled(
    model: Model, source: Tensor, target: Tensor, layers: int, hidden: int, vocabulary: int
) -> Tensor:
    """Return the logits (n, t, vocabulary), made step by step; the memory is of all steps."""
    steps = steps_of(model, model.embedding(source, vocabulary, hidden, name="encoder.words"))
    steps, states = stacked(lstm_cells, model, steps, hidden, "encoder.lstm", [None] * layers)
    memory = joined(model, steps, "memory")
    steps = steps_of(model, model.embedding(target, vocabulary, hidden, name="decoder.words"))
    steps, _ = stacked(lstm_cells, model, steps, hidden, "decoder.lstm", states)
    queries = dense_steps(model, steps, hidden, "attention.query", bias=False)
    mixed = []
    for step, query in zip(steps, queries):
        rows = model.reshape(query, (-1, 1, hidden))
        weights = model.softmax(model.apply("matmul", rows, memory, transpose_b=True))
        context = model.reshape(model.matmul(weights, memory), (-1, hidden))
        mixed.append(model.concat([context, step], axis=1))
    mixed = dense_steps(model, mixed, hidden, "attention.mix", bias=False, activation="tanh")
    return joined(model, dense_steps(model, mixed, vocabulary, "output"))


def data(length: int = 40, vocabulary: int = 32_000, count: int = 320) -> Splits:
    """Return 256 synthetic sentence pairs and 64 held out, or the folder's."""
    return translations("nmt", count, length, vocabulary)


if __name__ == "__main__":
    run_app(__file__)
