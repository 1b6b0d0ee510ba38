"""Where the values of a network lie, seen while it runs on samples: least and most, or percentiles.

A percentile leaves out the rare values beyond it, which are clipped then: the others have finer
steps. It takes a second pass over the samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference import InferenceSession
from soapstone.ir.tensor import Array

_BINS = 4096
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

    def narrow(self, batches: Iterable[Mapping[str, Array]], percentile: float) -> None:
        """Narrow the ranges to where so many of 100 values lie, as many beyond on either side."""
        counts = {name: np.zeros(_BINS, np.int64) for name in self.found}
        for batch in batches:
            made = self._session.run(batch)
            for name, count in counts.items():
                count += np.histogram(made[name], _BINS, self.found[name])[0]
        tail = (100 - percentile) / 100
        for name, count in counts.items():
            low, high = self.found[name]
            if high == low:
                continue
            tails = tail / 2 if low < 0 < high else tail  # all beyond the one end there is
            total, width = np.cumsum(count), (high - low) / _BINS
            first = int(np.searchsorted(total, tails * total[-1], "right"))
            last = int(np.searchsorted(total, (1 - tails) * total[-1], "left"))
            least = low + first * width if low < 0 else low
            most = low + (last + 1) * width if high > 0 else high
            self.found[name] = min(0.0, least), max(0.0, most)


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
