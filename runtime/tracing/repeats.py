"""Repeats in a stream of tokens: the substrings that cover most of it, and what they repeat.

Source: Yadav et al., "Automatic Tracing in Task-Based Runtime Systems", ASPLOS 2025, section 4:
suffixes that are neighbours in sorted order share the longest prefixes, and a greedy choice of
the longest shared ones that do not overlap covers most of the stream. Suffixes are sorted here by
doubling, vectorised, so the cost is O(n log^2 n); the paper's suffix array is O(n log n).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.native.memory import Array


def repeats(tokens: Sequence[int], shortest: int) -> list[tuple[tuple[int, ...], int]]:
    """The substrings of `shortest` tokens or more chosen at least twice, with their number.

    Longest first; chosen occurrences do not overlap. Of a run `abcabcabc` some power of a rotation
    of `abc` is chosen; `period` gives its root.
    """
    if len(tokens) - len(set(tokens)) < shortest:
        return []
    first, second, shared = _neighbours(np.asarray(tokens, dtype=np.int64))
    enough = shared >= shortest
    low = np.minimum(first, second)[enough]
    gap = np.abs(first - second)[enough]
    shared = shared[enough]
    # Occurrences that overlap are part of a run of period `gap`: its two halves are the repeat.
    run = shared > gap
    length = np.where(run, (shared + gap) // (2 * gap) * gap, shared)
    starts = np.concatenate([low, low + np.where(run, length, gap)])
    lengths = np.concatenate([length, length])
    keep = lengths >= shortest
    starts, lengths = starts[keep], lengths[keep]
    order = np.lexsort((starts, -lengths))
    taken = bytearray(len(tokens))
    found: dict[tuple[int, ...], int] = {}
    for start, extent in zip(starts[order].tolist(), lengths[order].tolist()):
        # What was taken before is at least as long, so it shows at one of the ends.
        if taken[start] or taken[start + extent - 1]:
            continue
        taken[start : start + extent] = b"\1" * extent
        text = tuple(tokens[start : start + extent])
        found[text] = found.get(text, 0) + 1
    return [(text, count) for text, count in found.items() if count > 1]


def _neighbours(tokens: Array) -> tuple[Array, Array, Array]:
    """The neighbours among the sorted suffixes, and how many tokens they share.

    Returns int64 arrays (n - 1,): starts of both suffixes, length of their common prefix.
    """
    n = tokens.size
    ranks = [np.unique(tokens, return_inverse=True)[1].astype(np.int64)]
    step = 1
    while True:
        rank = ranks[-1]
        after = np.full(n, -1, dtype=np.int64)
        after[: max(0, n - step)] = rank[step:]
        key = rank * (n + 1) + after + 1
        order = np.argsort(key, kind="stable")
        differs = np.diff(key[order]) != 0
        doubled = np.empty(n, dtype=np.int64)
        doubled[order] = np.concatenate([[0], np.cumsum(differs)])
        if differs.all():
            break
        ranks.append(doubled)
        step *= 2
    first, second = order[:-1], order[1:]
    shared = np.zeros(n - 1, dtype=np.int64)
    for level in reversed(range(len(ranks))):
        a, b = first + shared, second + shared
        inside = (a < n) & (b < n)
        rank = ranks[level]
        same = rank[np.minimum(a, n - 1)] == rank[np.minimum(b, n - 1)]
        shared += (inside & same).astype(np.int64) << level
    return first, second, shared


def period(text: Sequence[int]) -> int:
    """The smallest p such that every token equals the one p before it; len(text) if there is none.

    Knuth, Morris and Pratt's failure function: the text without its longest border.
    """
    border = [0] * len(text)
    length = 0
    for place in range(1, len(text)):
        while length and text[place] != text[length]:
            length = border[length - 1]
        length += text[place] == text[length]
        border[place] = length
    return len(text) - (border[-1] if border else 0)


def rotation(text: tuple[int, ...]) -> tuple[int, ...]:
    """The least rotation of a text: the same one for all rotations of a loop body."""
    n = len(text)
    one, other, length = 0, 1, 0
    while one < n and other < n and length < n:
        a, b = text[(one + length) % n], text[(other + length) % n]
        if a == b:
            length += 1
            continue
        if a > b:
            one += length + 1
        else:
            other += length + 1
        other += one == other
        length = 0
    start = min(one, other)
    return text[start:] + text[:start]
