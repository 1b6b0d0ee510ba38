"""A binary Tree-LSTM that tells good sentences from bad ones, by their trees.

What it computes follows the tree of each sentence, so it is a program of a dynamic session
(docs/dynamic.md). With SOAPSTONE_DATA set, on the Stanford Sentiment Treebank: folder `sst` in it,
of which neutral sentences are left out; else on made-up trees.

Source: Tai, Socher and Manning, Improved semantic representations from tree-structured long
short-term memory networks, ACL 2015, section 3.2; as in Liu, Machine learning workflow optimization
via automatic discovery of resource reuse opportunities, 2019, chapter 6, with a label at the root,
or with `labels="phrases"` at every phrase that is not neutral.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from soapstone import Adam, DynamicSession, Tensor, run_app
from soapstone.frontend.data.trees import NEUTRAL, Tree, good_or_bad, sentiment
from soapstone.frontend.dynamic.program import Program
from soapstone.frontend.dynamic.values import Lazy

OPTIONS = {"optimizer": Adam(1e-3), "epochs": 4, "batch_size": 20}


def program(
    session: DynamicSession,
    width: int = 300,
    hidden: int = 150,
    dropout: float = 0.5,
    labels: str = "phrases",
    cells: bool = True,
) -> Program:
    """Return the program of the network, in a session.

    Args:
        session: which records it. width: of a word's vector. hidden: of a phrase's.
        dropout: the share of a phrase's vector that a training step leaves out of what judges it.
        labels: "root", or "phrases" for all of them.
        cells: whether its functions are cells; if not, they are found.
    """
    trees = sentiment()
    number = trees.numbers()
    words = session.table("words", len(number) + 1, width)

    def leaf(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = m.split(m.dense(x, 3 * hidden, name="leaf"), [hidden] * 3, axis=1)
        c = m.sigmoid(i) * m.tanh(u)
        return m.sigmoid(o) * m.tanh(c), c

    def compose(m: Any, lh: Tensor, lc: Tensor, rh: Tensor, rc: Tensor) -> tuple[Tensor, Tensor]:
        gates = m.dense(m.concat([lh, rh], axis=1), 5 * hidden, name="compose")
        i, fl, fr, o, u = m.split(gates, [hidden] * 5, axis=1)
        c = m.sigmoid(i) * m.tanh(u) + m.sigmoid(fl) * lc + m.sigmoid(fr) * rc
        return m.sigmoid(o) * m.tanh(c), c

    def judge(m: Any, h: Tensor) -> Tensor:
        logits: Tensor = m.dense(m.dropout(h, dropout, name="dropout"), 2, name="classes")
        return logits

    functions: list[Callable[..., Any]] = [leaf, compose, judge]
    of_word, of_both, of_phrase = (
        session.cell(function) if cells else partial(function, session) for function in functions
    )

    def outputs(tree: Tree) -> list[tuple[Lazy, int]]:
        judged: list[tuple[Lazy, int]] = []

        def of(tree: Tree, root: bool = False) -> Any:
            if tree.word is not None:
                made = of_word(words[number.get(tree.word, 0)])
            else:
                left, right = tree.children
                made = of_both(*of(left), *of(right))
            if root or (labels == "phrases" and tree.label != NEUTRAL):
                judged.append((of_phrase(made[0]), int(tree.label > NEUTRAL)))
            return made

        of(tree, root=True)
        return judged[::-1]

    return Program(outputs, good_or_bad(trees.train), good_or_bad(trees.test), str(trees))


if __name__ == "__main__":
    run_app(__file__)
