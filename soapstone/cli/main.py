"""The command line: `soapstone train`, `predict`, `optimize`, `strategy`, `machine`, and more.

What a person reads goes to standard output; with `--json` it goes to standard error, and standard
output has one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import soapstone
from soapstone.cli import bench as cli_bench
from soapstone.cli import onnx as cli_onnx
from soapstone.cli import optimize as cli_optimize
from soapstone.cli import profile as cli_profile
from soapstone.cli import rules as cli_rules
from soapstone.cli import show as cli_show
from soapstone.cli import strategy as cli_strategy

if TYPE_CHECKING:
    from soapstone.frontend.training.callbacks import Checkpoint

app = typer.Typer(
    help="Deep learning where everything about how a model runs is searched, proved or measured.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_bench.app, name="bench")
app.add_typer(cli_onnx.app, name="onnx")
app.add_typer(cli_profile.app, name="profile")
app.add_typer(cli_rules.app, name="rules")
app.add_typer(cli_strategy.app, name="strategy")
app.add_typer(cli_strategy.machines, name="machine")
app.command()(cli_optimize.optimize)
app.command()(cli_show.show)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


@contextmanager
def _reported(debug: bool, checkpoint: list[Checkpoint] | None = None) -> Iterator[None]:
    """Turn errors into one line on standard error and an exit code."""
    try:
        yield
    except KeyboardInterrupt as error:
        saved = checkpoint[0].saved if checkpoint else None
        rest = f"; go on with --resume {saved}" if saved else "; no checkpoint was saved"
        _end(f"interrupted{'' if checkpoint is None else rest}", error, _INTERRUPTED)
    except BrokenPipeError:
        raise  # the reader has gone; there is nobody to tell
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        if debug or isinstance(error, typer.Exit):
            raise
        said = str(error)
        if isinstance(error, OSError) and error.strerror and error.filename is not None:
            said = f"file {str(error.filename)!r}: {error.strerror.lower()}"
        text = " ".join(said.split()) or type(error).__name__
        _end(f"error: {text}", error, 1)
    except Exception as error:  # of a user's script, or a fault of ours
        if debug:
            raise
        from soapstone.errors import fault

        _end(f"error: {fault(error)}; --debug shows the traceback", error, 1)


def _end(text: str, error: BaseException, code: int) -> NoReturn:
    """Say what went wrong, in one process of a run of several, and end with an exit code."""
    mpi = sys.modules.get("soapstone.runtime.executors.mpi.executor")
    if mpi is None or mpi.speaks(error):
        typer.echo(text, err=True)
    if mpi is not None:
        mpi.leave(code)
    raise typer.Exit(code) from None


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, allow_nan=False))


@app.command()
def train(
    app_name: Annotated[
        str, typer.Argument(metavar="APP", help="An app's name, or a .py script with build().")
    ],
    epochs: Annotated[int | None, typer.Option(min=0, help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="A constant rate.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors; default all cores.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each processor.")] = 1,
    executor: Annotated[
        str | None,
        typer.Option(help="local: threads; mpi: ranks of mpiexec, default under it; legate."),
    ] = None,
    mapper: Annotated[str, typer.Option(help="A mapper's name, or module:Class.")] = (
        "data_parallel"
    ),
    memory_bytes: Annotated[
        int | None, typer.Option(min=1, help="Work in a memory of that size; see bounded_memory.")
    ] = None,
    strategy: Annotated[Path | None, typer.Option(help="A strategy file to follow.")] = None,
    optimize: Annotated[
        bool, typer.Option("--optimize", help="Search for a faster training step first.")
    ] = False,
    step: Annotated[
        Path | None, typer.Option(help="A training step that `soapstone optimize` wrote.")
    ] = None,
    choices: Annotated[
        Path | None,
        typer.Option(help="Kernel choices to repeat, for the same bits; written if not there."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, dropout and order.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="A folder with train and test: npz files of x and y.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save here after each epoch: .safetensors or .npz.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint to go on from.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a timeline of ten steps (trace-event JSON).")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train an app; show its program, its strategy, and the accuracy on held-out samples."""
    saving: list[Checkpoint] = []
    with _reported(debug, saving):
        from soapstone.frontend.app import train_app
        from soapstone.frontend.training.callbacks import Checkpoint
        from soapstone.runtime.machines.start import default_executor, rank_of

        executor = executor or default_executor()
        rank = rank_of(executor)

        sys.path.append(str(Path.cwd()))  # where a mapper's module:Class is looked for, last
        if checkpoint is not None:
            saving.append(Checkpoint(checkpoint))
        result = train_app(
            app_name,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            cpus=cpus,
            threads=threads,
            executor=executor,
            mapper=mapper,
            memory_bytes=memory_bytes,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices,
            seed=seed,
            data=data,
            callbacks=saving,
            resume=resume,
            profile=profile,
            say=lambda text: typer.echo(f"{text}\n", err=as_json),
        )
        if rank == 0:
            typer.echo(str(result), err=as_json)
            if as_json:
                _print_json(result.as_dict())


@app.command()
def predict(
    model: Annotated[str, typer.Argument(help="An .onnx file, or an app's name.")],
    inputs: Annotated[Path, typer.Option("--input", "-i", help="An npz file of the inputs.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs here, as npz.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The weights of an app.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: all cores.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="One kernel an operator: no folding, no fusing.")
    ] = False,
    runs: Annotated[int, typer.Option(min=1, help="How often to run, for the time.")] = 1,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a model on the arrays of an npz file."""
    with _reported(debug):
        import numpy as np

        from soapstone.files import check_targets, write
        from soapstone.frontend import predict as task

        check_targets(output)
        result = task.predict(
            *(model, task.read_arrays(inputs)),
            checkpoint=checkpoint,
            threads=threads,
            plain=plain,
            runs=runs,
        )
        if output is not None:
            arrays: dict[str, Any] = dict(result.outputs)
            write(output, lambda stream: np.savez(stream, **arrays))
        typer.echo(str(result), err=as_json)
        if as_json:
            _print_json(result.as_dict())


@app.command()
def apps(as_json: Json = False, debug: Debug = False) -> None:
    """List the apps that the package carries."""
    with _reported(debug):
        from soapstone.frontend.app import app_names, load_app

        found = {name: load_app(name).summary for name in app_names()}
        if as_json:
            _print_json({"apps": found})
            return
        width = max(map(len, found))
        for name, doc in found.items():
            typer.echo(f"{name:<{width}}  {doc}")


@app.command()
def ops(as_json: Json = False, debug: Debug = False) -> None:
    """List the operators: inputs, dims and how each may be split, kernels, laws, ONNX name."""
    with _reported(debug):
        from soapstone.frontend.catalogue import operator_rows, operator_table

        rows = operator_rows()
        if as_json:
            _print_json({"operators": [row.as_dict() for row in rows]})
        else:
            typer.echo(operator_table(rows))


@app.command()
def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Tell what is found on this computer, what is slower for lack of what, and whether it works.

    The exit code is 1 when something that is installed does not work.
    """
    with _reported(debug):
        from soapstone.frontend.doctor import diagnose, report

        found = diagnose()
        if as_json:
            _print_json(found.as_dict())
        else:
            typer.echo(report(found))
    if found.problems:
        raise typer.Exit(1)


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        _print_json({"version": soapstone.__version__})
    else:
        typer.echo(f"soapstone {soapstone.__version__}")


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
