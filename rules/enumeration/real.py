"""Evaluation of nodes in floating point, in bulk: any declared operator, also one without laws.

Values are float64 under several seeds: elements of both signs with zeros among them, of both signs,
and positive, so that roots have values. What is not finite is undefined, and so is what is made of
it: graphs that are equal only where an operand is not zero, or not negative, differ. Ids are equal
where all elements are, within a tolerance: rows are sorted by random projections and cut at gaps.
Integers (`exact.py`) are faster for operators that have a structure.

Over quotients and differences most equations say that something cancels: `x - (x - y)` is y. An
operator on two elements whose result does not depend on an input it uses is *idle*, as is what is
constant, and what uses either; its id equals no other's, unless its value is an input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Form
from soapstone.ir.spec import OpSpec
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.rules.algebra.evaluate import constant, split_sizes
from soapstone.rules.enumeration.graphs import mixed
from soapstone.rules.enumeration.space import Input, OperatorUse, Space
from soapstone.search.rules import language
from soapstone.search.rules.shapes import Type, extents

Shape = tuple[int, ...]
SEEDS = 3  # by which values are compared; then one for each variable, which alone is redrawn
_TOLERANCE = 1e-9
_SMALLEST = 1e-9  # what is smaller everywhere is zero
_UNDEFINED = 1.7390851332151607  # stands for it in projections
_MOST_ELEMENTS = 1 << 24  # of one batch


@dataclass(frozen=True)
class _Output:
    """An operator's output on operands of given shapes.

    `stacked` says that many operands may be evaluated at once, along a leading axis.
    """

    spec: OpSpec
    form: Form
    use: OperatorUse
    shapes: tuple[Shape, ...]
    sizes: tuple[int, int] | None
    shape: Shape
    stacked: bool

    def attributes(self, shapes: Sequence[Shape]) -> dict[str, Any] | None:
        specs = [TensorSpec(shape, "float64") for shape in shapes]
        given = {} if self.sizes is None else {"sizes": self.sizes}
        found = self.form.attributes(self.use.parameters, *specs, **given)
        return None if found is None else self.spec.normalise(found)

    def run(self, *operands: Array) -> Array:
        """Return the output on one tuple of operands."""
        attributes = self.attributes([operand.shape for operand in operands])
        if attributes is None:
            raise GraphError(f"{self.use} does not take shapes {self.shapes}")
        with np.errstate(all="ignore"):
            result = np.array(self.spec.run(attributes, *operands)[self.form.output], np.float64)
        result[~np.isfinite(result)] = np.nan
        return result

    def run_all(self, count: int, *operands: Array) -> Array:
        """Return the outputs on `count` tuples: operands (count, ...), or (...) for all alike."""
        rank = max(map(len, self.shapes))
        wide = [
            operand.reshape(count, *(1,) * (rank - len(shape)), *shape)
            if operand.ndim > len(shape)
            else operand
            for operand, shape in zip(operands, self.shapes)
        ]
        return self.run(*wide)

    def each(self, count: int, *operands: Array) -> Array:
        """Return what `run_all` does, one tuple at a time."""
        result = np.empty((count, *self.shape))
        for row in range(count):
            result[row] = self.run(
                *(
                    operand[row] if operand.ndim > len(shape) else operand
                    for operand, shape in zip(operands, self.shapes)
                )
            )
        return result


class _Handle(NamedTuple):
    """An operator on operands of given types: its outputs and their types, and its fixed operands.

    `used` are the variables that these use, as bits.
    """

    made: tuple[_Output, ...]
    types: tuple[int, ...]
    fixed: tuple[Array, ...]
    used: int


class RealEvaluator:
    """Evaluates nodes of any space in floating point; see `engine.Evaluator`."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._weights: dict[int, Array] = {}
        self._handles: list[_Handle] = []
        self._tensors: list[Array] = []  # by number: (seeds, *shape)
        self._types: list[int] = []
        self._used: list[int] = []  # by tensor: the variables, as bits
        self._idle: list[bool] = []
        self._seeds = SEEDS
        self._inputs: dict[Any, tuple[Array, int]] = {}
        self._given = np.zeros(0, np.uint64)  # ids of inputs
        self._known: dict[int, tuple[Array, Array]] = {}  # by type: keys, ids
        self._next = 0

    def begin(self, space: Space, types: tuple[int, ...]) -> Array:
        """Draw the inputs, which are tensors 0 and on; return their ids."""
        variables = [each.term for each in space.inputs if each.term.is_variable]
        self._seeds = SEEDS + len(variables)
        for each, type_ in zip(space.inputs, types):
            values = self._draw(each)
            used = 0
            if each.term.is_variable:
                used = 1 << variables.index(each.term)
                values = values[[*range(SEEDS), *[SEEDS - 1] * len(variables)]]
                values[SEEDS + variables.index(each.term)] = self._draw(each)[SEEDS - 1]
            self._inputs[each.term] = values, used
            self._keep(type_, values, used, False)
        ids = [self._ids(t, v[None]) for t, v in zip(self._types, self._tensors)]
        self._given = np.concatenate(ids) if ids else np.zeros(0, np.uint64)
        return self._given

    def _keep(self, type_: int, values: Array, used: int, idle: bool) -> None:
        self._types.append(type_)
        self._tensors.append(values)
        self._used.append(used)
        self._idle.append(idle)

    def _draw(self, each: Input) -> Array:
        if not each.term.is_variable:
            value = constant(each.term, each.shape)
            if value is None:
                raise GraphError(f"constant {each.term} has no value of shape {each.shape}")
            return np.broadcast_to(np.asarray(value, np.float64), (self._seeds, *each.shape)).copy()
        values = self._rng.uniform(0.3, 1.7, (SEEDS, *each.shape))
        factors = np.ones(values.shape)
        for seed in range(SEEDS - 1):
            flat = np.ones(values[0].size)
            flat[seed % 2 :: 2] = -1
            if seed == 0:
                flat[2::6] = 0
            factors[seed] = self._rng.permutation(flat).reshape(each.shape)
        return values * factors

    def prepare(
        self, use: OperatorUse, operands: tuple[Type, ...], outputs: tuple[int, ...]
    ) -> int:
        """Return the handle of an operator on operands of these types.

        Raises:
            GraphError: no form has the operator's name, or it does not take such operands.
        """
        shapes = list(map(extents, operands))
        fixed = tuple(self._inputs[term][0] for term in use.fixed)
        shapes = shapes[: len(operands)] + (
            [value.shape[1:] for value in fixed] if len(operands) == use.operands else []
        )
        sizes = split_sizes(use.outputs[0], use.parameters, operands[0])
        if len(use.outputs) > 1 and sizes is None:
            raise GraphError(f"{use}: no concatenation along axis {use.parameters[0]}")
        made = tuple(self._output(symbol, use, tuple(shapes), sizes) for symbol in use.outputs)
        used = 0
        for term in use.fixed:
            used |= self._inputs[term][1]
        self._handles.append(_Handle(made, outputs, fixed, used))
        return len(self._handles) - 1

    def _output(
        self,
        symbol: str,
        use: OperatorUse,
        shapes: tuple[Shape, ...],
        sizes: tuple[int, int] | None,
    ) -> _Output:
        declared = language.forms().get(symbol)
        if declared is None:
            raise GraphError(f"operator {symbol!r} has no form; see `soapstone ops`")
        one = _Output(declared.spec, declared.form, use, shapes, sizes, (), False)
        # Two tuples of operands, to see whether a leading axis only makes many of one.
        trial = [self._rng.uniform(0.5, 1.5, (2, *shape)) for shape in shapes]
        singles = [one.run(*(operand[row] for operand in trial)) for row in (0, 1)]
        shape = singles[0].shape
        try:
            many = one.run_all(2, *trial)
            stacked = many.shape == (2, *shape) and np.allclose(many, singles, 1e-12, 1e-12)
        except (GraphError, ValueError, IndexError):
            stacked = False
        return _Output(declared.spec, declared.form, use, shapes, sizes, shape, stacked)

    def values(self, handles: Array, a: Array, b: Array) -> Array:
        """Return the ids of the outputs of nodes: uint64 (nodes, 2)."""
        out = np.zeros((len(handles), 2), np.uint64)
        idle = np.zeros((len(handles), 2), np.bool_)
        masks, before = self._before(handles, a, b)
        pending: dict[int, list[tuple[Array, int, Array]]] = {}
        for rows, output, type_, results in self._batches(handles, a, b):
            pending.setdefault(type_, []).append((rows, output, self._keys(results)))
            each = self._handles[handles[rows[0]]].made[output]
            idle[rows, output] = self._idle_rows(each, results, masks[rows], before[rows])
        for type_, parts in pending.items():
            ids = self._identify(type_, np.concatenate([keys for *_, keys in parts]))
            begin = 0
            for rows, output, keys in parts:
                out[rows, output] = ids[begin : begin + len(keys)]
                begin += len(keys)
        alone = idle & ~np.isin(out, self._given)
        out[alone] = self._fresh(int(alone.sum()))
        return out

    def _before(self, handles: Array, a: Array, b: Array) -> tuple[Array, Array]:
        """Return the variables that nodes use, as bits, and which have an idle operand."""
        used, idle = np.array(self._used, np.int64), np.array(self._idle, np.bool_)
        fixed = np.array([handle.used for handle in self._handles], np.int64)
        two = b >= 0
        return used[a] | np.where(two, used[b], 0) | fixed[handles], idle[a] | (two & idle[b])

    def _idle_rows(self, each: _Output, results: Array, masks: Array, idle: Array) -> Array:
        """Return which nodes are idle, of one operator with these results (rows, seeds, ...)."""
        rows = len(results)
        flat = results.reshape(rows, self._seeds, -1)
        base = flat[:, SEEDS - 1 : SEEDS]
        change = np.abs(np.nan_to_num(flat[:, SEEDS:] - base)).max(axis=2, initial=0.0)
        scale = np.abs(np.nan_to_num(base)).max(axis=2, initial=_SMALLEST)
        uses = (masks[:, None] >> np.arange(self._seeds - SEEDS)) & 1 == 1
        still = uses & (change <= 100 * _TOLERANCE * scale)
        constant = still.sum(axis=1) == uses.sum(axis=1)
        if each.spec.elementwise and len(each.shapes) == 2:
            constant |= still.any(axis=1)
        return np.asarray(idle | constant)

    def _batches(self, handles: Array, a: Array, b: Array) -> Any:
        """Yield rows of one operator, which output, its type, and the values (rows, seeds, ...)."""
        order = np.argsort(handles, kind="stable")
        cuts = np.flatnonzero(np.diff(handles[order])) + 1
        for group in np.split(order, cuts) if len(order) else ():
            made, types, fixed, _ = self._handles[handles[group[0]]]
            largest = max(math.prod(shape) for each in made for shape in (*each.shapes, each.shape))
            step = max(1, _MOST_ELEMENTS // (self._seeds * max(1, largest)))
            for begin in range(0, len(group), step):
                rows = group[begin : begin + step]
                operands = [np.stack([self._tensors[t] for t in a[rows]])]
                if b[rows[0]] >= 0:
                    operands.append(np.stack([self._tensors[t] for t in b[rows]]))
                operands += [np.broadcast_to(f, (len(rows), *f.shape)) for f in fixed]
                count = len(rows) * self._seeds
                flat = [operand.reshape(count, *operand.shape[2:]) for operand in operands]
                for output, (each, type_) in enumerate(zip(made, types)):
                    found = (each.run_all if each.stacked else each.each)(count, *flat)
                    yield rows, output, type_, found.reshape(len(rows), self._seeds, *each.shape)

    def store(self, handles: Array, a: Array, b: Array) -> None:
        """Keep the outputs of nodes as the next tensors."""
        found: dict[tuple[int, int], tuple[int, Array, bool]] = {}
        masks, before = self._before(handles, a, b)
        for rows, output, type_, results in self._batches(handles, a, b):
            each = self._handles[handles[rows[0]]].made[output]
            idle = self._idle_rows(each, results, masks[rows], before[rows]).tolist()
            for row, result, alone in zip(rows.tolist(), results, idle):
                found[row, output] = type_, result, alone
        for row, output in sorted(found):
            type_, result, alone = found[row, output]
            self._keep(type_, result, int(masks[row]), alone)

    def agree(
        self, handles: Array, a: Array, b: Array, outputs: Array, tensors: Array | None = None
    ) -> Array:
        """Return for each node whether an output of it equals a stored tensor, element by element.

        Where no tensors are given: whether it equals the output of the node before it.
        """
        mine: list[tuple[int, Array]] = [(-1, np.zeros(0))] * len(handles)
        for rows, output, type_, results in self._batches(handles, a, b):
            for row, result in zip(rows.tolist(), results):
                if outputs[row] == output:
                    mine[row] = type_, result
        if tensors is None:
            others = [(-1, np.zeros(0)), *mine[:-1]]
        else:
            others = [(self._types[t], self._tensors[t]) for t in tensors.tolist()]
        good = np.zeros(len(handles), np.bool_)
        by_type: dict[int, list[int]] = {}
        for row, (one, other) in enumerate(zip(mine, others)):
            if one[0] == other[0] and one[1].shape == other[1].shape:
                by_type.setdefault(one[0], []).append(row)
        for same in by_type.values():
            pair = (np.stack([side[row][1] for row in same]) for side in (mine, others))
            good[same] = _close(*pair)
        return good

    def tensor(self, tensor: int) -> Array:
        """Return the elements of a stored tensor: (elements, seeds)."""
        return self._tensors[tensor].reshape(self._seeds, -1).T

    # Ids

    def _ids(self, type_: int, values: Array) -> Array:
        return self._identify(type_, self._keys(values))

    def _keys(self, values: Array) -> Array:
        """Return the keys (rows, 1 + seeds) of tensors: of magnitudes, and a projection each seed.

        A key is not a number where a tensor is undefined everywhere: it equals no other.
        """
        flat = values[:, :SEEDS].reshape(len(values), SEEDS, -1)
        size = flat.shape[2]
        if size not in self._weights:
            self._weights[size] = np.random.default_rng(size).uniform(-1.5, 1.5, (SEEDS, size))
        undefined = np.isnan(flat)
        scale = np.abs(np.where(undefined, 0, flat)).max(axis=2, initial=0.0)
        scale[scale < _SMALLEST] = 0
        with np.errstate(invalid="ignore", divide="ignore"):
            scaled = np.where(scale[..., None] > 0, flat / scale[..., None], 0)
        scaled[undefined] = _UNDEFINED
        magnitude = np.log(np.where(scale > 0, scale, 1)) @ np.arange(1.0, SEEDS + 1)
        keys = np.column_stack((magnitude, (scaled * self._weights[size]).sum(axis=2)))
        keys[undefined.all(axis=(1, 2))] = np.nan
        return keys

    def _identify(self, type_: int, keys: Array) -> Array:
        """Return the ids of keys: those of known values that are close, or new ones."""
        known_keys, known_ids = self._known.get(
            type_, (np.zeros((0, 1 + SEEDS)), np.zeros(0, np.uint64))
        )
        whole = np.concatenate((known_keys, keys))
        labels = np.zeros(len(whole), np.int64)
        for column in range(1 + SEEDS):
            order = np.lexsort((whole[:, column], labels))
            gap = ~(np.diff(whole[order, column]) <= _TOLERANCE)  # also where not a number
            new = np.concatenate(([0], np.cumsum(gap | (np.diff(labels[order]) != 0))))
            labels[order] = new
        count = int(labels.max(initial=-1)) + 1
        ids = np.zeros(count, np.uint64)
        ids[labels[: len(known_ids)]] = known_ids
        fresh = np.flatnonzero(ids == 0)
        ids[fresh] = self._fresh(len(fresh))
        firsts = np.full(count, len(whole), np.int64)
        np.minimum.at(firsts, labels, np.arange(len(whole)))
        self._known[type_] = whole[firsts], ids
        return ids[labels[len(known_ids) :]]

    def _fresh(self, count: int) -> Array:
        """Return so many new ids."""
        self._next += count
        numbers = np.arange(self._next - count + 1, self._next + 1).astype(np.uint64)
        return mixed(numbers * np.uint64(0x9E3779B97F4A7C15))


def _close(left: Array, right: Array) -> Array:
    """Return for each row whether two tensors are equal under every seed."""
    one, other = (side.reshape(*side.shape[:2], -1) for side in (left, right))
    undefined = np.isnan(one)
    scale = np.abs(np.where(undefined, 0, one)).max(axis=2, initial=_SMALLEST)
    error = np.where(undefined, 0, np.abs(one - other))
    same = (undefined == np.isnan(other)) & (error <= 10 * _TOLERANCE * scale[..., None])
    return np.asarray(same.all(axis=(1, 2)))
