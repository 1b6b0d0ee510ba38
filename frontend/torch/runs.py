"""Running calls of patterns together: when, which rows each reads, and the operators on them.

Calls of one pattern that are ready at once (`frontend/dynamic/schedule.py`) are one run. What a run
makes stays in one tensor for each result, whose rows later runs gather. Autograd sees
the operators on rows, and nothing else. What runs follows from the structure of what was recorded;
plans of the last structures are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from soapstone.frontend.dynamic.schedule import Agenda
from soapstone.frontend.torch.values import Call

if TYPE_CHECKING:
    from soapstone.frontend.torch.patterns import Template

_PLANS = 32  # that are kept


class Run:
    """The results of calls that ran together: for each place in the pattern, (calls, …)."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values


@dataclass(frozen=True)
class Gather:
    """How a run gathers its inputs of one type.

    Attributes:
        inputs: the numbers of the pattern's inputs that are gathered.
        sources: earlier runs, with the place of a result and its rows; None: all rows in order.
        given: calls and inputs whose contents come from outside of these runs.
        order: the order of the rows, first of `sources`, then of `given`; None: as they are.
    """

    inputs: tuple[int, ...]
    sources: tuple[tuple[int, int, Any], ...]
    given: tuple[tuple[int, int], ...]
    order: Any


@dataclass(frozen=True)
class Part:
    """One run. template: the pattern that runs. calls: their numbers, in the order of rows."""

    template: Template
    calls: tuple[int, ...]
    gathers: tuple[Gather, ...]


class Runner:
    """Plans the runs of recorded calls, and carries them out."""

    def __init__(self) -> None:
        self._agenda = Agenda()
        self._plans: OrderedDict[Any, tuple[Part, ...]] = OrderedDict()

    def plan(self, structure: tuple[Any, ...], pending: Sequence[Call]) -> tuple[Part, ...]:
        """Return the runs of pending calls. structure: each call's pattern and what it reads."""
        known = self._plans.get(structure)
        if known is not None:
            self._plans.move_to_end(structure)
            return known
        place: dict[int, tuple[int, int]] = {}  # run and row, by call
        parts: list[Part] = []
        makers = [[m.index for m in call.operands if not m.done] for call in pending]
        order, starts = self._agenda.batches(
            np.array([call.cell.number for call in pending if call.cell], np.int64),
            np.cumsum([0, *map(len, makers)]),
            np.fromiter(chain.from_iterable(makers), np.int64),
        )
        for begin, end in pairwise(starts.tolist()):
            calls = [pending[number] for number in order[begin:end].tolist()]
            template = cast("Template", calls[0].cell)
            gathers = _gathers(structure, template, calls, place, parts)
            numbers = tuple(call.index for call in calls)
            for row, number in enumerate(numbers):
                place[number] = len(parts), row
            parts.append(Part(template, numbers, gathers))
        self._plans[structure] = tuple(parts)
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)
        return tuple(parts)

    def run(self, plan: tuple[Part, ...], pending: Sequence[Call]) -> None:
        """Run what is pending by its plan."""
        runs: list[Run] = []
        enabled = torch.is_grad_enabled()
        try:
            for part in plan:
                template = part.template
                torch.set_grad_enabled(template.grad)
                inputs: list[Any] = [None] * len(template.inputs)
                for gather in part.gathers:
                    found = _gathered(gather, runs, pending)
                    if len(gather.inputs) == 1:
                        inputs[gather.inputs[0]] = found
                        continue
                    shape = (len(gather.inputs), len(part.calls), *found.shape[1:])
                    for number, rows in zip(gather.inputs, found.view(shape).unbind(0)):
                        inputs[number] = rows
                run = Run(_computed(template, inputs))
                runs.append(run)
                template.runs += 1
                for row, number in enumerate(part.calls):
                    call = pending[number]
                    call.run, call.row, call.done = run, row, True
        finally:
            torch.set_grad_enabled(enabled)
            for call in pending:
                call.inputs, call.operands = [], {}


def _computed(template: Template, inputs: list[Any]) -> list[Any]:
    """Return the results of all operators of a pattern."""
    made: list[Any] = []
    for step in template.steps:
        tensors = [
            (made[ref] if ref >= 0 else inputs[-1 - ref]) if type(ref) is int else ref
            for ref in step.operands
        ]
        result = step.run(tensors)
        if step.several:
            made.extend(result)
        else:
            made.append(result)
    return made


def _gathers(
    structure: tuple[Any, ...],
    template: Template,
    calls: Sequence[Call],
    place: dict[int, tuple[int, int]],
    parts: Sequence[Part],
) -> tuple[Gather, ...]:
    """Return where the inputs of a run come from, those of one type together."""
    kinds: dict[Any, list[int]] = {}
    for number, spec in enumerate(template.inputs):
        kinds.setdefault(spec, []).append(number)
    made = []
    for kind, numbers in kinds.items():
        rows: dict[tuple[int, int], list[int]] = {}
        into: dict[tuple[int, int], list[int]] = {}
        given: list[tuple[int, int]] = []
        last: list[int] = []
        target = 0
        for number in numbers:
            for call in calls:
                source = structure[call.index][1 + number]
                if source is None:
                    given.append((call.index, number))
                    last.append(target)
                else:
                    run, row = place[source[0]]
                    key = run, source[1]
                    if key not in rows:
                        rows[key], into[key] = [], []
                    rows[key].append(row)
                    into[key].append(target)
                target += 1
        sources = tuple(
            (*key, _index(of, len(parts[key[0]].calls), kind.device)) for key, of in rows.items()
        )
        targets = [t for of in into.values() for t in of] + last
        order = [0] * target
        for at, t in enumerate(targets):
            order[t] = at
        made.append(
            Gather(tuple(numbers), sources, tuple(given), _index(order, target, kind.device))
        )
    return tuple(made)


def _index(rows: list[int], size: int, device: Any) -> Any:
    """Return rows as an index; None for all of a size in order."""
    return None if rows == list(range(size)) else torch.tensor(rows, device=device)


def _gathered(gather: Gather, runs: Sequence[Run], pending: Sequence[Call]) -> Any:
    """Return inputs of one type, (inputs times calls, …)."""
    parts = []
    for run, result, rows in gather.sources:
        values = runs[run].values[result]
        parts.append(values if rows is None else values.index_select(0, rows))
    if gather.given:
        contents = []
        for number, place in gather.given:
            maker, of = pending[number].inputs[place]
            made = maker.run if maker is not None else None
            contents.append(of if maker is None or made is None else made.values[of][maker.row])
        parts.append(torch.stack(contents))
    joined = parts[0] if len(parts) == 1 else torch.cat(parts)
    return joined if gather.order is None else joined.index_select(0, gather.order)
