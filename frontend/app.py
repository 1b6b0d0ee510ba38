"""Apps: scripts that define a model, its data and how it is trained; found, loaded and trained."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from soapstone.errors import fault
from soapstone.files import check_targets
from soapstone.frontend.arguments import count
from soapstone.frontend.data.sets import Splits, read_splits
from soapstone.frontend.training.callbacks import Callback, Checkpoint, ProfileSteps
from soapstone.frontend.training.checkpoint import check_exists
from soapstone.frontend.training.optimizers import optimizer as as_optimizer
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.machines.start import launched, machine_of, rank_of
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.program import Program
    from soapstone.frontend.dynamic.session import DynamicSession
    from soapstone.frontend.graphs.dataset import GraphData
    from soapstone.frontend.model import Model

PACKAGE = "soapstone.apps"
DEFAULT_MAPPER = "data_parallel"
STREAMING = "bounded_memory"  # the mapper of models larger than a memory
DEFAULTS: Mapping[str, Any] = {
    "optimizer": "sgd",
    "loss": "cross_entropy",
    "metrics": ("accuracy",),
    "epochs": 1,
    "batch_size": 64,
    "shuffle": True,
}
SUMMARY_ROWS = (
    ("loss", "loss", "{:.4f}"),
    ("train_accuracy", "training accuracy", "{:.2%}"),
    ("test_accuracy", "test accuracy", "{:.2%}"),
    ("train_micro_f1", "training micro-F1", "{:.2%}"),
    ("test_micro_f1", "test micro-F1", "{:.2%}"),
    ("step_us", "median step", "{:,.0f} us"),
    ("samples_per_s", "samples a second", "{:,.0f}"),
    ("peak_bytes", "memory", "{:,} bytes"),
    ("planned_bytes", "planned copies", "{:,} bytes a step"),
    ("copied_bytes", "counted copies", "{:,} bytes a step"),
)


class AppError(ValueError):
    """An app that cannot be found, loaded or run; names it, and what was found and needed."""


@dataclass(frozen=True)
class App:
    """A model with its data and its options.

    Attributes:
        build: the model for a batch size, no weights allocated and no data read.
        data: the data set; None where the script has none and `--data` must name it.
        options: optimizer, loss, metrics, epochs, batch_size and shuffle.
        over: the same app over another graph than its own, for apps that learn from one.
        program: of a dynamic session, for apps whose graph changes from sample to sample; they have
            no `build` (docs/dynamic.md).
    """

    name: str
    doc: str
    build: Callable[[int], Model]
    data: Callable[[], Splits] | None = None
    options: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    over: Callable[[GraphData], App] | None = None
    program: Callable[[DynamicSession], Program] | None = None

    @property
    def summary(self) -> str:
        """The first line of the app's documentation."""
        return self.doc.strip().partition("\n")[0]


@dataclass(frozen=True)
class TrainResult:
    """What training an app gave; what was not measured is None.

    Attributes:
        loss, train_accuracy: means over the last epoch, as it was trained.
        test_accuracy: of the held-out samples, after training.
        train_micro_f1, test_micro_f1: the same where a sample has several labels.
        epochs: epochs that training has done in all, those before a resume among them.
        step_us, samples_per_s: of the median step.
        peak_bytes: parameters, states, inputs and the arena of temporary tensors.
        planned_bytes, copied_bytes: between a fast memory and the one behind it in a step.
        strategy: the file that was given; None where the mapper made it.
        cuts: where the vertices of a graph are cut into parts in the end; None where not asked for.
    """

    loss: float | None
    train_accuracy: float | None
    test_accuracy: float | None
    epochs: int
    step_us: float
    samples_per_s: float
    peak_bytes: int
    executor: str
    mapper: str
    strategy: str | None
    seed: int
    cuts: tuple[int, ...] | None = None
    train_micro_f1: float | None = None
    test_micro_f1: float | None = None
    planned_bytes: int | None = None
    copied_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can say them; those of a fast memory where there is one."""
        found, optional = asdict(self), ("planned_bytes", "copied_bytes")
        return {k: v for k, v in found.items() if v is not None or k not in optional}

    def __str__(self) -> str:
        values = asdict(self)
        lines = [f"trained {self.epochs} epochs, mapper {self.mapper}, seed {self.seed}"]
        for name, label, form in SUMMARY_ROWS:
            if values[name] is not None:
                lines.append(f"  {label + ':':<19}{form.format(values[name])}")
        return "\n".join(lines)


def _modules() -> dict[str, str]:
    """Return the module of each app that the package carries, by the app's name."""
    package = importlib.import_module(PACKAGE)
    return {
        app.name: f"{PACKAGE}.{folder.name}.{app.name}"
        for folder in pkgutil.iter_modules(package.__path__)
        if folder.name[0] != "_"
        for app in pkgutil.iter_modules([str(Path(package.__path__[0]) / folder.name)])
    }


