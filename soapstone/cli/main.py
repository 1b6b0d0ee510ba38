"""The command line: `soapstone train`, `predict`, `optimize`, `strategy`, `machine`, and more.

What a person reads goes to standard output; with `--json` it goes to standard error, and standard
output has one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

import soapstone
from soapstone.cli import bench, graph, machine, memory, onnx, profile, rules, strategy
from soapstone.cli.common import Dims, Json, answer, bytes_of, command, dims_of, tell
from soapstone.cli.generate import generate
from soapstone.cli.optimize import optimize
from soapstone.cli.quantize import quantize
from soapstone.cli.show import show
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


FastMemory = Annotated[
    str | None, typer.Option(help="Stream values through a memory of that size: 200MB.")
]
Plan = Annotated[
    str | None, typer.Option(help="How: dp (fewest bytes), lru, stream, belady, or a file.")
]


@command(app)
def train(
    app_name: Annotated[
        str, typer.Argument(metavar="APP", help="An app's name, or a .py script with build().")
    ],
    epochs: Annotated[int | None, typer.Option(min=0, help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(min=0, help="A constant rate.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors; default all cores.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each processor.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="Run on so many NVIDIA GPUs instead.")] = 0,
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
    fast_memory: FastMemory = None,
    plan: Plan = None,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Two more threads copy; give them cores of their own.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32, mixed_float16: products take halves, or tf32 (GPUs).")
    ] = "float32",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, dropout and order.")] = 0,
    data: Annotated[
        Path | None, typer.Option(help="A folder with train and test: npz files of x and y.")
    ] = None,
    graph: Annotated[
        str | None, typer.Option(help="A graph to learn from: a file, a name, or a preset.")
    ] = None,
    parts: Annotated[
        int | None, typer.Option(min=1, help="Ranges of the graph's vertices, one a worker.")
    ] = None,
    partitioner: Annotated[
        str | None,
        typer.Option(help="Where it is cut: learned, the default, vertex, edge or metis."),
    ] = None,
    partition_costs: Annotated[
        Path | None, typer.Option(help="What was learned before; written in the end.")
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(help="Of graphs that change: off, patterns, batch or all, the default."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save here after each epoch: .safetensors or .npz.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint to go on from.")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Write a timeline of ten steps (trace-event JSON).")
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the program and the strategy too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train an app, and show the accuracy on held-out samples."""
    from soapstone.frontend.app import train_app
    from soapstone.frontend.progress import is_hushed
    from soapstone.frontend.training.callbacks import Checkpoint
    from soapstone.runtime.machines.start import default_executor, rank_of

    executor = executor or default_executor()
    rank = rank_of(executor)

    sys.path.append(str(Path.cwd()))  # where a mapper's module:Class is looked for, last

    def say(text: str) -> None:
        if not is_hushed():
            typer.echo(f"{text}\n", err=as_json)

    saving = [] if checkpoint is None else [Checkpoint(checkpoint)]
    try:
        result = train_app(
            app_name,
            epochs=epochs,
            batch_size=batch_size,
            learning_rate=learning_rate,
            cpus=cpus,
            threads=threads,
            gpus=gpus,
            executor=executor,
            mapper=mapper,
            memory_bytes=memory_bytes,
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices,
            reuse=reuse,
            fast_memory=None if fast_memory is None else bytes_of("--fast-memory", fast_memory),
            plan=plan,
            overlap=overlap,
            precision=precision,
            seed=seed,
            data=data,
            graph=graph,
            parts=parts,
            partitioner=partitioner,
            partition_costs=partition_costs,
            callbacks=saving,
            resume=resume,
            profile=profile,
            verbose=verbose,
            say=say,
        )
    except KeyboardInterrupt as error:
        saved = saving[0].saved if saving else None
        rest = f"go on with --resume {saved}" if saved else "no checkpoint was saved"
        error.args = (f"; {rest}",)
        raise
    if rank == 0:
        tell(result, result.as_dict(), as_json)


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
def predict(
    model: Annotated[str, typer.Argument(help="An .onnx file, or an app's name.")],
    inputs: Annotated[
        Path | None, typer.Option("--input", "-i", help="An npz file of the inputs.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the outputs here, as npz.")
    ] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The weights of an app.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of a processor. Default: cores are shared out.")
    ] = None,
    cpus: Annotated[
        int | None,
        typer.Option(min=1, help="Processors of a run; default 1, or those of the strategy."),
    ] = None,
    strategy: Annotated[
        Path | None, typer.Option(help="A strategy file to follow (`strategy search --inference`).")
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Runs at once, each on so many processors: to --benchmark.")
    ] = 1,
    plain: Annotated[
        bool, typer.Option("--plain", help="One kernel an operator: no folding, no fusing.")
    ] = False,
    runs: Annotated[
        int | None, typer.Option(min=1, help="How often to run, for the time; default once.")
    ] = None,
    benchmark: Annotated[
        bool,
        typer.Option(
            "--benchmark", help="Show percentiles of the times of 3 s of runs, or --runs."
        ),
    ] = False,
    dim: Dims = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure rival kernels first, and keep the times.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="float32, bfloat16, or int4 or int8 for weights of products.")
    ] = "float32",
    fast_memory: FastMemory = None,
    plan: Plan = None,
    as_json: Json = False,
) -> None:
    """Run a model on the arrays of an npz file; or measure runs, on inputs that are drawn."""
    import numpy as np

    from soapstone.files import check_targets, write
    from soapstone.frontend.inference import predict as task

    check_targets(output)
    options: dict[str, Any] = {
        "threads": threads,
        "cpus": cpus,
        "strategy": strategy,
        "plain": plain,
        "tune": "now" if tune else True,
        "precision": precision,
    }
    if benchmark:
        from soapstone.frontend.inference.latency import measure

        for option, found in (("-o", output), ("--fast-memory", fast_memory), ("--plan", plan)):
            if found is not None:
                raise DataError(f"{option} found with --benchmark, which measures runs alone")
        latency = measure(
            *(model, None if inputs is None else task.read_arrays(inputs)),
            dims=dims_of(dim),
            checkpoint=checkpoint,
            runs=runs,
            requests=requests,
            **options,
        )
        tell(latency, latency.as_dict(), as_json)
        return
    if inputs is None:
        raise DataError("no --input found; an npz file of the inputs needed, or --benchmark")
    if dim:
        raise DataError(
            "--dim found with --input, whose arrays have extents; it is of inputs that are drawn,"
            " with --benchmark"
        )
    if requests > 1:
        raise DataError(f"--requests {requests} found without --benchmark; 1 needed")
    result = task.predict(
        *(model, task.read_arrays(inputs)),
        checkpoint=checkpoint,
        runs=runs or 1,
        fast_memory=None if fast_memory is None else bytes_of("--fast-memory", fast_memory),
        plan=plan,
        **options,
    )
    if output is not None:
        arrays: dict[str, Any] = dict(task.stored(result.outputs))
        write(output, lambda stream: np.savez(stream, **arrays))
    tell(result, result.as_dict(), as_json)


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
            help="For a package instead: x86-64, x86-64-v3 or x86-64-v4; may be repeated."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="With --level: the package's machine_code, by default this one's."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile the kernels ahead of need, so that no first run waits for it (docs/caches.md)."""
    from soapstone.cache.objects import PACKAGED
    from soapstone.engine import ahead
    from soapstone.frontend.onnx.file import schema

    if not level:
        if folder is not None:
            raise DataError(f"--folder {str(folder)!r} found without --level, which it is of")
        count = ahead.fill()
        answer(f"{count} kernels are compiled for this computer", {"kernels": count}, as_json)
        return
    folders = [str(ahead.ship(each, folder or PACKAGED)) for each in level]
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
