"""`soapstone profile`: what a timeline says; whether a logged run obeyed its dependences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Json, answer, command, tell

app = typer.Typer(help="Timelines and logs of runs: show, check.", no_args_is_help=True)


@command(app, "show")
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
) -> None:
    """Show where the time of a run went: processors, operators, critical path, links.

    Reads what `train --profile` and `strategy simulate --timeline` write.
    """
    from soapstone.files import check_suffix, check_targets
    from soapstone.runtime.observe.profile import Profile
    from soapstone.runtime.observe.summary import summarise
    from soapstone.runtime.observe.summary_text import compared, text
    from soapstone.runtime.observe.timeline_picture import save_picture

    if len(files) > 2:
        raise ValueError(f"{len(files)} timelines found, one or two needed")
    if output is not None and len(files) > 1:
        raise ValueError("--output draws one timeline, two found")
    check_targets(output, reads=files)
    check_suffix(output, ".svg", what="picture")
    profiles = [Profile.load(path) for path in files]
    summaries = [summarise(profile, by) for profile in profiles]
    if output is not None:
        save_picture(profiles[0], output)
    whole = [summary.as_dict() for summary in summaries]
    if len(summaries) == 1:
        answer(text(summaries[0], top), whole[0], as_json)
    else:
        pair = {"first": whole[0], "second": whole[1]}
        answer(compared(summaries[0], summaries[1], top), pair, as_json)


@command(app, "check")
def check(
    file: Annotated[Path, typer.Argument(metavar="LOG", help="What `Runtime(log=...)` wrote.")],
    as_json: Json = False,
) -> None:
    """Check that a logged run obeyed the dependences of its program; exit code 1 if not.

    Works them out again from regions, tiles and privileges, and follows every value that is read.
    """
    from soapstone.runtime.observe.checker import check_log

    report = check_log(file)
    tell(report, report.as_dict(), as_json)
    if not report.accepted:
        raise typer.Exit(1)
