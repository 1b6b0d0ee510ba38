"""`soapstone profile`: what a timeline says; whether a logged run obeyed its dependences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.onnx import Debug, Json

app = typer.Typer(help="Timelines and logs of runs: show, check.", no_args_is_help=True)


@app.command("show")
def show(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE [FILE]", help="One timeline, or two to compare."),
    ],
    by: Annotated[
        str, typer.Option(help="operator: one row for a kind of work; name: for a launch.")
    ] = "operator",
    top: Annotated[int, typer.Option(min=1, help="Rows of the tables.")] = 12,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Draw the timeline here (SVG).")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say where the time of a run went: processors, operators, critical path, links.

    Reads what `train --profile` and `strategy simulate --timeline` write.
    """
    from soapstone.cli.main import _print_json, _reported  # it imports this module

    with _reported(debug):
        from soapstone.files import check_targets
        from soapstone.runtime.observe.profile import Profile
        from soapstone.runtime.observe.summary import summarise
        from soapstone.runtime.observe.summary_text import compared, text
        from soapstone.runtime.observe.timeline_picture import save_picture

        if len(files) > 2:
            raise ValueError(f"{len(files)} timelines found, one or two needed")
        if output is not None and len(files) > 1:
            raise ValueError("--output draws one timeline, two found")
        check_targets(output)
        profiles = [Profile.load(path) for path in files]
        summaries = [summarise(profile, by) for profile in profiles]
        if output is not None:
            save_picture(profiles[0], output)
        if as_json:
            whole = [summary.as_dict() for summary in summaries]
            _print_json(whole[0] if len(whole) == 1 else {"first": whole[0], "second": whole[1]})
        elif len(summaries) == 1:
            typer.echo(text(summaries[0], top))
        else:
            typer.echo(compared(summaries[0], summaries[1], top))


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="LOG", help="What `Runtime(log=...)` wrote.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a logged run obeyed the dependences of its program; exit code 1 if not.

    Works them out again from regions, tiles and privileges, and follows every value that is read.
    """
    from soapstone.cli.main import _print_json, _reported

    with _reported(debug):
        from soapstone.runtime.observe.checker import check_log

        report = check_log(file)
        typer.echo(str(report), err=as_json)
        if as_json:
            _print_json(report.as_dict())
        if not report.accepted:
            raise typer.Exit(1)
