"""Checkpoints of dynamic sessions: all that a resumed run needs, by the files of models.

A checkpoint says which cells and tables there are, and of which layers cells are. Cells are
recorded when they are first called, so those of a session that resumes are compared when it loads,
if it has called them, or else when it first does. So are layers of the session that have
parameters. Nothing is loaded unless all that is known then fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.frontend.dynamic.cell import Cell
from soapstone.frontend.training import checkpoint, compatibility
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.frontend.training.state import Position
from soapstone.kernels.choices import Choices

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.session import DynamicSession

_Shapes = dict[str, tuple[int, ...]]
_HINT = " (strict=False takes what fits: session.load_checkpoint)"


def save(session: DynamicSession, path: str | Path) -> None:
    """Write a session; see `DynamicSession.save_checkpoint`."""
    state = session.state()
    compatibility.check_finite(state, f"checkpoint {str(path)!r}")
    metadata = {
        "model": session.name,
        "seed": session.seed,
        "position": {**vars(session.position), "step": session.updates},
        "choices": dict(session.session.choices.made),
        "made_for": _made_for(session),
        "data": dict(session.data),
        "callbacks": session.hooks.saved(),
        "machine": session.session.machine.name,
    }
    checkpoint.save(path, state, metadata)


def load(session: DynamicSession, path: str | Path, strict: bool) -> Mapping[str, Any]:
    """Read a session and return the file's metadata; see `DynamicSession.load_checkpoint`."""
    arrays, metadata = checkpoint.load(path)
    label = f"checkpoint {str(path)!r}"
    made_for = metadata.get("made_for")
    if not isinstance(made_for, dict) or not isinstance(made_for.get("layers"), dict):
        raise CheckpointError(f"{label}: made_for {made_for!r} found, what it was made for needed")
    found = compatibility.differences(made_for, _made_for(session))
    if metadata.get("model") != session.name:
        found.insert(0, f"model {metadata.get('model')!r} found, {session.name!r} needed")
    layers_of, functions = session.layers_of, made_for.get("functions")
    if strict:
        tables = made_for.get("tables", [name for name in session.tables if name in arrays])
        found += _other_names("table", tables, session.tables)
        if functions is not None:  # files of before do not say
            found += _other_names("cell", functions, layers_of.functions)
    found += [
        f"array {name!r}: values that are not finite" for name in compatibility.infinite(arrays)
    ]
    shapes = {name: array.shape for name, array in arrays.items()}
    found += layers_of.apart(shapes, strict)
    compatibility.refuse(path, found, _HINT if strict else "")
    position = checkpoint.fields(metadata, "position", vars(Position()))
    choices = metadata.get("choices")
    if not isinstance(choices, dict):
        raise CheckpointError(f"{label}: choices {choices!r} found, variants by form needed")
    data = metadata.get("data") or {}
    if position["batch"] and session.data and data != session.data:
        raise CheckpointError(
            f"{label}: it is of the middle of an epoch with {data}; {session.data} found"
        )
    gone = set(made_for.get("tables", ())) - session.tables.keys()  # strict, there are none
    left = tuple(f"{name}.rows" for name in gone)
    arrays = {n: a for n, a in arrays.items() if n not in gone and not n.startswith(left)}
    session.load_state(arrays)
    for name in session.session.waiting.keys() - arrays.keys():  # of a checkpoint loaded before
        del session.session.waiting[name]
    layers_of.expect(path, made_for.get("cells", {}), functions, shapes, strict)
    session.session.choices = Choices(choices)
    session.position = Position(**position)
    session.updates = session.position.step
    return metadata


def _other_names(kind: str, there: Iterable[str], here: Iterable[str]) -> list[str]:
    """Return in words which cells or tables a checkpoint or a session alone has."""
    theirs, own = dict.fromkeys(there), dict.fromkeys(here)
    missing = [f"{kind} {name!r} is missing" for name in own if name not in theirs]
    return missing + [f"{kind} {name!r} found, none needed" for name in theirs if name not in own]


