"""The choices of a run: which variant served each form of call, kept so that a run can be repeated.

Which variant is fastest is measured, or expected where a run asks for no measurement (`Tune`), and
of two that are close each may win on another computer, or after an update. Variants differ by
rounding. So a run that is to give the same bits repeats the choices of the run before it: they are
kept by the form of a call (operator, attributes, shapes, strides, threads), and say nothing of
where it runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Literal

from soapstone.errors import warn
from soapstone.ir.errors import GraphError
from soapstone.ir.files import json_fields

FORMAT, VERSION = "soapstone-choices", 1
# What a free choice rests on: "now", what is measured, now where it is not yet; True, what has been
# measured, and where nothing has, what is expected of each variant; False, what is expected alone.
Tune = Literal["now"] | bool


class ChoiceError(GraphError):
    """A choice that cannot be repeated; names the operator, the variant, and those there are."""


class ChoiceWarning(UserWarning):
    """A choice that could not be repeated, where another was made instead."""


class Choices:
    """The choices of one run.

    Args:
        given: those to repeat: variant by form of call.
        strict: whether one that cannot be repeated is an error, or is said and made anew.
        tune: what a free choice rests on.
        most: how many are kept; those that were made or repeated last. All of them by default.
    """

    def __init__(
        self,
        given: Mapping[str, str] | None = None,
        *,
        strict: bool = False,
        tune: Tune = "now",
        most: int | None = None,
    ) -> None:
        self.tune = tune
        self._most = most
        self._given = dict(given or {})
        self._strict = strict
        self._made: OrderedDict[str, str] = OrderedDict()

    @property
    def made(self) -> Mapping[str, str]:
        """The variant of each form of call, of those that had a choice."""
        return dict(sorted(self._made.items()))

    def given(self, form: str) -> str | None:
        """Return the variant to choose for a form of call, or None where it is free."""
        return self._made.get(form) or self._given.get(form)

    def note(self, form: str, variant: str) -> None:
        """Take note of a choice."""
        self._made[form] = variant
        self._made.move_to_end(form)
        if self._most is not None and len(self._made) > self._most:
            self._made.popitem(last=False)

    def refuse(self, form: str, why: str) -> None:
        """Say that a choice cannot be repeated; it is free from now on.

        Raises:
            ChoiceError: unless it may be made anew.
        """
        if self._strict:
            raise ChoiceError(f"choices to repeat: {why}")
        self._given.pop(form, None)
        self._made.pop(form, None)
        message = f"choices to repeat: {why}; the fastest is chosen, so last bits may differ"
        warn(message, ChoiceWarning)

    def agree(self, made: Sequence[Mapping[str, str]]) -> bool:
        """Take over the choices of all processes; return whether some had made different ones.

        made: what each process has made, its own among them; of different ones the first's holds.
        """
        agreed: dict[str, str] = {}
        for each in reversed(made):
            agreed |= each
        self._given |= agreed
        self._made |= {form: agreed[form] for form in self._made.keys() & agreed.keys()}
        return any(agreed[form] != name for each in made for form, name in each.items())

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let what is selected inside follow these choices, in the calling thread."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    # Files

    def save(self, path: str | Path) -> None:
        """Write the choices made as JSON; a file that exists is replaced whole or not at all."""
        data = {"format": FORMAT, "version": VERSION, "choices": dict(self.made)}
        json_fields.save(path, json_fields.dump(data, ChoiceError))

    @staticmethod
    def load(path: str | Path) -> Choices:
        """Return the choices of a file, to be repeated.

        Raises:
            ChoiceError: it cannot be read, or a field is wrong; names it.
        """
        reader = json_fields.Fields(
            json_fields.read(path, ChoiceError), f"file {str(path)!r}", ChoiceError
        )
        reader.header(FORMAT, VERSION)
        given = reader.text_mapping("choices")
        reader.finish()
        return Choices(given, strict=True)


_CURRENT: ContextVar[Choices | None] = ContextVar("choices", default=None)


def current() -> Choices:
    """Return the choices that what is selected now follows: outside of a run, none of before."""
    return _CURRENT.get() or Choices()
