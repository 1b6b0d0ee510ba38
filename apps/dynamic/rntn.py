"""A recursive neural tensor network that says how good or bad each phrase of a sentence is.

A phrase's vector is a bilinear function of those of its two parts; all phrases are judged by one
classifier, of five classes. On the trees of the app treelstm.

Source: Socher et al., Recursive deep models for semantic compositionality over a sentiment
treebank, EMNLP 2013, section 4.3. Adam in place of AdaGrad: it moves each entry of the
tensor by about the learning rate, and (2 width)^2 of them meet in a number, so bilinear functions
are divided by 2 width; else each step changes the vectors of phrases beyond learning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from soapstone import Adam, DynamicSession, Tensor, run_app
from soapstone.frontend.data.trees import Tree, sentiment
from soapstone.frontend.dynamic.program import Program
from soapstone.frontend.dynamic.values import Lazy

CLASSES = 5
OPTIONS = {"optimizer": Adam(3e-3), "epochs": 4, "batch_size": 25}


def program(session: DynamicSession, width: int = 30, cells: bool = True) -> Program:
    """Return the program of the network, in a session.

    Args:
        session: which records it. width: of the vectors of words and phrases.
        cells: whether its functions are cells; if not, they are found.
    """
    trees = sentiment()
    number = trees.numbers()
    words = session.table("words", len(number) + 1, width)

    def compose(m: Any, left: Tensor, right: Tensor) -> Tensor:
        both = m.concat([left, right], axis=1)
        slices = m.dense(both, 2 * width * width, bias=False, name="tensor")
        bilinear = m.reshape(both, (1, 1, 2 * width)) @ m.reshape(slices, (1, 2 * width, width))
        bilinear = m.reshape(bilinear, (1, width)) / (2 * width)
        made: Tensor = m.tanh(bilinear + m.dense(both, width, name="compose"))
        return made

    def judge(m: Any, phrase: Tensor) -> Tensor:
        logits: Tensor = m.dense(phrase, CLASSES, name="classes")
        return logits

    functions: list[Callable[..., Any]] = [compose, judge]
    of_both, of_phrase = (session.cell(f) if cells else partial(f, session) for f in functions)

    def outputs(tree: Tree) -> list[tuple[Lazy, int]]:
        judged: list[tuple[Lazy, int]] = []

        def of(tree: Tree) -> Lazy:
            if tree.word is not None:
                made = words[number.get(tree.word, 0)]
            else:
                left, right = tree.children
                made = of_both(of(left), of(right))
            judged.append((of_phrase(made), tree.label))
            return made

        of(tree)
        return judged[::-1]

    return Program(outputs, trees.train, trees.test, str(trees))


if __name__ == "__main__":
    run_app(__file__)
