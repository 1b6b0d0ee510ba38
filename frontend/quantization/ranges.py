"""Where the values of a network lie, seen while it runs on samples.

The whole range is from the least to the greatest. A narrower one clips the rare values beyond it,
and the others have finer steps; which one is chosen takes a second pass over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.session import InferenceSession
from soapstone.ir.tensor import Array

_BINS = 4096
_LEAST = 1e-4  # of a distribution, where values are and it says that there are none
_SHARES = np.linspace(1.0, 0.2, 41)  # of a whole range that are tried
Range = tuple[float, float]


class Ranges:
    """Runs a model, of which values are outputs, on batches of samples, and keeps their ranges."""

    def __init__(self, session: InferenceSession, values: Sequence[str]) -> None:
        self._session = session
        self._values = values
        self.found: dict[str, Range] = {}

    def observe(self, batches: Iterable[Mapping[str, Array]]) -> None:
        """Widen the ranges by what values are on these batches.

        Raises:
            DataError: a value is not finite.
        """
        for batch in batches:
            made = self._session.run(batch)
            for name in self._values:
                array = made[name]
                if array.size == 0:
                    continue
                least, most = float(array.min()), float(array.max())
                if not (np.isfinite(least) and np.isfinite(most)):
                    raise DataError(
                        f"calibration: value {name!r} is {least} to {most}; finite numbers needed"
                    )
                low, high = self.found.get(name, (0.0, 0.0))
                self.found[name] = min(low, least), max(high, most)

    def narrow(self, batches: Iterable[Mapping[str, Array]], chosen: Callable[..., Range]) -> None:
        """Narrow the ranges by how often values lie where, on these batches.

        chosen: from counts of equal parts of a range, and the range, to the one to take.
        """
        counts = {name: np.zeros(_BINS, np.int64) for name in self.found}
        for batch in batches:
            made = self._session.run(batch)
            for name, count in counts.items():
                count += np.histogram(made[name], _BINS, self.found[name])[0]
        for name, count in counts.items():
            low, high = self.found[name]
            if high > low:
                self.found[name] = chosen(count, (low, high))


def percentile(counts: Array, limits: Range, percent: float) -> Range:
    """Return where so many of 100 values lie, as many beyond on either side where there are two."""
    low, high = limits
    tail = (100 - percent) / 100
    tail = tail / 2 if low < 0 < high else tail  # all beyond the one end there is
    total, width = np.cumsum(counts), (high - low) / len(counts)
    first = int(np.searchsorted(total, tail * total[-1], "right"))
    last = int(np.searchsorted(total, (1 - tail) * total[-1], "left"))
    least = low + first * width if low < 0 else low
    most = low + (last + 1) * width if high > 0 else high
    return min(0.0, least), max(0.0, most)


def entropy(counts: Array, limits: Range) -> Range:
    """Return the range whose bytes are nearest to the values' own distribution.

    Both ends are drawn in alike. What is beyond is clipped, and what falls on one byte is spread
    over all that does: the divergence of Kullback and Leibler says what that loses.

    Source: S. Migacz, 8-bit inference with TensorRT, 2017.
    """
    low, high = limits
    zero = round(-low / (high - low) * len(counts))
    losses = []
    for share in _SHARES:
        first = zero - math.ceil(zero * share)
        last = zero + math.ceil((len(counts) - zero) * share)
        inside = counts[first:last].astype(np.float64)
        clipped = inside.copy()
        clipped[0] += counts[:first].sum()
        clipped[-1] += counts[last:].sum()
        levels = np.unique(np.linspace(0, len(inside), 256, endpoint=False).astype(np.int64))
        lengths = np.diff([*levels, len(inside)])
        held = inside > 0
        filled = np.maximum(np.add.reduceat(held, levels), 1)
        spread = np.repeat(np.add.reduceat(inside, levels) / filled, lengths) * held
        p, q = clipped / clipped.sum(), np.maximum(spread / max(spread.sum(), 1), _LEAST)
        losses.append(float((p[p > 0] * np.log(p[p > 0] / q[p > 0])).sum()))
    share = _SHARES[int(np.argmin(losses))]
    return low * share, high * share


def scale_of(limits: Range, dtype: str) -> tuple[np.float32, Array]:
    """Return the scale and zero by which bytes of a type reach from one number to another.

    Signed bytes have a zero of 0 and reach as far below it as above.
    """
    low, high = limits
    if dtype == "int8":
        reach = max(-low, high)
        return np.float32(reach / 127 if reach else 1.0), np.zeros((), np.int8)
    scale = np.float32((high - low) / 255 if high > low else 1.0)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    return scale, np.asarray(zero, np.uint8)
