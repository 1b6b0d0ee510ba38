"""Checks made from an operator's declaration: cases run whole, tile by tile and lowered.

Nothing here knows an operator by name, so a newly declared operator is checked without more code.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.dtypes import DTYPES
from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Node
from soapstone.ir.spec import Case, GradientContext, OpSpec, Tile
from soapstone.ir.tensor import Array, TensorSpec, spec_of

FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
Cuts = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Subject:
    """One case of one operator, bound to arrays."""

    spec: OpSpec
    case: Case
    attributes: Mapping[str, Any]
    arrays: tuple[Array, ...]
    signature: Signature

    def run(self) -> tuple[Array, ...]:
        """Return the outputs of the whole operator."""
        return self.spec.run(self.attributes, *self.arrays)


@contextmanager
def named(*what: object) -> Iterator[None]:
    """Say of what case it is, in any error that comes out."""
    try:
        yield
    except BaseException as error:
        error.add_note(" ".join(map(str, what)))
        raise


def assert_near(found: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Assert what `numpy.testing.assert_allclose` does, with little work where it holds."""
    if np.shape(found) != np.shape(wanted) or not np.allclose(
        found, wanted, rtol, atol, equal_nan=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol)


def parse(text: str) -> tuple[TensorSpec, int, int | None]:
    """Return the spec and the limits written as `"int32 4 3 >=2 <5"`; float32 is the default."""
    dtype, low, high, shape = "float32", 0, None, []
    for term in text.split():
        if term in DTYPES:
            dtype = term
        elif term.startswith("<"):
            high = int(term[1:])
        elif term.startswith(">="):
            low = int(term[2:])
        else:
            shape.append(int(term))
    return TensorSpec(tuple(shape), dtype), low, high


def draw(text: str, generator: np.random.Generator, positive: bool, real: str) -> Array:
    """Return a random array of a case's spec; floating-point ones have the type `real`."""
    spec, low, high = parse(text)
    if spec.is_float:
        values = (
            generator.uniform(0.2, 0.9, spec.shape)
            if positive
            else generator.standard_normal(spec.shape)
        )
        return np.asarray(values, real)
    if high is None:
        high = 2 if spec.dtype == "bool" else 10
    return np.asarray(generator.integers(low, high, spec.shape), spec.dtype)


def subject(spec: OpSpec, case: Case, real: str = "float64") -> Subject:
    """Return the case bound to arrays that are the same on every run."""
    generator = np.random.default_rng(zlib.crc32(f"{spec.name} {case}".encode()))
    arrays = tuple(
        np.array(case.contents[place], real if parse(text)[0].is_float else parse(text)[0].dtype)
        if place in case.contents
        else draw(text, generator, case.positive, real)
        for place, text in enumerate(case.inputs)
    )
    attributes = spec.normalise(case.attributes)
    signature = spec.bind([spec_of(array) for array in arrays], attributes)
    return Subject(spec, case, attributes, arrays, signature)


def box(lo: Array, hi: Array) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(lo, hi))


def tiles(
    signature: Signature, degrees: Mapping[str, int], cuts: Cuts | None = None
) -> Iterator[Tile]:
    """Yield the point tasks of an operator, in row-major order of its dims."""
    grid, lo, hi = signature.points(degrees, cuts)
    points = math.prod(grid)
    inputs = [operand.tiles(lo, hi, points) for operand in signature.inputs]
    outputs = [signature.written(i, lo, hi, points) for i in range(len(signature.outputs))]
    for point in range(points):
        yield Tile(
            {name: (int(lo[name][point]), int(hi[name][point])) for name in lo},
            tuple((first[point], last[point]) for first, last in inputs),
            tuple((first[point], last[point]) for first, last in outputs),
            tuple(operand.shape for operand in signature.inputs),
            tuple(operand.shape for operand in signature.outputs),
        )


def localized(spec: OpSpec, attributes: Mapping[str, Any], tile: Tile) -> Mapping[str, Any]:
    """Return the attributes of one point task."""
    return attributes if spec.localize is None else spec.localize(attributes, tile)


def identity(monoid: str, dtype: np.dtype[Any]) -> Any:
    """Return the value that a fold begins with."""
    if monoid in ("sum", "prod"):
        return dtype.type(monoid == "prod")
    if dtype == np.bool_:
        return dtype.type(monoid == "min")
    if dtype.kind == "f":
        return dtype.type(np.inf if monoid == "min" else -np.inf)
    limits = np.iinfo(dtype)
    return dtype.type(limits.max if monoid == "min" else limits.min)


