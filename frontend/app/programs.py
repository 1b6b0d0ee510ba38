"""Apps whose graph changes from sample to sample are trained by a dynamic session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from soapstone.frontend.app.load import App, AppError
from soapstone.frontend.app.result import TrainResult
from soapstone.frontend.arguments import count
from soapstone.frontend.dynamic.program import Program, accuracy, fit
from soapstone.frontend.dynamic.session import DynamicSession
from soapstone.frontend.training.callbacks import Checkpoint
from soapstone.frontend.training.checkpoint import check_exists
from soapstone.frontend.training.optimizers import optimizer as as_optimizer

_OF_PROGRAMS = (
    *("app", "epochs", "batch_size", "cpus", "reuse", "seed", "learning_rate"),
    *("checkpoint", "resume"),
)


def train_program(
    app: App,
    made: Callable[[DynamicSession], Program],
    arguments: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> TrainResult:
    """Train an app whose graph changes; `arguments` are those of `train_app`, as `defaults` are."""
    known = (*_OF_PROGRAMS, "callbacks", "progress", "verbose", "say")
    for name, default in defaults.items():
        if name not in known and arguments[name] != default:
            raise AppError(
                f"app {app.name!r}: {name} {str(arguments[name])!r} found; its graph changes from"
                f" sample to sample, and {', '.join(_OF_PROGRAMS[1:])} are what it has"
            )
    options = {**app.options, **{k: v for k, v in arguments.items() if v is not None}}
    for name, least in (("batch_size", 1), ("epochs", 0)):
        count(f"app {app.name!r}: {name}", options[name], least, AppError)
    hooks = list(options["callbacks"])
    if arguments["checkpoint"] is not None:
        hooks.append(Checkpoint(arguments["checkpoint"]))
    if arguments["resume"] is not None:
        check_exists(arguments["resume"])
    optimizer = as_optimizer(options["optimizer"])
    if arguments["learning_rate"] is not None:
        optimizer = replace(optimizer, learning_rate=arguments["learning_rate"])
    with DynamicSession(
        app.name,
        optimizer,
        seed=options["seed"],
        cpus=arguments["cpus"],
        reuse=options.get("reuse", "all"),
    ) as session:
        program = made(session)
        options["say"](program.data)
        history = fit(
            session,
            program,
            epochs=options["epochs"],
            batch_size=options["batch_size"],
            shuffle=bool(options["shuffle"]),
            callbacks=hooks,
            resume=arguments["resume"],
            progress=options["progress"],
        )
        right = accuracy(session, program, program.test)
        options["say"](str(session.report()))
        return TrainResult(
            loss=history.last("loss"),
            train_accuracy=history.last("accuracy"),
            test_accuracy=right,
            epochs=session.position.epoch,
            step_us=history.step_us,
            samples_per_s=history.samples_per_s,
            peak_bytes=session.session.peak_bytes,
            executor="local",
            mapper=session.session.mapper.name,
            strategy=None,
            seed=options["seed"],
        )
