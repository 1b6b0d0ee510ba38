"""An optimised model as a page: before and after, which rules were used, and every step."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from soapstone.files import write

if TYPE_CHECKING:
    from soapstone.frontend.optimization.result import OptimizeResult

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: right; }
td:first-child, th:first-child, td.rule { text-align: left; } pre { overflow-x: auto; }
rect.before { fill: #b9c4cc; } rect.after { fill: #2f7f79; } code { font-size: 13px; }
@media (prefers-color-scheme: dark) { body { background: #15191c; color: #dde3e6; } }
"""
_WIDTH = 360


def report(result: OptimizeResult) -> str:
    """Return the page as one HTML document that needs nothing else."""
    title = f"{result.graph.name}: {result.speedup:.2f}x"
    rows = "".join(
        f"<tr><td>{name}</td><td>{before:,.0f}</td><td>{after:,.0f}</td>"
        f"<td>{_bars(before, after)}</td></tr>"
        for name, before, after in result.metrics()
    )
    rules = "".join(
        f"<tr><td>{count}</td><td class=rule><code>{escape(name)}</code></td>"
        f"<td class=rule><code>{escape(result.equations[name])}</code></td></tr>"
        for name, count in sorted(result.substitutions.items(), key=lambda item: -item[1])
    )
    kept = "" if result.kept else "<p>The original is kept: what was found is not faster.</p>"
    ended = "searched to the end" if result.complete else "not searched to the end"
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>
<h1>{escape(title)}</h1>{kept}
<p>{len(result.graph.nodes)} operators; {result.candidates} graphs priced in
{result.seconds:.1f} s, {ended}; outputs differ by at most {result.max_abs_error:.2g}.</p>
<table><tr><th></th><th>before</th><th>after</th><th></th></tr>{rows}</table>
<h2>Rules</h2><table><tr><th>times</th><th class=rule>rule</th><th></th></tr>{rules}</table>
<h2>Steps</h2><pre>{escape(result.explanation or "no substitution was applied")}</pre>
</html>
"""


def save_report(result: OptimizeResult, path: str | Path) -> None:
    """Write the page of a result."""
    write(Path(path), report(result).encode())


def _bars(before: float, after: float) -> str:
    """Return two bars, one above the other, on one scale."""
    most = max(before, after) or 1.0
    bars = "".join(
        f'<rect class="{name}" y="{at}" width="{_WIDTH * value / most:.1f}" height="9"/>'
        for name, at, value in (("before", 0, before), ("after", 11, after))
    )
    return f'<svg width="{_WIDTH}" height="20" role="img">{bars}</svg>'
