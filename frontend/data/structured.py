"""Made-up samples whose structure differs from one to the next: lattices of words, and questions.

Both can be learned, and both follow from a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.ir.tensor import Array

CHARACTERS, WORDS = 40, 60  # of the language of lattices
KINDS = 3  # of its words; those of kind 0 are of the kind of the word before them
_LENGTHS = (2, 5)  # of its words: from, and below

SIDE = 3  # of a scene, in places
COLOURS, SHAPES = ("red", "green", "blue"), ("circle", "square", "triangle")
DIRECTIONS = ("left", "right", "above", "below")
MOST = 4  # what is counted: so many, or more
ANSWERS = ("no", "yes", *map(str, range(MOST)), f"{MOST} or more")
Layout = tuple[Any, ...]  # a module's name, then a word or a direction, or layouts, or both


@dataclass(frozen=True)
class Lattice:
    """Characters, and the words of a lexicon that are spelled by some of them.

    Attributes:
        characters: numbers below `CHARACTERS`.
        words: all that match: first and last place, and number below `WORDS`, by their last place.
        kinds: by the last place of each word of the sentence, its kind. Other matches have none.
    """

    characters: tuple[int, ...]
    words: tuple[tuple[int, int, int], ...]
    kinds: tuple[tuple[int, int], ...]


def lattices(count: int, seed: int = 0) -> Iterator[Lattice]:
    """Yield lattices of sentences of three to eight words and single characters between some.

    The lexicon is the same for all seeds. count: of lattices. seed: of what is drawn.
    """
    fixed = np.random.default_rng(0)
    lexicon: dict[tuple[int, ...], int] = {}
    while len(lexicon) < WORDS:
        spelled = fixed.integers(CHARACTERS, size=fixed.integers(*_LENGTHS))
        lexicon.setdefault(tuple(map(int, spelled)), len(lexicon))
    spellings = list(lexicon)
    random = np.random.default_rng(seed)
    for _ in range(count):
        characters: list[int] = []
        kinds: list[tuple[int, int]] = []
        for word in map(int, random.integers(WORDS, size=random.integers(3, 9))):
            if random.random() < 0.3:
                characters.append(int(random.integers(CHARACTERS)))
            characters += spellings[word]
            kind = word % KINDS or (kinds[-1][1] if kinds else 0)
            kinds.append((len(characters) - 1, kind))
        found = [
            (first, last, lexicon[part])
            for last in range(len(characters))
            for first in range(max(0, last + 2 - _LENGTHS[1]), last)
            if (part := tuple(characters[first : last + 1])) in lexicon
        ]
        yield Lattice(tuple(characters), tuple(found), tuple(kinds))


@dataclass(frozen=True)
class Question:
    """A question about a scene.

    Attributes:
        layout: which modules answer it: ("exists" or "count", of), where what it is of is
            ("find", word), ("relate", direction, of) or ("and", of, of).
        scene: (places, colours and shapes) float32, 1 for what the object there is; rows of zeros
            are empty places. Places go by rows of `SIDE`.
        answer: its number among `ANSWERS`.
    """

    layout: Layout
    scene: Array
    answer: int


def questions(count: int, seed: int = 0) -> Iterator[Question]:
    """Yield questions such as `count(and(find[red], relate[left](find[circle])))`, with answers.

    count: of questions. seed: of what is drawn.
    """
    random = np.random.default_rng(seed)
    kinds = (*COLOURS, *SHAPES)

    def found(depth: int) -> Layout:
        first: Layout = ("find", str(random.choice(kinds)))
        drawn = random.random()
        if depth == 0 or drawn < 0.3:
            return first
        if drawn < 0.5:
            return (
                "and",
                ("find", str(random.choice(COLOURS))),
                ("find", str(random.choice(SHAPES))),
            )
        return "and", first, ("relate", str(random.choice(DIRECTIONS)), found(depth - 1))

    for _ in range(count):
        scene = np.zeros((SIDE * SIDE, len(kinds)), np.float32)
        for place in np.flatnonzero(random.random(len(scene)) < 0.6):
            scene[place, random.integers(len(COLOURS))] = 1
            scene[place, len(COLOURS) + random.integers(len(SHAPES))] = 1
        layout = (str(random.choice(("exists", "count"))), found(int(random.integers(3))))
        yield Question(layout, scene, _answer(layout, scene))


def _answer(layout: Layout, scene: Array) -> int:
    kind, of = layout
    many = int(_places(of, scene).sum())
    return int(many > 0) if kind == "exists" else 2 + min(many, MOST)


def _places(layout: Layout, scene: Array) -> Array:
    """Return which places a layout means, (places,) of truth values."""
    match layout:
        case ("find", word):
            return np.greater(scene[:, (*COLOURS, *SHAPES).index(word)], 0)
        case ("and", one, other):
            return np.logical_and(_places(one, scene), _places(other, scene))
        case (_, direction, of):
            rows, columns = np.divmod(np.arange(len(scene)), SIDE)
            along = rows if direction in ("above", "below") else columns
            those = along[_places(of, scene)]
            if not len(those):
                return np.zeros(len(scene), bool)
            before = direction in ("left", "above")
            less: Array = along < those.max()
            return less if before else np.greater(along, those.min())
    raise ValueError(f"layout {layout!r} found, one of find, and, relate needed")
