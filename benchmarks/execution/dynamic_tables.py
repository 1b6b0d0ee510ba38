"""Patterns that are found in models whose graph changes, by depth, and what they are worth.

    python benchmarks/execution/dynamic_tables.py [--rounds 3] [--only treelstm,cnn,…]

Steps of batches of 20 (forward, backward, update), one call at a time: operator by operator
(`off`), by cells (`by hand`), and by patterns found at a depth of at most P_Depth, which are
counted in three batches and again in the same three; P_Freq is one a sample. `covered`: operators
that are in patterns. Compiling is since the beginning, all else of a step. Then models whose graph
does not change: operator by operator, and as one cell.

Source: Liu, Machine learning workflow optimization via automatic discovery of resource reuse
opportunities, 2019, tables 6.1 to 6.4. On the trees of SOAPSTONE_DATA, else on made-up ones; images
are random numbers of MNIST's shape.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import in_turns, median, ratio, serve, show, write

from soapstone import DynamicSession
from soapstone.frontend.app import app_module
from soapstone.frontend.dynamic.report import CellReport
from soapstone.ir.graph import Initial

CHANGING = {"treelstm": {"labels": "root", "dropout": 0.0}, "rntn": {}, "lattice": {}}
STATIC = {"cnn": 128, "rnn": 100, "birnn": 100}  # with the samples of a batch
DEPTHS = range(5, 11)
BATCH, COLLECTED = 20, 3
BUDGET_S, LEAST = 1.0, 3  # of a round, and steps
SIDE, UNITS, CLASSES = 28, 128, 10
RUNNING = ("forward", "backward", "weights", "update")
Step = Callable[[], None]


def changing(model: str, how: str) -> tuple[DynamicSession, Step, dict[str, Any]]:
    """Return a session after warm-up, a step of it, and what was counted."""
    session = DynamicSession(
        model,
        cpus=1,
        reuse="off" if how == "off" else "patterns",
        pattern_depth=int(how) if how.isdigit() else 1,
        collect_steps=COLLECTED,
        pattern_frequency=COLLECTED * BATCH,
    )
    session.__enter__()
    program = app_module(model).program(session, cells=how == "by hand", **CHANGING[model])
    size = COLLECTED * BATCH
    batches = [program.train[first : first + BATCH] for first in range(0, size, BATCH)]
    turn = itertools.cycle(batches)

    def step() -> None:
        made = [program.outputs(sample) for sample in next(turn)]
        session.step([session.cross_entropy(*each) for outputs in made for each in outputs])

    for _ in range(COLLECTED):
        step()
    before = session.report().cells
    for _ in range(COLLECTED):
        step()
    return session, step, counted(before, session.report().cells)


def counted(before: tuple[CellReport, ...], after: tuple[CellReport, ...]) -> dict[str, Any]:
    """Return what occurred between two reports."""
    known = [cell.calls for cell in before] + [0] * (len(after) - len(before))
    rows = [(cell, cell.calls - calls) for cell, calls in zip(after, known, strict=True)]
    found = [(cell, calls) for cell, calls in rows if calls and cell.name.startswith("pattern")]
    occurrences = sum(calls for _, calls in found)
    inside = sum(cell.operators * calls for cell, calls in found)
    operators = sum(cell.operators * calls for cell, calls in rows)
    if not found:
        return {"operators": operators // COLLECTED}
    return {
        "operators": operators // COLLECTED,
        "patterns": len(found),
        "occurrences": occurrences,
        "of each": occurrences / len(found),
        "operators of each": inside / occurrences,
        "covered": inside / operators,
    }


def static(model: str, how: str, full: bool) -> tuple[DynamicSession, Step, dict[str, Any]]:
    """Return a session of a model whose graph does not change, and a step of it.

    Layers of a recurrent network are of all samples; those of the convolutional one are batched.
    """
    batch = STATIC[model]
    images = np.random.default_rng(0).random((batch, SIDE * SIDE), np.float32)
    targets = np.eye(CLASSES, dtype=np.float32)[np.arange(batch) % CLASSES]
    if model == "cnn":
        reuse, function = ("all" if how == "graph" else "batch"), convolutional
        inputs = [[x.reshape(1, SIDE, SIDE), y] for x, y in zip(images, targets)]
    else:
        reuse, function = ("patterns" if how == "graph" else "off"), recurrent
        inputs = [[images, targets, np.zeros((batch, UNITS), np.float32)]]
    session = DynamicSession(model, cpus=1, reuse=reuse, pattern_depth=1)
    session.__enter__()

    def both(m: Any, *operands: Any) -> Any:
        return function(m, *operands, *([model == "birnn"] if model != "cnn" else []))

    cell = session.cell(both) if how == "graph" else lambda *operands: both(session, *operands)

    def step() -> None:
        if full:
            session.step([cell(*map(session.value, each))[1] for each in inputs])
            return
        with session.inference():
            session.values([cell(*map(session.value, each))[0] for each in inputs])

    for _ in range(3):
        step()
    return session, step, {}


def judged(m: Any, x: Any, target: Any) -> tuple[Any, Any]:
    """Record logits, and the cross-entropy of all samples together."""
    logits = m.dense(x, CLASSES, name="classes")
    axes = tuple(range(1, len(logits.shape)))
    return logits, -m.reduce_sum(m.log_softmax(logits, axis=-1) * target, axes=axes)


def convolutional(m: Any, x: Any, target: Any) -> tuple[Any, Any]:
    x = m.conv2d(x, 32, kernel=3, activation="relu", name="conv1")
    x = m.conv2d(x, 64, kernel=3, activation="relu", name="conv2")
    return judged(m, m.flatten(m.max_pool2d(x, 2)), target)


def recurrent(m: Any, x: Any, target: Any, zero: Any, both: bool) -> tuple[Any, Any]:
    """Record two layers of LSTM over the rows of images, in one direction or in both."""
    steps = list(m.split(x, [SIDE] * SIDE, axis=2))

    def layer(steps: list[Any], name: str) -> list[Any]:
        h, c, states = zero, zero, []
        width = steps[0].shape[-1] + UNITS
        weight = m.parameter(f"{name}.weight", (width, 4 * UNITS), Initial("uniform", 0.1))
        bias = m.parameter(f"{name}.bias", (4 * UNITS,))
        for x in steps:
            gates = m.concat([x, h], axis=2) @ weight + bias
            i, f, o, u = m.split(gates, [UNITS] * 4, axis=2)
            c = m.sigmoid(f) * c + m.sigmoid(i) * m.tanh(u)
            h = m.sigmoid(o) * m.tanh(c)
            states.append(h)
        return states

    ends = [layer(layer(steps, "first"), "second")[-1]]
    if both:
        ends.append(layer(layer(steps[::-1], "first back"), "second back")[-1])
    return judged(m, m.concat(ends, axis=2) if both else ends[0], target)


def peer(model: str, how: str) -> None:
    if model in CHANGING:
        session, step, counts = changing(model, how)
    else:
        session, step, counts = static(model, how.split()[0], how.endswith("full"))

    def do_round() -> dict[str, Any]:
        before, times = dict(session.seconds), list[float]()
        while len(times) < LEAST or sum(times) < BUDGET_S:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        ms = {k: (s - before[k]) * 1e3 / len(times) for k, s in session.seconds.items()}
        running = sum(ms[stage] for stage in RUNNING)
        apart = {"finding": ms["finding"], "scheduling": ms["scheduling"], "running": running}
        mean = sum(times) / len(times) * 1e3
        return {
            "ms": sorted(times)[len(times) // 2] * 1e3,
            "recording": mean - sum(apart.values()) - ms["compiling"],
            **apart,
            "compiling s": session.seconds["compiling"],
            **counts,
        }

    serve(do_round)


def rows(model: str, measured: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield what each way took, and how much faster than operator by operator it is."""
    for how, rounds in measured.items():
        first = next(name for name in measured if name.endswith(how.split()[-1]) or name == "off")
        times = {"ms": median(rounds, "ms"), "times faster": ratio(measured[first], rounds)}
        stages = {k: median(rounds, k) for k in rounds[0] if k != "ms"}
        yield {"model": model, "by": f"depth {how}" if how.isdigit() else how, **times, **stages}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join((*CHANGING, *STATIC)))
    parser.add_argument("--peer", nargs=2)
    given = parser.parse_args()
    if given.peer:
        peer(*given.peer)
        return
    ways = {model: ["off", "by hand", *map(str, DEPTHS)] for model in CHANGING}
    parts = ["operators forward", "graph forward", "operators full", "graph full"]
    ways |= dict.fromkeys(STATIC, parts)
    found: list[dict[str, Any]] = []
    for model in given.only.split(","):
        own = [sys.executable, __file__, "--peer", model]
        commands = {how: [*own, how] for how in ways[model]}
        for row in rows(model, in_turns(commands, given.rounds)):
            show(row)
            found.append(row)
    columns = list(dict.fromkeys(key for row in found for key in row))
    title = "Patterns by depth, and steps with and without them (Liu, tables 6.1 to 6.4)"
    command = f"python benchmarks/execution/dynamic_tables.py --rounds {given.rounds}"
    write("dynamic_tables", title, command, columns, found)


if __name__ == "__main__":
    main()