def run_split(
    spec: OpSpec,
    attributes: Mapping[str, Any],
    arrays: Sequence[Array],
    degrees: Mapping[str, int],
    cuts: Cuts | None = None,
) -> list[Array]:
    """Run every point task by itself and return the outputs put together.

    Final tiles are pasted, and must cover the output exactly once; partial ones are folded. When a
    lowered dim is split, the operator's primitives run with the degrees they inherit.
    """
    signature = spec.bind([spec_of(array) for array in arrays], attributes)
    if cuts is None:
        signature.check(degrees)
    if signature.lowers(degrees):
        return run_lowered(spec, attributes, arrays, degrees)
    monoids = [signature.monoid(i, degrees) for i in range(len(signature.outputs))]
    results, written = [], []
    for monoid, output in zip(monoids, signature.output_specs):
        start = identity(monoid, np.dtype(output.dtype)) if monoid else 0
        results.append(np.full(output.shape, start, output.dtype))
        written.append(np.zeros(output.shape, np.int64))
    for tile in tiles(signature, degrees, cuts):
        parts = [array[box(*bounds)] for array, bounds in zip(arrays, tile.inputs)]
        made = spec.run(localized(spec, attributes, tile), *parts, dtypes=signature.dtypes)
        assert len(made) == len(results)
        for value, bounds, monoid, result, count in zip(
            made, tile.outputs, monoids, results, written
        ):
            place = box(*bounds)
            assert value.shape == result[place].shape, (
                f"{spec.name} {dict(degrees)} {dict(tile.intervals)}: tile {value.shape} found,"
                f" {result[place].shape} needed"
            )
            assert value.dtype == result.dtype
            result[place] = FOLDS[monoid](result[place], value) if monoid else value
            count[place] += 1
    for monoid, count in zip(monoids, written):
        assert np.all(count >= 1) if monoid else np.all(count == 1), (
            f"{spec.name} {dict(degrees)}: tiles do not cover the output"
        )
    return results


def inherited(node: Node, signature: Signature, degrees: Mapping[str, int]) -> dict[str, int]:
    """Return the degrees a node takes over from its origin, by dim name, where they are legal."""
    rename = dict(node.rename)
    taken: dict[str, int] = {}
    for dim in signature.dims:
        degree = degrees.get(rename.get(dim.name, dim.name), 1)
        if degree > 1 and degree <= dim.extent and dim.kind is not Kind.WHOLE:
            taken[dim.name] = degree
    try:
        signature.check(taken)
    except GraphError:
        return {}
    return taken


