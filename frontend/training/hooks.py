"""The callbacks of a fit together: called in their order, saved and gone on with as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from soapstone.frontend.arguments import meant, shown_value, takes
from soapstone.frontend.progress import ProgressBar
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.errors import GraphError

_HOOKS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Hooks:
    """What a fit calls as it goes.

    Args:
        given: callbacks, or one. progress: whether a bar shows how far training is.

    Raises:
        GraphError: something else than callbacks, or a hook that there is not.
    """

    def __init__(self, given: Any = (), progress: bool = False) -> None:
        self._own = _checked(given)
        self._all = (*self._own, *([ProgressBar()] if progress else []))

    def call(self, hook: str, state: TrainingState) -> None:
        """Call a hook of all callbacks, then what they have put off; that also where one fails."""
        try:
            for each in self._all:
                getattr(each, hook)(state)
        finally:
            state.called()

    def begin(self, state: TrainingState, saved: Any = None) -> None:
        """Begin a fit. saved: what `saved` returned in the run that is resumed, if one is.

        Raises:
            CheckpointError: it is something else.
        """
        self.call("on_train_begin", state)
        left = _read(saved)
        for each in self._own:
            name = _name(each, each.save_state())
            if not left.get(name):
                continue
            try:
                each.load_state(left[name].pop(0), state)
            except (KeyError, TypeError) as error:
                raise CheckpointError(
                    f"checkpoint: what it has of callback {name!r} does not fit: {error!r}"
                ) from None

    def saved(self) -> list[dict[str, Any]]:
        """Return what callbacks have for a resumed run, for the metadata of a checkpoint."""
        found = ((each, each.save_state()) for each in self._own)
        return [{"name": _name(each, kept), "state": kept} for each, kept in found if kept]

    def end(self, state: TrainingState) -> None:
        """End a fit."""
        self.call("on_train_end", state)


def _name(callback: Callback, kept: dict[str, Any]) -> str:
    """Return what callbacks are told apart by in a checkpoint."""
    return " ".join([type(callback).__name__, *([kept["monitor"]] if "monitor" in kept else [])])


def _read(saved: Any) -> dict[str, list[dict[str, Any]]]:
    """Return what a checkpoint has of callbacks, by name."""
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for each in saved or ():
            found.setdefault(str(each["name"]), []).append({**each["state"]})
    except (KeyError, TypeError):
        raise CheckpointError(
            f"checkpoint: field 'callbacks': {saved!r} found, states by name needed"
        ) from None
    return found


def _checked(given: Any) -> tuple[Callback, ...]:
    """Return callbacks from what `fit` was given: several, or one."""
    listed = (given,) if isinstance(given, Callback | type) or callable(given) else given
    if not isinstance(listed, Sequence):
        raise GraphError(f"fit: callbacks: {given!r} found, a list of callbacks needed")
    for each in listed:
        if not isinstance(each, Callback):
            raise GraphError(
                f"fit: callbacks: {shown_value(each)} found, one of soapstone.callbacks, or of a"
                " class made from Callback, needed"
            )
        for name in dir(each):
            if name not in _HOOKS and name.startswith("on_"):
                raise GraphError(
                    f"callback {type(each).__name__}: {name!r} found, hooks are"
                    f" {', '.join(_HOOKS)}{meant(name, _HOOKS)}"
                )
            if name in _HOOKS and not takes(getattr(each, name), None):
                raise GraphError(
                    f"callback {type(each).__name__}: {name} takes other arguments than (self,"
                    " state)"
                )
    return tuple(listed)
