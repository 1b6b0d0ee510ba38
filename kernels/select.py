"""The choice of a kernel variant for a call, by measured or expected cost.

Where no native variant serves a call, the NumPy reference does, as a Python-bodied entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from soapstone.ir.spec import operator, operators
from soapstone.kernels.choices import Tune, current
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.measure import fastest, form, known, measured
from soapstone.kernels.registry import Variant, variants

if TYPE_CHECKING:
    from soapstone.kernels.cuda.entry import DeviceEntry

REFERENCE = "reference"


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
    """Return the name and entry of the fastest variant for a call, or of the named one.

    A choice of this run for a call of the same form (`Choices`) is repeated. The entry is None for
    the reference, which the caller runs as a Python body.

    Raises:
        ValueError: the named variant does not exist or does not serve the call.
        ChoiceError: a choice to be repeated cannot be.
    """
    if variant is not None:
        return variant, _named(call, processor, variant)
    candidates = variants(call.operator, processor)
    if len(candidates) < 2:
        entries = [entry for candidate in candidates if (entry := candidate.bind(call))]
        return (candidates[0].name, entries[0]) if entries else (REFERENCE, None)
    of = form(call) if processor == "cpu" else f"{processor} {form(call)}"
    choices = current()
    given = choices.given(of)
    if given is not None:
        try:
            entry = _named(call, processor, given)
        except ValueError as error:
            choices.refuse(of, str(error))
        else:
            choices.note(of, given)
            return given, entry
    name, entry = _fastest(call, of, candidates, _rests_on(choices.tune, processor))
    if entry is not None:
        choices.note(of, name)
    return name, entry


def select_device(call: Call, variant: str | None = None) -> tuple[str, DeviceEntry]:
    """Return the name and entry of the fastest CUDA variant of a call, or of the named one.

    Like `select`, but calls that no variant serves are left to the host.

    Raises:
        ValueError: no variant serves the call; names its operands.
    """
    have = variants(call.operator, "cuda")
    entry: Any
    if variant is None:
        name, entry = select(call, "cuda")
    else:
        name = variant
        bound = (each.bind(call) for each in have if each.name == variant)
        entry = next((each for each in bound if each is not None), None)
    if entry is not None:
        return name, entry
    names = ", ".join(each.name for each in have) or "none"
    operands = ", ".join(f"{x.dtype} {tuple(x.shape)}" for x in (*call.inputs, *call.outputs))
    raise ValueError(
        f"{call.operator}: no CUDA kernel{f' {variant!r}' if variant else ''} serves"
        f" {operands or 'no operands'}; its CUDA kernels are {names}"
    )


def unserved(processor: str = "cpu") -> tuple[str, ...]:
    """Return the names of the operators that have no native variant for a processor kind."""
    return tuple(spec.name for spec in operators() if not variants(spec.name, processor))


def _rests_on(tune: Tune, processor: str) -> Tune:
    """Return what a free choice is based on; times mean nothing in the simulator of GPUs."""
    if processor == "cuda" and tune:
        from soapstone.native.cuda.device import simulated

        return tune if not simulated() else False
    return tune


def _named(call: Call, processor: str, name: str) -> Entry | None:
    """Return the entry of a variant; None for the reference."""
    if name == REFERENCE:
        return None
    have = variants(call.operator, processor)
    for candidate in have:
        entry: Entry | None = candidate.bind(call) if candidate.name == name else None
        if entry is not None:
            return entry
    names = ", ".join(each.name for each in have) or "none"
    raise ValueError(
        f"{call.operator}: variant {name!r} does not serve this call; variants are {names}"
    )


def _fastest(
    call: Call, of: str, candidates: Sequence[Variant], tune: Tune
) -> tuple[str, Entry | None]:
    """Return the name and entry of the fastest variant, by known or new measurements.

    Without either, the one with the least expected cost; the others are not even bound.
    """
    times = known(of, candidates) if tune else None
    if times is None and tune == "now":
        times = measured(call, of, candidates)
    by_expected = sorted(candidates, key=lambda each: each.expects(call))
    if times:  # of those about as fast, what is expected to be: noise decides nothing
        name = fastest(times, [each.name for each in by_expected])
        entry = next(each for each in candidates if each.name == name).bind(call)
        if entry is not None:
            return name, entry
    # Nothing is recorded, or what is served a call of other contents.
    expected = tune != "now"
    rest = by_expected if expected else candidates
    for each in rest:
        entry = each.bind(call)
        if entry is not None:
            return each.name, entry
    return REFERENCE, None
