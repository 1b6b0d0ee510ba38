"""A lattice LSTM that reads characters, and the words of a lexicon that they may spell.

Along a chain of characters, words are shortcuts: the memory of the character where a word begins
goes through a cell of the word and joins that of the character where it ends, as much as a gate of
each lets in. Sentences are made up: each word is of a kind, and some of the kind before.

Source: Zhang and Yang, Chinese NER using lattice LSTM, ACL 2018, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from soapstone import Adam, DynamicSession, Tensor, run_app
from soapstone.frontend.data.structured import CHARACTERS, KINDS, WORDS, Lattice, lattices
from soapstone.frontend.dynamic.program import Program
from soapstone.frontend.dynamic.values import Lazy

OPTIONS = {"optimizer": Adam(3e-3), "epochs": 6, "batch_size": 20}


def program(
    session: DynamicSession,
    width: int = 50,
    hidden: int = 64,
    train: int = 800,
    test: int = 200,
    cells: bool = True,
) -> Program:
    """Return the program of the network, in a session; accuracy is of all words of a sentence.

    Args:
        session: which records it. width: of the vectors of characters and of words.
        hidden: of the states. train, test: how many sentences.
        cells: whether its functions are cells; if not, they are found.
    """
    characters = session.table("characters", CHARACTERS, width)
    lexicon = session.table("words", WORDS, width)

    def gates(m: Any, x: Tensor, h: Tensor, count: int, name: str) -> list[Tensor]:
        made = m.dense(m.concat([x, h], axis=1), count * hidden, name=name)
        parts: list[Tensor] = m.split(made, [hidden] * count, axis=1)
        return parts

    def character(m: Any, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u, f = gates(m, x, h, 4, "character")
        c = m.sigmoid(f) * c + m.sigmoid(i) * m.tanh(u)
        return m.sigmoid(o) * m.tanh(c), c

    def word(m: Any, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        i, f, u = gates(m, x, h, 3, "word")
        made: Tensor = m.sigmoid(f) * c + m.sigmoid(i) * m.tanh(u)
        return made

    def share(m: Any, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """How much of a word's memory joins, and that share of it; shares are to be normalised."""
        gate = m.dense(m.concat([x, c], axis=1), hidden, name="share")
        weight = m.exp(m.sigmoid(gate))
        return weight, weight * c

    def joined(
        m: Any, x: Tensor, h: Tensor, weights: Tensor, memories: Tensor
    ) -> tuple[Tensor, Tensor]:
        i, o, u = gates(m, x, h, 3, "joined")
        weight = m.exp(m.sigmoid(i))
        c = (memories + weight * m.tanh(u)) / (weights + weight)
        return m.sigmoid(o) * m.tanh(c), c

    def add(m: Any, w: Tensor, c: Tensor, weight: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return w + weight, c + memory

    def judge(m: Any, h: Tensor) -> Tensor:
        logits: Tensor = m.dense(h, KINDS, name="kinds")
        return logits

    functions: list[Callable[..., Any]] = [character, word, share, joined, add, judge]
    of_character, of_word, share_of, joined_by, sum_of, of_state = (
        session.cell(f) if cells else partial(f, session) for f in functions
    )

    def outputs(lattice: Lattice) -> list[tuple[Lazy, int]]:
        zero = session.value(np.zeros(hidden, np.float32))
        h, c = zero, zero
        states: list[tuple[Lazy, Lazy]] = []
        ending: dict[int, list[tuple[int, int]]] = {}
        for first, last, number in lattice.words:
            ending.setdefault(last, []).append((first, number))
        for place, number in enumerate(lattice.characters):
            x = characters[number]
            shares = [
                share_of(x, of_word(lexicon[word], *states[first]))
                for first, word in ending.get(place, ())
            ]
            if shares:
                total = shares[0]
                for each in shares[1:]:
                    total = sum_of(*total, *each)
                h, c = joined_by(x, h, *total)
            else:
                h, c = of_character(x, h, c)
            states.append((h, c))
        return [(of_state(states[place][0]), kind) for place, kind in lattice.kinds]

    data = f"{train} and {test} made-up sentences"
    samples = tuple(lattices(train, 0)), tuple(lattices(test, 1))
    return Program(outputs, *samples, data, each=True)


if __name__ == "__main__":
    run_app(__file__)
