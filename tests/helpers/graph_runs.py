"""What every way of running a random graph must return, and how a graph that fails is made smaller.

Results are compared with the sequential NumPy run. How far they may be from it is told by that run
itself: it is repeated with all floating-point values disturbed by a few roundings, and once with
halves in single precision. Where these differ in kind (another index, a NaN), nothing is compared.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from helpers.random_graphs import Sample, closed
from helpers.session_runs import ran

from soapstone.engine.mapper import GraphMapper
from soapstone.frontend.inference.session import InferenceSession
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array, Role, rounded
from soapstone.kernels import select
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import Variant
from soapstone.runtime import Launch, Machine, Region

# Roundings by which values are disturbed: kernels have polynomials where NumPy has others.
NOISE = {"float16": 2.0**-11, "float32": 2.0**-22, "float64": 2.0**-50}
ABSOLUTE = {"float16": 4e-6, "float32": 4e-6, "float64": 1e-12}  # of the largest magnitude, and
WIDER = {"float16": np.dtype("float32"), "float32": np.dtype("float64")}
SCALE = 32.0  # of other values' up to this
HUGE = 1e15  # beyond, a product may be infinite or not: kinds of values are not compared
MACHINES = (
    Machine.local(cpus=2),
    Machine.local(cpus=3, memories=3),
    Machine.local(cpus=1, threads=2),
)
SAMPLES, SLACK = 3, 16.0


@dataclass(frozen=True)
class Bounds:
    """An output as the reference has it, where it says something, and how far others may be."""

    value: Array
    certain: Array
    within: Array

    def misfit(self, found: Array) -> str:
        """Return what is wrong with a result, or nothing."""
        value = self.value
        if found.dtype != value.dtype or found.shape != value.shape:
            return (
                f"{found.dtype}{list(found.shape)} found, {value.dtype}{list(value.shape)} needed"
            )
        if value.dtype.kind != "f":
            wrong = self.certain & (found != value)
        else:
            one, other = found.astype(np.float64), value.astype(np.float64)
            with np.errstate(invalid="ignore"):
                near = np.abs(one - other) <= self.within
            same = (one == other) | (np.isnan(one) & np.isnan(other))
            wrong = self.certain & ~(same | (near & np.isfinite(other)))
        if not wrong.any():
            return ""
        place = tuple(int(axis[0]) for axis in np.nonzero(wrong)) if wrong.ndim else ()
        count = f"{int(np.count_nonzero(wrong))} of {wrong.size} differ"
        return f"{count}: at {place} {found[place]} found, {value[place]} needed"


def bounds(sample: Sample) -> dict[str, Bounds]:
    """Return what the outputs of a sample may be."""
    graph, result = sample.graph, {}
    with np.errstate(all="ignore"):
        known = interpret(replace(graph, outputs=tuple(graph.tensors)), sample.values)
        others = [_disturbed(sample, number) for number in range(SAMPLES)]
        exact = _disturbed(sample, None)
        others += [exact, _unread(sample)]
    # What cancels inside an operator is as uncertain as its operands are large.
    every = [*known.values(), *(exact or {}).values()]
    largest = max(map(_largest, every), default=0.0)
    scale = min(max(1.0, largest), SCALE)
    # A mean of infinities is NaN to kernels that subtract one of them first.
    infinite = any(np.isinf(known[n]).any() for node in graph.nodes for n in node.inputs)
    # Minus infinity is NaN after a relu in oneDNN's epilogue (see `relu`'s declaration).
    rectified = any(node.attributes.get("activation") == "relu" for node in graph.nodes)
    # Weights that overflow are multiplied by a difference, which rounding decides whether it is 0.
    weighs = any(node.operator in ("attention_grad", "attention_mask_grad") for node in graph.nodes)
    coarsest = max((ABSOLUTE.get(array.dtype.name, 0.0) for array in known.values()), default=0.0)
    for name in dict.fromkeys(graph.outputs):
        value = known[name]
        rest = [other[name] for other in others if other is not None]
        if value.dtype.kind != "f":
            certain = np.logical_and.reduce([other == value for other in rest]) if rest else None
            shape = np.ones(value.shape, bool) if certain is None else np.asarray(certain)
            result[name] = Bounds(value, shape, np.zeros(value.shape))
            continue
        wide = value.astype(np.float64)
        spread, certain = np.zeros(value.shape), np.ones(value.shape, bool)
        for other in (np.asarray(o, np.float64) for o in rest):
            with np.errstate(invalid="ignore"):
                distance = np.abs(other - wide)
            kind = (np.isnan(other) == np.isnan(wide)) & (np.isposinf(other) == np.isposinf(wide))
            certain &= kind & (np.isneginf(other) == np.isneginf(wide))
            spread = np.maximum(spread, np.where(np.isfinite(distance), distance, 0))
        noise = NOISE[value.dtype.name]
        floor = coarsest * max(scale, _largest(value))
        if (
            exact is not None and value.dtype != np.float16
        ):  # what the reference itself is wrong by, anywhere in the array
            with np.errstate(invalid="ignore"):
                floor += SLACK * _largest(exact[name].astype(np.float64) - wide)
        with np.errstate(invalid="ignore"):
            certain &= ~(np.abs(wide) > float(np.finfo(value.dtype).max) * 0.99) | np.isinf(wide)
            certain &= largest < HUGE
            certain &= ~(np.isinf(wide) & infinite)
            certain &= ~((wide == 0) & infinite & rectified)
            certain &= ~(np.isnan(wide) & weighs)
            within = SLACK * spread + 4 * noise * np.abs(wide) + floor
        result[name] = Bounds(value, certain, within)
    return result


def _largest(array: Array) -> float:
    """Return the largest magnitude of finite numbers."""
    if array.dtype.kind != "f":
        return 0.0
    return float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))


def _disturbed(sample: Sample, number: int | None) -> dict[str, Array] | None:
    """Return the outputs of the reference with disturbed values; without a number, in wide types.

    None where they have no meaning: a disturbed index that a table lacks.
    """
    random = np.random.default_rng([sample.seed, 0 if number is None else number + 1])

    def disturbed(array: Array) -> Array:
        if array.dtype.kind != "f":
            return array
        if number is None:
            return array.astype(WIDER.get(array.dtype.name, array.dtype))
        by = random.uniform(-1, 1, array.shape) * NOISE[array.dtype.name]
        return np.asarray(rounded(np.asarray(array * (1 + by)), array.dtype))

    known = {name: disturbed(array) for name, array in sample.values.items()}
    try:
        for node in sample.graph.nodes:
            arrays = [known[name] for name in node.inputs]
            if number is None:
                results: Sequence[Array] = node.spec.compute(node.attributes, *arrays)
            else:
                dtypes = [sample.graph.tensors[name].dtype for name in node.outputs]
                results = node.spec.run(node.attributes, *arrays, dtypes=dtypes)
            known.update((n, disturbed(np.asarray(r))) for n, r in zip(node.outputs, results))
    except GraphError:
        return None
    return {name: known[name] for name in sample.graph.outputs}


def _unread(sample: Sample) -> dict[str, Array] | None:
    """Return the outputs of the reference where values that a causal mask hides are not read.

    A kernel may leave them out or multiply them by 0, as it likes (docs/onnx.md): between this and
    the reference nothing is compared. None where that is the same.
    """
    known, differs = dict(sample.values), False
    for node in sample.graph.nodes:
        arrays = [known[name] for name in node.inputs]
        dtypes = [sample.graph.tensors[name].dtype for name in node.outputs]
        results = list(node.spec.run(node.attributes, *arrays, dtypes=dtypes))
        masked = node.attributes.get("causal") and node.spec.inputs[:3] == ("q", "k", "v")
        if masked and not np.isfinite(arrays[2].astype(np.float64)).all():
            q, k, v, *rest = arrays
            y, places, differs = np.array(results[0]), np.arange(v.shape[1]), True
            for row in range(q.shape[1]):
                seen = (places <= row + node.attributes.get("ahead", 0))[:, None, None]
                given = np.where(seen, v, v.dtype.type(0))
                made = node.spec.run(node.attributes, q, k, given, *rest, dtypes=dtypes)
                y[:, row] = made[0][:, row]
            results[0] = y
        known.update(zip(node.outputs, map(np.asarray, results)))
    return {name: known[name] for name in sample.graph.outputs} if differs else None


@contextlib.contextmanager
def drawn_kernels(seed: int) -> Iterator[None]:
    """Let a seed choose among the kernels that serve a call; nothing is measured or kept."""
    before = {name: getattr(select, name) for name in ("known", "measured")}

    def drawn(call: Call, of: str, candidates: Sequence[Variant]) -> dict[str, float]:
        serve = [each for each in candidates if each.bind(call) is not None]
        # By the form of the call: workers that bind in parallel ask in any order.
        random = np.random.default_rng([seed, zlib.crc32(of.encode())])
        return {each.name: us for each, us in zip(serve, random.random(len(serve)).tolist())}

    select.known = lambda of, candidates: None  # type: ignore[attr-defined]
    select.measured = drawn  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(select, name, function)


class RandomMapper(GraphMapper):
    """Places points and chooses instances at random, from a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)
        self._whole: dict[tuple[str, str], bool] = {}

    def place_all(self, launch: Launch) -> Array:
        return self._random.integers(0, len(self.machine.processors), launch.points)

    def whole_instances(self, region: Region, memory: str) -> bool:
        return self._whole.setdefault((region.name, memory), bool(self._random.integers(2)))


