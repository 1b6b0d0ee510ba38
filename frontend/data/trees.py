"""Trees of sentences: the Stanford Sentiment Treebank, or made-up ones of the same form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from soapstone.errors import DataError
from soapstone.files import check_file
from soapstone.frontend.data.sets import data_folder

NEUTRAL = 2  # of the labels 0 to 4, from very negative to very positive
_SIZES = {"train": 800, "dev": 100, "test": 200}  # of what is made up, by part
_MOST_BYTES = 64 << 20  # of a file


@dataclass(frozen=True)
class Tree:
    """A phrase: a word, or two phrases, with a label.

    Attributes:
        label: 0 (very negative) to 4 (very positive). word: None where there are `children`.
        children: of which there are two, or none.
    """

    label: int
    word: str | None = None
    children: tuple[Tree, ...] = ()

    def phrases(self) -> Iterator[Tree]:
        """Yield this phrase and all inside of it."""
        pending = [self]
        while pending:
            tree = pending.pop()
            yield tree
            pending += tree.children

    def words(self) -> Iterator[str]:
        """Yield the words, as they are read."""
        pending = [self]
        while pending:
            tree = pending.pop()
            if tree.word is not None:
                yield tree.word
            pending += tree.children[::-1]


@dataclass(frozen=True)
class Treebank:
    """Trees in three parts; `synthetic` tells that they were made up."""

    train: tuple[Tree, ...]
    dev: tuple[Tree, ...]
    test: tuple[Tree, ...]
    synthetic: bool = False

    def numbers(self) -> dict[str, int]:
        """Return the number of each word of `train`, from 1; 0 is for words that are not known."""
        known = dict.fromkeys(t.word for tree in self.train for t in tree.phrases() if t.word)
        return {word: place for place, word in enumerate(known, 1)}

    def __str__(self) -> str:
        made = "made-up trees" if self.synthetic else "trees"
        return f"{len(self.train)}, {len(self.dev)} and {len(self.test)} {made}"


def sentiment() -> Treebank:
    """Return the trees of folder `sst` in SOAPSTONE_DATA, `train.txt`, `dev.txt` and `test.txt`.

    Where it is not there, made-up ones, whose words are good, bad or neither, or turn what follows.

    Raises:
        DataError: a file is absent or malformed; names the line.
    """
    folder = data_folder()
    made = folder is None or not (folder / "sst").is_dir()
    if folder is None or made:
        train, dev, test = (_made_up(size, part) for part, size in enumerate(_SIZES.values()))
    else:
        train, dev, test = (read_trees(folder / "sst" / f"{part}.txt") for part in _SIZES)
    return Treebank(tuple(train), tuple(dev), tuple(test), made)


def good_or_bad(trees: Iterable[Tree]) -> list[Tree]:
    """Return the trees that are not neutral."""
    return [tree for tree in trees if tree.label != NEUTRAL]


def read_trees(path: str | Path) -> Iterator[Tree]:
    """Yield the trees of a file, a line each: `(3 (2 It) (4 (2 's) (4 lovely)))`.

    Raises:
        DataError: the file is absent or too large, or a line is no tree; names it.
    """
    path = Path(path)
    check_file(path, f"trees {str(path)!r}", DataError)
    if path.stat().st_size > _MOST_BYTES:
        raise DataError(f"trees {str(path)!r}: over {_MOST_BYTES:,} bytes found")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield _tree(line)
                except ValueError as error:
                    raise DataError(f"trees {str(path)!r}, line {number}: {error}") from None


def _tree(line: str) -> Tree:
    """Return the tree of a line; words may have spaces that are not broken at."""
    stack: list[list[str | Tree]] = [[]]
    for token in re.findall(r"[()]|[^() \t\r\n]+", line):
        if token == "(":
            stack.append([])
        elif token == ")":
            if len(stack) < 2:
                raise ValueError("')' found without '('")
            stack[-2].append(_phrase(stack.pop()))
        else:
            stack[-1].append(token)
    if len(stack) > 1 or len(stack[0]) != 1 or not isinstance(stack[0][0], Tree):
        raise ValueError("one tree in parentheses needed")
    return stack[0][0]


def _phrase(parts: list[str | Tree]) -> Tree:
    """Return the phrase of a label and a word, or of a label and two phrases."""
    label, *rest = parts or [""]
    if not isinstance(label, str) or label not in "01234" or len(label) != 1:
        raise ValueError(f"label {label!r} found, 0 to 4 needed")
    if len(rest) == 1 and isinstance(rest[0], str):
        return Tree(int(label), rest[0])
    children = tuple(part for part in rest if isinstance(part, Tree))
    if len(rest) != 2 or len(children) != 2:
        raise ValueError(f"{len(rest)} parts found after a label, a word or two phrases needed")
    return Tree(int(label), None, children)


def _made_up(count: int, seed: int) -> Iterator[Tree]:
    """Yield trees whose labels follow from their words: the sum of both sides, or its opposite."""
    random = np.random.default_rng(seed)

    def leaf() -> tuple[int, Tree]:
        kind = int(random.integers(-1, 2))
        word = f"{('bad', 'plain', 'good')[kind + 1]}{random.integers(20)}"
        return kind, Tree(NEUTRAL + kind, word)

    def phrase(depth: int) -> tuple[int, Tree]:
        if depth == 0 or random.random() < 0.2:
            return leaf()
        value, right = phrase(depth - 1)
        if random.random() < 0.2:
            value, left = -value, Tree(NEUTRAL, "not")
        else:
            more, left = phrase(depth - 1)
            value = max(-2, min(2, value + more))
        return value, Tree(NEUTRAL + value, None, (left, right))

    for _ in range(count):
        value = 0
        while not value:  # labels of roots are never neutral
            value, tree = phrase(int(random.integers(2, 6)))
        yield tree