def app_names() -> tuple[str, ...]:
    """Return the names of the apps that the package carries."""
    return tuple(sorted(_modules()))


def app_module(name: str) -> ModuleType:
    """Return the module of an app that the package carries.

    Raises:
        AppError: there is none of this name.
    """
    modules = _modules()
    if name not in modules:
        raise AppError(
            f"app {name!r} found; one of {', '.join(sorted(modules))}, or the path of a .py script"
            " needed"
        )
    return importlib.import_module(modules[name])


def load_app(name_or_path: str | Path) -> App:
    """Return an app of the package by name, or that of a script that defines `build(batch_size)`.

    Raises:
        AppError: no such app or script, or a script that cannot be loaded or lacks a part.
    """
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or text.endswith(".py"):
        return _app(_load_script(Path(text)), Path(text).stem)
    return _app(app_module(text), text)


def _load_script(path: Path) -> ModuleType:
    label = f"app {str(path)!r}"
    if not path.is_file():
        raise AppError(f"{label}: no such file")
    name = f"soapstone_app_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AppError(f"{label}: not a Python script")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # as Python does for a script: it may import its neighbours
    sys.modules[name] = module  # dataclasses and type hints look their module up
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError) as error:
        raise AppError(f"{label}: {error}") from error
    except Exception as error:
        raise AppError(f"{label}: {fault(error)}") from error
    return module


def _app(module: ModuleType, name: str) -> App:
    build, data = getattr(module, "build", None), getattr(module, "data", None)
    given, program = getattr(module, "OPTIONS", {}), getattr(module, "program", None)
    if callable(program):
        build = partial(_changing, name)
    if not callable(build):
        raise AppError(f"app {name!r}: build: {build!r} found, a function of the batch size needed")
    if data is not None and not callable(data):
        raise AppError(f"app {name!r}: data: {data!r} found, a function that returns Splits needed")
    if not isinstance(given, Mapping):
        raise AppError(f"app {name!r}: OPTIONS: {given!r} found, a dict needed")
    unknown = sorted(map(str, given.keys() - DEFAULTS.keys()))
    if unknown:
        raise AppError(
            f"app {name!r}: OPTIONS: {unknown[0]!r} found, some of {', '.join(DEFAULTS)} needed"
        )
    checked = None if data is None else _checked(name, data)
    app = App(name, module.__doc__ or "", build, checked, {**DEFAULTS, **given}, program=program)
    if data is None or not all("graph" in signature(each).parameters for each in (build, data)):
        return app

    def over(graph: GraphData) -> App:
        return replace(
            app,
            build=partial(build, graph=graph),
            data=_checked(name, partial(data, graph=graph)),
            options={**app.options, **_options_of(graph)},
        )

    return replace(app, over=over)


def _options_of(graph: GraphData) -> dict[str, Any]:
    """Return the options that follow from a graph: a step is over all of it."""
    options: dict[str, Any] = {"batch_size": graph.adjacency.vertices}
    if graph.several:
        options |= {"loss": "masked_bce", "metrics": ["micro_f1"]}
    return options


