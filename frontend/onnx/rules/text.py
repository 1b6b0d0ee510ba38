"""ONNX operators that read texts: between pieces, on Python's own (`texts.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.texts import PLACE, TEXT, places_of
from soapstone.frontend.onnx.values import MICROSOFT, Value, rule
from soapstone.ir.tensor import Array

_DIGITS = 8  # that numbers have as ONNX Runtime writes them
_NAMES = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}


def cast_text(n: Call, x: Value, dtype: str) -> Value:
    """Return numbers as texts, or texts as numbers.

    Raises:
        OnnxError: a text is no number; names it.
    """
    array = n.array(x, apart=True)
    if dtype == TEXT:
        return n.known(_each(_written(array.dtype), array))
    kind = np.dtype(dtype).kind
    read: Callable[[str], Any] = float if kind == "f" else int
    try:
        found = [read(text) for text in array.flat]
        return n.known(np.array(found, None if found else dtype).reshape(array.shape), dtype)
    except (ValueError, OverflowError) as error:
        raise OnnxError(f"{x.label!r}: a text that is no {dtype} found: {error}") from None


def _written(dtype: np.dtype[Any]) -> Callable[[Any], str]:
    if dtype.kind != "f":
        return lambda number: str(int(number))

    def written(number: Any) -> str:
        text = f"{float(number):.{_DIGITS}g}"
        return _NAMES.get(text, text)

    return written


def _each(make: Callable[..., str], *arrays: Array) -> Array:
    """Return the text that is made of each element of arrays, which broadcast."""
    spread = np.broadcast_arrays(*arrays)
    made = np.empty(spread[0].shape, object)
    made.reshape(-1)[:] = [make(*each) for each in zip(*(array.flat for array in spread))]
    return made


@rule("StringConcat")
def string_concat(n: Call) -> Value:
    return n.known(_each(str.__add__, n.array(0), n.array(1)))


@rule("StringSplit")
def string_split(n: Call) -> list[Value]:
    x, most = n.array(0), n.attribute("maxsplit", -1)
    by = n.attribute("delimiter") or None
    parts = [text.split(by, most) for text in x.flat]
    counts = np.asarray([len(each) for each in parts], np.int64)
    made = _padded(parts, int(counts.max(initial=0)), "")
    return [n.known(made.reshape(*x.shape, -1 if x.size else 0)), n.known(counts.reshape(x.shape))]


def _padded(parts: Sequence[Sequence[str]], width: int, filler: str) -> Array:
    """Return rows of texts, all of them as wide: (rows, width)."""
    made = np.full((len(parts), width), filler, object)
    for row, each in zip(made, parts):
        row[: len(each)] = each
    return made


@rule("RegexFullMatch")
def regex_full_match(n: Call) -> Value:
    expression, x = _compiled(n, n.attribute("pattern", "")), n.array(0)
    found = [expression.fullmatch(text) is not None for text in x.flat]
    return n.known(np.asarray(found, bool).reshape(x.shape))


def _compiled(n: Call, pattern: str) -> re.Pattern[str]:
    """Return an expression, whose letters and digits are ASCII's, as in RE2."""
    try:
        return re.compile(pattern, re.ASCII)
    except re.error as error:
        raise OnnxError(f"expression {pattern!r} is not supported: {error}") from None


@rule("StringNormalizer")
def string_normalizer(n: Call) -> Value:
    x, stops = n.array(0), list(n.attribute("stopwords", ()))
    if x.ndim not in (1, 2) or (x.ndim == 2 and x.shape[0] != 1):
        raise OnnxError(f"input 0 has shape {x.shape}; (c,) or (1, c) needed")
    change = n.text("case_change_action", "NONE", ("NONE", "LOWER", "UPPER"))
    alike: Callable[[str], str] = str if n.attribute("is_case_sensitive", 0) else str.lower
    unwanted = set(map(alike, stops))
    changes: dict[str, Callable[[str], str]] = {"LOWER": str.lower, "UPPER": str.upper}
    changed = changes.get(change, str)
    kept = [changed(text) for text in x.flat if alike(text) not in unwanted] or [""]
    return n.known(np.asarray(kept, object).reshape((1, -1) if x.ndim == 2 else -1))


@rule("Tokenizer", domain=MICROSOFT)
def tokenizer(n: Call) -> Value:
    """The tokens of each text: what an expression matches, or what lies between separators."""
    x, least = n.array(0), n.attribute("mincharnum", 1)
    expression, separators = n.attribute("tokenexp"), n.attribute("separators", ())
    unwanted = set(n.attribute("stopwords", ()))
    if bool(expression) == bool(separators):
        raise OnnxError("attributes 'tokenexp' and 'separators' found or missing; one needed")
    if expression:
        compiled = _compiled(n, expression)
        parts = [[found[0] for found in compiled.finditer(text)] for text in x.flat]
    elif tuple(separators) == ("",):
        parts = [list(text) for text in x.flat]
    else:
        compiled = _compiled(n, "|".join(f"(?:{each})" for each in separators))
        parts = [compiled.split(text) for text in x.flat]
    parts = [[t for t in each if len(t) >= least and t not in unwanted] for each in parts]
    if n.attribute("mark", 0):
        parts = [["\x02", *each, "\x03"] for each in parts]
    width = max(map(len, parts), default=0)
    made = _padded(parts, width, n.attribute("pad_value", ""))
    return n.known(made.reshape(*x.shape, width))


