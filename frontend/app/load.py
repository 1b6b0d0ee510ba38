"""Apps are found and loaded: scripts that define a model, its data and how it is trained."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from soapstone.errors import fault, hint
from soapstone.files import check_file
from soapstone.frontend.data.sets import Splits

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.program import Program
    from soapstone.frontend.dynamic.session import DynamicSession
    from soapstone.frontend.graphs.dataset import GraphData
    from soapstone.frontend.model import Model

PACKAGE = "soapstone.apps"
DEFAULTS: Mapping[str, Any] = {
    "optimizer": "sgd",
    "loss": "cross_entropy",
    "metrics": ("accuracy",),
    "epochs": 1,
    "batch_size": 64,
    "shuffle": True,
}


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
            f"app {name!r} found; a .py script or an app (`soapstone apps` lists them) needed"
            f"{hint(name, modules)}"
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
    check_file(path, label, AppError)
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
            f"{hint(unknown[0], DEFAULTS)}"
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
            raise AppError(
                f"app {name!r}: data: {type(splits).__name__} returned,"
                " Splits (soapstone.frontend.data.sets) needed"
            )
        return splits

    return call
