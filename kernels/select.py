"""The choice of a variant for a call: by measured cost, among those that serve it.

The NumPy reference serves what no native variant does; it runs as a Python-bodied entry.
"""

from __future__ import annotations

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.measure import measured_us
from soapstone.kernels.registry import Variant, variants

REFERENCE = "reference"
# A later variant must beat an earlier one by this factor, so that noise decides nothing.
MARGIN = 0.95


def run_reference(call: Call) -> None:
    """Run the operator's NumPy reference on the call's arrays."""
    spec = operator(call.operator)
    for array, result in zip(call.outputs, spec.run(call.attributes, *call.inputs), strict=True):
        array[...] = result


def select(
    call: Call, processor: str = "cpu", variant: str | None = None
) -> tuple[str, Entry | None]:
    """Return the name and entry of the fastest variant, or of the one that is named.

    The entry is None for the reference, which the caller runs as a Python body.

    Raises:
        ValueError: the named variant does not exist or does not serve the call.
    """
    found: list[tuple[Variant, Entry]] = []
    if variant != REFERENCE:
        for candidate in variants(call.operator, processor):
            if variant is not None and candidate.name != variant:
                continue
            entry = candidate.bind(call)
            if entry is not None:
                found.append((candidate, entry))
        if variant is not None and not found:
            have = ", ".join(v.name for v in variants(call.operator, processor)) or "none"
            raise ValueError(
                f"{call.operator}: variant {variant!r} does not serve this call;"
                f" variants are {have}"
            )
    if not found:
        return REFERENCE, None
    best, entry = found[0]
    if len(found) > 1:
        times = measured_us(call, [candidate for candidate, _ in found])
        for candidate, other in found[1:]:
            limit = times.get(best.name, float("inf")) * MARGIN
            if times.get(candidate.name, float("inf")) < limit:
                best, entry = candidate, other
    return best.name, entry
