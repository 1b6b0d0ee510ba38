"""What every way of training a random model must end with: losses, parameters and states.

The oracle is the sequential NumPy run of the steps. How far others may be from it is told by that
run itself, repeated with all values disturbed by a few roundings, and once in a wider type.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from helpers.graph_runs import MACHINES, NOISE, WIDER, degrees_of, drawn_kernels
from helpers.random_training import Batch, Training

import soapstone
from soapstone import Model
from soapstone.callbacks import Callback, Checkpoint
from soapstone.engine.initial import materialise
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.strategy.configuration import Copies, Keep, Reshard, Step
from soapstone.ir.strategy.recomputation import recomputable
from soapstone.ir.tensor import Array, Role, rounded
from soapstone.ir.training.guard import LEARNING_RATE, STEP
from soapstone.runtime import Machine

# How often a spread is allowed, beside so much of the largest element, or of LEAST; and which
# spread says that roundings decide.
SLACK, RELATIVE, LEAST, UNSURE = 16.0, 1e-5, 0.05, 1e-4
State = dict[str, Array]
Ended = tuple[list[float], State]  # the losses of the steps, and what is carried after them


@dataclass(frozen=True)
class Expected:
    """What the reference ends with, and how far it is from itself where roundings differ."""

    losses: list[float]
    state: State
    within: Mapping[str, float]
    unsure: frozenset[str]  # states of which roundings decide
    certain: bool  # whether it is finite, and stays near itself

    def misfit(self, ended: Ended, wider: float = 1.0) -> str:
        """Return what is wrong with what another way ended with, or nothing."""
        losses, state = ended
        if len(losses) != len(self.losses):
            return f"{len(losses)} steps found, {len(self.losses)} needed"
        for number, (found, needed) in enumerate(zip(losses, self.losses)):
            if not abs(found - needed) <= wider * self.within[f"loss {number}"]:
                return f"loss {number}: {found} found, {needed} needed"
        for name, value in self.state.items():
            found = state[name]
            if found.shape != value.shape or found.dtype != value.dtype:
                return f"{name}: {found.dtype}{found.shape} found"
            if value.dtype.kind != "f":
                if not np.array_equal(found, value):
                    return f"{name}: {found} found, {value} needed"
                continue
            off = np.abs(found.astype("float64") - value)
            if name in self.unsure:
                if not np.isfinite(found).all():
                    return f"{name}: not finite"
                continue
            if not off.max(initial=0.0) <= wider * self.within[name]:
                where = np.unravel_index(int(np.argmax(off)), off.shape)
                return (
                    f"{name}: at {where} {found[where]} found, {value[where]} needed, off by"
                    f" {off[where]:.3g} with {wider * self.within[name]:.3g} allowed"
                )
        return ""


def reference(case: Training, number: int | None = 0, model: Model | None = None) -> Ended:
    """Return how the sequential NumPy run ends.

    number: 0 for the run itself, others for disturbed ones, None for one in wider types.
    """
    random = np.random.default_rng([case.seed, number or 0])

    def disturbed(array: Array) -> Array:
        if array.dtype.kind != "f" or number == 0:
            return array
        if number is None:
            return array.astype(WIDER.get(array.dtype.name, array.dtype))
        by = random.uniform(-1, 1, array.shape) * NOISE[array.dtype.name]
        return np.asarray(rounded(np.asarray(array * (1 + by)), array.dtype))

    model = model or case.compiled()
    trainer, losses, state = model.trainer, [], {}
    for step, batch in enumerate(case.batches):
        inputs = batch[0]
        size = len(next(iter(inputs.values())))
        graph = trainer.original_graph(size)
        if not state:
            state = {
                name: materialise(graph.initials.get(name), graph.tensors[name], model.seed, name)
                for role in (Role.PARAMETER, Role.STATE)
                for name in graph.inputs(role)
            }
            state = {name: disturbed(array) for name, array in state.items()}
        rate = trainer.optimizer.rate(step)
        given = state | inputs | targets(model, batch)
        given |= {LEARNING_RATE: np.float32(rate), STEP: np.int64(step + 1)}
        given |= model.constants
        known = {name: np.asarray(given[name]) for name in graph.roles}
        for node in graph.nodes:
            arrays = [known[name] for name in node.inputs]
            if number is None:
                results: Sequence[Array] = node.spec.compute(node.attributes, *arrays)
            else:
                dtypes = [graph.tensors[name].dtype for name in node.outputs]
                results = node.spec.run(node.attributes, *arrays, dtypes=dtypes)
            made = zip(node.outputs, results)
            known.update((name, disturbed(np.asarray(array))) for name, array in made)
        losses.append(float(known[graph.outputs[0]]))
        state = {name: known[graph.updates.get(name, name)] for name in state}
    return losses, state


def targets(model: Model, batch: Batch) -> dict[str, Array]:
    """Return labels and weights by the names of the graph's inputs."""
    inputs, labels = model.trainer._one("reference", *batch)
    return model.trainer._targets(inputs, labels)


