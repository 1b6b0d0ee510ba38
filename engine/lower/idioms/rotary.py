"""Rotary embeddings that a graph spells out, as one operator.

Exporters write x * cosine + turned(x) * sine, where `turned` joins both halves of a row, or its
neighbours, in each other's place and one of them negated; ONNX itself writes the four products of
halves. Either is some eight launches. What an element of a result is made of is followed back
through what moves elements along the last axis, so a spelling is known by what it computes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from soapstone.engine.lower.fold import Site
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Node
from soapstone.ir.ops.products.rotary import width_of
from soapstone.ir.tensor import Array
from soapstone.records import dataclass

_WIDEST = 1024  # elements of a row that are followed
_DEEPEST = 8  # operators on the way

# For each element, the one of the source that is added to it, the one of a table that this is
# multiplied by, and the sign of that, 0 where nothing is added.
_SOURCE, _TABLE, _SIGN = range(3)


@dataclass(frozen=True)
class _Row:
    """What the elements of a row are made of: those of one source, some times those of tables.

    terms: by the table's name, "" where there is none. parts: the nodes that make it.
    """

    source: str
    terms: Mapping[str, Array]
    parts: tuple[Node, ...] = ()

    def moved(self, node: Node, by: Mapping[str, Array]) -> _Row:
        """Return the row of which a node makes these terms."""
        return _Row(self.source, by, (*self.parts, node))


def rotated(site: Site, node: Node) -> str | None:
    """Return the rotary embedding that a sum, a concatenation or a reshape ends, or None."""
    builder = site.builder
    makers = [builder.maker(value) for value in node.inputs]
    ends = {"add": ("mul",), "concat": ("add", "sub", "rotary_embedding"), "reshape": ("concat",)}
    if not any(maker is not None and maker.operator in ends[node.operator] for maker in makers):
        return None
    spec = builder.spec(node.inputs[0])
    shape = node.attributes.get("shape", spec.shape)
    if not spec.is_float or not shape or shape[-1] > _WIDEST:
        return None
    follow = _Follow(builder, tuple(shape[:-1]))
    for row in follow.made(node, 0):
        found = _turned(builder, row)
        if found is not None:
            base, width, interleaved, tables = found
            extent = row.terms[tables[0]].shape[1]
            x = _part(site, row.source, base, extent)
            if builder.spec(x).dtype == spec.dtype:
                return site.emit(
                    *("rotary_embedding", x, *tables),
                    name=node.name,
                    sources=tuple(dict.fromkeys(n for part in row.parts for n in part.work_of)),
                    width=None if width == extent else width,
                    interleaved=interleaved,
                )
    return None


def _part(site: Site, value: str, start: int, extent: int) -> str:
    """Return so many elements of each row from one on."""
    shape = site.builder.spec(value).shape
    if shape[-1] == extent:
        return value
    starts, stops = [0] * len(shape), [*shape[:-1], start + extent]
    starts[-1] = start
    return site.emit("slice", value, starts=starts, stops=stops, steps=(1,) * len(shape))


def _turned(builder: GraphBuilder, row: _Row) -> tuple[int, int, bool, tuple[str, str]] | None:
    """Return where the elements begin that a row is turned of, how many are, and by which tables.

    In between is whether they are interleaved. None: it is no rotation.
    """
    names = [name for name in row.terms if name]
    if len(names) != 2:
        return None
    kept = row.terms.get("", np.zeros_like(row.terms[names[0]]))
    for cosine, sine in itertools.permutations(names):
        straight, across = row.terms[cosine], row.terms[sine]
        width, places = int(np.count_nonzero(straight[_SIGN])), np.arange(straight.shape[1])
        base, turned, half = int(straight[_SOURCE, 0]), places < width, width // 2
        if width < 2 or width % 2 or not np.array_equal(straight[_SIGN], turned):
            continue
        if not np.array_equal(straight[_SOURCE, :width], base + places[:width]):
            continue
        if not np.array_equal(kept[_SIGN], ~turned):
            continue
        if not np.array_equal(kept[_SOURCE, width:], base + places[width:]):
            continue
        for interleaved in (False, True):
            inside = places[:width]
            partner = inside ^ 1 if interleaved else (inside + half) % width
            pair = inside // 2 if interleaved else inside % half
            sign = np.where(partner > inside, -1, 1)
            if not np.array_equal(across[_SIGN], [*sign, *[0] * (len(places) - width)]):
                continue
            if not np.array_equal(across[_SOURCE, :width], base + partner):
                continue
            if all(
                np.array_equal(term[_TABLE, :width], inside if extent == width else pair)
                for term, extent in (
                    (row.terms[name], builder.spec(name).shape[-1]) for name in (cosine, sine)
                )
            ):
                return base, width, interleaved, (cosine, sine)
    return None


@dataclass(frozen=True)
class _Follow:
    """Follows values back in a graph whose leading extents are these."""

    builder: GraphBuilder
    lead: tuple[int, ...]

    def value(self, value: str, depth: int, moves: bool = False) -> Iterator[_Row]:
        """Yield what a value may be made of. moves: follow what moves elements alone."""
        node, rank = self.builder.maker(value), len(self.lead)
        shape = self.builder.spec(value).shape
        if shape[:rank] != self.lead or depth > _DEEPEST:
            return
        rows = [] if node is None else [*self.made(node, depth + 1, moves, value)]
        yield from rows
        if not rows and len(shape) == rank + 1 and shape[-1] <= _WIDEST:
            elements = np.arange(shape[-1])
            plain = np.stack([elements, np.zeros_like(elements), np.ones_like(elements)])
            yield _Row(value, {"": plain})

    def made(self, node: Node, depth: int, moves: bool = False, value: str = "") -> Iterator[_Row]:
        """Yield what a node's result, of this name if it has several, may be made of."""
        operator, at, rank = node.operator, node.attributes, len(self.lead)
        if operator in ("slice", "split"):
            cut = self._cut(node, value)
            if cut is None:
                return
            for row in self.value(node.inputs[0], depth, moves=True):
                yield row.moved(node, {k: t[cut] for k, t in row.terms.items()})
        elif operator == "neg" or (operator == "affine" and (at["scale"], at["shift"]) == (-1, 0)):
            for row in self.value(node.inputs[0], depth, moves):
                yield row.moved(node, _signed(row.terms, -1))
        elif operator == "reshape" and at["shape"][:rank] == self.lead:
            for row in self.value(node.inputs[0], depth, moves):
                shape = (3, *at["shape"][rank:])
                yield row.moved(node, {k: t.reshape(shape) for k, t in row.terms.items()})
        elif operator == "concat" and at["axis"] >= rank:
            each = [[*self.value(name, depth, moves)] for name in node.inputs]
            for rows in itertools.product(*each):
                if len({row.source for row in rows}) == 1:
                    yield _joined(node, rows, at["axis"] - rank + 1)
        elif moves:
            return
        elif operator in ("add", "sub"):
            left, right = ([*self.value(name, depth)] for name in node.inputs)
            for one, other in itertools.product(left, right):
                terms = _signed(other.terms, -1 if operator == "sub" else 1)
                if one.source == other.source and one.terms.keys().isdisjoint(terms):
                    whole = _Row(one.source, {**one.terms, **terms}, (*one.parts, *other.parts))
                    yield whole.moved(node, whole.terms)
        elif operator == "mul":
            for x, table in (node.inputs, node.inputs[::-1]):
                for row in self.value(x, depth, moves=True):
                    product = self._times(row, table)
                    if product is not None:
                        yield row.moved(node, product)
        elif operator == "rotary_embedding":
            for row in self.value(node.inputs[0], depth, moves=True):
                yield row.moved(node, self._rotation(node, row))

    def _times(self, row: _Row, table: str) -> Mapping[str, Array] | None:
        """Return the terms of a row times a table that is as long, or None."""
        terms, shape = row.terms[""], self.builder.spec(table).shape
        if terms.ndim != 2 or shape[-1:] != terms.shape[1:] or len(shape) > len(self.lead) + 1:
            return None
        numbered = terms.copy()
        numbered[_TABLE] = np.arange(shape[-1])
        return {table: numbered}

    def _rotation(self, node: Node, row: _Row) -> Mapping[str, Array]:
        """Return the terms of what is turned already."""
        x, (_, *tables) = row.terms[""], node.inputs
        extent = x.shape[1]
        width, places = width_of(node.attributes, extent), np.arange(extent)
        interleaved, half = node.attributes["interleaved"], max(width // 2, 1)
        partner = places ^ 1 if interleaved else (places + half) % max(width, 1)
        partner = np.where(places < width, partner, places)
        terms = {}
        for name, place in zip(tables, (places, partner)):
            pair = places // 2 if interleaved else places % half
            number = places if self.builder.spec(name).shape[-1] == width else pair
            sign = np.where(place > places, -1, 1) * (places < width)
            terms[name] = np.stack([x[_SOURCE, place], number, x[_SIGN, place] * sign])
        kept = x.copy()
        kept[_SIGN, :width] = 0
        return {**terms, "": kept}

    def _cut(self, node: Node, value: str) -> tuple[slice, ...] | None:
        """Return which part of terms a slice or a split takes, if it takes all rows; or None."""
        shape, rank = self.builder.spec(node.inputs[0]).shape, len(self.lead)
        at = node.attributes
        if node.operator == "slice":
            cuts = [*zip(at["starts"], at["stops"], at["steps"])]
            whole = cuts[:rank] == [(0, extent, 1) for extent in self.lead]
            fine = whole and all(step > 0 for _, _, step in cuts)
            return (slice(None), *itertools.starmap(slice, cuts[rank:])) if fine else None
        if at["axis"] < rank or value not in node.outputs:
            return None
        bounds = [*itertools.accumulate(at["sizes"], initial=0)]
        number = node.outputs.index(value)
        cut = [slice(None)] * (1 + len(shape) - rank)
        cut[1 + at["axis"] - rank] = slice(bounds[number], bounds[number + 1])
        return tuple(cut)


def _signed(terms: Mapping[str, Array], sign: int) -> Mapping[str, Array]:
    factors = np.array([1, 1, sign])
    return {k: t * factors.reshape(3, *[1] * (t.ndim - 1)) for k, t in terms.items()}


def _joined(node: Node, rows: Sequence[_Row], axis: int) -> _Row:
    """Return the row whose parts are these, one after the other along an axis of terms."""
    names = dict.fromkeys(name for row in rows for name in row.terms)
    terms = {}
    for name in names:
        none = [np.zeros_like(next(iter(row.terms.values()))) for row in rows]
        each = [row.terms.get(name, zeros) for row, zeros in zip(rows, none)]
        terms[name] = np.concatenate(each, axis)
    parts = tuple(dict.fromkeys(part for row in rows for part in row.parts))
    return _Row(rows[0].source, terms, (*parts, node))