@rule("MurmurHash3", domain=MICROSOFT)
def murmur_hash(n: Call) -> Value:
    """The hash of each text, or of the bytes of each number: unsigned if `positive`."""
    x = n.array(0, apart=True)
    if n.value().is_text:
        parts = [text.encode("utf-8", "surrogatepass") for text in x.flat]
    elif x.dtype.kind in "iuf" and x.dtype.itemsize in (4, 8):
        parts = [number.tobytes() for number in x.flat]
    else:
        raise OnnxError(f"{n.value().spec} found; texts, or numbers of 4 or 8 bytes, needed")
    found = np.empty(x.size, np.uint32)
    lengths = np.array([len(part) for part in parts], np.int64)
    for length in np.unique(lengths).tolist():
        at = np.flatnonzero(lengths == length)
        found[at] = _hashed(b"".join(parts[i] for i in at), length, n.attribute("seed", 0))
    kind = np.uint32 if n.attribute("positive", 1) else np.int32
    return n.known(found.view(kind).reshape(x.shape))


def _hashed(data: bytes, length: int, seed: int) -> Array:
    """Return the 32-bit MurmurHash3 of parts of equal lengths, one after another.

    Source: Appleby, SMHasher, MurmurHash3_x86_32.
    """

    def rotated(x: Array, by: int) -> Array:
        return np.asarray((x << np.uint32(by)) | (x >> np.uint32(32 - by)))

    count = len(data) // length if length else 1
    words = np.zeros((count, -(-length // 4) * 4), np.uint8)
    words[:, :length] = np.frombuffer(data, np.uint8).reshape(count, length)
    made = np.full(count, seed & 0xFFFFFFFF, np.uint32)
    for place, word in enumerate(words.view("<u4").T, 1):
        made ^= rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        if 4 * place <= length:  # not a tail
            made = rotated(made, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    made ^= np.uint32(length)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        made = (made ^ (made >> np.uint32(shift))) * np.uint32(factor)
    return made


@rule("TfIdfVectorizer")
def tf_idf_vectorizer(n: Call) -> Value:
    x = n.array(0, apart=True)
    if x.ndim not in (1, 2):
        raise OnnxError(f"input 0 has shape {x.shape}; (c,) or (n, c) needed")
    pool = n.attribute("pool_strings" if n.value().is_text else "pool_int64s")
    if pool is None:
        raise OnnxError(f"input 0 is {n.value().spec}; a pool of its type is missing")
    starts = (*n.attribute("ngram_counts", ()), len(pool))
    column = np.asarray(n.attribute("ngram_indexes", ()), np.int64)
    grams = [_grams(pool[a:b], length) for length, (a, b) in enumerate(pairwise(starts), 1)]
    if sum(map(len, grams)) != column.size or (column < 0).any():
        raise OnnxError(f"attribute 'ngram_indexes': {column.size} found for the pool's sequences")
    words = np.unique(np.asarray(pool, object if n.value().is_text else np.int64))
    rows = places_of(words, np.atleast_2d(x))
    width = int(column.max(initial=-1)) + 1
    counts = np.zeros((len(rows), width), np.float32)
    least, most = n.attribute("min_gram_length", 1), n.attribute("max_gram_length", 1)
    before = 0
    for length, each in enumerate(grams, 1):
        mine = column[before : before + len(each)]
        before += len(each)
        if each and least <= length <= most:
            wanted = places_of(words, np.asarray(each, words.dtype))
            for skip in range(1 if length == 1 else n.attribute("max_skip_count", 0) + 1):
                row, gram = _found(rows, wanted, skip + 1, words.size)
                np.add.at(counts, (row, mine[gram]), 1)
    mode = n.text("mode", "TF", ("TF", "IDF", "TFIDF"))
    made = np.minimum(counts, 1) if mode == "IDF" else counts
    weights = n.attribute("weights")
    if mode != "TF" and weights is not None:
        scale = np.zeros(width, np.float32)
        scale[column] = weights
        made = made * scale
    return n.known(made[0] if x.ndim == 1 else made)


def _grams(pool: Sequence[Any], length: int) -> list[Sequence[Any]]:
    """Return the sequences of a length that a part of the pool lists one after another."""
    if len(pool) % length:
        raise OnnxError(f"attribute 'ngram_counts': {len(pool)} elements found, {length} in each")
    return [pool[i : i + length] for i in range(0, len(pool), length)]


def _found(rows: Array, wanted: Array, step: int, words: int) -> tuple[Array, Array]:
    """Return where sequences of words stand in rows, every `step`-th word: row and sequence.

    Sequences that begin alike are one state; each word leads from one state to the next.
    """
    length = wanted.shape[1]
    count = rows.shape[1] - (length - 1) * step
    if count < 1:
        return np.empty(0, PLACE), np.empty(0, PLACE)
    state, path = rows[:, :count], wanted[:, 0]
    base = words + 1  # the last word is any that no sequence has
    for i in range(1, length):
        keys, inverse = np.unique(path * base + wanted[:, i], return_inverse=True)
        moved = state * base + rows[:, i * step : i * step + count]
        at = np.minimum(np.searchsorted(keys, moved), keys.size - 1)
        state = np.where(keys[at] == moved, at, keys.size)
        path = inverse.reshape(-1)
    gram = np.full(max(int(state.max(initial=0)), int(path.max())) + 1, -1)
    gram[path] = np.arange(len(path))
    which = gram[state]
    row, _ = np.nonzero(which >= 0)
    return row, which[which >= 0]
