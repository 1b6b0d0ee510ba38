"""A recurrent network that tells good sentences from bad ones, each of its own length: no padding.

A sentence is as many calls of a cell as it has words; those of all sentences of a batch that are
still going on run together. On the sentences of the trees of the app treelstm.

Source: Cho et al., Learning phrase representations using RNN encoder-decoder for statistical
machine translation, EMNLP 2014, for the gated recurrent unit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from soapstone import Adam, DynamicSession, Tensor, run_app
from soapstone.frontend.data.trees import NEUTRAL, Tree, good_or_bad, sentiment
from soapstone.frontend.dynamic.program import Program
from soapstone.frontend.dynamic.values import Lazy

OPTIONS = {"optimizer": Adam(1e-3), "epochs": 4, "batch_size": 20}


def program(
    session: DynamicSession,
    width: int = 100,
    hidden: int = 100,
    dropout: float = 0.5,
    cell: str = "gru",
    cells: bool = True,
) -> Program:
    """Return the program of the network, in a session.

    Args:
        session: which records it. width: of a word's vector. hidden: of the state.
        dropout: the share of the last state that a training step leaves out of what judges it.
        cell: "gru", or "rnn" for Elman's.
        cells: whether its functions are cells; if not, they are found.
    """
    if cell not in ("gru", "rnn"):
        raise ValueError(f"dynrnn: cell {cell!r} found, gru or rnn needed")
    trees = sentiment()
    number = trees.numbers()
    words = session.table("words", len(number) + 1, width)

    def step(m: Any, x: Tensor, h: Tensor) -> Tensor:
        both = m.concat([x, h], axis=1)
        state: Tensor
        if cell == "rnn":
            state = m.dense(both, hidden, activation="tanh", name="state")
            return state
        r, z = m.split(m.sigmoid(m.dense(both, 2 * hidden, name="gates")), [hidden] * 2, axis=1)
        new = m.tanh(m.dense(m.concat([x, r * h], axis=1), hidden, name="new"))
        state = new + z * (h - new)
        return state

    def judge(m: Any, h: Tensor) -> Tensor:
        logits: Tensor = m.dense(m.dropout(h, dropout, name="dropout"), 2, name="classes")
        return logits

    functions: list[Callable[..., Any]] = [step, judge]
    of_word, of_all = (session.cell(f) if cells else partial(f, session) for f in functions)

    def outputs(tree: Tree) -> list[tuple[Lazy, int]]:
        h = session.value(np.zeros(hidden, np.float32))
        for word in tree.words():
            h = of_word(words[number.get(word, 0)], h)
        return [(of_all(h), int(tree.label > NEUTRAL))]

    return Program(outputs, good_or_bad(trees.train), good_or_bad(trees.test), str(trees))


if __name__ == "__main__":
    run_app(__file__)
