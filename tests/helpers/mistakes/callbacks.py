"""Callbacks.

A row is what was written and what the error says of it.
"""

from __future__ import annotations

from typing import Any

from helpers.mistakes.models import X, Y, net

from soapstone.callbacks import Callback, Checkpoint, CSVLogger, EarlyStopping, TensorBoard


class Short(Callback):
    def on_epoch_end(self) -> None:  # type: ignore[override]
        pass


class Misspelt(Callback):
    def on_epoch_ended(self, state: Any) -> None:
        pass


class Loud(Callback):
    def on_step_end(self, state: Any) -> None:
        state.learning_rate = "high"


CALLBACKS: list[tuple[Any, ...]] = [
    (
        lambda: net().fit(X, Y, callbacks=[lambda state: 1]),
        "fit: callbacks: function '<lambda>' found, one of soapstone.callbacks",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Short()]),
        "callback Short: on_epoch_end takes other arguments than (self, state)",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Misspelt()]),
        "callback Misspelt: 'on_epoch_ended' found, hooks are on_train_begin",
        "did you mean 'on_epoch_end'?",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Loud()], progress=False),
        "learning_rate: 'high' set by a callback, 0 or more needed",
    ),
    (
        lambda: EarlyStopping(mode="min"),
        "EarlyStopping: unknown argument 'mode'; EarlyStopping(mon",
    ),
    (lambda: EarlyStopping("loss", 3, "a"), "EarlyStopping: minimum_delta: 'a' found, a number"),
    (lambda: CSVLogger(), "CSVLogger: missing a required argument: 'path'"),
    (
        lambda: net().fit(X, Y, callbacks=[CSVLogger("no/c.csv")], progress=False),
        "file 'no/c.csv': folder 'no' does not exist",
    ),
    (
        lambda: net().fit(X, Y, callbacks=[Checkpoint("c.npz", best="val_accuracy")]),
        "Checkpoint: monitor 'val_accuracy' found, one of loss, accuracy needed",
    ),
    (lambda: TensorBoard(3), "TensorBoard: folder 3 found, a path needed"),
    (
        lambda: Checkpoint("m.pt"),
        "checkpoint 'm.pt': suffix '.pt' found, .safetensors or .npz needed",
    ),
    (
        lambda: EarlyStopping("loss", patience=0),
        "EarlyStopping: patience: 0 found, an integer of 1 or more needed",
    ),
]
