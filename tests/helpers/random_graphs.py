"""Random graphs of all declared operators, on values that follow from their seeds.

A graph follows from its seed. Operators are drawn from the registry by their cases, in other types
and at other extents, on values that other operators made wherever these fit. What is undefined (a
number cast to an integer type that cannot hold it) is not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from helpers.operator_checks import parse

from soapstone.dtypes import DTYPES
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Affine, Product, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.spec import OpSpec, operators
from soapstone.ir.tensor import Array, Role, TensorSpec, rounded, spec_of

MOST_POINTS = 20_000  # of one operator: graphs are many, so each is small
EXTENTS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
INTEGERS = ("int32", "int64", "int8", "uint8", "bool")


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


class _Drawing:
    """A graph that is being drawn, with what its values hold."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.builder = GraphBuilder("random")
        self.known: dict[str, Array] = {}
        self.real = str(self.random.choice(["float32", "float32", "float16", "float64"]))
        self.specs = [s for s in operators() if not any(case.contents for case in s.cases)]

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
        padded = "padding" in {*spec.attributes, *dict(attributes.get("items", ()))}
        if not all(_defined(spec, padded, arrays, result) for result in results):
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


def _defined(spec: OpSpec, padded: bool, arrays: Sequence[Array], result: Array) -> bool:
    """Return whether NumPy's result is what any machine makes.

    A cast may have no right answer, and infinite weights times padding are NaN or skipped.
    """
    if padded and not all(np.isfinite(a).all() for a in arrays[1:]):
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
    return closed(Sample(seed, builder.build(), drawing.known))


def closed(sample: Sample) -> Sample:
    """Return the sample without what its outputs do not need."""
    graph = sample.graph.pruned()
    read = {name for node in graph.nodes for name in node.inputs} | set(graph.outputs)
    roles = {name: role for name, role in graph.roles.items() if name in read}
    tensors = {n: each for n, each in graph.tensors.items() if n in roles or n in graph.producers}
    graph = replace(graph, roles=roles, tensors=tensors)
    return Sample(sample.seed, graph, {name: sample.values[name] for name in roles})
