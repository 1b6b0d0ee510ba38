"""`soapstone rules`: generate, verify, check and show the rules of the graph optimiser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soapstone.system import usable_cores

if TYPE_CHECKING:
    from soapstone.search.rules.rule import RuleFile

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
app = typer.Typer(
    help="Generate, verify, check and show the rules of the graph optimiser.",
    no_args_is_help=True,
)
File = Annotated[
    Path | None, typer.Argument(metavar="FILE", help="A rule file; default: the package's own.")
]
Processes = Annotated[
    int | None, typer.Option(min=1, help="That share the work; default: the cores.")
]


def _load(file: Path | None) -> RuleFile:
    from soapstone.search.rules import rulefile

    return rulefile.load() if file is None else rulefile.load(file)


def _show(report: Any, as_json: bool) -> None:
    from soapstone.cli.main import _print_json

    if as_json:
        _print_json(report.as_dict())
    else:
        typer.echo(str(report))


@app.command()
def generate(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")
    ] = Path("rules.json"),
    max_operators: Annotated[
        int | None, typer.Option(min=1, max=6, help="Of a graph; default: each space's own.")
    ] = None,
    operators: Annotated[
        str | None, typer.Option(help="Only these symbols: matmul,add,concat,split0.")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(help="A space of graphs; repeat. Default: all but large.")
    ] = None,
    processes: Processes = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Enumerate graphs, find the rules among them, prove them, and write them to a file."""
    from soapstone.cli.main import _reported
    from soapstone.frontend.progress import staged

    with _reported(debug), staged() as stages:
        from soapstone.rules.generate import chosen_spaces, generate

        wanted = None if operators is None else [w.strip() for w in operators.split(",")]
        spaces = chosen_spaces(space, wanted, max_operators)
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
        stages.close()
        _show(report, as_json)
        if not as_json:
            typer.echo(f"written to {output}")


@app.command()
def verify(
    file: File = None,
    processes: Processes = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Prove every rule again from the laws, and have Z3 check each derivation."""
    from soapstone.cli.main import _reported
    from soapstone.frontend.progress import staged

    with _reported(debug), staged() as stages:
        from soapstone.rules.verify import verify

        report = verify(_load(file), processes=processes or usable_cores(), progress=stages)
        stages.close()
        _show(report, as_json)
        if report.refuted:
            raise typer.Exit(1)


@app.command()
def check(
    file: File = None,
    processes: Processes = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Replay every proof of a rule file, without a prover; the exit code is 1 if one fails."""
    from soapstone.cli.main import _reported
    from soapstone.frontend.progress import staged

    with _reported(debug), staged() as stages:
        from soapstone.rules.verify import check_file

        report = check_file(_load(file), processes=processes or usable_cores(), progress=stages)
        stages.close()
        _show(report, as_json)
        if report.failed:
            raise typer.Exit(1)


@app.command()
def show(
    identity: Annotated[
        str | None, typer.Argument(metavar="ID", help="The first digits of a rule's identity.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", help="Of another rule file.")] = None,
    unproved: Annotated[
        bool, typer.Option("--unproved", help="The candidates that have no proof.")
    ] = False,
    refuted: Annotated[
        bool, typer.Option("--refuted", help="The candidates that fail at other shapes.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print rules as mathematics; one rule with its proof."""
    from soapstone.cli.main import _print_json, _reported

    with _reported(debug):
        from soapstone.rules.verify import derivation
        from soapstone.search.rules import rulefile

        rules = _load(file)
        if identity is not None:
            rule = rules.rule(identity)
            if as_json:
                _print_json(rulefile.rule_json(rule))
            else:
                typer.echo(f"{rule}\n{derivation(rule)}")
            return
        rejected = [*(rules.unproved if unproved else ()), *(rules.refuted if refuted else ())]
        if as_json:
            name = "candidates" if unproved or refuted else "rules"
            items: list[Any] = [rulefile.rejected_json(item) for item in rejected]
            if name == "rules":
                items = [rulefile.rule_json(rule) for rule in rules.rules]
            _print_json({name: items})
        elif unproved or refuted:
            typer.echo("\n".join(map(str, rejected)) or "none")
        else:
            typer.echo("\n".join(map(str, rules.rules)))


@app.command()
def stats(file: File = None, as_json: Json = False, debug: Debug = False) -> None:
    """Count the rules of a file: all, proved, guarded, derivable; by size, space and symbol."""
    from soapstone.cli.main import _print_json, _reported

    with _reported(debug):
        counts = _load(file).statistics()
        if as_json:
            _print_json(counts)
            return
        for name, value in counts.items():
            shown = value
            if isinstance(value, dict):
                shown = "  ".join(f"{key}: {count:,}" for key, count in value.items())
            typer.echo(f"{name:<16}{shown}")


@app.command()
def match(
    foreign: Annotated[
        Path, typer.Argument(metavar="FOREIGN.json", help="Rules of another system.")
    ],
    file: Annotated[Path | None, typer.Option("--file", help="Of another rule file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say of each foreign rule: in the set, derivable from it, refuted, or unknown."""
    from soapstone.cli.main import _print_json, _reported
    from soapstone.frontend.progress import staged

    with _reported(debug), staged() as stages:
        from soapstone.rules import judge
        from soapstone.rules.foreign import load
        from soapstone.rules.verify import trusted

        rules = _load(file) if file is None else trusted(file)
        judged = judge.match_all(load(foreign), rules, progress=stages)
        stages.close()
        if as_json:
            counts: dict[str, int] = dict.fromkeys(judge.VERDICTS, 0)
            for each in judged:
                counts[each.verdict] += 1
            _print_json({**counts, "matches": [each.as_dict() for each in judged]})
        else:
            typer.echo("\n".join(map(str, judged)))


@app.command()
def laws(
    validate: Annotated[
        bool, typer.Option("--validate", help="Show each at all sizes within stated bounds.")
    ] = False,
    consistency: Annotated[
        bool, typer.Option("--consistency", help="Look for contradictions and redundant laws.")
    ] = False,
    processes: Processes = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the laws that rules are proved from; validate them."""
    from soapstone.cli.main import _print_json, _reported
    from soapstone.frontend.progress import staged

    with _reported(debug), staged() as stages:
        from soapstone.rules.verify import law_report

        report = law_report(
            validate=validate,
            consistency=consistency,
            processes=processes or usable_cores(),
            progress=stages,
        )
        stages.close()
        if as_json:
            _print_json(report.as_dict())
        else:
            typer.echo(str(report))
        if report.failed:
            raise typer.Exit(1)
