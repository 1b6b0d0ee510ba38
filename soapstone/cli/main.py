"""The command line: `soapstone train`, `predict`, `optimize`, `strategy`, `machine`, and more.

What a person reads goes to standard output; with `--json` it goes to standard error, and standard
output has one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

import soapstone
from soapstone.cli import bench, graph, machine, memory, onnx, profile, rules, strategy
from soapstone.cli.common import Json, answer, command
from soapstone.cli.generate import generate
from soapstone.cli.optimize import optimize
from soapstone.cli.predict import predict
from soapstone.cli.quantize import quantize
from soapstone.cli.show import show
from soapstone.cli.train import train
from soapstone.errors import DataError

app = typer.Typer(
    help="Deep learning where everything about how a model runs is searched, proved or measured.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

app.add_typer(bench.app, name="bench")
app.add_typer(graph.app, name="graph")
app.add_typer(memory.app, name="memory")
app.add_typer(onnx.app, name="onnx")
app.add_typer(profile.app, name="profile")
app.add_typer(rules.app, name="rules")
app.add_typer(strategy.app, name="strategy")
app.add_typer(machine.app, name="machine")
command(app)(generate)
command(app)(optimize)
command(app)(quantize)
command(app)(show)
command(app)(train)
command(app)(predict)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"soapstone {soapstone.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Deep learning where everything about how a model runs is searched, proved or measured."""


@command(app)
def new(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="The folder to make.")],
    as_json: Json = False,
) -> None:
    """Write a small project: a model, its data, and a script that trains it."""
    from soapstone.frontend.app.project import new_project

    files = new_project(folder)
    lines = [f"wrote {path}" for path in files]
    lines.append(f"train it with: soapstone train {files[-1]}")
    answer("\n".join(lines), {"files": [str(path) for path in files]}, as_json)


@command(app)
def apps(as_json: Json = False) -> None:
    """List the apps that the package carries."""
    from soapstone.frontend.app import app_names, load_app

    found = {name: load_app(name).summary for name in app_names()}
    width = max(map(len, found))
    lines = [f"{name:<{width}}  {doc}" for name, doc in found.items()]
    answer("\n".join(lines), {"apps": found}, as_json)


@command(app)
def ops(as_json: Json = False) -> None:
    """List the operators: inputs, dims and how each may be split, kernels, laws, ONNX name."""
    from soapstone.frontend.catalogue import operator_rows, operator_table

    rows = operator_rows()
    answer(operator_table(rows), {"operators": [row.as_dict() for row in rows]}, as_json)


@command(app)
def doctor(as_json: Json = False) -> None:
    """Tell what is found on this computer, what is slower for lack of what, and whether it works.

    The exit code is 1 when something that is installed does not work.
    """
    from soapstone.frontend.doctor import diagnose, report

    found = diagnose()
    answer(report(found), found.as_dict(), as_json)
    if found.problems:
        raise typer.Exit(1)


@command(app, name="compile")
def compile_(
    level: Annotated[
        list[str] | None,
        typer.Option(
            help="For a package instead: x86-64, x86-64-v3, x86-64-v4 or x86-64-v4+avx512vnni;"
            " may be repeated."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --level: the package's machine_code, by default this one's."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels ahead of need, so that no first run waits for it (docs/caches.md)."""
    from soapstone.cache.answers import PACKAGED
    from soapstone.engine import ahead_of_time
    from soapstone.frontend.onnx.file import schema
    from soapstone.frontend.progress import staged

    if not level:
        if folder is not None:
            raise DataError(f"--folder {str(folder)!r} found without --level, which it is of")
        with staged() as stages:
            count = ahead_of_time.fill(stages)
        answer(f"{count} kernels are compiled for this computer", {"kernels": count}, as_json)
        return
    with staged() as stages:
        folders = [str(ahead_of_time.ship(each, folder or PACKAGED, stages)) for each in level]
    ahead_of_time.tell(folder or PACKAGED)
    schema.ship(folder or PACKAGED)
    answer(f"compiled into {', '.join(folders)}", {"folders": folders}, as_json)


@command(app)
def version(as_json: Json = False) -> None:
    """Print the version."""
    answer(f"soapstone {soapstone.__version__}", {"version": soapstone.__version__}, as_json)


def run_app(script: str | Path) -> None:
    """Train the app of a script, with the options of `soapstone train` from the command line.

    A script ends with:

        if __name__ == "__main__":
            run_app(__file__)
    """
    app(["train", str(script), *sys.argv[1:]], prog_name=Path(script).name)


def main() -> None:
    """Run the command line."""
    app(prog_name="soapstone")


if __name__ == "__main__":
    main()
