"""`soapstone memory`: plans for a memory that is too small for all values of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Cpus, Dims, Json, Threads, command, dims_of, tell, with_output
from soapstone.cli.strategy import BatchSize, ModelName, Sizes
from soapstone.limits import size_of

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
    cpus: Cpus = None,
    threads: Threads = 1,
    method: Annotated[
        str, typer.Option(help="dp: fewest bytes; lru, stream or belady: no search.")
    ] = "dp",
    minimize: Annotated[
        str, typer.Option(help="bytes that are copied, or time: of nodes, measured, and copies.")
    ] = "bytes",
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute values anew where that is better.")
    ] = False,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Times are of steps trained with --overlap.")
    ] = False,
    machine: Annotated[
        str | None, typer.Option(help="A described GPU in place of this computer: estimated times.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds, measuring among them, at most. By default 30 of search."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here (JSON).")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw what holds the fast memory, node by node (.svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan what is copied between a fast memory and a backing one, and when, to run a model.

    `soapstone train MODEL --plan FILE` follows the plan that is written. An interrupt ends the
    search; the best plan until then is shown and written.
    """
    from soapstone.deadline import Deadline, TimeUpError
    from soapstone.files import check_suffix, check_targets, write
    from soapstone.frontend.memory_plans import SECONDS, Launches
    from soapstone.frontend.progress import planning
    from soapstone.frontend.strategies.finding import parse_sizes, with_constants
    from soapstone.frontend.strategies.plot import memory_chart
    from soapstone.ir.errors import GraphError
    from soapstone.search.placement.find import TIME, memory_plan
    from soapstone.search.placement.recomputation import recomputing

    check_targets(output, plot, reads=(model,))
    check_suffix(output, ".json")
    check_suffix(plot, ".svg", what="picture")
    deadline = Deadline(budget)
    sizes, dims = parse_sizes(size), dims_of(dim)
    capacity_bytes = size_of("--capacity", capacity)
    graph, contents = with_constants(model, batch_size, training=training, sizes=sizes, dims=dims)
    launches = Launches(
        *(graph, cpus, threads),
        timed=minimize == TIME,
        contents=contents,
        copiers=overlap,
        machine=machine,
        deadline=deadline,
    )
    try:
        footprint, times = launches(())
    except TimeUpError:
        raise GraphError(
            "--budget ended before the times of nodes were known; a larger one needed, or the same"
            " again: what was measured by then is kept"
        ) from None
    deadline = Deadline(SECONDS) if budget is None else deadline
    with planning() as progress:
        if recompute:
            found = recomputing(
                launches.values,
                launches,
                capacity_bytes,
                method,
                minimize=minimize,
                deadline=deadline,
                progress=progress,
            )
        else:
            found = memory_plan(
                footprint,
                capacity_bytes,
                method,
                deadline=deadline,
                progress=progress,
                minimize=minimize,
                times=times,
            )
    if output is not None:
        found.plan.save(output)
    if plot is not None:
        footprint, _ = launches(found.plan.recomputed)
        write(plot, memory_chart(found.plan, footprint, graph.name).encode())
    tell(found, with_output(found.as_dict(), output), as_json)
