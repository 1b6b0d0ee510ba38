"""Summaries of profiles as tables to read, one of them or two side by side."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.runtime.observe.summary import Summary, Work
from soapstone.text_table import lines_of


def _us(ns: float) -> str:
    return f"{ns / 1e3:,.1f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Rows under a header; the first `texts` columns are aligned left, the others right."""
    return "\n".join(lines_of([header, *rows], texts))


def _more(shown: int, there: int) -> str:
    return f"\n({there - shown} more: --top)" if there > shown else ""


def text(summary: Summary, top: int = 12) -> str:
    """A summary as tables. top: rows of the tables of operators and of the critical path."""
    steps = max(1, summary.steps)
    parts = [
        f"{summary.name}: {_us(summary.wall_ns)} us, {summary.steps} steps of "
        f"{_us(summary.wall_ns / steps)} us, {summary.events} operations, "
        f"{summary.ranks} rank{'s' * (summary.ranks != 1)}, "
        f"processors busy {summary.utilisation:.0%}",
        table(
            ("rank", "processor", "busy us", "waiting us", "idle us", "busy"),
            [
                (
                    *(str(row.rank), f"{row.name} ({row.kind})"),
                    *map(_us, (row.busy_ns, row.wait_ns, row.idle_ns)),
                    f"{row.busy_ns / summary.wall_ns if summary.wall_ns else 0:.0%}",
                )
                for row in summary.rows
            ],
            texts=2,
        ),
        table(
            ("operator", "kind", "count", "total us", "mean us", "share", "imbalance"),
            [
                (
                    *(work.name, work.category, str(work.count)),
                    *(_us(work.total_ns), _us(work.mean_ns)),
                    *(f"{work.share:.1%}", f"{work.imbalance:.2f}"),
                )
                for work in summary.work[:top]
            ],
            texts=2,
        )
        + _more(top, len(summary.work)),
        f"critical path: {sum(part.count for part in summary.path)} parts; no number of "
        f"processors takes less than {_us(summary.bound_ns)} us\n"
        + table(
            ("on the path", "kind", "count", "total us", "share"),
            [
                (
                    *(part.name, part.category, str(part.count)),
                    *(_us(part.total_ns), f"{part.share:.1%}"),
                )
                for part in summary.path[:top]
            ],
            texts=2,
        )
        + _more(top, len(summary.path)),
    ]
    if summary.links:
        parts.append(
            table(
                ("from", "to", "count", "bytes", "busy us", "GB/s"),
                [
                    (
                        *(link.source or "several", link.target or "several", str(link.count)),
                        *(f"{link.nbytes:,}", _us(link.busy_ns)),
                        f"{link.bytes_per_s / 1e9:.2f}",
                    )
                    for link in summary.links
                ],
                texts=2,
            )
        )
    return "\n\n".join(parts)


def compared(one: Summary, two: Summary, top: int = 12) -> str:
    """Two summaries side by side, times a step, with the ratio of the second to the first."""
    first, second = max(1, one.steps), max(1, two.steps)
    works = [{(w.category, w.name): w for w in summary.work} for summary in (one, two)]
    keys = sorted({*works[0], *works[1]}, key=lambda key: -_step_ns(works, (first, second), key))
    rows = [
        _compared("step", one.wall_ns / first, two.wall_ns / second),
        _compared("longest chain", one.bound_ns / first, two.bound_ns / second),
        (
            *("processors busy", f"{one.utilisation:.0%}", f"{two.utilisation:.0%}"),
            f"{two.utilisation / one.utilisation:.2f}" if one.utilisation else "-",
        ),
        *(
            _compared(
                f"{key[1]} ({key[0]})",
                works[0][key].total_ns / first if key in works[0] else None,
                works[1][key].total_ns / second if key in works[1] else None,
            )
            for key in keys[:top]
        ),
        _compared(
            "bytes moved",
            sum(link.nbytes for link in one.links) / first * 1e3,
            sum(link.nbytes for link in two.links) / second * 1e3,
        ),
    ]
    return table(("us a step", one.name, two.name, "ratio"), rows) + _more(top, len(keys))


def _compared(name: str, one: float | None, two: float | None) -> tuple[str, str, str, str]:
    shown = ["-" if value is None else _us(value) for value in (one, two)]
    ratio = f"{two / one:.3g}" if one and two is not None else "-"
    return (name, shown[0], shown[1], ratio)


def _step_ns(
    works: Sequence[dict[tuple[str, str], Work]], steps: Sequence[int], key: tuple[str, str]
) -> float:
    return max(
        work[key].total_ns / count if key in work else 0.0 for work, count in zip(works, steps)
    )
