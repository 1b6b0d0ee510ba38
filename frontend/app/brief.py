"""What training begins with, in a few lines; the program and the strategy are its long form."""

from __future__ import annotations

from collections import Counter

from soapstone.frontend.data.sets import Splits
from soapstone.frontend.model import Model


def brief(model: Model, splits: Splits, epochs: int, batch_size: int) -> str:
    """Return a line each on a compiled model, its data, how it is trained, and where.

    epochs, batch_size: of the training to come.
    """
    trainer = model.trainer
    graph, step = model.graph, trainer.training_graph(trainer.part_size(batch_size))
    shapes = model.parameters().values()
    count = sum(_size(shape) for shape in shapes)
    objective = trainer.objective
    losses = ", ".join(dict.fromkeys(type(term.loss).__name__ for term in objective.terms))
    measured = ", ".join(objective.names[1:]) or "nothing besides"
    workers = trainer.machine.workers
    strategy = trainer.strategy_for(trainer.part_size(batch_size))
    split = Counter(
        "x".join(str(degree) for degree in item.degrees.values() if degree > 1) or "1"
        for item in strategy.configurations.values()
    )
    several = sum(number for degrees, number in split.items() if degrees != "1")
    rows = {
        "model": f"{model.name}: {len(graph.nodes)} operators, {count:,} parameters in"
        f" {len(shapes)} arrays, {graph.flops() / 1e6:,.1f} MFLOP forward",
        "data": str(splits),
        "training": f"{epochs} epochs, batches of {batch_size}, {type(trainer.optimizer).__name__}"
        f" with rate {trainer.optimizer.rate(trainer.steps_done):g}",
        "loss": f"{losses}; measured: {measured}",
        "machine": f"executor {trainer.executor}, {len(workers)} processors of"
        f" {workers[0].threads if workers else 1} threads",
        "strategy": f"{len(step.nodes)} operators in a step, {several} of"
        f" {len(strategy.configurations)} in several pieces",
    }
    lines = [f"{name + ':':<10}{text}" for name, text in rows.items()]
    found = trainer.steps.result
    if found is not None:
        state = "kept" if found.kept else f"not kept: {found.reason or 'it is no faster'}"
        lines.append(
            f"{'optimize:':<10}{found.candidates} graphs searched in {found.seconds:.1f} s,"
            f" {sum(found.substitutions.values())} substitutions, {found.speedup:.2f}x; {state}"
        )
    return "\n".join(lines)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for extent in shape:
        size *= extent
    return size
