"""Random graphs of all declared operators, and what every way of running one must return.

A graph follows from its seed. Operators are drawn from the registry by their cases, in other types
and at other extents, on values that other operators made wherever these fit. What is undefined (a
number cast to an integer type that cannot hold it) is not drawn.

Results are compared with the sequential NumPy run. How far they may be from it is told by that run
itself: it is repeated with all floating-point values disturbed by a few roundings, and once with
halves in single precision. Where these differ in kind (another index, a NaN), nothing is compared.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers.operator_checks import parse
from helpers.session_runs import ran

from soapstone.engine.mapper import GraphMapper
from soapstone.frontend.inference import InferenceSession
from soapstone.ir.dims import Affine, Kind, Product, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, GraphBuilder
from soapstone.ir.interpret import interpret
from soapstone.ir.spec import OpSpec, operators
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import DTYPES, Array, Role, TensorSpec, rounded, spec_of
from soapstone.kernels import select
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import Variant
from soapstone.runtime import Launch, Machine, Region

MOST_POINTS = 20_000  # of one operator: graphs are many, so each is small
EXTENTS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
INTEGERS = ("int32", "int64", "int8", "uint8", "bool")
# Roundings by which values are disturbed: kernels have polynomials where NumPy has others.
NOISE = {"float16": 2.0**-11, "float32": 2.0**-22, "float64": 2.0**-50}
ABSOLUTE = {"float16": 4e-6, "float32": 4e-6, "float64": 1e-12}  # of the largest magnitude, and
WIDER = {"float16": np.dtype("float32"), "float32": np.dtype("float64")}
SCALE = 32.0  # of other values' up to this
HUGE = 1e15  # beyond, a product may be infinite or not: kinds of values are not compared
SAMPLES, SLACK = 3, 16.0
MACHINES = (
    Machine.local(cpus=2),
    Machine.local(cpus=3, memories=3),
    Machine.local(cpus=1, threads=2),
)


@dataclass(frozen=True)
class Sample:
    """A graph with the contents of its inputs; those that are parameters are constant."""

    seed: int
    graph: Graph
    values: Mapping[str, Array]

    @property
    def unbound(self) -> Graph:
        """The graph with nothing constant."""
        return replace(self.graph, roles=dict.fromkeys(self.graph.roles, Role.INPUT))

    def __str__(self) -> str:
        lines = [f"seed {self.seed}"]
        for name, role in self.graph.roles.items():
            array = self.values[name]
            contents = np.array2string(array, threshold=12, edgeitems=3).replace("\n", "")
            lines.append(f"{name} = {self.graph.tensors[name]} {role} {contents}")
        for node in self.graph.nodes:
            given = ", ".join(node.inputs)
            made = ", ".join(f"{name}: {self.graph.tensors[name]}" for name in node.outputs)
            lines.append(f"{made} = {node.operator}({given}) {dict(node.attributes)}")
        return "\n".join([*lines, f"outputs {', '.join(self.graph.outputs)}"])


# ------------------------------------------------------------------ drawing


class _Drawing:
    """A graph that is being drawn, with what its values hold."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.builder = GraphBuilder("random")
        self.known: dict[str, Array] = {}
        self.real = str(self.random.choice(["float32", "float32", "float16", "float64"]))
        self.specs = operators()

    def chance(self, of: float) -> bool:
        return bool(self.random.random() < of)

    def node(self, name: str, inputs: Sequence[str], attributes: Mapping[str, Any]) -> str | None:
        """Add a node unless its meaning is undefined for what its inputs hold."""
        arrays = [self.known[value] for value in inputs]
        spec = next(each for each in self.specs if each.name == name)
        made = spec.bind([spec_of(a) for a in arrays], spec.normalise(attributes)).output_specs
        with np.errstate(all="ignore"):
            try:
                results = spec.run(spec.normalise(attributes), *arrays)
            except GraphError:  # an index outside a table
                return None
        if not all(_defined(spec, arrays, result) for result in results):
            return None
        outputs = self.builder.apply(name, *inputs, **attributes)
        for output, result, wanted in zip(outputs, results, made, strict=True):
            assert spec_of(result) == wanted, f"{name}: {spec_of(result)} found, {wanted} needed"
            self.known[output] = np.asarray(result)
        return outputs[0]

    def fresh(self, spec: TensorSpec, low: int, high: int | None, positive: bool) -> str:
        """Declare an input or a constant, with contents."""
        role = Role.PARAMETER if self.chance(0.4) else Role.INPUT
        name = self.builder.input(f"in{len(self.known)}", spec.shape, spec.dtype, role)
        self.known[name] = self.contents(spec, low, high, positive)
        return name

    def contents(self, spec: TensorSpec, low: int, high: int | None, positive: bool) -> Array:
        random = self.random
        if spec.dtype == "bool":
            return random.integers(0, 2, spec.shape).astype(bool)
        if not spec.is_float:
            if high is None and self.chance(0.2):
                limits = np.iinfo(spec.dtype)
                values = random.integers(limits.min, limits.max, spec.shape, spec.dtype, True)
                return np.asarray(values, spec.dtype)
            return np.asarray(
                random.integers(low, 10 if high is None else high, spec.shape), spec.dtype
            )
        if positive:
            return np.asarray(random.uniform(0.2, 0.9, spec.shape), spec.dtype)
        values = random.standard_normal(spec.shape) * random.choice([0.1, 1.0, 1.0, 5.0])
        if self.chance(0.05) and spec.size:
            special = random.choice([0.0, np.inf, -np.inf, np.nan, 1e4, -1e4])
            values = np.where(random.random(spec.shape) < 0.1, special, values)
        return rounded(np.asarray(values), spec.dtype)

    def operand(self, spec: TensorSpec, low: int, high: int | None, positive: bool) -> str:
        """Return a value of a spec: one that there is, adapted perhaps, or a fresh one."""
        names = [n for n, a in self.known.items() if a.dtype.name == spec.dtype]
        self.random.shuffle(names)
        for name in names if self.chance(0.75) else ():
            found = self.adapted(name, spec)
            if found is None:
                continue
            array = self.known[found]
            if positive and not bool((array > 0.01).all() and (array < 1).all()):
                continue
            if high is not None and array.size and not low <= array.min() <= array.max() < high:
                continue
            return found
        return self.fresh(spec, low, high, positive)

    def adapted(self, name: str, spec: TensorSpec) -> str | None:
        """Return a value in another shape, or None where there is no way."""
        array = self.known[name]
        if array.shape == spec.shape:
            return name
        if array.size == spec.size:
            return self.node("reshape", (name,), {"shape": spec.shape})
        if not array.size or not spec.size or self.chance(0.6):
            return None
        value: str | None = self.node("reshape", (name,), {"shape": (array.size,)})
        if value is not None and array.size < spec.size:
            value = self.node("tile", (value,), {"repeats": (-(-spec.size // array.size),)})
        if value is not None and self.known[value].size != spec.size:
            cut = {"starts": (0,), "stops": (spec.size,), "steps": (1,)}
            value = self.node("slice", (value,), cut)
        if value is not None and spec.shape != (spec.size,):
            value = self.node("reshape", (value,), {"shape": spec.shape})
        return value

    def operator(self) -> None:
        """Add an operator of the registry, with what its operands need."""
        spec = self.specs[self.random.integers(len(self.specs))]
        if not spec.cases:
            return
        case = spec.cases[self.random.integers(len(spec.cases))]
        wanted = [parse(text) for text in case.inputs]
        given = [
            (replace(s, dtype=self.real) if s.is_float else s, low, high) for s, low, high in wanted
        ]
        attributes = dict(case.attributes)
        if any(high is None for _, _, high in given) and self.chance(0.15):
            given = self.retyped(spec, attributes, given)
        attributes = self.other_attributes(spec, attributes, [s for s, _, _ in given])
        specs = self.resized(spec, attributes, [s for s, _, _ in given])
        names = [
            self.operand(s, low, high, case.positive) for s, (_, low, high) in zip(specs, given)
        ]
        self.node(spec.name, names, attributes)

    def retyped(
        self,
        spec: OpSpec,
        attributes: Mapping[str, Any],
        given: list[tuple[TensorSpec, int, int | None]],
    ) -> list[tuple[TensorSpec, int, int | None]]:
        """Return real operands as whole numbers, where the operator takes them."""
        dtype = str(self.random.choice(INTEGERS))
        changed = [(replace(s, dtype=dtype) if s.is_float else s, a, b) for s, a, b in given]
        return changed if _binds(spec, attributes, [s for s, _, _ in changed]) else given

    def other_attributes(
        self, spec: OpSpec, attributes: dict[str, Any], specs: Sequence[TensorSpec]
    ) -> dict[str, Any]:
        """Return attributes with some that have few values drawn anew, where that is legal."""
        for name, attribute in spec.attributes.items():
            choices = attribute.choices or ((False, True) if attribute.kind == "bool" else None)
            if choices is None or choices == DTYPES or not self.chance(0.2):
                continue
            changed = {**attributes, name: choices[self.random.integers(len(choices))]}
            if _binds(spec, changed, specs):
                attributes = changed
        return attributes

    def resized(
        self, spec: OpSpec, attributes: Mapping[str, Any], specs: list[TensorSpec]
    ) -> list[TensorSpec]:
        """Return operands at other extents, often those of a value that there is."""
        signature = spec.bind(specs, spec.normalise(attributes))
        for _ in range(4):
            sizes: dict[str, int] = {}
            if self.known and specs and self.chance(0.7):
                place = int(self.random.integers(len(specs)))
                like = list(self.known.values())[self.random.integers(len(self.known))]
                axes = signature.inputs[place].axes
                if like.ndim == len(axes):
                    sizes = {a.dim: e for a, e in zip(axes, like.shape) if isinstance(a, Affine)}
            else:
                chosen = [dim.name for dim in signature.dims if self.chance(0.4)]
                sizes = {name: int(self.random.choice(EXTENTS)) for name in chosen}
            shapes = grown(signature, sizes)
            changed = [replace(old, shape=shape) for old, shape in zip(specs, shapes)]
            if _binds(spec, attributes, changed):
                return changed
        return specs


def grown(signature: Signature, sizes: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the input shapes at which some dims have these extents, where axes follow dims."""
    extents = {dim.name: sizes.get(dim.name, dim.extent) for dim in signature.dims}
    shapes = []
    for operand in signature.inputs:
        shape = []
        for axis in operand.axes:
            if isinstance(axis, Affine):
                more = extents[axis.dim] - signature.by_name[axis.dim].extent
                shape.append(max(0, axis.extent + axis.stride * more))
            elif isinstance(axis, Product):
                shape.append(math.prod(extents[name] for name in axis.dims))
            else:
                shape.append(axis.extent)
        shapes.append(tuple(shape))
    return shapes


def _binds(spec: OpSpec, attributes: Mapping[str, Any], specs: Sequence[TensorSpec]) -> bool:
    try:
        made = spec.bind(specs, spec.normalise(attributes))
    except GraphError:
        return False
    return math.prod(max(dim.extent, 1) for dim in made.dims) <= MOST_POINTS


def _defined(spec: OpSpec, arrays: Sequence[Array], result: Array) -> bool:
    """Return whether NumPy's result is what any machine makes.

    A cast may have no right answer, and infinite weights times padding are NaN or skipped.
    """
    if "padding" in spec.attributes and not all(np.isfinite(a).all() for a in arrays[1:]):
        return False
    if spec.name != "cast" or result.dtype.kind not in "iu" or arrays[0].dtype.kind != "f":
        return True
    limits, given = np.iinfo(result.dtype), arrays[0].astype(np.float64)
    inside = (given >= limits.min) & (given < float(limits.max))
    return bool(inside.all())


def draw(seed: int, most: int = 8) -> Sample:
    """Return the random graph of a seed, of about `most` operators at most."""
    drawing = _Drawing(seed)
    random = drawing.random
    for _ in range(int(random.integers(1, most + 1))):
        drawing.operator()
    while not drawing.builder.nodes:
        drawing.operator()
    builder = drawing.builder
    read = {name for node in builder.nodes for name in node.inputs}
    made = [name for node in builder.nodes for name in node.outputs]
    builder.output(*(n for n in made if n not in read or drawing.chance(0.15)))
    return _closed(Sample(seed, builder.build(), drawing.known))


def _closed(sample: Sample) -> Sample:
    """Return the sample without what its outputs do not need."""
    graph = sample.graph.pruned()
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    roles = {name: role for name, role in graph.roles.items() if name in read}
    graph = replace(graph, roles=roles)
    return Sample(sample.seed, graph, {name: sample.values[name] for name in roles})


# ------------------------------------------------------------------ comparing


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
        others.append(exact)
    # What cancels inside an operator is as uncertain as its operands are large.
    every = [*known.values(), *(exact or {}).values()]
    largest = max(map(_largest, every), default=0.0)
    scale = min(max(1.0, largest), SCALE)
    # A mean of infinities is NaN to kernels that subtract one of them first.
    infinite = any(np.isinf(known[n]).any() for node in graph.nodes for n in node.inputs)
    # Minus infinity is NaN after a relu in oneDNN's epilogue (see `relu`'s declaration).
    rectified = any(node.attributes.get("activation") == "relu" for node in graph.nodes)
    # Kernels do not read the keys that a query does not see; the reference has 0 times infinity.
    causal = any(node.attributes.get("causal") for node in graph.nodes)
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
            certain &= ~(np.isnan(wide) & infinite & causal)
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


# ------------------------------------------------------------------ running


@contextlib.contextmanager
def drawn_kernels(seed: int) -> Iterator[None]:
    """Let a seed choose among the kernels that serve a call; nothing is measured or kept."""
    random = np.random.default_rng(seed)
    before = {name: getattr(select, name) for name in ("known", "measured")}

    def drawn(call: Call, of: str, every: object, serve: Sequence[Variant]) -> dict[str, float]:
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


# ------------------------------------------------------------------ making smaller


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
        made = _closed(replace(sample, graph=replace(graph, outputs=node.outputs)))
        if (len(made.graph.nodes), set(made.graph.outputs)) != whole:
            yield made
    if len(graph.outputs) > 1:
        for name in graph.outputs:
            rest = tuple(other for other in graph.outputs if other != name)
            yield _closed(replace(sample, graph=replace(graph, outputs=rest)))
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
            yield _closed(replace(sample, graph=made, values={**sample.values, **known}))


__all__ = ["WAYS", "Sample", "bounds", "draw", "failure", "shrink", "ways_of"]
