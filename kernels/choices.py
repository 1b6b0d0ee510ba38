"""The choices of a run: the variant that serves each form of call, kept to repeat the run exactly.

Which variant is fastest is measured, or expected if a run asks for no measurement (`Tune`). Of two
similar ones either may win on another computer or after an update, and variants differ by rounding.
So a run that is to give the same bits repeats the choices of an earlier run. They are kept by the
form of a call (operator, attributes, shapes, strides, threads), independently of where it runs.
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
    """A choice that cannot be repeated; names the operator, the variant, and the available ones."""


class ChoiceWarning(UserWarning):
    """A choice that could not be repeated, so that another was made."""


class Choices:
    """The choices of one run.

    Args:
        given: choices to repeat: the variant by form of call.
        strict: whether a choice that cannot be repeated is an error, or a warning and made again.
        tune: what a free choice is based on.
        most: how many are kept, those used last; by default all.
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
        """The variant of each form of call that had a choice."""
        return dict(sorted(self._made.items()))

    def given(self, form: str) -> str | None:
        """Return the variant to choose for a form of call; None if the choice is free."""
        return self._made.get(form) or self._given.get(form)

    def note(self, form: str, variant: str) -> None:
        """Record a choice."""
        self._made[form] = variant
        self._made.move_to_end(form)
        if self._most is not None and len(self._made) > self._most:
            self._made.popitem(last=False)

    def refuse(self, form: str, why: str) -> None:
        """Report that a choice cannot be repeated; it is free from now on.

        Raises:
            ChoiceError: if `strict`.
        """
        if self._strict:
            raise ChoiceError(f"choices to repeat: {why}")
        self._given.pop(form, None)
        self._made.pop(form, None)
        message = f"choices to repeat: {why}; the fastest is chosen, so last bits may differ"
        warn(message, ChoiceWarning)

    def agree(self, made: Sequence[Mapping[str, str]]) -> bool:
        """Adopt the choices of all processes; return whether they differed.

        made: those of each process, including this one; where they differ the first process
        decides.
        """
        agreed: dict[str, str] = {}
        for each in reversed(made):
            agreed |= each
        self._given |= agreed
        self._made |= {form: agreed[form] for form in self._made.keys() & agreed.keys()}
        return any(agreed[form] != name for each in made for form, name in each.items())

    @contextmanager
    def current(self) -> Iterator[None]:
        """Use these choices for everything selected inside the block, in the calling thread."""
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)

    # Files

    def save(self, path: str | Path) -> None:
        """Save the choices as JSON, atomically."""
        data = {"format": FORMAT, "version": VERSION, "choices": dict(self.made)}
        json_fields.save(path, json_fields.dump(data, ChoiceError))

    @staticmethod
    def load(path: str | Path) -> Choices:
        """Return the choices in a file, to be repeated.

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
    """Return the choices of the calling thread; outside of a run, empty ones."""
    return _CURRENT.get() or Choices()