def expected(case: Training) -> Expected:
    """Return what all ways must end with."""
    model = case.compiled()
    with np.errstate(all="ignore"):
        losses, state = reference(case, model=model)
        others = [reference(case, number, model) for number in (1, 2, None)]
    within: dict[str, float] = {}
    unsure = set()
    certain = bool(np.isfinite(losses).all())
    for number, loss in enumerate(losses):
        spread = max(abs(other[number] - loss) for other, _ in others)
        within[f"loss {number}"] = SLACK * spread + RELATIVE * max(abs(loss), LEAST)
        certain &= bool(spread <= 1e-3 * max(1.0, abs(loss)))
    for name, value in state.items():
        if value.dtype.kind != "f":
            continue
        wide = value.astype("float64")
        spread = max(float(np.abs(other[name] - wide).max(initial=0.0)) for _, other in others)
        scale = max(float(np.abs(wide).max(initial=0.0)), LEAST)
        within[name] = SLACK * spread + RELATIVE * scale
        if spread > UNSURE * scale:
            unsure.add(name)
        certain &= bool(np.isfinite(wide).all())
    return Expected(losses, state, within, frozenset(unsure), certain)


def stepped(case: Training, model: Model, evaluates: bool = False) -> Ended:
    """Return how a compiled model ends, stepped batch by batch; and close it."""
    losses = []
    try:
        for inputs, labels, weights in case.batches:
            if evaluates:
                model.evaluate(inputs, labels, **_weighed(weights))
                model.predict(inputs)
            found = model.train_on_batch(inputs, labels, **_weighed(weights))
            losses.append(found["loss"])
        return losses, model.weights() | model.trainer.state()
    finally:
        model.close()


def _weighed(weights: Any) -> dict[str, Any]:
    return {} if weights is None else {"sample_weights": weights}


def by_strategy(case: Training) -> Ended:
    """Train by a random strategy, on a random machine."""
    random = np.random.default_rng([case.seed, 7])
    machines = (*MACHINES, Machine.local(cpus=2).bounded(1 << 24))
    machine = machines[random.integers(len(machines))]
    model = case.compiled(machine=machine)
    graph = model.trainer.original_graph(model.batch_size)
    strategy = drawn_strategy(graph, machine, random)
    model.close()
    model = case.compiled(machine=machine, strategy=strategy)
    return stepped(case, model, evaluates=bool(random.integers(2)))


