"""`soapstone train`: apps and scripts, trained."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Cpus, FastMemory, Json, Plan, Threads, bytes_of, tell


def train(
    app_name: Annotated[
        str, typer.Argument(metavar="APP", help="An app's name, or a .py script with build().")
    ],
    epochs: Annotated[int | None, typer.Option(min=0, help="Passes over the data.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples in a step.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="A constant learning rate.")
    ] = None,
    cpus: Cpus = None,
    threads: Threads = 1,
    gpus: Annotated[int, typer.Option(min=0, help="Run on so many NVIDIA GPUs instead.")] = 0,
    executor: Annotated[
        str | None,
        typer.Option(help="local: threads; mpi: ranks of mpiexec, default under it; legate."),
    ] = None,
    mapper: Annotated[str, typer.Option(help="A mapper's name, or module:Class.")] = (
        "data_parallel"
    ),
    memory_bytes: Annotated[
        str | None, typer.Option(help="Work in a memory of that size; see bounded_memory.")
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
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, dropout and order.")] = 0,
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
        typer.Option(help="How the graph is cut: learned (the default), vertex, edge or metis."),
    ] = None,
    partition_costs: Annotated[
        Path | None, typer.Option(help="A file of learned costs; rewritten at the end.")
    ] = None,
    reuse: Annotated[
        str | None,
        typer.Option(help="For graphs that change: off, patterns, batch or all (the default)."),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Save here after each epoch: .safetensors or .npz.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="A checkpoint to continue from.")] = None,
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

    executor = default_executor() if executor is None else executor
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
            memory_bytes=bytes_of("--memory-bytes", memory_bytes),
            strategy=strategy,
            optimize=optimize,
            step=step,
            choices=choices,
            reuse=reuse,
            fast_memory=bytes_of("--fast-memory", fast_memory),
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
