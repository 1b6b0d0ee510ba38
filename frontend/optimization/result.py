"""The result of a search for a faster model: the model, its costs and times, and its files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.files import write
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.search.cost import Cost

if TYPE_CHECKING:
    from soapstone.search.optimize.chain import Chain

_OTHER_SIZES = "another size needs a search of its own"


@dataclass(frozen=True)
class OptimizeResult:
    """An optimised model, with its predicted and measured costs and how it was found.

    Attributes:
        graph, weights: the model; the original if the search found nothing faster.
        before, after: predicted costs; NaN if the budget ended before anything was priced.
        measured_before_us, measured_after_us: medians of runs in processes of their own, taken in
            turns on the target; None if it is only described, or the budget ended before.
        substitutions: how often each rule was applied, by its identity.
        equations: the rules that were applied, as mathematics.
        candidates: the number of graphs priced. complete: whether the search ended before its
            budget.
        seconds: of everything. measuring_seconds: of these, the time spent measuring costs.
        max_abs_error: the largest difference of an output from the original's on random inputs.
        kept: whether the optimised graph is the one returned. reason: why not, or what is not known
            of it.
        explanation: where the gain comes from, for people.
        dims: the extents of symbolic dims of the inputs; the graph is for them alone.
        layouts: the axis orders of the graph's values that differ from the rule's.
        chain: the substitutions, in a form in which they can be applied again; None for training
            graphs, if layouts were chosen, or if all graphs were considered.
        original: the model as it was given.
    """

    graph: Graph
    weights: Mapping[str, Array]
    before: Cost
    after: Cost
    measured_before_us: float | None
    measured_after_us: float | None
    substitutions: Mapping[str, int]
    equations: Mapping[str, str]
    candidates: int
    complete: bool
    seconds: float
    measuring_seconds: float
    max_abs_error: float
    kept: bool
    explanation: str = field(default="", repr=False)
    layouts: Layouts | None = None
    chain: Chain | None = field(default=None, repr=False)
    reason: str = ""
    dims: Mapping[str, int] = field(default_factory=dict)
    original: Original | None = field(default=None, repr=False)

    @property
    def speedup(self) -> float:
        """The measured time before over that after; the predicted one if nothing was measured."""
        if self.measured_before_us is not None and self.measured_after_us:
            return self.measured_before_us / self.measured_after_us
        return self.predicted_speedup

    @property
    def predicted_speedup(self) -> float:
        """The predicted time before over that after; 1 if there is none."""
        found = self.before.time_us / self.after.time_us if self.after.time_us else 1.0
        return found if math.isfinite(found) else 1.0

    def save(self, path: str | Path) -> str:
        """Save the model: as an ONNX file by its suffix, else as a graph file with its weights.

        path: of the file. An original that is kept is saved with its symbolic dims, as its file has
        it.

        Returns "", or if the optimised model cannot be saved, why the original was saved.

        Raises:
            GraphError: the original cannot be saved either: an operator has no counterpart in ONNX.
        """
        if not self.kept and self.dims and self.original and self.original.copy(path):
            return ""
        try:
            _save(self.graph, self.weights, path, self.layouts)
            return ""
        except GraphError as error:
            if self.original is None or not self.original.save(path, self.graph):
                raise
            return f"what was found cannot be written: {error}"

    def save_chain(self, path: str | Path) -> None:
        """Save the substitutions to a file, to be applied again without a search.

        path: of the file.

        Raises:
            GraphError: a result of a kind that has no chain.
        """
        if self.chain is None:
            raise GraphError("no chain: inference without layouts or exhaustive search needed")
        self.chain.save(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON data; None for what is not known."""
        found = {
            "cost_before_us": self.before.time_us,
            "cost_after_us": self.after.time_us,
            "estimated": self.after.estimated,
            "measured_before_us": self.measured_before_us,
            "measured_after_us": self.measured_after_us,
            "speedup": self.speedup,
            "predicted_speedup": self.predicted_speedup,
            **{
                f"{name}_{when}": getattr(cost, name)
                for name in ("launches", "bytes", "flops")
                for when, cost in (("before", self.before), ("after", self.after))
            },
            "substitutions": dict(self.substitutions),
            "candidates": self.candidates,
            "complete": self.complete,
            "seconds": self.seconds,
            "measuring_seconds": self.measuring_seconds,
            "max_abs_error": self.max_abs_error,
            "kept": self.kept,
            "reason": self.reason,
            "dims": dict(self.dims),
            "layouts": None if self.layouts is None else len(self.layouts),
        }
        unknown = {n for n, v in found.items() if isinstance(v, float) and not math.isfinite(v)}
        return {**found, **dict.fromkeys(unknown)}

    def metrics(self) -> list[tuple[str, float, float]]:
        """Return the measured and predicted figures: a name, the value before and after."""
        before, after = self.before, self.after
        measured = []
        if self.measured_before_us is not None and self.measured_after_us is not None:
            measured = [("measured us", self.measured_before_us, self.measured_after_us)]
        estimated = " (estimated)" if after.estimated else ""
        return [
            *measured,
            (f"predicted us{estimated}", before.time_us, after.time_us),
            ("launches", before.launches, after.launches),
            ("bytes moved", before.bytes, after.bytes),
            ("operations", before.flops, after.flops),
            ("peak bytes", before.peak_bytes, after.peak_bytes),
        ]

    def __str__(self) -> str:
        lines = [f"{self.graph.name}: {len(self.graph.nodes)} operators"]
        if math.isnan(self.before.time_us):
            return f"{lines[0]}\n  {self.reason}"
        if self.dims:
            given = ", ".join(f"{name} = {extent}" for name, extent in self.dims.items())
            lines.append(f"  {'' if self.kept else 'searched '}for {given} alone; {_OTHER_SIZES}")
        rows = self.metrics()
        lines += [f"  {name:<24} {one:>14,.0f} -> {two:>14,.0f}" for name, one, two in rows]
        if self.measured_after_us is not None:
            gains = f"{self.speedup:.2f}x where {self.predicted_speedup:.2f}x was predicted"
            lines.append(f"  measured {gains}")
        lines.append(
            f"  {self.speedup:.2f}x, found in {self.seconds:.1f} s among {self.candidates} graphs"
            + ("" if self.complete else " (not searched to the end)")
        )
        if self.reason:
            lines.append(f"  {'' if self.kept else 'the original is kept: '}{self.reason}")
        for name, count in sorted(self.substitutions.items(), key=lambda item: -item[1]):
            lines.append(f"  {count:4d} x {name}  {self.equations[name]}")
        if self.max_abs_error:
            lines.append(f"  outputs differ by at most {self.max_abs_error:.2g}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True)
class Original:
    """The model that was given, saved if the optimised one cannot be."""

    graph: Graph
    weights: Mapping[str, Array]
    file: Path | None = None

    def save(self, path: str | Path, graph: Graph) -> bool:
        """Save it, from its own file if the format is the same; return whether it was saved."""
        if graph is not self.graph:
            try:
                _save(self.graph, self.weights, path)
                return True
            except GraphError:
                pass
        return self.copy(path)

    def copy(self, path: str | Path) -> bool:
        """Copy its file if both are ONNX files without external data; return whether it did."""
        suffixes = {Path(name).suffix.lower() for name in (path, self.file or "")}
        if self.file is None or suffixes != {".onnx"} or _has_data(self.file):
            return False
        write(path, self.file.read_bytes())
        return True


def _has_data(file: Path) -> bool:
    """Return whether an ONNX file has weights in other files, relative to its folder."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    return any(tensor.external_data for tensor in model.graph.initializer)


def _save(
    graph: Graph, weights: Mapping[str, Array], path: str | Path, layouts: Layouts | None = None
) -> None:
    if str(path).lower().endswith(".onnx"):
        from soapstone.frontend.onnx import to_onnx

        to_onnx(graph, weights, path, layouts=layouts)
    else:
        from soapstone.ir.files.graphs import save_graph

        save_graph(graph, path, dict(weights) or None, layouts)
