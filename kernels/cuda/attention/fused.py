"""Attention and its gradients in one pass over tiles of scores: one launch, or three.

Forward, a block owns queries and walks over keys: each row keeps its greatest score and the sum of
its weights so far, and what it has mixed is scaled when the greatest one grows. The gradients make
scores and weights again, from the logarithms of rows' sums: of queries in blocks that own queries,
of keys and values in blocks that own keys and walk over queries. So every sum has one order.

Source: Dao, FlashAttention-2, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from soapstone.dtypes import HALVES
from soapstone.ir.ops.products.attention import leaves_zeros, scale_of
from soapstone.kernels.cuda.attention.tiles import BRANCHES, Element, Fragments, Registers, Rows
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal
from soapstone.kernels.cuda.entry import DeviceEntry, Launch, sequence
from soapstone.kernels.cuda.libraries.cublaslt import bindings
from soapstone.kernels.cuda.libraries.device import asked
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import View, reinterpreted, room, views
from soapstone.kernels.cuda.substrate.copying import COPYING, WORDS
from soapstone.kernels.cuda.substrate.element import parameters
from soapstone.kernels.cuda.substrate.folds import lane_folds
from soapstone.kernels.cuda.substrate.target import SIMULATED, Kernel, built
from soapstone.kernels.cuda.substrate.tensor_cores import MULTIPLIED, serves
from soapstone.kernels.cuda.substrate.vectors import VECTORS
from soapstone.kernels.entry import Call, Declined
from soapstone.kernels.registry import arrange, variant

FUSED = "fused"  # the variants' name
FEW = 16  # queries, of fewer of which a tile is mostly empty
LEAST = literal(float(np.finfo(np.float32).min), "float32")
NONE = "float32(-inf)"
OF_KEYS = ("key", "value", "dkey", "dvalue")  # operands whose rows are keys', not queries'


@dataclass(frozen=True)
class Kind:
    """What a kernel is generated for, besides types.

    Attributes:
        way: how tiles are computed. by_queries: whether a block owns queries, not keys.
        causal: whether keys may not follow queries. masked: whether there is a mask.
        scale: of scores.
    """

    way: Registers | Fragments
    by_queries: bool
    causal: bool
    masked: bool
    scale: float

    def place(self, each: Element) -> tuple[str, str]:
        """Return the texts of an element's query and key."""
        own, other = f"first + {self.way.rows[each.slot]}", f"other + {each.column}"
        return (own, other) if self.by_queries else (other, own)

    def shown(self, to: str) -> list[str]:
        """Return the statements that scale, mask and hide scores."""
        way, lines, edge = self.way, list[str](), list[str]()
        count = "k_count" if self.by_queries else "q_count"
        tests = [f"other + {way.wide} > {count}"]
        if self.causal and self.by_queries:
            tests.append(f"other + {way.wide - 1} > first + ahead")
        elif self.causal:
            tests.append(f"first + {way.high - 1} > other + ahead")
        for each in way.elements(to):
            query, key = self.place(each)
            lines.append(f"{each.name} = {each.name} * {literal(self.scale, 'float32')}")
            if self.masked:
                at = f"o_mask + ({query}) * s_mask_2 + ({key}) * s_mask_3"
                inside = f"({query} < q_count) & ({key} < k_count)"
                lines.append(f"{each.name} = {each.name} + read(mask, {at}, {inside})")
            hidden = [f"(other + {each.column} >= {count})"]
            hidden += [f"({key} > {query} + ahead)"] if self.causal else []
            edge.append(f"    {each.name} = chosen({' | '.join(hidden)}, {NONE}, {each.name})")
        return [*lines, f"if {' or '.join(tests)}:", *edge]

    def walk(self, rows: Rows, body: Sequence[str]) -> list[str]:
        """Return the loop over the tiles that a block sees, which first waits for some rows."""
        way, lines = self.way, ["other = 0", f"end = {rows.count}"]
        if self.causal and self.by_queries:
            lines.append(f"end = min(end, max(first + {way.high} + ahead, 0))")
        elif self.causal:
            lines.append(f"other = max(first - ahead, 0) // {way.wide} * {way.wide}")
        body = [*body, f"other += {way.wide}"]
        lines += [*way.turn(None, rows), "while other < end:", *("    " + line for line in body)]
        return [*lines, *way.turn(rows, None)]

    def seen(self, queries: int, keys: int, ahead: int) -> int:
        """Return how many scores are computed of a sample and head."""
        high, wide = self.way.high, self.way.wide
        count, others = (queries, keys) if self.by_queries else (keys, queries)
        tiles = 0
        for first in range(0, count, high):
            begin, end = 0, others
            if self.causal and self.by_queries:
                end = min(end, max(first + high + ahead, 0))
            elif self.causal:
                begin = max(first - ahead, 0) // wide * wide
            tiles += max(0, -(-(end - begin) // wide))
        return min(tiles * high * wide, queries * keys)

    def stored(
        self, to: Rows, sums: Sequence[Element], value: Callable[[Element], str]
    ) -> list[str]:
        """Return the statements that store sums where there are such rows."""
        lines = []
        for each in sums:
            row = f"first + {self.way.rows[each.slot]}"
            place, made = to.element(row, each.column), f"{to.dtype}({value(each)})"
            inside = f"({row} < {to.count}) & ({each.column} < {to.width})"
            lines.append(f"write({to.name}, {place}, {made}, {inside})")
        return lines


def _forward(kind: Kind, zeros: bool, q: Rows, k: Rows, v: Rows, y: Rows) -> list[str]:
    """Return the statements of a block of queries."""
    way = kind.way
    scores, sums = way.elements("s"), way.sums("y_", v.width)
    slots = range(len(way.rows))
    lines = [f"most{n}, total{n} = {LEAST}, float32(0)" for n in slots]
    lines += [f"{each.name} = float32(0)" for each in sums]
    body = [
        *way.turn(k, v),
        *way.scores("s", q, k),
        *kind.shown("s"),
        *way.turn(v, k, f"other + {way.wide}"),
        *(f"top{n} = most{n}" for n in slots),
        # One that is not a number makes the row's sum so in any case.
        *(f"top{each.slot} = fmax(top{each.slot}, {each.name})" for each in scores),
    ]
    for n in slots:
        body += [
            f"top{n} = fold_max(top{n}, folded)",
            f"rescale{n} = exp(most{n} - top{n})",
            f"most{n}, total{n} = top{n}, total{n} * rescale{n}",
        ]
    for each in scores:
        body.append(f"{each.name} = exp({each.name} - top{each.slot})")
        body.append(f"total{each.slot} = total{each.slot} + {each.name}")
    body += [f"{each.name} = {each.name} * rescale{each.slot}" for each in sums]
    lines += kind.walk(k, [*body, *way.mixed("y_", "s", v)])
    for n in slots:
        lines += [
            f"total{n} = fold_sum(total{n}, folded)",
            f"divisor{n} = total{n}",
            *([f"if total{n} == float32(0): divisor{n} = float32(1)"] if zeros else []),
            f"at_row = first + {way.rows[n]}",
            "if column == 0 and at_row < q_count:",
            f"    lse[o_lse + at_row * s_lse_2] = {y.dtype}(log(total{n}) + most{n})",
        ]
    value = "{0.name} / divisor{0.slot}"
    return [*lines, *kind.stored(y, sums, value.format)]


def _of_queries(kind: Kind, dy: Rows, q: Rows, k: Rows, v: Rows, dq: Rows) -> list[str]:
    """Return the statements of a block of queries that makes their gradients."""
    way = kind.way
    sums = way.sums("y_", k.width)
    lines = [f"{each.name} = float32(0)" for each in sums]
    for n, row in enumerate(way.rows):
        lines += _of_row(str(n), f"first + {row}")
    body = [
        *way.turn(v, k),
        *way.scores("d", dy, v),
        *way.turn(k, v, f"other + {way.wide}"),
        *way.scores("s", q, k),
        *kind.shown("s"),
    ]
    for score, inner in zip(way.elements("s"), way.elements("d")):
        weight = f"exp({score.name} - lse_at{score.slot})"
        body.append(f"{inner.name} = {weight} * ({inner.name} - inner_at{score.slot})")
    lines += kind.walk(v, [*body, *way.mixed("y_", "d", k)])
    scale = literal(kind.scale, "float32")
    return [*lines, *kind.stored(dq, sums, ("{0.name} * " + scale).format)]


def _of_keys(kind: Kind, dy: Rows, q: Rows, k: Rows, v: Rows, dk: Rows, dv: Rows) -> list[str]:
    """Return the statements of a block of keys that makes gradients of them and of values."""
    way = kind.way
    of_k, of_v = way.sums("k_", k.width), way.sums("v_", v.width)
    lines = [f"{each.name} = float32(0)" for each in (*of_k, *of_v)]
    body = [*way.turn(q, dy), *way.scores("s", k, q), *kind.shown("s")]
    body += [*way.turn(dy, None), *way.scores("d", v, dy)]
    pairs = list(zip(way.elements("s"), way.elements("d")))
    for column in dict.fromkeys(score.column for score, _ in pairs):
        body += _of_row("", f"other + {column}")
        for score, inner in pairs:
            if score.column == column:
                body.append(f"{score.name} = exp({score.name} - lse_at)")
                body.append(f"{inner.name} = {score.name} * ({inner.name} - inner_at)")
    body += [*way.mixed("v_", "s", dy), *way.mixed("k_", "d", q)]
    body += way.turn(None, q, f"other + {way.wide}")
    lines += kind.walk(q, body)
    scale = literal(kind.scale, "float32")
    lines += kind.stored(dk, of_k, ("{0.name} * " + scale).format)
    return [*lines, *kind.stored(dv, of_v, "{0.name}".format)]


def _of_row(n: str, row: str) -> list[str]:
    """Return the statements that read the logarithm of a query's sum, and dy times y of it."""
    return [
        f"at_row = {row}",
        "inside = at_row < q_count",
        f"lse_at{n} = larger(read(lse, o_lse + at_row * s_lse_2, inside), {LEAST})",
        f"inner_at{n} = read(inner, o_inner + at_row * s_inner_2, inside)",
    ]


@cache
def _compiled(name: str, source: str, lanes: int) -> Kernel:
    values = {**BRANCHES, **lane_folds(lanes), **MULTIPLIED, **COPYING, **VECTORS}
    return built(name, source, **values)


def _launch(
    suffix: str,
    kind: Kind,
    rows: Mapping[str, View],
    more: Mapping[str, View],
    ahead: int,
    body: Sequence[str],
    products: int,
) -> Launch:
    """Return the launch of a kernel.

    Args:
        rows: operands (b, positions, heads, elements). more: those of b, heads, and then queries.
        products: terms of all products of a query and a key.
    """
    way, q, k = kind.way, rows["query"], rows["key"]
    name = way.kernel + suffix
    operands = {
        each: reinterpreted(view, "uint16") if each in way.copied else view
        for each, view in (*rows.items(), *more.items())
    }
    names, values = parameters(operands)
    names += [f"{each}_width" for each in rows]
    values += [view.shape[3] for view in rows.values()]
    lines = [
        f"def {name}(blocks, heads, sharing, q_count, k_count, ahead, {', '.join(names)}):",
        "    thread, tile = cuda.threadIdx.x, cuda.blockIdx.x",
        f"    first, head = tile % blocks * {way.high}, tile // blocks % heads",
        "    sample = tile // blocks // heads",
        f"    folded = cuda.shared.array({way.threads if SIMULATED else 1}, float32)",
    ]
    for each in operands:
        at = "head // sharing" if each in ("key", "value") else "head"
        step = f"{at}) * s_{each}_{1 if each in more else 2}"
        lines.append(f"    o_{each} = o_{each} + sample * s_{each}_0 + ({step}")
    lines += ["    " + line for line in (*way.start(), *body)]
    samples, count, heads, _ = q.shape
    blocks = -(-(count if kind.by_queries else k.shape[1]) // way.high)
    given = (blocks, heads, heads // k.shape[2], count, k.shape[1], ahead)
    kernel = _compiled(name, "\n".join(lines), way.lanes)
    grid = (blocks * heads * samples,)
    flops = (2.0 * products + 10.0) * samples * heads * kind.seen(count, k.shape[1], ahead)
    return Launch(kernel, grid, (way.threads,), (*given, *values), flops=flops)


def _way(
    own: Sequence[Rows], other: Sequence[Rows], views: Sequence[View], kept: int, widest: int
) -> Registers | Fragments:
    """Return how tiles are computed: by tensor cores, if rows can be; see `ways.Fragments`.

    Raises:
        Declined: results have more elements than threads keep.
    """
    dtype = own[0].dtype
    fits = max(each.width for each in (*own, *other)) <= Fragments.most
    pieces = fits and serves(dtype) and all(map(_in_pieces, views))
    if kept > (Fragments if pieces else Registers).most:
        raise Declined
    return Fragments(dtype, own, other, kept, widest) if pieces else Registers(own, other)


def _in_pieces(x: View) -> bool:
    """Return whether rows lie in pieces of eight halves, each at a boundary of its size."""
    steps = (x.offset, *x.strides[:-1])
    if x.span is None or x.strides[-1] > 1 or any(each % WORDS for each in steps):
        return False
    return x.aligned(16)


def _rows(views: Mapping[str, View]) -> dict[str, Rows]:
    """Return what kernels know of operands (b, positions, heads, elements)."""
    return {
        name: Rows(name, "k_count" if name in OF_KEYS else "q_count", view.shape[3], view.dtype)
        for name, view in views.items()
    }


def _served(operands: Sequence[View], masks: Sequence[View]) -> bool:
    """Return whether the kernels have operands of such types, which have elements."""
    dtypes, known = {x.dtype for x in operands}, {"float32", *HALVES}
    fit = len(dtypes) == 1 and dtypes | {x.dtype for x in masks} <= known
    return fit and min(x.shape[-1] for x in operands) > 0


def _masked(masks: Sequence[View], scores: Sequence[int]) -> dict[str, View]:
    return {f"mask{n or ''}": mask.broadcast(scores) for n, mask in enumerate(masks)}


def _expected(call: Call) -> float:
    """Return the time relative to the primitives': of few queries, tiles are mostly empty."""
    return 2.0 if call.inputs[0].shape[1] < FEW else 1.0


@variant("attention", FUSED, processor="cuda", expected=_expected)
def attention(call: Call) -> DeviceEntry | None:
    """Return the entry of attention, in one launch."""
    (q, k, v, *masks), (y, lse) = views(call)
    if lse.size == 0:
        return DeviceEntry(())
    if not _served((q, k, v, y), masks):
        return None
    at = call.attributes
    operands = {"query": q, "key": k, "value": v, "result": y}
    rows = _rows(operands)
    own, other = [rows["query"]], [rows["key"], rows["value"]]
    kind = Kind(
        _way(own, other, (q, k, v), v.shape[3], 64),
        True,
        bool(at["causal"]),
        bool(masks),
        scale_of(at, q.shape[3]),
    )
    body = _forward(kind, leaves_zeros(at, k.shape[1]), *rows.values())
    more = {"lse": lse, **_masked(masks, (*lse.shape, k.shape[1]))}
    products = q.shape[3] + v.shape[3]
    return DeviceEntry((_launch("", kind, operands, more, at.get("ahead", 0), body, products),))


def _expected_of_gradients(call: Call) -> float:
    """Return the time relative to the primitives': a library's five products of all scores are
    faster than seven of ours."""
    single = call.inputs[0].dtype.name == "float32" and not call.attributes["causal"]
    return 2.0 if single and asked(call, bindings) else 1.0


@variant("attention_grad", FUSED, processor="cuda", expected=_expected_of_gradients)
def attention_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of the gradients of queries, keys and values, in three launches."""
    (dy, q, k, v, y, lse, *masks), (dq, dk, dv) = views(call)
    if 0 in (lse.size, dk.size) or not _served((dy, q, k, v, y, dq, dk, dv), masks):
        return None
    at = call.attributes
    operands = {"dresult": dy, "query": q, "key": k, "value": v}
    rows = _rows({**operands, "dquery": dq, "dkey": dk, "dvalue": dv})
    of_queries, of_keys = (
        [rows[n] for n in names] for names in (("query", "dresult"), OF_KEYS[:2])
    )
    settings = bool(at["causal"]), bool(masks), scale_of(at, q.shape[3])
    inner = room(lse.shape, "float32", lse.span)
    more = {"lse": lse, "inner": inner, **_masked(masks, (*lse.shape, k.shape[1]))}

    def launch(name: str, made: Mapping[str, View]) -> Launch:
        by_queries, kept = "dquery" in made, sum(x.shape[3] for x in made.values())
        sides = (of_queries, of_keys) if by_queries else (of_keys, of_queries)
        kind = Kind(_way(*sides, tuple(operands.values()), kept, 32), by_queries, *settings)
        write = _of_queries if by_queries else _of_keys
        body = write(kind, *(rows[name] for name in (*operands, *made)))
        # There is a product for each result, and one for each of the two tiles.
        products, ahead = q.shape[3] + v.shape[3] + kept, at.get("ahead", 0)
        return _launch(name, kind, {**operands, **made}, more, ahead, body, products)

    def term(text: Text, values: Sequence[Value]) -> list[Value]:
        one, two = (text.cast(value, "float32") for value in values)
        return [text.set(f"{one.name} * {two.name}", "float32")]

    by_query = inner.through(lambda x: x.transpose(0, 2, 1))
    inners = fold([dy, y], [3], [("sum", "float32")], [by_query], term)
    made = launch("_queries", {"dquery": dq}), launch("_keys", {"dkey": dk, "dvalue": dv})
    return sequence((inners, DeviceEntry(made)))


arrange("attention_grad", "cuda", ("cudnn", FUSED, "lowered"))
