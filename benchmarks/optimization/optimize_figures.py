"""The figures and tables of MetaFlow and TASO about graph optimisation, on soapstone's executor.

    python benchmarks/optimization/optimize_figures.py [--only alpha,groups] [--models nasrnn]

| `--only` | is | of |
| --- | --- | --- |
| `alpha` | cost of the best graph and seconds of search, by alpha | MetaFlow, Figure 10 |
| `modules` | modules before and after, by metric | MetaFlow, Figure 6 |
| `devices` | one Inception module for two described devices | MetaFlow, Figure 7 |
| `metrics` | models before and after, by metric | MetaFlow, Table 2 |
| `rules` | which model used which rule how often | TASO, Figure 2.10 |
| `groups` | the 32 convolutions of ResNeXt-50, in so many launches or groups | TASO, Figure 2.9d |
| `sizes` | speedup by the most operators of a rule | TASO, Figure 2.11 |

Searches are by measured costs of single launches; where their seconds are told, a first one fills
the database and does not count. `modules` and `metrics` also measure whole graphs, in turns.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import geometric_means, show, write
from models import export

import soapstone
from soapstone.apps.images import inception, squeezenet
from soapstone.frontend.model import Model
from soapstone.frontend.optimization.result import OptimizeResult
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.search.cost import ExecutorCost
from soapstone.system import usable_cores

Row = dict[str, Any]
Weighted = tuple[Graph, dict[str, Array]]
ALPHAS = (1.2, 1.1, 1.05, 1.02, 1.01, 1.0)
SIZES = (4, 3, 2, 1)
DEVICES = ("p100", "v100")
BATCHES = (1, 8)
MODELS = {  # by figure; modules are built here, the others are exported
    "alpha": ("inception e", "squeezenet", "nasrnn"),
    "metrics": ("resnet50", "resnext50_branches", "squeezenet", "inception_v3", "nasrnn", "rnntc"),
    "rules": ("resnet50", "resnext50_branches", "squeezenet", "inception_v3", "nasrnn", "rnntc"),
    "sizes": ("resnext50_branches", "nasrnn", "squeezenet"),
}
RESNEXT = ((128, 56), (256, 28), (512, 14), (1024, 7))  # channels and extent of grouped 3x3
GROUPS = (32, 16, 8, 4, 2, 1)


class Figures:
    """The figures, each a function that yields the rows of its table."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.known: dict[tuple[object, ...], OptimizeResult] = {}

    def names(self, figure: str) -> tuple[str, ...]:
        chosen = self.options.models
        return tuple(chosen.split(",")) if chosen else MODELS[figure]

    def best(self, name: str, **given: Any) -> OptimizeResult:
        """Return what the search finds for a model; figures share what they have in common."""
        key = (name, *given.items())
        if key not in self.known:
            model, weights = self.of(name)
            options = {"seconds": self.options.seconds, "threads": self.options.threads, **given}
            self.known[key] = soapstone.optimize(model, weights, **options)
        return self.known[key]

    def timed(self, name: str, **given: Any) -> OptimizeResult:
        """As `best`, but all launches were measured before."""
        if not any(known == name for known, *_ in self.known):
            self.best(name, **{**given, "seconds": 300.0})
        return self.best(name, **given)

    def of(self, name: str) -> tuple[Path, dict[str, Array]] | Weighted:
        """Return a model by its name: a file, or the graph and weights of a module."""
        if name in MODULES:
            return drawn(MODULES[name]())
        return export(name, self.options.folder), {}

    def alpha(self) -> Iterator[Row]:
        for name in self.names("alpha"):
            for alpha in ALPHAS:
                found = self.timed(name, alpha=alpha)
                yield {
                    "model": name,
                    "alpha": alpha,
                    "before us": found.before.time_us,
                    "best us": found.after.time_us,
                    "": bar(found.after.time_us / found.before.time_us),
                    "search s": found.seconds,
                    "graphs": found.candidates,
                    "to the end": found.complete,
                }

    def modules(self) -> Iterator[Row]:
        for name in MODULES:
            yield {"module": name, **metrics(self.best(name))}

    def devices(self) -> Iterator[Row]:
        for batch, device in itertools.product(BATCHES, DEVICES):
            graph, weights = drawn(inception.module(batch), batch)
            found, every = (
                soapstone.optimize(graph, weights, machine=device, rules="metaflow", method=method)
                for method in ("backtracking", "exhaustive")
            )
            yield {
                "batch": batch,
                "device": device,
                "before us (estimated)": found.before.time_us,
                "best us (estimated)": found.after.time_us,
                "of all graphs": every.after.time_us,
                "certified": every.complete,
                "launches": f"{found.before.launches} -> {found.after.launches}",
                "convolutions of the best graph": convolutions(every.graph),
            }

    def metrics(self) -> Iterator[Row]:
        for name in self.names("metrics"):
            yield {"model": name, **metrics(self.best(name))}

    def rules(self) -> Iterator[Row]:
        found = {name: self.best(name) for name in self.names("rules")}
        used: dict[str, str] = {}
        for result in found.values():
            used |= result.equations
        for rule, equation in sorted(used.items(), key=lambda item: (len(item[1]), item)):
            counts = {name: result.substitutions.get(rule, "") for name, result in found.items()}
            yield {"rule": rule[:7], **counts, "as mathematics": f"`{equation}`"}

    def groups(self) -> Iterator[Row]:
        """32 convolutions: as they are, as launches of so many, and as fewer groups with zeros."""
        model = ExecutorCost(self.options.threads)
        for channels, size in RESNEXT:
            base = model.cost(*grouped(channels, size, 32)).time_us
            for groups in GROUPS:
                apart = model.cost(*grouped(channels, size, 32 // groups, launches=groups)).time_us
                wide = model.cost(*grouped(channels, size, groups)).time_us
                yield {
                    "channels": channels,
                    "extent": size,
                    "n": groups,
                    "n launches of 32/n groups, us": apart,
                    "/ one launch": apart / base,
                    "one launch of n wider groups, us": wide,
                    "wider / one launch": wide / base,
                    "": bar(wide / base),
                }

    def sizes(self) -> Iterator[Row]:
        for name in self.names("sizes"):
            row: Row = {"model": name}
            for size in SIZES:
                found = self.timed(name, max_rule_size=size)
                row[f"up to {size}"] = found.before.time_us / found.after.time_us
                row[f"up to {size}, s"] = found.seconds
            yield row


MODULES: dict[str, Callable[[], Model]] = {
    **{
        f"inception {kind}": functools.partial(inception.module, kind=kind)
        for kind in inception.MODULES
    },
    "fire": squeezenet.module,
}
TITLES = {
    "alpha": "Best graph and search time by alpha",
    "modules": "Modules of Inception-v3 and SqueezeNet, by metric",
    "devices": "An Inception module for described devices",
    "metrics": "Models before and after, by metric",
    "rules": "Which rules each model used",
    "groups": "The 32 convolutions of ResNeXt-50, in n launches or n groups",
    "sizes": "Predicted speedup by the most operators of a rule",
}


def drawn(model: Model, batch: int = 1) -> Weighted:
    """Return the forward graph of a model, and seeded weights."""
    graph = model.build(batch)
    random = np.random.default_rng(0)
    weights = {
        name: random.random(graph.tensors[name].shape, np.float32) * np.float32(0.1) + 0.01
        for name, role in graph.roles.items()
        if role is not Role.INPUT
    }
    return graph, {name: array.astype(np.float32) for name, array in weights.items()}


def metrics(found: OptimizeResult) -> Row:
    """Return what a model costs before and after; measured where the search found anything."""
    before, after = found.before, found.after
    row: Row = {}
    if found.measured_before_us is not None and found.measured_after_us is not None:
        row |= {"ms": found.measured_before_us / 1e3, "ms after": found.measured_after_us / 1e3}
    return row | {
        "predicted ms": before.time_us / 1e3,
        "predicted ms after": after.time_us / 1e3,
        "speedup": found.speedup,
        "MB moved": f"{before.bytes / 1e6:.3g} -> {after.bytes / 1e6:.3g}",
        "launches": f"{before.launches} -> {after.launches}",
        "GFLOP": f"{before.flops / 1e9:.3g} -> {after.flops / 1e9:.3g}",
        "GFLOP/s": f"{before.flops / before.time_us / 1e3:.3g} -> "
        f"{after.flops / after.time_us / 1e3:.3g}",
        "kept": found.kept,
    }


def convolutions(graph: Graph) -> str:
    """Return the convolutions of a graph as height x width x channels."""
    kernels = [graph.tensors[n.inputs[1]].shape for n in graph.nodes if n.operator == "conv2d"]
    return ", ".join(f"{h}x{w}x{channels}" for channels, _, h, w in sorted(kernels))


def grouped(channels: int, size: int, groups: int, launches: int = 1) -> Weighted:
    """Return grouped 3x3 convolutions of an image, each of its part of the channels."""
    builder = GraphBuilder("groups")
    x = builder.input("x", (1, channels, size, size))
    part = channels // launches
    parts = builder.apply("split", x, axis=1, sizes=(part,) * launches) if launches > 1 else (x,)
    weights: dict[str, Array] = {}
    made = []
    for number, piece in enumerate(parts):
        w = builder.input(f"w{number}", (part, part // groups, 3, 3), role=Role.PARAMETER)
        weights[w] = np.full((part, part // groups, 3, 3), 0.1, np.float32)
        given = {"groups": groups, "padding": (1, 1, 1, 1), "bias": False}
        made += builder.apply("conv2d", piece, w, **given)
    builder.output(*(builder.apply("concat", *made, axis=1) if launches > 1 else made))
    return builder.build(), weights


def bar(share: float, width: int = 20) -> str:
    """Return a bar as long as a share of `width`, at most twice that."""
    return "▇" * min(2 * width, round(width * share))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default=",".join(TITLES), help=", ".join(TITLES))
    parser.add_argument("--models", help="other models, of benchmarks/models.py")
    parser.add_argument("--seconds", type=float, default=20.0, help="of one search")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "soapstone")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    figures = Figures(options)
    for only in options.only.split(","):
        rows: list[Row] = []
        for row in getattr(figures, only)():
            rows.append(row)
            show(row)
        if not rows:
            print(f"{only}: nothing was found")
            continue
        ratios = [key for key in rows[0] if key == "speedup" or key.startswith("up to")]
        if ratios:
            means = geometric_means(rows, [key for key in ratios if not key.endswith(" s")])
            rows.append({next(iter(rows[0])): "geometric mean", **means})
        if not options.no_write:
            columns = list(dict.fromkeys(key for row in rows for key in row))
            command = f"python benchmarks/optimization/optimize_figures.py --only {only}"
            write(f"optimize_{only}", TITLES[only], command, columns, rows)


if __name__ == "__main__":
    main()
