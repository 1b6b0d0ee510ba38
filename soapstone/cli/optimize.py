"""`soapstone optimize`: a faster equivalent of a model, with a report of how it was found."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Dims, Json, dims_of, print_json, tell_written, with_output


def optimize(
    model: Annotated[
        str, typer.Argument(help="An .onnx file, a graph file, or an app's name with --training.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write it here: .onnx or a graph, .json.")
    ] = None,
    target: Annotated[str, typer.Option(help="soapstone or onnxruntime.")] = "soapstone",
    machine: Annotated[
        str | None,
        typer.Option(help="A described device, by name or file: estimated; gpu: here, measured."),
    ] = None,
    objective: Annotated[
        str, typer.Option(help="time, memory, flops, bytes, launches, sums, limits.")
    ] = "time",
    alpha: Annotated[
        float, typer.Option(min=1, help="Search on from graphs up to so many times as costly.")
    ] = 1.05,
    budget: Annotated[
        float, typer.Option(min=0, help="Seconds of search, measuring and checking together.")
    ] = 120.0,
    candidates: Annotated[int, typer.Option(min=1, help="Graphs priced for one piece.")] = 300,
    method: Annotated[
        str, typer.Option(help="backtracking, saturation or exhaustive.")
    ] = "backtracking",
    layouts: Annotated[
        bool, typer.Option("--layouts", help="Choose axis orders of values too.")
    ] = False,
    rules: Annotated[
        Path | None, typer.Option(help="Another rule file, or metaflow: its substitutions.")
    ] = None,
    max_rule_size: Annotated[
        int | None, typer.Option(min=1, help="The most operators of a rule.")
    ] = None,
    floats: Annotated[
        str, typer.Option(help="What they hold: zeros, infinities too, or reals: may make NaN.")
    ] = "zeros",
    training: Annotated[bool, typer.Option("--training", help="An app's training graph.")] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Default: an app's own, 1 of inputs that take any.")
    ] = None,
    dim: Dims = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a page of what was found here (HTML).")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Show every step, proved.")] = False,
    save_chain: Annotated[
        Path | None, typer.Option(help="Write the substitutions here, to be applied again.")
    ] = None,
    chain: Annotated[
        Path | None, typer.Option(help="Apply these substitutions instead of searching.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Search for a faster equivalent of a model; check it, measure it, and write it."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.optimization.optimize import optimize as search
    from soapstone.frontend.progress import staged
    from soapstone.frontend.strategies.finding import with_constants
    from soapstone.runtime import Machine

    check_targets(output, report, save_chain, reads=(model, chain))
    check_suffix(output, *([".json"] if training else [".onnx", ".json"]))
    check_suffix(save_chain, ".json")
    check_suffix(report, ".html", what="report")
    if threads is not None:
        Machine.local(cpus=1, threads=threads)  # or says that there are too many
    taken, held = with_constants(model, batch_size) if training else (model, {})
    with staged() as stages:
        result = search(
            taken,
            held,
            dims=dims_of(dim),
            batch_size=1 if training or batch_size is None else batch_size,
            target=target,
            machine=machine,
            objective=objective,
            alpha=alpha,
            seconds=budget,
            candidates=candidates,
            method=method,
            layouts=layouts,
            rules=rules,
            max_rule_size=max_rule_size,
            threads=threads,
            progress=stages,
            chain=chain,
            floats=floats,  # type: ignore[arg-type]  # checked there
        )
    problem = "" if output is None else result.save(output)
    if save_chain is not None:
        result.save_chain(save_chain)
    if report is not None:
        from soapstone.frontend.optimization.report import save_report

        save_report(result, report)
    typer.echo(str(result), err=as_json)
    if problem:
        typer.echo(f"the original was written: {problem}", err=True)
    tell_written(output, save_chain, report, as_json=as_json)
    if explain:
        typer.echo(result.explanation or "no substitution was applied", err=as_json)
    if as_json:
        print_json(with_output(result.as_dict(), output))