def drawn_strategy(graph: Graph, machine: Machine, random: np.random.Generator) -> Strategy:
    """Return a random legal strategy of a training graph."""
    share = random.choice([0.2, 0.6, 1.0])
    rest = Configuration({"n": 2} if random.random() < 0.3 else {})
    found = Strategy(configurations={"*": rest})

    def taken(**more: Any) -> None:
        nonlocal found
        try:
            grown = {of: {**getattr(found, of), **items} for of, items in more.items()}
            made = replace(found, **grown)
            made.check(graph)
        except GraphError:
            return
        found = made

    def devices(degrees: Mapping[str, int]) -> tuple[int, ...]:
        points = math.prod(degrees.values())
        return tuple(random.integers(0, len(machine.processors), points).tolist())

    for node in graph.nodes:
        if random.random() < share and (node.origin is None or random.random() < 0.3):
            signature = graph.signature(node)
            degrees = degrees_of(signature, random)
            degrees = {name: degrees[name] for name in signature.by_name if name in degrees}
            taken(configurations={node.name: Configuration(degrees, devices(degrees))})
            if degrees and random.random() < 0.3:  # one dim cut unevenly, or computed twice
                dim = str(random.choice([*degrees]))
                extent = signature.by_name[dim].extent
                inner = sorted(
                    random.permutation(np.arange(1, extent))[: degrees[dim] - 1].tolist()
                )
                more: dict[str, Any] = {"cuts": {dim: (0, *inner, extent)}}
                if random.random() < 0.4:
                    more = {"replicated": (dim,)}
                made = Configuration(degrees, devices(degrees), **more)
                taken(configurations={node.name: made})
    for value in recomputable(graph):
        if random.random() < 0.3:
            taken(tensors={value: Keep.RECOMPUTE})
    for node in graph.nodes:
        for value in node.inputs:
            if random.random() < 0.1 and value in graph.producers:
                shape = graph.tensors[value].shape
                layout = {
                    f"d{i}": 2 for i, e in enumerate(shape) if e > 1 and random.random() < 0.5
                }
                step = Step("permute", Configuration(layout, devices(layout)))
                kept = list(Copies)[random.integers(3)]
                taken(reshards={(value, node.name): Reshard((step, Step("permute")), kept)})
    for node in graph.nodes if machine.processors[0].memory.endswith("bounded") else ():
        for value in node.outputs:
            if random.random() < 0.15 and value not in found.tensors:
                taken(tensors={value: Keep.OFFLOAD})
    return found


def memory(case: Training, random: np.random.Generator) -> dict[str, Any]:
    """Return settings of a fast memory that is smaller than what a step holds."""
    graph = case.compiled().trainer.original_graph(case.build().batch_size)
    least = max(
        sum(_bytes(graph, name) for name in {*node.inputs, *node.outputs}) for node in graph.nodes
    )
    whole = sum(_bytes(graph, name) for name in graph.tensors)
    capacity = int(least * 4 + (whole - least) * random.uniform(0, 0.3)) + 4096
    return {"plan": str(random.choice(["dp", "lru", "belady", "stream"])), "fast_memory": capacity}


def in_little_memory(case: Training) -> Ended:
    """Train in a fast memory that is smaller than what a step holds."""
    random = np.random.default_rng([case.seed, 8])
    cpus = int(random.integers(1, 3))
    return stepped(case, case.compiled(cpus=cpus, **memory(case, random)))


def _bytes(graph: Graph, name: str) -> int:
    spec = graph.tensors[name]
    return int(np.dtype(spec.dtype).itemsize * max(spec.size, 1) + 64)


