"""The choice of the next token: the likeliest, or one drawn from the likely ones."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from soapstone.errors import DataError, warn
from soapstone.ir.tensor import Array

_LIKELY = 1024  # tokens that are looked at first for those that make up `top_p`


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from logits.

    Attributes:
        temperature: divides the logits; at 0 the likeliest token is taken.
        top_k: tokens are drawn from so many of the likeliest; None for all.
        top_p: tokens are drawn from the fewest likeliest whose probabilities sum to this, in (0,
            1].
        seed: of the draws; each row of a batch has its own random numbers.

    Raises:
        DataError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            if not isinstance(getattr(self, name), int | float | np.integer | np.floating):
                raise DataError(f"{name}: {getattr(self, name)!r} found; a number needed")
        if not 0 <= self.temperature < np.inf:
            raise DataError(
                f"temperature: {self.temperature} found; a finite number, 0 or more, needed"
            )
        if self.top_k is not None and not isinstance(self.top_k, int | np.integer):
            raise DataError(f"top_k: {self.top_k!r} found; an integer, 1 or more, needed")
        if self.top_k is not None and self.top_k < 1:
            raise DataError(f"top_k: {self.top_k} found; 1 or more needed")
        if not 0 < self.top_p <= 1:
            raise DataError(f"top_p: {self.top_p} found; more than 0 and at most 1 needed")
        if not (isinstance(self.seed, int | np.integer) and self.seed >= 0):
            raise DataError(f"seed: {self.seed!r} found; an integer, 0 or more, needed")
        idle = [each.name for each in fields(self) if getattr(self, each.name) != each.default]
        if self.temperature == 0 and idle:
            warn(
                f"{idle[0]}: {getattr(self, idle[0])} has no effect at temperature 0, where the"
                " likeliest token is taken; a temperature above 0 draws",
            )

    def generator(self, row: int) -> np.random.Generator:
        """Return the random numbers of a row of a batch."""
        return np.random.default_rng((self.seed, row))

    def choose(self, logits: Array, random: np.random.Generator) -> int:
        """Return a token. logits: (words,); of equally likely tokens the first is taken.

        Raises:
            DataError: a logit is NaN.
        """
        first = int(logits.argmax())
        if np.isnan(logits[first]):
            raise DataError("logits: nan found; numbers needed")
        if self.temperature == 0:
            return first
        scores = (logits.astype(np.float64) - logits[first]) / self.temperature
        words = np.arange(scores.size)
        if self.top_k is not None and self.top_k < scores.size:
            words = np.argpartition(scores, -self.top_k)[-self.top_k :]
        shares = np.exp(scores[words])
        shares /= shares.sum()
        if self.top_p < 1:
            kept = _largest(shares, self.top_p)
            words, shares = words[kept], shares[kept] / shares[kept].sum()
        place = int(np.searchsorted(shares.cumsum(), random.random()))
        return int(words[min(place, words.size - 1)])


def _largest(shares: Array, least: float) -> Array:
    """Return the indices of the fewest largest shares that sum to `least`, in descending order."""
    some = np.arange(shares.size)
    if shares.size > _LIKELY:
        few = np.argpartition(shares, -_LIKELY)[-_LIKELY:]
        if shares[few].sum() >= least:
            some = few
    order = some[np.argsort(-shares[some], kind="stable")]
    return order[: int(np.searchsorted(shares[order].cumsum(), least)) + 1]
