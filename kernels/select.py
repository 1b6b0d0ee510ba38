"""The choice of a variant for a call: by measured cost, among those that serve it.

The NumPy reference serves what no native variant does; it runs as a Python-bodied entry.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.measure import known_us, measured_us, remember
from soapstone.kernels.registry import Variant, variants

REFERENCE = "reference"
# A later variant must beat an earlier one by this factor, so that noise decides nothing.
MARGIN = 0.95


def run_reference(call: Call) -> None:
    """Run the operator's NumPy reference on the call's arrays."""
    spec = operator(call.operator)
    dtypes = [array.dtype for array in call.outputs]
    results = spec.run(call.attributes, *call.inputs, dtypes=dtypes)
    for array, result in zip(call.outputs, results, strict=True):
        array[...] = result


def select(
    call: Call, processor: str = "cpu", variant: str | None = None
) -> tuple[str, Entry | None]:
    """Return the name and entry of the fastest variant, or of the one that is named.

    The entry is None for the reference, which the caller runs as a Python body.

    Raises:
        ValueError: the named variant does not exist or does not serve the call.
    """
    candidates = variants(call.operator, processor) if variant != REFERENCE else ()
    if variant is not None:
        candidates = tuple(candidate for candidate in candidates if candidate.name == variant)
    known = known_us(call, candidates) if len(candidates) > 1 else None
    if known is not None:
        best = _fastest(candidates, known)
        entry = best.bind(call) if best is not None else None
        if best is not None and entry is not None:
            return best.name, entry
    found: dict[str, tuple[Variant, Entry]] = {}
    for candidate in candidates:
        entry = candidate.bind(call)
        if entry is not None:
            found[candidate.name] = (candidate, entry)
    if variant not in (None, REFERENCE) and not found:
        have = ", ".join(v.name for v in variants(call.operator, processor)) or "none"
        raise ValueError(
            f"{call.operator}: variant {variant!r} does not serve this call; variants are {have}"
        )
    if not found:
        return REFERENCE, None
    if len(found) > 1:
        times = measured_us(call, [candidate for candidate, _ in found.values()])
        best = _fastest([candidate for candidate, _ in found.values()], times)
    else:
        times, best = {}, None
    if len(candidates) > 1:
        remember(call, candidates, times.keys() or found.keys())
    best = best or next(iter(found.values()))[0]
    return best.name, found[best.name][1]


def _fastest(candidates: Sequence[Variant], times: Mapping[str, float]) -> Variant | None:
    """Return the first variant that no later one beats clearly, or None where none has a time."""
    best: Variant | None = None
    for candidate in candidates:
        us = times.get(candidate.name, math.inf)
        if us < (times[best.name] * MARGIN if best is not None else math.inf):
            best = candidate
    return best
