"""`soapstone predict`: a model run on the arrays of a file, or timed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from soapstone.cli.common import Dims, FastMemory, Json, Plan, Precision, bytes_of, dims_of, tell
from soapstone.errors import DataError


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
        int | None,
        typer.Option(min=1, help="Threads of a processor. Default: cores are shared out."),
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
    precision: Precision = "float32",
    fast_memory: FastMemory = None,
    plan: Plan = None,
    as_json: Json = False,
) -> None:
    """Run a model on the arrays of an npz file; or measure runs, on inputs that are drawn."""
    import numpy as np

    from soapstone.files import check_suffix, check_targets, write
    from soapstone.frontend.inference import predict as task

    check_targets(output, reads=(model, inputs, checkpoint, strategy))
    check_suffix(output, ".npz")
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
    task.check_model(model)
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
        fast_memory=bytes_of("--fast-memory", fast_memory),
        plan=plan,
        **options,
    )
    if output is not None:
        arrays: dict[str, Any] = dict(task.stored(result.outputs))
        write(output, lambda stream: np.savez(stream, **arrays))
    tell(result, result.as_dict(), as_json)