def by_session(sample: Sample, *, constant: bool, plain: bool = False) -> dict[str, Array]:
    """Return the outputs of an inference session, with parameters constant or not."""
    graph = sample.graph if constant else sample.unbound
    inputs = {name: sample.values[name] for name in graph.inputs(Role.INPUT)}
    weights = {name: array for name, array in sample.values.items() if name not in inputs}
    threads = 1 + (sample.seed // 4) % 2
    with InferenceSession(graph, weights, threads=threads, plain=plain) as session:
        session.run(inputs)
        return session.run(inputs)  # the second run finds what the first left behind


def by_strategy(sample: Sample) -> dict[str, Array]:
    """Return the outputs under a random strategy, on a random machine."""
    random = np.random.default_rng([sample.seed, 7])
    graph = sample.unbound
    configurations = {
        node.name: Configuration(degrees_of(graph.signature(node), random)) for node in graph.nodes
    }
    machine = MACHINES[random.integers(len(MACHINES))]
    mapper = RandomMapper(int(random.integers(1 << 30)))
    strategy = Strategy(configurations=configurations)
    return ran(graph, sample.values, strategy, machine, mapper, runs=2)[0]


def degrees_of(signature: Signature, random: np.random.Generator) -> dict[str, int]:
    """Return legal degrees of at most four points."""
    degrees: dict[str, int] = {}
    for dim in random.permutation(np.array([d.name for d in signature.dims], object)):
        degree = int(random.integers(1, 4))
        found = signature.by_name[dim]
        if found.kind is Kind.WHOLE or degree > found.extent or degree == 1:
            continue
        if math.prod(degrees.values()) * degree > 4:
            continue
        try:
            signature.check({**degrees, dim: degree})
        except GraphError:
            continue
        degrees[dim] = degree
    return degrees


def by_optimize(sample: Sample) -> dict[str, Array]:
    """Return the outputs of the graph that a short search makes of it."""
    from soapstone import optimize

    graph = sample.graph
    inputs = {name: sample.values[name] for name in graph.inputs(Role.INPUT)}
    weights = {name: array for name, array in sample.values.items() if name not in inputs}
    found = optimize(graph, weights, seconds=0.3, candidates=20, threads=1)
    with InferenceSession(found.graph, found.weights, threads=1) as session:
        return session.run(inputs)


WAYS: Mapping[str, Callable[[Sample], dict[str, Array]]] = {
    "session": lambda sample: by_session(sample, constant=True),
    "session without constants": lambda sample: by_session(sample, constant=False),
    "plain session": lambda sample: by_session(sample, constant=True, plain=True),
    "strategy": by_strategy,
    "optimize": by_optimize,
}


def ways_of(seed: int) -> tuple[str, ...]:
    """Return the ways in which the graph of a seed is run: each costs as much as its drawing."""
    others = ("session without constants", "strategy", "plain session", "strategy")
    return ("session", others[seed % len(others)])


def failure(sample: Sample, ways: Sequence[str] = ()) -> str:
    """Return which way of running a sample fails, and how; nothing where all are right.

    ways: those of its seed where none is named.
    """
    with np.errstate(all="ignore"):
        allowed = bounds(sample)
    ways = ways or ways_of(sample.seed)
    for way in ways:
        with drawn_kernels(sample.seed), np.errstate(all="ignore"):
            try:
                found = WAYS[way](sample)
            except Exception as error:
                return f"{way}: {type(error).__name__}: {error}"
        for name in dict.fromkeys(sample.graph.outputs):
            wrong = allowed[name].misfit(np.asarray(found[name]))
            if wrong:
                return f"{way}: output {name!r}: {wrong}"
    return ""


def shrink(sample: Sample, fails: Callable[[Sample], bool]) -> Sample:
    """Return the smallest sample found that fails still: fewer outputs, then fewer operators."""
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(sample):
            if fails(candidate):
                sample, progress = candidate, True
                break
    return sample


def _smaller(sample: Sample) -> Iterator[Sample]:
    """Yield samples with one operator's results alone, and with one operator's results given."""
    graph = sample.graph
    whole = len(graph.nodes), set(graph.outputs)
    for node in graph.nodes:
        made = closed(replace(sample, graph=replace(graph, outputs=node.outputs)))
        if (len(made.graph.nodes), set(made.graph.outputs)) != whole:
            yield made
    if len(graph.outputs) > 1:
        for name in graph.outputs:
            rest = tuple(other for other in graph.outputs if other != name)
            yield closed(replace(sample, graph=replace(graph, outputs=rest)))
    with np.errstate(all="ignore"):
        known = interpret(replace(graph, outputs=tuple(graph.tensors)), sample.values)
    for node in graph.nodes:
        keep = tuple(other for other in graph.nodes if other is not node)
        if not keep:
            continue
        outputs = tuple(name for name in graph.outputs if name not in node.outputs)
        if not outputs:
            continue
        for role in (Role.INPUT, Role.PARAMETER):
            roles = {**graph.roles, **dict.fromkeys(node.outputs, role)}
            made = replace(graph, nodes=keep, roles=roles, outputs=outputs)
            yield closed(replace(sample, graph=made, values={**sample.values, **known}))
