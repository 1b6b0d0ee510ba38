"""`soapstone memory`: plans for a memory that is too small for all values of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Dims, Json, bytes_of, command, dims_of, tell
from soapstone.cli.strategy import BatchSize, ModelName, Sizes

app = typer.Typer(help="Models larger than a memory: plan.", no_args_is_help=True)


@command(app, "plan")
def plan(
    model: ModelName,
    capacity: Annotated[str, typer.Option(help="Of the fast memory: 200MB, or bytes.")],
    batch_size: BatchSize = None,
    size: Sizes = None,
    dim: Dims = None,
    training: Annotated[
        bool, typer.Option("--training/--inference", help="An app's step, or its forward graph.")
    ] = True,
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors; default all cores.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each processor.")] = 1,
    method: Annotated[
        str, typer.Option(help="dp: fewest bytes; lru, stream or belady: no search.")
    ] = "dp",
    budget: Annotated[float, typer.Option(min=0, help="Seconds of search, at most.")] = 30.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here (JSON).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what holds the fast memory, node by node (.svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is copied between a fast memory and a backing one, and when, to run a model.

    `soapstone train MODEL --plan FILE` follows the plan that is written. An interrupt ends the
    search; the best plan until then is shown and written.
    """
    from soapstone.deadline import Deadline
    from soapstone.files import check_targets, write
    from soapstone.frontend.planned import launched
    from soapstone.frontend.progress import planning
    from soapstone.frontend.strategies.finding import graph_of, parse_sizes
    from soapstone.frontend.strategies.plot import memory_chart
    from soapstone.search.placement.find import memory_plan

    check_targets(output, plot)
    sizes, dims = parse_sizes(size), dims_of(dim)
    graph = graph_of(model, batch_size, training=training, sizes=sizes, dims=dims)
    footprint = launched(graph, cpus, threads)
    with planning() as progress:
        found = memory_plan(
            footprint,
            bytes_of("--capacity", capacity),
            method,
            deadline=Deadline(budget),
            progress=progress,
        )
    if output is not None:
        found.plan.save(output)
    if plot is not None:
        write(plot, memory_chart(found.plan, footprint, graph.name).encode())
    tell(found, {**found.as_dict(), "output": None if output is None else str(output)}, as_json)