def _changing(name: str, *sizes: Any, **more: Any) -> Model:
    raise AppError(
        f"app {name!r}: its graph changes from sample to sample; one whose graph does not needed"
    )


def _checked(name: str, data: Callable[[], Any]) -> Callable[[], Splits]:
    def call() -> Splits:
        splits = data()
        if not isinstance(splits, Splits):
            raise AppError(f"app {name!r}: data: {type(splits).__name__} returned, Splits needed")
        return splits

    return call


def train_app(
    app: App | str | Path,
    *,
    epochs: int | None = None,
    batch_size: int | None = None,
    cpus: int | None = None,
    threads: int = 1,
    executor: str = "local",
    mapper: str = DEFAULT_MAPPER,
    memory_bytes: int | None = None,
    strategy: str | Path | None = None,
    optimize: bool = False,
    step: str | Path | None = None,
    choices: str | Path | None = None,
    graph: str | Path | None = None,
    parts: int | None = None,
    partitioner: str = "learned",
    partition_costs: str | Path | None = None,
    reuse: str | None = None,
    fast_memory: int | None = None,
    plan: str | Path | None = None,
    seed: int = 0,
    learning_rate: float | None = None,
    data: str | Path | None = None,
    checkpoint: str | Path | None = None,
    resume: str | Path | None = None,
    profile: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> TrainResult:
    """Train an app and return what came of it.

    Args:
        epochs, batch_size, learning_rate: by default as the app's options say.
        cpus, threads: processors to run on, by default all cores, and threads of each.
        executor: local (threads of this process), mpi (one process a rank, under mpiexec), legate.
        mapper: a mapper's name, or `module:Class`; strategy: the file of a strategy to follow.
        memory_bytes: the size of a memory that the processors work in, besides the computer's.
        optimize: whether to search for a faster step first; step: the file of one that was found.
        choices: a file of kernel choices to repeat, or to write where there is none.
        fast_memory, plan: a memory of so many bytes that values are streamed through, and how that
            is planned: dp, lru, stream, belady, or the file of a plan.
        data: a folder to take the data from in place of the app's own (see `read_splits`).
        graph: a graph to learn from in place of the app's own (see `read_graph`).
        parts: into how many ranges its vertices are cut; by default the mapper decides.
        partitioner: how: learned, vertex or edge. partition_costs: a file of what was learned
            before, which is written anew in the end (`soapstone.frontend.graphs.partitioned`).
        reuse: of apps whose graph changes from sample to sample: off, patterns, batch or all, which
            is the default (docs/dynamic.md). What they cannot do is refused.
        checkpoint: a file to save to after each epoch; resume: one to go on from.
        profile: a file for the timeline of some ten steps.
        say: called with the program, the strategy and the data set, as text.

    Raises:
        AppError: an app or options that do not fit, besides what `Model` raises.
    """
    arguments = dict(locals())
    if not isinstance(app, App):
        app = load_app(app)
    if app.program is not None:
        return _train_program(app, app.program, arguments)
    if reuse is not None:
        raise AppError(f"app {app.name!r}: reuse {reuse!r} found with a graph that does not change")
    edges = None
    if graph is not None:
        if app.over is None or data is not None:
            found = "--data, which has no graph" if data is not None else "which learns from none"
            raise AppError(f"app {app.name!r}: graph {str(graph)!r} found with {found}")
        from soapstone.frontend.graphs.files import read_graph

        given = read_graph(graph)
        app, edges = app.over(given), given.adjacency
    if parts is not None:
        others = {"--graph": graph is None, "no --mapper": mapper != DEFAULT_MAPPER}
        others |= {"no --strategy": strategy is not None, "no --step": step is not None}
        learns = partitioner == "learned" and parts > 1  # from timelines of its own
        others |= {"no --optimize": optimize, "no --profile": learns and profile is not None}
        if wrong := [what for what, found in others.items() if found]:
            raise AppError(f"app {app.name!r}: {parts} parts found; {', '.join(wrong)} needed")
        if cpus is None:
            cpus = max(1, min(parts, usable_cores()) // launched())
    elif partition_costs is not None:
        raise AppError(f"app {app.name!r}: costs of partitions found; --parts needed")
    options = app.options
    size = options["batch_size"] if batch_size is None else batch_size
    most = options["epochs"] if epochs is None else epochs
    for name, value, least in (("batch size", size, 1), ("epochs", most, 0)):
        count(f"app {app.name!r}: {name}", value, least, AppError)
    if resume is not None:
        check_exists(resume)
    check_targets(choices, partition_costs)
    machine = None
    if memory_bytes is not None and (fast_memory, plan) != (None, None):
        raise AppError(
            f"app {app.name!r}: memory_bytes {memory_bytes} found beside a fast memory or its plan;"
            " one of them needed"
        )
    if memory_bytes is not None:
        machine = machine_of(executor, cpus, threads).bounded(memory_bytes)
    optimizer = as_optimizer(options["optimizer"])
    if learning_rate is not None:
        optimizer = replace(optimizer, learning_rate=learning_rate)
    hooks = list(callbacks)
    if checkpoint is not None:
        hooks.append(Checkpoint(checkpoint))
    if profile is not None:
        hooks.append(ProfileSteps(profile))
    if rank_of(executor):
        say = _nothing  # the first process speaks for all
    if executor != "local" and machine is None:
        machine = machine_of(executor, cpus, threads)  # Legate has started when data are prepared
    splits = _splits(app, data)
    repeat = choices is not None and Path(choices).exists()
    with app.build(size) as model, _advised(memory_bytes, mapper):
        split = None
        if parts is not None and edges is not None:
            from soapstone.frontend.graphs.partitioned import Partitioned

            split = Partitioned(model, edges, parts, partitioner, costs=partition_costs)
            hooks.append(split)
        model.compile(
            optimizer,
            loss=options["loss"],
            metrics=options["metrics"],
            executor=executor,
            cpus=cpus,
            threads=threads,
            machine=machine,
            mapper=mapper if split is None else split.mapper,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices if repeat else None,
            seed=seed,
            fast_memory=fast_memory,
            plan=plan,
        )
        say(str(model.training_graph))
        say(str(model.strategy))
        say(str(splits))
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
        named = mapper if split is None else split.mapper.name
        done = int(history.epochs[-1]["epoch"]) + 1 if history.epochs else 0
        return TrainResult(
            loss=history.last("loss"),
            train_accuracy=history.last("accuracy"),
            test_accuracy=scores.get("accuracy"),
            epochs=done,
            step_us=history.step_us,
            samples_per_s=history.samples_per_s,
            peak_bytes=model.peak_bytes,
            executor=executor,
            mapper=named if strategy is None else "strategy",
            strategy=None if strategy is None else str(strategy),
            seed=seed,
            cuts=None if split is None else split.partitioner.cuts,
            train_micro_f1=history.last("micro_f1"),
            test_micro_f1=scores.get("micro_f1"),
            **dict(zip(("planned_bytes", "copied_bytes"), model.trainer.moved_bytes or ())),
        )


_OF_PROGRAMS = (
    *("app", "epochs", "batch_size", "cpus", "threads", "reuse", "seed", "learning_rate"),
    *("checkpoint", "resume"),
)


def _train_program(
    app: App, made: Callable[[DynamicSession], Program], arguments: Mapping[str, Any]
) -> TrainResult:
    """Train an app whose graph changes; `arguments` are those of `train_app`."""
    from soapstone.frontend.dynamic.program import accuracy, fit
    from soapstone.frontend.dynamic.session import DynamicSession

    known = (*_OF_PROGRAMS, "callbacks", "progress", "say")
    for name, parameter in signature(train_app).parameters.items():
        if name not in known and arguments[name] != parameter.default:
            raise AppError(
                f"app {app.name!r}: {name} {arguments[name]!r} found; its graph changes from sample"
                f" to sample, and {', '.join(_OF_PROGRAMS[1:])} are what it has"
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
        threads=options["threads"],
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
