"""The loop of generation: logits of each prompt's last token, a choice, and the same again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.generation.decoder import Decoder, Run
from soapstone.frontend.generation.sampling import Sampling
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.frontend.inference import InferenceSession

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
    """Return what follows one prompt, or each of several; see `InferenceSession.generate`."""
    one = np.ndim(prompts[0]) == 0 if len(prompts) else True
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
    """Yield what follows one prompt; see `InferenceSession.stream`."""
    sampling, rows = Sampling(**drawn), _checked([prompt])
    for (token,) in _loop(session, rows, max_new_tokens, stop, sampling):
        assert token is not None  # a loop of one row ends with it
        yield token


def _checked(prompts: Any) -> list[list[int]]:
    rows = []
    for number, prompt in enumerate(prompts):
        array = np.asarray(prompt)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
            raise DataError(
                f"generate: prompt {number}: {array.dtype}{list(array.shape)} found; integers, one"
                " or more in a row, needed"
            )
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
    """Yield the next token of every row, None where it has ended, until all have."""
    if max_new_tokens < 0:
        raise DataError(f"max_new_tokens: {max_new_tokens} found; 0 or more needed")
    if session.decoder is None:
        session.decoder = Decoder(session)
    ends = {stop} if isinstance(stop, int | np.integer) else set(stop)
    run = Run(session.decoder, [list(row) for row in rows], max(map(len, rows)) + max_new_tokens)
    random = [sampling.generator(row) for row in range(len(rows))]
    going = [True] * len(rows)
    for _ in range(max_new_tokens):
        logits = run.logits(going)
        tokens: list[int | None] = [None] * len(rows)
        for row, alive in enumerate(going):
            if alive:
                token = tokens[row] = sampling.choose(logits[row], random[row])
                run.tokens[row].append(token)
                going[row] = token not in ends
        yield tuple(tokens)
        if not any(going):
            return
