"""Programs of dynamic sessions: how samples become outputs, and the loop that trains them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.data.batches import permutation
from soapstone.frontend.dynamic import checkpoints
from soapstone.frontend.dynamic.session import DynamicSession
from soapstone.frontend.dynamic.values import Lazy
from soapstone.frontend.training.hooks import Hooks
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.frontend.training.trainer import TrainingResult

_Outputs = Sequence[tuple[Lazy, int]]


@dataclass(frozen=True)
class Program:
    """A classifier of samples of any structure.

    Attributes:
        outputs: of a sample, logits (1, classes) with their labels, what the sample is judged by
            first; called inside of a session, for which it records.
        train, test: samples. data: what they are, in words.
        each: whether a sample is judged by the mean over all its outputs, not by the first.
    """

    outputs: Callable[[Any], _Outputs]
    train: Sequence[Any]
    test: Sequence[Any]
    data: str = ""
    each: bool = False


def fit(
    session: DynamicSession,
    program: Program,
    *,
    epochs: int,
    batch_size: int,
    shuffle: bool = True,
    callbacks: Sequence[Callback] = (),
    resume: str | Path | None = None,
    progress: bool = True,
) -> TrainingResult:
    """Train on the samples of a program, and return the history.

    A step's loss is the mean over all outputs of its samples; accuracy is as the program judges.

    Args:
        session, program: what is trained, and on what. batch_size: samples of a step.
        epochs: how many in all, those before a resume among them.
        shuffle: whether each epoch has the samples in an order of its own, drawn by the seed.
        callbacks: what is called as training goes (`soapstone.frontend.training.callbacks`).
        resume: a checkpoint to go on from, in the middle of an epoch if it was there.
        progress: whether a line on standard error shows how far training is.

    Raises:
        DataError: no samples, or one without outputs.
        CheckpointError: a checkpoint of something else.
        NonFiniteLoss: the loss is NaN or infinite.
    """
    samples = program.train
    if not samples:
        raise DataError("fit: 0 samples found, 1 or more needed")
    data = {"batch_size": batch_size, "steps_per_epoch": -(-len(samples) // batch_size)}
    session.data = data
    counted = None
    if resume is None:
        session.position.start_epoch(0)
    else:
        counted = checkpoints.load(session, resume, True).get("callbacks")
    position = session.position
    state = TrainingState(
        epochs=epochs,
        step=session.updates,
        steps_per_epoch=data["steps_per_epoch"],
        model=cast("Any", session),  # which is saved as a model is
        measured=("loss", "accuracy"),
    )
    hooks = session.hooks = Hooks(callbacks, progress)
    result = TrainingResult()
    began, busy = time.perf_counter(), []
    hooks.begin(state, counted)
    try:
        while position.epoch < epochs and not state.stop:
            state.epoch = position.epoch
            hooks.call("on_epoch_begin", state)
            order = permutation(session.seed, state.epoch, 0, len(samples)) if shuffle else None
            for batch in list(_batches(samples, batch_size, order))[position.batch :]:
                start = time.perf_counter()
                made = [program.outputs(sample) for sample in batch]
                losses = [session.cross_entropy(*each) for outputs in made for each in outputs]
                right = _right(session, program, made)
                loss = session.step(losses)
                spent = time.perf_counter() - start
                busy.append(spent)
                position.batch += 1
                position.loss_sum += loss * len(batch)
                position.correct += right
                position.samples += len(batch)
                state.step, state.loss, state.step_us = session.updates, loss, spent * 1e6
                state.samples_per_s = len(batch) / spent
                state.metrics = {"accuracy": position.correct / position.samples}
                hooks.call("on_step_end", state)
                if state.stop:
                    return result
            state.loss = position.loss_sum / position.samples
            state.metrics = {"accuracy": position.correct / position.samples}
            record = {"epoch": float(state.epoch), "loss": state.loss, **state.metrics}
            result.epochs.append(record)
            position.start_epoch(state.epoch + 1)
            hooks.call("on_epoch_end", state)
    finally:
        result.ended(time.perf_counter() - began, busy, batch_size)
        hooks.end(state)
    return result


def accuracy(
    session: DynamicSession, program: Program, samples: Sequence[Any], batch_size: int = 64
) -> float:
    """Return the share of samples that are judged right, as the program judges them."""
    right = 0.0
    for batch in _batches(samples, batch_size, None):
        with session.inference():
            right += _right(session, program, [program.outputs(sample) for sample in batch])
    return right / max(len(samples), 1)


def _right(session: DynamicSession, program: Program, made: Sequence[_Outputs]) -> float:
    """Return how many samples are judged right, each by the share of its outputs that are."""
    judged = [outputs if program.each else outputs[:1] for outputs in made]
    if not all(judged):
        raise DataError("outputs: 0 found of a sample, 1 or more needed")
    logits, labels = zip(*(each for outputs in judged for each in outputs))
    hits = session.values(logits).argmax(axis=-1) == labels
    ends = np.cumsum([len(outputs) for outputs in judged])
    return float(sum(part.mean() for part in np.split(hits, ends[:-1])))


def _batches(samples: Sequence[Any], size: int, order: Any) -> Iterator[list[Any]]:
    places = range(len(samples)) if order is None else order
    for first in range(0, len(samples), size):
        yield [samples[place] for place in places[first : first + size]]
