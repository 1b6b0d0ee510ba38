"""The generation loop: compute the logits of each prompt's last token, choose a token, repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.errors import DataError, hint
from soapstone.frontend.generation.decoder import Decoder
from soapstone.frontend.generation.run import Run
from soapstone.frontend.generation.sampling import Sampling
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference.session import InferenceSession

Prompts = Sequence[int] | Sequence[Sequence[int]] | Array
Tokens = tuple[int | None, ...]


def generated(
    session: InferenceSession,
    prompts: Prompts,
    max_new_tokens: int,
    stop: int | Sequence[int],
    drawn: Mapping[str, Any],
    on_tokens: Callable[[Tokens], object] | None,
) -> list[Any]:
    """Return the continuation of one prompt or of several; see `InferenceSession.generate`."""
    if on_tokens is not None and not callable(on_tokens):
        raise DataError(f"on_tokens: {on_tokens!r} found; a function needed")
    try:
        one = not len(prompts) or np.ndim(prompts[0]) == 0
    except (TypeError, KeyError, ValueError):
        kind = type(prompts).__name__
        raise DataError(f"generate: {kind} found; tokens of one prompt or several needed") from None
    rows = _checked([prompts] if one else prompts)
    made: list[list[int]] = [[] for _ in rows]
    for tokens in _loop(session, rows, max_new_tokens, stop, Sampling(**drawn)):
        for row, token in zip(made, tokens):
            if token is not None:
                row.append(token)
        if on_tokens is not None:
            on_tokens(tokens)
    return made[0] if one else made


def streamed(
    session: InferenceSession,
    prompt: Sequence[int] | Array,
    max_new_tokens: int = 128,
    *,
    stop: int | Sequence[int] = (),
    **drawn: Any,
) -> Iterator[int]:
    """Return an iterator of one prompt's continuation; see `InferenceSession.stream`."""
    known = [each.name for each in fields(Sampling)]
    unknown = sorted(drawn.keys() - set(known))
    if unknown:
        options = ", ".join(["max_new_tokens", "stop", *known])
        near = hint(unknown[0], known)
        raise DataError(f"stream: unknown option {unknown[0]!r}; options are {options}{near}")
    tokens = _loop(session, _checked([prompt]), max_new_tokens, stop, Sampling(**drawn))
    return (token for (token,) in tokens if token is not None)


def _checked(prompts: Any) -> list[list[int]]:
    rows = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise DataError(f"generate: prompt {number}: text found; its tokens needed")
        if not np.size(np.asarray(prompt, object)):
            raise DataError(f"generate: prompt {number}: no tokens found; one or more needed")
        try:
            array = np.asarray(prompt)
        except ValueError:  # rows of different lengths
            array = np.empty(len(prompt), object)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise DataError(
                f"generate: prompt {number}: {array.dtype}{list(array.shape)} found; integers, one"
                " or more in a row, needed"
            )
        if (least := array.min()) < 0:
            raise DataError(f"generate: prompt {number}: token {least} found; 0 or more needed")
        rows.append(array.tolist())
    if not rows:
        raise DataError("generate: no prompts found; one or more needed")
    return rows


def _loop(
    session: InferenceSession,
    rows: list[list[int]],
    max_new_tokens: int,
    stop: int | Sequence[int],
    sampling: Sampling,
) -> Iterator[Tokens]:
    """Return an iterator of the next token of every row, None where it has ended, until all have.

    Raises:
        DataError: arguments that do not fit, before any token is made.
    """
    if not (isinstance(max_new_tokens, int | np.integer) and max_new_tokens >= 0):
        raise DataError(f"max_new_tokens: {max_new_tokens!r} found; an integer, 0 or more, needed")
    ends = set(stop) if isinstance(stop, Iterable) else {stop}
    if not all(isinstance(token, int | np.integer) for token in ends):
        raise DataError(f"stop: {stop!r} found; a token, or several, needed")
    if session.decoder is None:
        session.decoder = Decoder(session.serial)
    session.decoder.check(rows, int(max_new_tokens), ends)
    most = max(map(len, rows)) + max(int(max_new_tokens) - 1, 0)
    run = Run(session.decoder, [list(row) for row in rows], most)
    return _tokens(session, run, max_new_tokens, ends, sampling)


def _tokens(
    session: InferenceSession, run: Run, most: int, ends: set[int], sampling: Sampling
) -> Iterator[Tokens]:
    """Yield the tokens of a run. session: the run's own, which nobody else may hold."""
    random = [sampling.generator(row) for row in range(len(run.tokens))]
    going = [True] * len(run.tokens)
    for _ in range(most):
        logits = run.logits(going)
        tokens: list[int | None] = [None] * len(going)
        for row, alive in enumerate(going):
            if alive:
                token = tokens[row] = sampling.choose(logits[row], random[row])
                run.tokens[row].append(token)
                going[row] = token not in ends
        yield tuple(tokens)
        if not any(going):
            return
