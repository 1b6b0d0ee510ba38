"""`soapstone bench tasks`: Task Bench on this runtime, what a task costs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from soapstone.cli.common import Json, command, tell

app = typer.Typer(help="Benchmarks of the runtime.", no_args_is_help=True)


@app.callback()
def _bench() -> None:
    """Benchmarks of the runtime."""


@command(app, "tasks")
def tasks(
    pattern: Annotated[
        str,
        typer.Option(
            help="trivial, no_comm, stencil_1d, stencil_1d_periodic, dom, tree, fft, all_to_all,"
            " nearest, spread or random_nearest."
        ),
    ] = "stencil_1d",
    kernel: Annotated[str, typer.Option(help="compute, memory, empty or imbalance.")] = "compute",
    body: Annotated[
        str,
        typer.Option(
            help="native: compiled entries; python: functions whose work releases the interpreter"
            " lock; pure: functions that hold it."
        ),
    ] = "native",
    workers: Annotated[int | None, typer.Option(min=1, help="Processors; default all.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Tasks of a step; default one a worker.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a run.")] = 1000,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Iterations of a task's kernel; with METG, of the largest tasks."
            " Default: 8192, and 128 of the memory kernel.",
        ),
    ] = None,
    graphs: Annotated[int, typer.Option(min=1, help="Equal graphs side by side.")] = 1,
    output_bytes: Annotated[int, typer.Option(min=0, help="Bytes that each task writes.")] = 16,
    radix: Annotated[
        int, typer.Option(min=0, help="Predecessors, for nearest, spread and random_nearest.")
    ] = 3,
    scratch_bytes: Annotated[
        int, typer.Option(min=4096, help="Scratch bytes of each point, for the memory kernel.")
    ] = 1 << 22,
    imbalance: Annotated[
        float, typer.Option(min=0, max=2, help="Spread of task sizes, for the imbalance kernel.")
    ] = 1.0,
    traced: Annotated[bool, typer.Option(help="Replay a trace, or launch every step.")] = True,
    executor: Annotated[str, typer.Option(help="local or mpi.")] = "local",
    processes: Annotated[
        bool, typer.Option("--processes", help="Python bodies run in processes of their own.")
    ] = False,
    metg: Annotated[bool, typer.Option(help="Make tasks smaller, for METG(50 %).")] = True,
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of a size, or as many as take 2 s; the fastest counts.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Run task graphs whose tasks check their inputs, and show what a task costs.

    An interrupt ends the measurement: what was measured until then is shown.
    """
    from soapstone.frontend.progress import staged
    from soapstone.frontend.taskbench import report

    options: dict[str, Any] = {
        "pattern": pattern,
        "kernel": kernel,
        "body": body,
        "workers": workers,
        "width": width,
        "steps": steps,
        "iterations": iterations,
        "graphs": graphs,
        "output_bytes": output_bytes,
        "radix": radix,
        "scratch_bytes": scratch_bytes,
        "imbalance": imbalance,
        "traced": traced,
        "executor": executor,
        "processes": processes,
        "sweep": metg,
        "repeats": repeats,
    }
    with staged(2.0) as stages:
        found = report.measure(**options, progress=stages)
    if found is None:
        return  # another process of this run tells
    tell(report.text(found), found, as_json)