class _Stops(Callback):
    """Stops a fit after so many steps."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, state: Any) -> None:
        if state.step >= self.after:
            raise KeyboardInterrupt


def resumed(case: Training) -> str:
    """Return how a fit that is interrupted and resumed differs from one that is not, or nothing."""
    random = np.random.default_rng([case.seed, 9])
    inputs = {
        name: np.concatenate([b[0][name] for b in case.batches]) for name in case.batches[0][0]
    }
    labels = _joined([b[1] for b in case.batches])
    weights = None if case.batches[0][2] is None else np.concatenate([b[2] for b in case.batches])
    more = {"cpus": 2}
    epochs, at = 2, int(random.integers(1, 6))
    validation = {
        "validation_data": (inputs, labels) if weights is None else (inputs, labels, weights)
    }
    if random.integers(2):
        validation = {}
    given = dict(
        progress=False,
        epochs=epochs,
        batch_size=case.build().batch_size,
        **validation,
        **_weighed(weights),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.safetensors"
        one = case.compiled(**more)
        record = one.fit(inputs, labels, **given)
        state = one.weights() | one.trainer.state()
        choices = Path(folder) / "choices.json"
        one.save_choices(choices)
        one.close()
        two = case.compiled(**more, choices=choices)
        with suppress(KeyboardInterrupt):
            two.fit(
                inputs, labels, **given, callbacks=[Checkpoint(path, every_steps=1), _Stops(at)]
            )
        two.close()
        three = case.compiled(**more, choices=choices)
        again = three.fit(inputs, labels, **given, resume=path)
        found = three.weights() | three.trainer.state()
        three.close()
    for name, value in state.items():
        if not np.array_equal(found[name], value, equal_nan=value.dtype.kind == "f"):
            return f"stopped at {at}: {name} differs by {np.abs(found[name] - value).max()}"
    if again.epochs and again.epochs[-1] != record.epochs[-1]:
        return f"stopped at {at}: {again.epochs[-1]} found, {record.epochs[-1]} needed"
    return ""


def _joined(labels: Sequence[Any]) -> Any:
    if isinstance(labels[0], Mapping):
        return {name: np.concatenate([each[name] for each in labels]) for name in labels[0]}
    return np.concatenate(labels)


def in_halves(case: Training) -> str:
    """Return how mixed precision differs from its own NumPy run, or nothing."""
    model = case.compiled(precision="mixed_float16")
    with np.errstate(all="ignore"):
        losses, _ = reference(case, model=model)
    found, _ = stepped(case, case.compiled(precision="mixed_float16", cpus=2))
    for number, (a, b) in enumerate(zip(found, losses)):
        if not abs(a - b) <= 3e-2 * max(1.0, abs(b)):
            return f"loss {number}: {a} found, {b} needed"
    return ""


def options(case: Training, random: np.random.Generator) -> dict[str, Any]:
    """Return further settings of `compile`, which change roundings alone."""
    kind = int(random.integers(6))
    if kind == 0:
        return {"cpus": 1}
    if kind == 1:
        return {"cpus": 2, "micro_batches": 2}
    if kind == 2:
        return {"cpus": 2, "precision": "mixed_float16"}
    if kind == 3:
        machine = MACHINES[random.integers(len(MACHINES))]
        probe = case.compiled(machine=machine)
        graph = probe.trainer.original_graph(probe.batch_size)
        return {"machine": machine, "strategy": drawn_strategy(graph, machine, random)}
    if kind == 4:
        return {"cpus": 2, **memory(case, random)}
    return {"cpus": 2}


def left_and_taken_up(case: Training) -> str:
    """Return how a training that is left and taken up differs from one that is not, or nothing.

    Between two steps it is saved and loaded, evaluated, or compiled again.
    """
    random = np.random.default_rng([case.seed, 10])
    more = options(case, random)
    batches = [*case.batches, *case.batches]
    script = [str(random.choice(ACTIONS)) for _ in batches]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = case.compiled(**more)
        losses = [_step(model, batch) for batch in batches]
        state = model.weights() | model.trainer.state()
        more["choices"] = folder / "choices.json"
        model.save_choices(more["choices"])
        model.close()
        model = case.compiled(**more)
        found = []
        for batch, action in zip(batches, script):
            inputs, labels, weights = batch
            if action == "evaluate":
                model.evaluate(inputs, labels, **_weighed(weights))
                model.predict(inputs)
                model.gradients(inputs, labels, **_weighed(weights))
            elif action == "checkpoint":
                model.save_checkpoint(folder / "run.npz")
                model.close()
                model = case.compiled(**more)
                if random.integers(2):
                    _step(model, batch)
                model.load_checkpoint(folder / "run.npz")
            elif action == "save":
                model.save(folder / "run.safetensors", optimizer=True)
                model.close()
                model = soapstone.load(folder / "run.safetensors")
                for pattern, (l1, l2) in case.build().penalties.items():
                    model.regularize(pattern, l1=l1, l2=l2)
                model.compile(**{**case.settings, **more})
            elif action == "compile":
                model.compile(**{**case.settings, **more})
            elif action == "set":
                model.set_weights(model.weights())
            found.append(_step(model, batch))
        ended = model.weights() | model.trainer.state()
        model.close()
    said = f"{script} with { {k: v for k, v in more.items() if k not in ('choices', 'strategy')} }"
    for number, (a, b) in enumerate(zip(found, losses)):
        if a != b:
            return f"{said}: loss {number}: {a} found, {b} needed"
    for name, value in state.items():
        if not np.array_equal(ended[name], value, equal_nan=value.dtype.kind == "f"):
            return f"{said}: {name} differs by {np.abs(ended[name] - value).max()}"
    return ""


ACTIONS = ("", "evaluate", "checkpoint", "save", "compile", "set")


def _step(model: Model, batch: Batch) -> float:
    inputs, labels, weights = batch
    return model.train_on_batch(inputs, labels, **_weighed(weights))["loss"]


def in_parts(case: Training) -> Ended:
    """Train in micro-batches, by a random strategy, and perhaps in a fast memory."""
    random = np.random.default_rng([case.seed, 12])
    machine = Machine.local(cpus=int(random.integers(1, 3)))
    parts = int(random.integers(2, 4)) if case.parts else 1
    probe = case.compiled(machine=machine, micro_batches=parts)
    size = probe.trainer.part_size(probe.batch_size)
    graph = probe.trainer.original_graph(size)
    more: dict[str, Any] = {"machine": machine, "micro_batches": parts}
    more["strategy"] = drawn_strategy(graph, machine, random)
    if random.integers(2):
        more |= memory(case, random)
    return stepped(case, case.compiled(**more))


def slope(case: Training) -> str:
    """Return how gradients differ from the slope of the loss in wide types, or nothing."""
    model = case.compiled(cpus=2)
    inputs, labels, weights = case.batches[0]
    grads = model.gradients(inputs, labels, **_weighed(weights))
    trainer = model.trainer
    with np.errstate(all="ignore"):
        graph = trainer.original_graph(model.batch_size)
        state = {
            name: materialise(
                graph.initials.get(name), graph.tensors[name], model.seed, name
            ).astype("float64")
            for role in (Role.PARAMETER, Role.STATE)
            for name in graph.inputs(role)
        }
        given = state | inputs | targets(model, case.batches[0]) | model.constants
        given |= {LEARNING_RATE: np.float32(0), STEP: np.int64(1)}
        given = {
            n: a.astype("float64") if np.asarray(a).dtype == np.float32 else np.asarray(a)
            for n, a in given.items()
        }
        random = np.random.default_rng(case.seed)
        model.close()
        way = {name: random.standard_normal(grads[name].shape) for name in grads}
        needed = sum(float((grads[name].astype("float64") * way[name]).sum()) for name in grads)
        scale = sum(float(np.abs(grads[name] * way[name]).sum()) for name in grads)

        def loss(by: float) -> float:
            at = dict(given)
            for name in way:
                at[name] = given[name] + by * way[name]
            known = {name: at[name] for name in graph.roles}
            for node in graph.nodes:
                arrays = node.spec.compute(node.attributes, *(known[name] for name in node.inputs))
                known.update(zip(node.outputs, map(np.asarray, arrays)))
                if graph.outputs[0] in known:
                    break
            return float(known[graph.outputs[0]])

        slopes = [(loss(h) - loss(-h)) / (2 * h) for h in (1e-4, 1e-5, 1e-6)]
        onesided = (loss(1e-6) - loss(0)) / 1e-6
    model.close()
    if not np.isfinite(slopes).all() or np.ptp([*slopes, onesided]) > 1e-3 * (scale + 1e-3):
        return ""
    if abs(slopes[1] - needed) > 3e-3 * scale + 1e-5:
        return f"slope {slopes} found, {needed} by gradients, of terms {scale}"
    return ""


WAYS: dict[str, Callable[[Training], Ended]] = {
    "plain": lambda case: stepped(case, case.compiled(cpus=1), evaluates=True),
    "strategy": by_strategy,
    "data parallel": lambda case: stepped(case, case.compiled(cpus=2)),
    "memory": in_little_memory,
    "parts": in_parts,
}


SELVES: dict[str, Callable[[Training], str]] = {
    "resumed": resumed,
    "halves": in_halves,
    "left": left_and_taken_up,
    "slope": slope,
}


def ways_of(seed: int) -> tuple[str, ...]:
    """Return the ways in which the model of a seed is trained: each costs as much as the oracle."""
    ways = [*WAYS, *SELVES]
    return "strategy", ways[seed % len(ways)]


def failure(case: Training, ways: Sequence[str] = ()) -> str:
    """Return which way of training fails, and how; nothing where all are right.

    ways: those of its seed where none is named.
    """
    allowed = expected(case)
    if not allowed.certain:
        return ""
    for way in dict.fromkeys(ways or ways_of(case.seed)):
        with drawn_kernels(case.seed), np.errstate(all="ignore"):
            try:
                wrong = SELVES[way](case) if way in SELVES else allowed.misfit(WAYS[way](case))
            except Exception as error:
                wrong = f"{type(error).__name__}: {error}"
        if wrong:
            return f"{way}: {wrong}"
    return ""
