"""A module network that answers questions about small scenes.

The layout of each question says which modules answer it: find says where something is, relate where
what is left, right, above or below of it would be, and is both, exists and count answer. Modules
know no labels but the answer. Questions and scenes are made up.

Source: Andreas et al., Learning to compose neural networks for question answering, NAACL 2016, for
find by a word's vector, exists and count; Andreas et al., Neural module networks, CVPR 2016, for
relate, a dense layer of each direction. Layouts are given, not learned.
"""

from __future__ import annotations

from typing import Any

from soapstone import Adam, DynamicSession, Tensor, run_app
from soapstone.frontend.data.structured import (
    ANSWERS,
    COLOURS,
    SHAPES,
    SIDE,
    Layout,
    Question,
    questions,
)
from soapstone.frontend.dynamic.program import Program
from soapstone.frontend.dynamic.values import Lazy
from soapstone.ir.graph import Initial

OPTIONS = {"optimizer": Adam(5e-3), "epochs": 15, "batch_size": 32}


def program(
    session: DynamicSession, hidden: int = 32, train: int = 2000, test: int = 400
) -> Program:
    """Return the program of the network, in a session.

    Args:
        session: which records it. hidden: the width of words' vectors and inside of modules.
        train, test: how many questions.
    """
    places = SIDE * SIDE
    number = {word: place for place, word in enumerate((*COLOURS, *SHAPES))}
    words = session.table("words", len(number), hidden, Initial("normal", 1.0))

    @session.cell
    def find(m: Any, scene: Tensor, word: Tensor) -> Tensor:
        seen = m.dense(scene, hidden, name="scene")
        alike = m.reshape(seen @ m.reshape(word, (1, hidden, 1)), (1, places))
        where: Tensor = m.sigmoid(alike)
        return where

    @session.cell
    def relate(m: Any, where: Tensor, direction: str) -> Tensor:
        made: Tensor = m.dense(where, places, activation="sigmoid", name=direction)
        return made

    @session.cell
    def both(m: Any, one: Tensor, other: Tensor) -> Tensor:
        return one * other

    @session.cell
    def exists(m: Any, where: Tensor) -> Tensor:
        most = m.reshape(m.reduce_max(where, axes=(1,)), (1, 1))
        logits: Tensor = m.dense(most, len(ANSWERS), name="answers")
        return logits

    @session.cell
    def count(m: Any, where: Tensor) -> Tensor:
        inside = m.dense(where, hidden, activation="relu", name="inside")
        logits: Tensor = m.dense(inside, len(ANSWERS), name="answers")
        return logits

    def outputs(question: Question) -> list[tuple[Lazy, int]]:
        scene = session.value(question.scene)

        def of(layout: Layout) -> Any:
            match layout:
                case ("find", word):
                    return find(scene, words[number[word]])
                case ("relate", direction, where):
                    return relate(of(where), direction)
                case ("and", one, other):
                    return both(of(one), of(other))
                case (answer, where):
                    return (exists if answer == "exists" else count)(of(where))
            raise ValueError(f"layout {layout!r} found, find, relate, and, exists or count needed")

        return [(of(question.layout), question.answer)]

    samples = tuple(questions(train, 0)), tuple(questions(test, 1))
    return Program(outputs, *samples, f"{train} and {test} made-up questions")


if __name__ == "__main__":
    run_app(__file__)
