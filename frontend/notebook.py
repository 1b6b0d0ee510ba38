"""What notebooks show: tables and curves as HTML, from the text that is printed elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

_STYLE = "text-align:left;font-family:ui-monospace,monospace;white-space:pre"


def table(rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table; the first row is its head."""
    head, *body = rows
    lines = [f"<caption>{escape(caption)}</caption>"] if caption else []
    lines.append(_row("th", head))
    lines += [_row("td", row) for row in body]
    return f"<table>{''.join(lines)}</table>"


def _row(kind: str, cells: Sequence[str]) -> str:
    found = "".join(f'<{kind} style="{_STYLE}">{escape(cell)}</{kind}>' for cell in cells)
    return f"<tr>{found}</tr>"


def curves(history: Mapping[str, Sequence[float]], title: str) -> str:
    """Return a picture (SVG) of values by epoch, one chart for each name without `validation_`.

    history: values by name, the numbers of their epochs under "epoch".
    """
    from soapstone.frontend.strategies.plot import COLOURS, Curve, beside, chart

    epochs = [epoch + 1 for epoch in history["epoch"]]
    names = [name for name in history if name != "epoch" and not name.startswith("validation_")]
    charts = []
    for name in names:
        pair = [each for each in (name, f"validation_{name}") if len(history.get(each, ())) > 0]
        drawn = [
            Curve(each, COLOURS[place], list(zip(epochs, history[each])))
            for place, each in enumerate(pair)
        ]
        charts.append(chart(title, "epoch", name, drawn))
    return beside(charts)
