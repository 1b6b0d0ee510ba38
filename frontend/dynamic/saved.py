"""Checkpoints of dynamic sessions: all that a resumed run needs, by the files of models.

A checkpoint says of which layers the cells are. Cells are recorded when they are first called, so
those of a session that resumes are compared when it loads, if it has called them, or else when it
first does. So are layers of the session that have parameters; shapes, when they are bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.training import checkpoint, saved
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.compiled import Position
from soapstone.kernels.choices import Choices

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.session import DynamicSession


def save(session: DynamicSession, path: str | Path) -> None:
    """Write a session; see `DynamicSession.save_checkpoint`."""
    state = session.state()
    if bad := saved.infinite(state):
        raise CheckpointError(
            f"checkpoint {str(path)!r}: not written: {bad[0]!r} has values that are not finite;"
            " what was there is as it was"
        )
    metadata = {
        "model": session.name,
        "seed": session.seed,
        "position": {**vars(session.position), "step": session.updates},
        "choices": dict(session.session.choices.made),
        "made_for": _made_for(session),
        "data": dict(session.data),
        "machine": session.session.machine.name,
    }
    checkpoint.save(path, state, metadata)


def load(session: DynamicSession, path: str | Path) -> Mapping[str, Any]:
    """Read a session; see `DynamicSession.load_checkpoint`."""
    arrays, metadata = checkpoint.load(path)
    label = f"checkpoint {str(path)!r}"
    made_for = metadata.get("made_for")
    if not isinstance(made_for, dict) or not isinstance(made_for.get("layers"), dict):
        raise CheckpointError(f"{label}: made_for {made_for!r} found, what it was made for needed")
    found = saved.differences(made_for, _made_for(session))
    if metadata.get("model") != session.name:
        found.insert(0, f"model {metadata.get('model')!r} found, {session.name!r} needed")
    found += [f"table {name!r} is missing" for name in session.tables if name not in arrays]
    found += [f"array {name!r}: values that are not finite" for name in saved.infinite(arrays)]
    saved.refuse(path, found)
    position = checkpoint.fields(metadata, "position", vars(Position()))
    choices = metadata.get("choices")
    if not isinstance(choices, dict):
        raise CheckpointError(f"{label}: choices {choices!r} found, variants by form needed")
    session.load_state(arrays)
    session.layers_of.expect(path, made_for.get("cells", {}))
    session.session.choices = Choices(choices)
    session.position = Position(**position)
    session.updates = session.position.step
    data: Mapping[str, Any] = metadata.get("data") or {}
    return data


def _made_for(session: DynamicSession) -> dict[str, Any]:
    """Return what `saved.differences` compares."""
    return {
        "layers": {},
        "cells": session.layers_of.cells,
        "seed": session.seed,
        "optimizer": saved.settings(session.optimizer),
        "batch_size": 1,
    }


class LayersOf:
    """The layers of a session's cells, and those that a checkpoint says they should have.

    Attributes:
        cells: what `saved.layers` returns of each, by name and types of operands.
    """

    def __init__(self) -> None:
        self.cells: dict[str, Any] = {}
        self._needed: dict[str, Any] = {}  # of cells that were not called since a checkpoint
        self._path: str | Path = ""

    def expect(self, path: str | Path, cells: Mapping[str, Any]) -> None:
        """Take the cells of a checkpoint, which those that are not called yet have to equal."""
        self._path = path
        self._needed = {name: cells[name] for name in cells if name not in self.cells}
        self.cells = {**cells, **self.cells}

    def add(self, name: str, cell: Cell) -> None:
        """Take a cell that was recorded.

        Raises:
            CheckpointError: it is of other layers than in the checkpoint; names what differs.
        """
        made = saved.layers(cell.build(2, training=True))
        if name in self._needed:
            one, other = ({"layers": {}, "cells": {name: of}} for of in (self._needed[name], made))
            saved.refuse(self._path, saved.differences(one, other))
            del self._needed[name]
        self.cells[name] = made


__all__ = ["LayersOf", "load", "save"]
