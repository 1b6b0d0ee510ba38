"""Apps are trained, as their options and the caller's say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.files import check_suffix, check_targets
from soapstone.frontend.app.brief import brief
from soapstone.frontend.app.load import App, AppError, load_app
from soapstone.frontend.app.result import TrainResult
from soapstone.frontend.arguments import count
from soapstone.frontend.data.sets import Splits, read_splits
from soapstone.frontend.training.callbacks import Checkpoint, ProfileSteps
from soapstone.frontend.training.checkpoint import check_exists
from soapstone.frontend.training.optimizers import optimizer as as_optimizer
from soapstone.frontend.training.state import Callback
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.machines.start import launched, machine_of, rank_of
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.frontend.graphs.adjacency import Adjacency
    from soapstone.frontend.model import Model
    from soapstone.frontend.training.trainer import TrainingResult
    from soapstone.search.partition.cuts import Cuts

DEFAULT_MAPPER = "data_parallel"
STREAMING = "bounded_memory"  # the mapper of models larger than a memory


def train_app(
    app: App | str | Path,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    cpus: int | None = None,
    threads: int = 1,
    gpus: int = 0,
    executor: str = "local",
    mapper: str = DEFAULT_MAPPER,
    memory_bytes: int | None = None,
    strategy: str | Path | None = None,
    optimize: bool = False,
    step: str | Path | None = None,
    choices: str | Path | None = None,
    graph: str | Path | None = None,
    parts: int | None = None,
    partitioner: str | None = None,
    partition_costs: str | Path | None = None,
    reuse: str | None = None,
    fast_memory: int | None = None,
    plan: str | Path | None = None,
    overlap: bool = False,
    precision: str = "float32",
    seed: int = 0,
    learning_rate: float | None = None,
    data: str | Path | None = None,
    checkpoint: str | Path | None = None,
    resume: str | Path | None = None,
    profile: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    verbose: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Train an app and return its losses, scores and times.

    Args:
        app: an app, its name, or the path of a script that defines `build`.
        epochs, batch_size, learning_rate: by default those of the app's options.
        cpus, threads: the processors to run on, by default all cores, and the threads of each.
        gpus: the number of this computer's NVIDIA GPUs to run on instead (docs/cuda.md).
        executor: local (threads of this process), mpi (one process a rank, under mpiexec), legate.
        mapper: a mapper's name, or `module:Class`. strategy: the file of a strategy to follow.
        memory_bytes: the size of a memory that the processors work in, besides the computer's.
        optimize: whether to search for a faster step first. step: the file of one that was found.
        choices: a file of kernel choices to repeat; it is written where there is none.
        fast_memory: bytes of a memory that values are streamed through (docs/memory.md).
        plan: how that is planned: dp, lru, stream, belady, or the file of a plan.
        overlap: whether two more threads make the copies.
        precision: float32, mixed_float16 (docs/training.md), or tf32 on GPUs (docs/cuda.md).
        seed: of weights, dropout and the order of samples.
        data: a folder to take the data from instead of the app's own (see `read_splits`).
        graph: a graph to learn from instead of the app's own (see `read_graph`).
        parts: the number of ranges that its vertices are cut into; by default the mapper decides.
        partitioner: how they are cut: learned (the default), vertex, edge or metis.
        partition_costs: a file of what was learned before, rewritten at the end
            (`soapstone.frontend.graphs.partitioned`).
        reuse: for apps whose graph changes from sample to sample: off, patterns, batch or all (the
            default; docs/dynamic.md). Other arguments that such apps do not support are refused.
        checkpoint: a file to save to after each epoch. resume: one to continue from.
        profile: a file for the timeline of some ten steps.
        callbacks: called during training.
        progress: whether a progress line is shown on standard error.
        verbose: whether the program and the strategy are said before training begins.
        say: called with a few lines about the model and its data, and with later messages.

    Raises:
        AppError: an app or options that do not fit; besides what `Model` raises.
    """
    arguments = dict(locals())
    if not isinstance(app, App):
        app = load_app(app)
    if app.program is not None:
        from soapstone.frontend.app.programs import train_program

        parameters = signature(train_app).parameters
        defaults = {name: parameter.default for name, parameter in parameters.items()}
        return train_program(app, app.program, arguments, defaults)
    if reuse is not None:
        raise AppError(f"app {app.name!r}: reuse {reuse!r} found with a graph that does not change")
    _check_parts(app, arguments)
    how, edges, cuts = partitioner or "learned", None, None
    if graph is not None:
        app, edges, cuts = _over(app, graph, data, parts if how == "metis" else None)
    if parts is not None and cpus is None and not gpus:
        cpus = max(1, min(parts, usable_cores()) // launched())
    options = app.options
    hooks = list(callbacks)
    if checkpoint is not None:
        hooks.append(Checkpoint(checkpoint))
    if profile is not None:
        hooks.append(ProfileSteps(profile))
    size, most = _check(app, arguments, hooks)
    optimizer = as_optimizer(options["optimizer"])
    if learning_rate is not None:
        optimizer = replace(optimizer, learning_rate=learning_rate)
    if rank_of(executor):
        say = _nothing  # the first process speaks for all
    machine = None
    if executor != "local" or memory_bytes is not None:  # Legate has started when data are prepared
        machine = machine_of(executor, cpus, threads, gpus)
        machine = machine if memory_bytes is None else machine.bounded(memory_bytes)
    splits = _splits(app, data)
    repeat = choices is not None and Path(choices).exists()
    with app.build(size) as model, _advised(memory_bytes, mapper):
        split = None
        if parts is not None and edges is not None:
            from soapstone.frontend.graphs.partitioned import Partitioned

            split = Partitioned(model, edges, parts, how, costs=partition_costs, given=cuts)
            hooks.append(split)
        model.compile(
            optimizer,
            loss=options["loss"],
            metrics=options["metrics"],
            precision=precision,
            executor=executor,
            cpus=cpus,
            threads=threads,
            gpus=gpus,
            machine=machine,
            mapper=mapper if split is None else split.mapper,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices if repeat else None,
            seed=seed,
            fast_memory=fast_memory,
            plan=plan,
            overlap=overlap,
        )
        model.trainer.steps.expect(size, progress)
        if verbose:
            say(str(model.training_graph))
            say(str(model.strategy))
        say(brief(model, splits, most, size))
        if verbose and model.trainer.steps.result is not None:
            say(str(model.trainer.steps.result))
        history = model.fit(
            splits.train_x,
            splits.train_y,
            batch_size=size,
            epochs=most,
            shuffle=bool(options["shuffle"]),
            callbacks=hooks,
            resume=resume,
            progress=progress,
        )
        scores = model.evaluate(splits.test_x, splits.test_y, batch_size=size)
        if choices is not None and not repeat and not rank_of(executor):
            model.save_choices(choices)
        if split is not None:
            say(str(split.partitioner))
            if not rank_of(executor):
                split.save()
        return _result(
            *(model, history, scores),
            executor=executor,
            mapper=mapper if split is None else split.mapper.name,
            strategy=strategy,
            seed=seed,
            cuts=None if split is None else split.partitioner.cuts,
        )


def _check(app: App, given: Mapping[str, Any], hooks: Sequence[Callback]) -> tuple[int, int]:
    """Check what needs no model, and return the batch size and the number of epochs.

    given: the arguments of `train_app`. hooks: the callbacks, those of its options among them.

    Raises:
        AppError, CheckpointError, OSError: an argument that does not fit.
    """
    found = []
    for name, least in (("batch_size", 1), ("epochs", 0)):
        value = app.options[name] if given[name] is None else given[name]
        found.append(count(f"app {app.name!r}: {name.replace('_', ' ')}", value, least, AppError))
    if given["resume"] is not None:
        check_exists(given["resume"])
    saved = [each.path for each in hooks if isinstance(each, Checkpoint)]
    check_targets(given["choices"], given["partition_costs"], given["profile"], *saved)
    check_suffix(given["profile"], ".json")
    if given["memory_bytes"] is not None and (given["fast_memory"], given["plan"]) != (None, None):
        raise AppError(
            f"app {app.name!r}: memory_bytes {given['memory_bytes']} found beside a fast memory or"
            " its plan; one of them needed"
        )
    size, most = found
    return size, most


def _check_parts(app: App, given: Mapping[str, Any]) -> None:
    """Check what is said of parts of a graph. given: the arguments of `train_app`.

    Raises:
        AppError: parts that do not fit the rest, or what is said of them where there are none.
    """
    parts, how, costs = given["parts"], given["partitioner"], given["partition_costs"]
    if parts is None:
        if how is not None or costs is not None:
            found = "costs of partitions" if how is None else f"partitioner {how!r}"
            raise AppError(f"app {app.name!r}: {found} found; --parts needed")
        return
    learns = how in (None, "learned")  # from timelines of its own, where there are several parts
    needed = {
        "--graph": given["graph"] is not None,
        "no --mapper": given["mapper"] == DEFAULT_MAPPER,
        "no --strategy": given["strategy"] is None,
        "no --step": given["step"] is None,
        "no --optimize": not given["optimize"],
        "no --profile": given["profile"] is None or not learns or parts == 1,
        "--partitioner learned for --partition-costs": learns or costs is None,
    }
    if missing := [what for what, there in needed.items() if not there]:
        raise AppError(f"app {app.name!r}: {parts} parts found; {', '.join(missing)} needed")


def _over(
    app: App, graph: str | Path, data: str | Path | None, parts: int | None
) -> tuple[App, Adjacency, Cuts | None]:
    """Return the app over another graph, its edges, and where METIS cuts it into so many parts.

    Raises:
        AppError: the app learns from no graph, or from data of a folder.
    """
    from soapstone.frontend.graphs.files import read_graph

    if app.over is None or data is not None:
        why = "with --data, which has no graph" if data is not None else "of an app without one"
        raise AppError(f"app {app.name!r}: graph {str(graph)!r} found {why}")
    given, cuts = read_graph(graph), None
    if parts is not None:
        from soapstone.frontend.graphs.metis import renumbered_by_metis

        given, cuts = renumbered_by_metis(given, parts)
    return app.over(given), given.adjacency, cuts


def _result(
    model: Model,
    history: TrainingResult,
    scores: Mapping[str, float],
    *,
    mapper: str,
    strategy: str | Path | None,
    **told: Any,
) -> TrainResult:
    """Return what came of training. told: what else `TrainResult` has of how it was done."""
    planned, copied = model.trainer.moved_bytes or (None, None)
    return TrainResult(
        loss=history.last("loss"),
        train_accuracy=history.last("accuracy"),
        test_accuracy=scores.get("accuracy"),
        epochs=int(history.epochs[-1]["epoch"]) + 1 if history.epochs else 0,
        step_us=history.step_us,
        samples_per_s=history.samples_per_s,
        peak_bytes=model.peak_bytes,
        mapper=mapper if strategy is None else "strategy",
        strategy=None if strategy is None else str(strategy),
        train_micro_f1=history.last("micro_f1"),
        test_micro_f1=scores.get("micro_f1"),
        planned_bytes=planned,
        copied_bytes=copied,
        **told,
    )


def _nothing(text: str) -> None:
    pass


@contextmanager
def _advised(memory_bytes: int | None, mapper: str) -> Iterator[None]:
    """Say, where a small memory was too small, which mapper runs a model in it all the same."""
    try:
        yield
    except MemoryExhausted as error:
        if memory_bytes is None or mapper == STREAMING:
            raise
        raise MemoryExhausted(f"{error}; mapper {STREAMING!r} streams through it") from error


def _splits(app: App, data: str | Path | None) -> Splits:
    if data is not None:
        return read_splits(data)
    if app.data is None:
        raise AppError(f"app {app.name!r}: it has no data of its own; --data FOLDER needed")
    return app.data()
