"""Checkpoints of dynamic sessions: all that a resumed run needs, by the files of models.

Cells are recorded when they are first called, so what a checkpoint has is compared with the session
by its name, seed, optimizer and tables; shapes of parameters, when cells that have them are bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    if found:
        raise CheckpointError(f"{label}: {'; '.join(found[:3])}")
    position = checkpoint.fields(metadata, "position", vars(Position()))
    choices = metadata.get("choices")
    if not isinstance(choices, dict):
        raise CheckpointError(f"{label}: choices {choices!r} found, variants by form needed")
    session.load_state(arrays)
    session.session.choices = Choices(choices)
    session.position = Position(**position)
    session.updates = session.position.step
    data: Mapping[str, Any] = metadata.get("data") or {}
    return data


def _made_for(session: DynamicSession) -> dict[str, Any]:
    """Return what `saved.differences` compares; the layers of cells are not known beforehand."""
    optimizer = saved.settings(session.optimizer)
    return {"layers": {}, "seed": session.seed, "optimizer": optimizer, "batch_size": 1}


__all__ = ["load", "save"]
