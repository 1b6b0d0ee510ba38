"""Programs of dynamic sessions: how samples become outputs, and the loop that trains them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from soapstone.errors import DataError
from soapstone.frontend.data.batches import permutation
from soapstone.frontend.dynamic.session import DynamicSession
from soapstone.frontend.dynamic.values import Lazy
from soapstone.frontend.training.callbacks import Callback, ProgressBar, TrainingState
from soapstone.frontend.training.trainer import TrainingResult


@dataclass(frozen=True)
class Program:
    """A classifier of samples of any structure.

    Attributes:
        outputs: of a sample, logits (1, classes) with their labels, what the sample is judged by
            first; called inside of a session, for which it records.
        train, test: samples. data: what they are, in words.
    """

    outputs: Callable[[Any], Sequence[tuple[Lazy, int]]]
    train: Sequence[Any]
    test: Sequence[Any]
    data: str = ""


def fit(
    session: DynamicSession,
    program: Program,
    *,
    epochs: int,
    batch_size: int,
    shuffle: bool = True,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
) -> TrainingResult:
    """Train on the samples of a program, and return the history.

    A step's loss is the mean over all outputs of its samples; accuracy is of the first of each.

    Raises:
        DataError: no samples.
        NonFiniteLoss: the loss is NaN or infinite.
    """
    samples = program.train
    if not samples:
        raise DataError("fit: 0 samples found, 1 or more needed")
    steps = -(-len(samples) // batch_size)
    state = TrainingState(epochs=epochs, steps_per_epoch=steps, measured=("loss", "accuracy"))
    hooks = [*callbacks, *([ProgressBar()] if progress else [])]
    result = TrainingResult()
    began, busy = time.perf_counter(), []
    for hook in hooks:
        hook.on_train_begin(state)
    try:
        for epoch in range(epochs):
            state.epoch, total, right, done = epoch, 0.0, 0, 0
            for hook in hooks:
                hook.on_epoch_begin(state)
            order = permutation(session.seed, epoch, 0, len(samples)) if shuffle else None
            for batch in _batches(samples, batch_size, order):
                start = time.perf_counter()
                made = [program.outputs(sample) for sample in batch]
                losses = [session.cross_entropy(*each) for outputs in made for each in outputs]
                right += _right(session, made)
                loss = session.step(losses)
                spent = time.perf_counter() - start
                busy.append(spent)
                total, done = total + loss * len(batch), done + len(batch)
                state.step, state.loss, state.step_us = session.updates, loss, spent * 1e6
                state.samples_per_s = len(batch) / spent
                state.metrics = {"accuracy": right / done}
                for hook in hooks:
                    hook.on_step_end(state)
                if state.stop:
                    return result
            state.loss = total / done
            result.epochs.append(
                {"epoch": float(epoch), "loss": state.loss, "accuracy": right / done}
            )
            for hook in hooks:
                hook.on_epoch_end(state)
            if state.stop:
                break
    finally:
        result.ended(time.perf_counter() - began, busy, batch_size)
        for hook in hooks:
            hook.on_train_end(state)
    return result


def accuracy(
    session: DynamicSession, program: Program, samples: Sequence[Any], batch_size: int = 64
) -> float:
    """Return the share of samples whose first output has its label."""
    right = 0
    for batch in _batches(samples, batch_size, None):
        with session.inference():
            right += _right(session, [program.outputs(sample) for sample in batch])
    return right / max(len(samples), 1)


def _right(session: DynamicSession, made: Sequence[Sequence[tuple[Lazy, int]]]) -> int:
    """Return how many first outputs have their labels."""
    logits = session.values([outputs[0][0] for outputs in made])
    return int((logits.argmax(axis=-1) == [outputs[0][1] for outputs in made]).sum())


def _batches(samples: Sequence[Any], size: int, order: Any) -> Iterator[list[Any]]:
    places = range(len(samples)) if order is None else order
    for first in range(0, len(samples), size):
        yield [samples[place] for place in places[first : first + size]]


__all__ = ["Program", "accuracy", "fit"]
