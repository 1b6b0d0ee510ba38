"""`soapstone rules`: generate, verify, check and show the rules of the graph optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soapstone.cli.common import Json, answer, command
from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.search.rules.rule import RuleFile

app = typer.Typer(
    help="Generate, verify, check and show the rules of the graph optimiser.",
    no_args_is_help=True,
)
File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A rule file; default: the package's own.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="Processes that share the work; default: one a core.")
]


def _load(file: Path | None) -> RuleFile:
    from soapstone.search.rules import rulefile

    return rulefile.load() if file is None else rulefile.load(file)


@command(app)
def generate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")
    ] = Path("rules.json"),
    max_operators: Annotated[
        int | None,
        typer.Option(
            min=1, max=6, help="The most operators of a graph; default: each space's own."
        ),
    ] = None,
    operators: Annotated[
        str | None, typer.Option(help="Only these symbols: matmul,add,concat,split0.")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(help="A space of graphs; repeat. Default: all but large.")
    ] = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Enumerate graphs, find the rules among them, prove them, and write them to a file."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.progress import staged
    from soapstone.rules.generate import chosen_spaces, generate

    check_targets(output)
    check_suffix(output, ".json")
    wanted = None if operators is None else [w.strip() for w in operators.split(",")]
    spaces = chosen_spaces(space, wanted, max_operators)
    with staged() as stages:
        try:
            _, report = generate(
                spaces, output, processes=processes or usable_cores(), progress=stages
            )
        except KeyboardInterrupt:
            stages.close()
            typer.echo(
                f"finished stages are in {output}.partial; the same command goes on", err=True
            )
            raise
    answer(f"{report}\nwritten to {output}", report.as_dict(), as_json)


@command(app)
def verify(
    file: File = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Prove every rule again from the laws, and have Z3 check each derivation."""
    from soapstone.frontend.progress import staged
    from soapstone.rules.file_checks import verify

    with staged() as stages:
        report = verify(_load(file), processes=processes or usable_cores(), progress=stages)
    answer(report, report.as_dict(), as_json)
    if report.refuted:
        raise typer.Exit(1)


@command(app)
def check(
    file: File = None,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """Replay every proof of a rule file, without a prover; the exit code is 1 if one fails."""
    from soapstone.frontend.progress import staged
    from soapstone.rules.file_checks import check_file

    with staged() as stages:
        report = check_file(_load(file), processes=processes or usable_cores(), progress=stages)
    answer(report, report.as_dict(), as_json)
    if report.failed:
        raise typer.Exit(1)


@command(app)
def show(
    identity: Annotated[
        str | None, typer.Argument(metavar="ID", help="The first digits of a rule's identity.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Another rule file.")] = None,
    unproved: Annotated[
        bool, typer.Option("--unproved", help="The candidates that have no proof.")
    ] = False,
    refuted: Annotated[
        bool, typer.Option("--refuted", help="The candidates that fail at other shapes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print rules as mathematics; one rule with its proof."""
    from soapstone.rules.file_checks import derivation
    from soapstone.search.rules import rulefile

    rules = _load(file)
    if identity is not None:
        rule = rules.rule(identity)
        answer(f"{rule}\n{derivation(rule)}", rulefile.rule_json(rule), as_json)
    elif unproved or refuted:
        rejected = [*(rules.unproved if unproved else ()), *(rules.refuted if refuted else ())]
        items = [rulefile.rejected_json(item) for item in rejected]
        answer("\n".join(map(str, rejected)) or "none", {"candidates": items}, as_json)
    else:
        items = [rulefile.rule_json(rule) for rule in rules.rules]
        answer("\n".join(map(str, rules.rules)), {"rules": items}, as_json)


@command(app)
def stats(file: File = None, as_json: Json = False) -> None:
    """Count the rules of a file: all, proved, guarded, derivable; by size, space and symbol."""
    counts = _load(file).statistics()
    lines = []
    for name, value in counts.items():
        shown = value
        if isinstance(value, dict):
            shown = "  ".join(f"{key}: {count:,}" for key, count in value.items())
        lines.append(f"{name:<16}{shown}")
    answer("\n".join(lines), counts, as_json)


@command(app)
def match(
    foreign: Annotated[
        Path, typer.Argument(metavar="FOREIGN.json", help="Rules of another system.")
    ],
    file: Annotated[Path | None, typer.Option("--file", help="Another rule file.")] = None,
    as_json: Json = False,
) -> None:
    """Judge each foreign rule: in the set, derivable from it, refuted, or unknown."""
    from soapstone.frontend.progress import staged
    from soapstone.rules import foreign_verdicts
    from soapstone.rules.file_checks import trusted
    from soapstone.rules.foreign import load

    with staged() as stages:
        rules = _load(file) if file is None else trusted(file)
        judged = foreign_verdicts.match_all(load(foreign), rules, progress=stages)
    counts: dict[str, Any] = dict.fromkeys(foreign_verdicts.VERDICTS, 0)
    for each in judged:
        counts[each.verdict] += 1
    counts["matches"] = [each.as_dict() for each in judged]
    answer("\n".join(map(str, judged)), counts, as_json)


@command(app)
def laws(
    validate: Annotated[
        bool, typer.Option("--validate", help="Show each at all sizes within stated bounds.")
    ] = False,
    consistency: Annotated[
        bool, typer.Option("--consistency", help="Look for contradictions and redundant laws.")
    ] = False,
    processes: Processes = None,
    as_json: Json = False,
) -> None:
    """List the laws that rules are proved from; validate them."""
    from soapstone.frontend.progress import staged
    from soapstone.rules.laws.report import law_report

    with staged() as stages:
        report = law_report(
            validate=validate,
            consistency=consistency,
            processes=processes or usable_cores(),
            progress=stages,
        )
    answer(report, report.as_dict(), as_json)
    if report.failed:
        raise typer.Exit(1)
