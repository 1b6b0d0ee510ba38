"""The comparison, tensor by tensor, of terms whose ids are equal (TASO, section 2.3.2, step 2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soapstone.ir.tensor import Array
from soapstone.rules.enumeration.propose import Terms
from soapstone.rules.enumeration.protocol import Evaluator
from soapstone.rules.workers import Progress

_ROWS = 1 << 14  # compared at once


def values_apart(
    terms: Terms, handle: Array, evaluator: Evaluator, progress: Progress | None = None
) -> int:
    """Compare tensors of equal id element by element, and give those that differ ids of their own.

    Returns how many differed: none, but for accidents of hashing. `terms.value` is changed.
    """

    def agree(chunk: Array) -> Array:
        node = terms.node[chunk]
        output = (chunk - terms.first[node]).astype(np.int32)
        return evaluator.agree(handle[node], terms.a[node], terms.b[node], output)

    changed = 0
    for attempt in range(1, 10):
        tensors = _sharing(terms)
        different: list[int] = []
        for begin in range(0, len(tensors), _ROWS):
            chunk = tensors[max(begin - 1, 0) : begin + _ROWS]  # one more, to compare with
            value = terms.value[chunk]
            bad = ~agree(chunk)[1:] & (value[1:] == value[:-1])
            different += chunk[1:][bad].tolist()
            if progress is not None:
                progress("comparison of terms", min(begin + _ROWS, len(tensors)), len(tensors))
        if not different:
            break
        for value in np.unique(terms.value[different]):
            changed += _split(tensors[terms.value[tensors] == value], attempt, terms, agree)
    return changed


def _sharing(terms: Terms) -> Array:
    """Return the tensors, inputs left out, that share their id with another, by id."""
    value = terms.value[terms.inputs :]
    order = np.argsort(value, kind="stable")
    same = value[order[1:]] == value[order[:-1]]
    shared = np.append(same, False) | np.append(False, same)
    return np.asarray(terms.inputs + order[shared[: len(order)]])


def _split(tensors: Array, attempt: int, terms: Terms, agree: Callable[[Array], Array]) -> int:
    """Give an id to each set of equal tensors among those of one id; return how many got others."""
    first: list[int] = []  # of each set
    changed = 0
    for tensor in tensors.tolist():
        same = (number for number, other in enumerate(first) if agree(np.array([other, tensor]))[1])
        number = next(same, len(first))
        if number == len(first):
            first.append(tensor)
        if number:
            value = int(terms.value[tensor]) + number * attempt * 0x9E3779B97F4A7C16
            terms.value[tensor] = value % 2**64
            changed += 1
    return changed