def declared(
    spec: OpSpec, attributes: Mapping[str, Any], arrays: Sequence[Array]
) -> tuple[GraphBuilder, Node]:
    """Return a graph under construction that holds one node of the operator."""
    builder = GraphBuilder("check")
    names = [builder.input(f"in{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    builder.apply(spec.name, *names, name="whole", **attributes)
    return builder, builder.nodes[-1]


def run_lowered(
    spec: OpSpec,
    attributes: Mapping[str, Any],
    arrays: Sequence[Array],
    degrees: Mapping[str, int],
) -> list[Array]:
    """Run an operator's primitives under inherited degrees and return its outputs."""
    assert spec.lower is not None, f"{spec.name} has lowered dims but no lowering"
    builder, node = declared(spec, attributes, arrays)
    outputs = spec.lower(Emitter(builder, node, "lower."), node)
    assert len(outputs) == len(node.outputs)
    forward = spec.bind([spec_of(array) for array in arrays], attributes)
    values = {f"in{i}": array for i, array in enumerate(arrays)}
    followed: set[str] = set()
    for primitive in builder.nodes[1:]:
        operands = [values[name] for name in primitive.inputs]
        signature = primitive.spec.bind([spec_of(a) for a in operands], primitive.attributes)
        check_carried(node, forward, primitive, signature)
        taken = inherited(primitive, signature, degrees)
        followed.update(dict(primitive.rename).get(dim, dim) for dim in taken)
        made = run_split(primitive.spec, primitive.attributes, operands, taken)
        values.update(zip(primitive.outputs, made))
    assert followed.issuperset(degrees), f"{spec.name}: no primitive follows {dict(degrees)}"
    return [values[name] for name in outputs]


def check_carried(origin: Node, forward: Signature, node: Node, signature: Signature) -> None:
    """Assert that dims which take over a degree mean the same dim: equal extents, or groups."""
    rename = dict(node.rename)
    for dim in signature.dims:
        source = forward.by_name.get(rename.get(dim.name, dim.name))
        if source is not None and dim.extent > 1 and source.extent > 1:
            assert dim.extent % source.extent == 0, (
                f"{origin.operator}: {node.name} takes dim {dim.name}={dim.extent}"
                f" from {source.name}={source.extent}"
            )


def uneven_cuts(signature: Signature) -> Iterator[tuple[dict[str, int], Cuts]]:
    """Yield a few unequal tilings of each splittable dim, empty tiles among them."""
    inner = {
        name
        for product in signature.products
        for position, name in enumerate(product.dims)
        if math.prod(product.extents[:position]) > 1
    }
    splittable = [
        dim
        for dim in signature.dims
        if dim.kind in (Kind.FREE, Kind.REDUCED) and dim.name not in inner
    ]
    # An axis of joined dims is empty when one of them is; the others say nothing of the tile then.
    joined = {name for product in signature.products for name in product.dims}
    for dim in splittable:
        extent = dim.extent
        cuts_of = {(0, min(1, extent), extent), (0, max(extent - 1, 0), extent)}
        if dim.name in joined:
            cuts_of = {cut for cut in cuts_of if 0 < cut[1] < extent}
        else:
            cuts_of |= {(0, 0, extent), (0, extent, extent)}
        for cut in sorted(cuts_of):
            yield {dim.name: 2}, {dim.name: cut}
    splittable = [dim for dim in splittable if dim.name not in joined]
    if splittable:
        first, last = splittable[0], splittable[-1]
        cuts = {first.name: (0, min(1, first.extent), min(1, first.extent), first.extent)}
        cuts[last.name] = (0, max(last.extent - 1, 0), last.extent)
        yield {name: len(cut) - 1 for name, cut in cuts.items()}, cuts


def sampled_gradients(
    item: Subject, output: int, generator: np.random.Generator, samples: int = 16
) -> Iterator[tuple[int, float, float]]:
    """Yield (input, gradient along a direction, central difference) of one output's weighted sum.

    Raises:
        GraphError: the gradient needs another output to take part.
    """
    builder, node = declared(item.spec, item.case.attributes, item.arrays)
    weights = generator.standard_normal(item.signature.outputs[output].shape)
    grads: list[str | None] = [None] * len(node.outputs)
    grads[output] = builder.input("seed", weights.shape, "float64")
    context = GradientContext(
        Emitter(builder, node, "grad."), node, node.inputs, node.outputs, tuple(grads)
    )
    assert item.spec.gradient is not None
    made = item.spec.gradient(context)
    assert len(made) == len(node.inputs)
    values = {f"in{i}": array for i, array in enumerate(item.arrays)} | {"seed": weights}
    for step in builder.nodes:
        operands = [values[name] for name in step.inputs]
        bound = step.spec.bind([spec_of(a) for a in operands], step.attributes)
        if step is not builder.nodes[0]:
            check_carried(node, item.signature, step, bound)
        values.update(zip(step.outputs, step.spec.run(step.attributes, *operands)))
    chosen = item.case.differentiable
    for position, array in enumerate(item.arrays):
        if array.dtype.kind != "f" if chosen is None else position not in chosen:
            continue
        name = made[position]
        assert name is not None, f"no gradient of input {position}"
        gradient = values[name]
        assert gradient.shape == array.shape
        assert gradient.dtype == array.dtype
        directions = [generator.standard_normal(array.shape) for _ in range(2)]
        for place in generator.permutation(array.size)[:samples]:
            direction = np.zeros(array.size)
            direction[place] = 1
            directions.append(direction.reshape(array.shape))
        for direction in directions:
            step_size = 1e-6
            ends = []
            for sign in (1, -1):
                moved = list(item.arrays)
                moved[position] = array + sign * step_size * direction
                value = item.spec.run(item.attributes, *moved)[output]
                ends.append(float(np.sum(weights * value)))
            yield (
                position,
                float(np.sum(gradient * direction)),
                (ends[0] - ends[1]) / (2 * step_size),
            )


def mutations(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, list[TensorSpec]]]:
    """Yield input specs with one extent or one rank changed, most of which fit no operator."""
    for position, spec in enumerate(specs):
        shapes = {"rank": [(*spec.shape, 2), spec.shape[1:]] if spec.rank else [(2,)]}
        shapes["extent"] = [
            tuple(e + 1 if axis == place else e for place, e in enumerate(spec.shape))
            for axis in range(spec.rank)
        ]
        for kind, changed in shapes.items():
            for shape in changed:
                yield (
                    kind,
                    [
                        TensorSpec(shape, other.dtype) if i == position else other
                        for i, other in enumerate(specs)
                    ],
                )
