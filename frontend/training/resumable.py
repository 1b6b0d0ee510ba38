"""What training goes on from: its position, its checkpoints, and what another trainer has left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.errors import warn
from soapstone.frontend.training import checkpoint, compatibility
from soapstone.frontend.training.compiled import Compiled, together
from soapstone.frontend.training.state import Position
from soapstone.frontend.training.step_graph import GRADIENTS
from soapstone.ir.tensor import Array
from soapstone.kernels.choices import Choices


class Resumable(Compiled):
    """A compiled model whose training can be left and gone on with; see `Trainer` for its loops."""

    @property
    def steps_done(self) -> int:
        """Steps since the start of training."""
        return self._position.step

    @together
    def save_checkpoint(self, path: str | Path) -> None:
        """Write everything a resumed run needs to a file, atomically.

        Raises:
            CheckpointError: values that are not finite, as gradients that overflow leave behind.
        """
        if not any(kind == "train" for kind, _, _ in self._bounds):
            self.bound("train", self.part_size(self.model.batch_size))
        with self.session.lock:
            position = dict(vars(self._position))
            sums = self.objective.kept(self._sums)
            state = self.session.state()  # of all processes
        state = {name: value for name, value in state.items() if not name.endswith(GRADIENTS)}
        compatibility.check_finite(state, f"checkpoint {str(path)!r}")
        metadata = {
            "model": self.model.name,
            "seed": self.model.seed,
            "position": position,
            "rate": self._fitted.rate(),
            "callbacks": self._hooks.saved(),
            "sums": sums,
            "choices": dict(self.choices.made),
            "made_for": self._made_for(self.model.batch_size),
            "data": dict(self._data),
            "machine": self.machine.name,
        }
        if self.first:
            checkpoint.save(path, state, metadata)

    def _made_for(self, batch_size: int) -> dict[str, Any]:
        """Return what a checkpoint of this training is for."""
        return {
            **self.model.made_for(batch_size),
            "loss": self.objective.described,
            "seed": self.model.seed,
            "optimizer": compatibility.settings(self.optimizer),
        }

    @together
    def load_checkpoint(self, path: str | Path, strict: bool = True) -> compatibility.Loaded:
        """Read parameters, states and position, and repeat the choices of the run that wrote them.

        Choices that cannot be repeated here are made anew, which is said (`ChoiceWarning`); those
        of a file that `compile` was given come before the checkpoint's. What strict says, and the
        errors, see `Model.load_checkpoint`.
        """
        return self._load(path, strict)[0]

    def _load(self, path: str | Path, strict: bool) -> tuple[compatibility.Loaded, dict[str, Any]]:
        taken, metadata, done = compatibility.read(path, self._made_for, self.carried, strict)
        position = None
        if done.position:
            position = checkpoint.fields(metadata, "position", dict(vars(Position())))
            self._repeat(metadata.get("choices", {}))
        with self.session.lock:
            self.session.load_state(taken)
            self.changed = True
            if position is not None:
                self._position = Position(**position)
                self._sums = self._read_sums(metadata)
        return done, metadata

    def _read_sums(self, metadata: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Return the sums of a checkpoint in the middle of an epoch.

        Raises:
            CheckpointError: they are no numbers.
        """
        names, position = self.objective.names, self._position
        found = metadata.get("sums")
        if found is None:  # of a file that has those of the loss and one metric
            known = (position.loss_sum, position.correct)
            return {name: [value, position.samples] for name, value in zip(names, known)}
        try:
            return {
                name: [np.asarray(value, np.float64) for value in found[name]]
                for name in names
                if name in found
            }
        except (TypeError, ValueError):
            raise checkpoint.CheckpointError(
                f"checkpoint: field 'sums': {found!r} found, numbers by name needed"
            ) from None

    def _resume(self, path: str | Path) -> tuple[float | None, Any]:
        """Go on where a checkpoint was; in the middle of an epoch, with as much data as there was.

        Returns the learning rate that a callback had set, None where none had, and what callbacks
        had counted.

        Raises:
            CheckpointError: besides those of a load, another number of batches, or a rate that is
                none.
        """
        _, metadata = self._load(path, True)
        made_in = metadata.get("data") or self._data
        if self._position.batch and made_in != self._data:
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r}: it is of the middle of an epoch with {made_in};"
                f" {self._data} found"
            )
        rate: float | None = metadata.get("rate")
        if rate is not None and not (type(rate) in (int, float) and 0 <= rate < math.inf):
            raise checkpoint.CheckpointError(
                f"checkpoint {str(path)!r}: field 'rate': {rate!r} found, 0 or more needed"
            )
        return rate, metadata.get("callbacks")

    def state(self) -> dict[str, Array]:
        """Return copies of what is carried by now, by name."""
        return {} if self._session is None else self._session.state()

    def load_state(self, values: Mapping[str, Array]) -> None:
        """Replace parameters and states by values, whose names and shapes were checked."""
        self.changed = True
        self.session.load_state(values)

    def adopt(self, other: Compiled) -> dict[str, Array]:
        """Return what the model carries on from the other trainer, whose place this one takes.

        Parameters and states of the model, and those of the optimizer where it is the same.
        """
        if not other.changed or other._session is None:
            return {}
        values = other._session.state()
        kept = {name: value for name, value in values.items() if name in self.model.carried}
        self.changed = True
        if compatibility.settings(other.optimizer) == compatibility.settings(self.optimizer):
            kept |= {name: value for name, value in values.items() if name in self.carried}
            self._position.step = other._position.step
        elif len(kept) < len(values):
            warn(
                f"compile: weights are kept, but the states of {other.optimizer} are not those of"
                f" {self.optimizer}, which begins anew",
            )
        return kept

    def begin(self, begun: tuple[dict[str, Any], int]) -> None:
        """Go on with the optimizer of a saved model, or drop its states if it is another.

        begun: that one's settings, and how many steps it has done.
        """
        settings, step = begun
        if settings == compatibility.settings(self.optimizer):
            self._position.step = step
            return
        for name in set(self.model.values) - set(self.model.carried):
            del self.model.values[name]

    def _repeat(self, given: Any) -> None:
        """Follow the choices of a checkpoint; what is bound with others is bound again."""
        texts = isinstance(given, dict) and all(isinstance(name, str) for name in given.values())
        if not texts:
            raise checkpoint.CheckpointError(
                f"checkpoint: field 'choices': {given!r} found, variants by form of call needed"
            )
        if self._repeats or given.items() <= self.choices.made.items():
            return
        self.choices = Choices(given)
        self.rebind()
        if self._session is not None:
            self._session.choices = self.choices