def _made_for(session: DynamicSession) -> dict[str, Any]:
    """Return what `compatibility.differences` compares."""
    return {
        "layers": {},
        "cells": session.layers_of.cells,
        "functions": session.layers_of.functions,
        "tables": list(session.tables),
        "seed": session.seed,
        "optimizer": compatibility.settings(session.optimizer),
        "batch_size": 1,
    }


class LayersOf:
    """The layers of a session's cells, and those that a checkpoint says they should have.

    Attributes:
        cells: what `compatibility.layers` returns of each, by name and types of operands.
        functions: whether each was called, by name of the cell.
    """

    def __init__(self) -> None:
        self.cells: dict[str, Any] = {}
        self.functions: dict[str, bool] = {}
        self._shapes: dict[str, _Shapes] = {}  # of parameters, by cell
        self._path: str | Path | None = None  # of a checkpoint, of which is what follows
        self._strict = False
        self._needed: dict[str, Any] = {}  # of cells that were not called since
        self._called: Mapping[str, bool] = {}
        self._there: _Shapes = {}

    def left_over(self, parameter: str) -> bool:
        """Return whether a parameter is of a cell that the checkpoint has and the session not."""
        gone = self._called.keys() - self.functions.keys()
        return parameter.startswith(tuple(f"{name}." for name in gone))

    def apart(self, there: _Shapes, strict: bool, of: str | None = None) -> list[str]:
        """Return in words which parameters a checkpoint does not have, or in other shapes.

        of: a cell, by default all. Not strict, parameters may be missing.
        """
        return [
            f"{cell}: parameter {name!r} is missing"
            if name not in there
            else f"{cell}: parameter {name!r}: shape {there[name]} found, {shape} needed"
            for cell, shapes in self._shapes.items()
            for name, shape in shapes.items()
            if of in (None, cell) and there.get(name, None if strict else shape) != shape
        ]

    def expect(
        self,
        path: str | Path,
        cells: Mapping[str, Any],
        functions: Mapping[str, bool] | None,
        there: _Shapes,
        strict: bool,
    ) -> None:
        """Take the cells of a checkpoint, which those that are not called yet have to equal."""
        self._path, self._strict = path, strict
        self._needed = {name: cells[name] for name in cells if name not in self.cells}
        self._called = self.functions if functions is None else functions
        self._there = dict(there)
        self.cells = {**cells, **self.cells}
        self.functions = {
            name: called or self._called.get(name, False) for name, called in self.functions.items()
        }

    def function(self, name: str) -> None:
        """Take the name of a cell.

        Raises:
            CheckpointError: the checkpoint that was loaded has none of that name.
        """
        if self._path is not None and self._strict and name not in self._called:
            compatibility.refuse(self._path, [f"cell {name!r} is missing"], _HINT)
        self.functions.setdefault(name, False)

    def add(self, name: str, cell: Cell, function: str = "") -> None:
        """Take a cell that was recorded. function: its name alone.

        Raises:
            CheckpointError: it is of other layers than in the checkpoint, or has parameters that
                are not there, though it was called before, or are of other shapes; names them.
        """
        graph = cell.build(2, training=True)
        made = compatibility.layers(graph)
        self._shapes[name] = {each: graph.tensors[each].shape for each in cell.parameters}
        if self._path is not None:
            found = []
            if name in self._needed:
                alike = (self._needed[name], made)
                one, other = ({"layers": {}, "cells": {name: of}} for of in alike)
                found = compatibility.differences(one, other)
            strict = self._strict and self._called.get(function, True)
            found = found or self.apart(self._there, strict, name)
            if found:
                del self._shapes[name]
                unused = [each for each in self._needed if each != name]
                rest = f"; not called so far: {', '.join(unused[:3])}" if unused else ""
                compatibility.refuse(self._path, found, rest + (_HINT if strict else ""))
            self._needed.pop(name, None)
            self._there |= self._shapes[name]
        if function:
            self.functions[function] = True
        self.cells[name] = made
