"""What a search for a faster model has given: the model, its costs and times, and its files."""

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
    """An optimised model, what was predicted and measured of it, and how it came about.

    Attributes:
        graph, weights: the model; the original where the search found nothing faster.
        before, after: predicted costs; not numbers where the budget ended before anything was.
        measured_before_us, measured_after_us: medians of runs in processes of their own, taken in
            turns on the target; None where it is only described, or the budget ended before.
        substitutions: how often each rule was applied, by its identity.
        equations: the rules that were applied, as mathematics.
        candidates: how many graphs were priced. complete: whether the search ended by itself,
            before its budget did.
        seconds: of everything. measuring_seconds: of these, what measuring costs took.
        max_abs_error: the largest difference of an output from the original's on random inputs.
        kept: whether the optimised graph is the one returned. reason: why not, or what of it is
            not known.
        explanation: where the gain comes from, for people.
        dims: the extents that symbolic dims of the inputs were given: the graph is for them alone.
        layouts: axis orders of the graph's values, where others than the rule's were chosen.
        chain: the substitutions, in the form in which they can be applied again; None for training
            graphs, and where layouts were chosen or all graphs were looked at.
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
        """Measured time before over after, predicted where nothing was measured."""
        if self.measured_before_us is not None and self.measured_after_us:
            return self.measured_before_us / self.measured_after_us
        return self.predicted_speedup

    @property
    def predicted_speedup(self) -> float:
        """Predicted time before over after; 1 where there is none."""
        found = self.before.time_us / self.after.time_us if self.after.time_us else 1.0
        return found if math.isfinite(found) else 1.0

    def save(self, path: str | Path) -> str:
        """Write the model: an ONNX file by its suffix, else a graph file and its weights.

        An original that is kept, with symbolic dims, is written as its file has it.

        Returns "", or where what was found cannot be written, why the original was.

        Raises:
            GraphError: the original cannot be written either: an operator has no counterpart in
                ONNX.
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
        """Write the substitutions to a file, to be applied again without a search.

        Raises:
            GraphError: the result is of a kind that has no chain.
        """
        if self.chain is None:
            raise GraphError("no chain: inference without layouts or exhaustive search needed")
        self.chain.save(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON; what is not known is None."""
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
        """Return what was measured and predicted: a name, before and after."""
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
    """The model that was given, to be written where what was found of it cannot be."""

    graph: Graph
    weights: Mapping[str, Array]
    file: Path | None = None

    def save(self, path: str | Path, graph: Graph) -> bool:
        """Write it, as it is in its own file if that is of the same format; return whether so."""
        if graph is not self.graph:
            try:
                _save(self.graph, self.weights, path)
                return True
            except GraphError:
                pass
        return self.copy(path)

    def copy(self, path: str | Path) -> bool:
        """Write its file again, if both are ONNX files that stand alone; return whether so."""
        suffixes = {Path(name).suffix.lower() for name in (path, self.file or "")}
        if self.file is None or suffixes != {".onnx"} or _has_data(self.file):
            return False
        write(path, self.file.read_bytes())
        return True


def _has_data(file: Path) -> bool:
    """Return whether an ONNX file has weights in other files, which are found from its folder."""
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
