"""ONNX operators that are matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

import math
import string

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.errors import OnnxError
from soapstone.frontend.onnx.values import Value, rule


@rule("MatMul")
def matmul(n: Call) -> Value:
    return product(n, n.value(0), n.value(1))


def product(n: Call, a: Value, b: Value) -> Value:
    """Return the product of matrices, or of vectors, as NumPy's matmul."""
    if a.rank == 0 or b.rank == 0:
        raise OnnxError("an operand of rank 0 found; 1 or more needed")
    left, right = a.rank == 1, b.rank == 1
    a = n.reshape(a, (1, *a.shape)) if left else a
    b = n.reshape(b, (*b.shape, 1)) if right else b
    if b.rank == 2 and b.array is not None and b.spec.is_float:
        y = n("linear", a, b, bias=False)
    else:
        y = n("matmul", a, b)
    if left or right:
        shape = y.shape[: y.rank - 2] + (() if left else (y.shape[-2],))
        y = n.reshape(y, (*shape, *(() if right else (y.shape[-1],))))
    return y


@rule("Gemm")
def gemm(n: Call) -> Value:
    a, b, c = n.value(0), n.value(1), n.maybe(2)
    if a.rank != 2 or b.rank != 2:
        raise OnnxError(f"ranks {a.rank} and {b.rank} found; matrices needed")
    alpha, beta = n.attribute("alpha", 1.0), n.attribute("beta", 1.0)
    ta, tb = bool(n.attribute("transA", 0)), bool(n.attribute("transB", 0))
    columns = b.shape[0] if tb else b.shape[1]
    if c is not None:
        if n.version < 7 and not n.attribute("broadcast", 0):
            c = n.reshape(c, c.shape)
        if c.rank > 2:
            raise OnnxError(f"input 2 has rank {c.rank}; at most 2 needed")
        if beta != 1.0:
            c = scaled(n, c, beta)
    plain = not ta and alpha == 1.0 and a.spec.is_float
    if plain and (b.array is not None or not tb):
        # The shape that kernels know best; a transposed weight is folded away later.
        w = n("transpose", b, permutation=(1, 0)) if tb else b
        if c is not None and c.shape in ((columns,), (1, columns)):
            return n("linear", a, w, n.reshape(c, (columns,)))
        y = n("linear", a, w, bias=False)
    else:
        y = n("matmul", a, b, transpose_a=ta, transpose_b=tb)
        if alpha != 1.0:
            y = scaled(n, y, alpha)
    return y if c is None else n("add", y, c)


def scaled(n: Call, x: Value, factor: float) -> Value:
    """Return x times a number."""
    if x.spec.is_float:
        return n("affine", x, scale=factor)
    return n.cast(n("affine", n.cast(x, "float64"), scale=factor), x.dtype)


@rule("Einsum")
def einsum(n: Call) -> Value:
    return contracted(n, n.attribute("equation"), n.values())


def contracted(n: Call, equation: str, operands: list[Value]) -> Value:
    """Return an Einstein summation, two operands at a time.

    Raises:
        OnnxError: the equation is malformed or does not fit the operands.
    """
    terms, result = _terms(equation, operands)
    extents: dict[str, int] = {}
    parts: list[tuple[Value, str]] = []
    for value, term in zip(operands, terms):
        value, term = _diagonal(n, value, term)
        for letter, extent in zip(term, value.shape):
            if extents.setdefault(letter, extent) == 1:
                extents[letter] = extent
            if extent not in (1, extents[letter]):
                raise OnnxError(
                    f"dim {letter} is {extents[letter]} but {extent} in a later operand"
                )
        parts.append((value, term))
    while len(parts) > 1:
        (a, left), (b, right), *rest = parts
        later = {letter for _, term in rest for letter in term} | set(result)
        parts = [_pair(n, a, left, b, right, later), *rest]
    value, term = parts[0]
    gone = tuple(axis for axis, letter in enumerate(term) if letter not in result)
    if gone:
        value = n("reduce_sum", value, axes=gone, keepdims=False)
        term = "".join(letter for letter in term if letter in result)
    if set(result) - set(term):
        raise OnnxError(f"equation {equation!r}: a dim of the result is in no operand")
    value = n.transpose(value, [term.index(letter) for letter in result])
    return n.broadcast(value, [extents[letter] for letter in result])


def _terms(equation: str, operands: list[Value]) -> tuple[list[str], str]:
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise OnnxError(f"equation {equation!r}: {len(terms)} terms for {len(operands)} operands")
    spare = [letter for letter in string.ascii_letters[::-1] if letter not in equation]
    most = 0
    for term, value in zip(terms, operands):
        named = term.replace("...", "", 1)
        dots = value.rank - len(named)
        if (not named.isalpha() and named) or dots < 0 or (dots and named == term):
            raise OnnxError(f"equation {equation!r}: term {term!r} does not fit {value.spec}")
        most = max(most, dots)
    batch = "".join(spare[:most])

    def full(term: str, count: int) -> str:
        return term.replace("...", batch[most - count :], 1)

    spelled = [full(t, v.rank - len(t.replace("...", "", 1))) for t, v in zip(terms, operands)]
    if arrow:
        result = full(right, most)
    else:
        letters = "".join(t.replace("...", "", 1) for t in terms)
        result = batch + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    if len(set(result)) != len(result) or "." in result:
        raise OnnxError(f"equation {equation!r}: the result's dims are not legal")
    return spelled, result


def _diagonal(n: Call, x: Value, term: str) -> tuple[Value, str]:
    """Return x with dims that its term names twice replaced by their diagonal."""
    for letter in dict.fromkeys(term):
        while term.count(letter) > 1:
            i = term.index(letter)
            j = term.index(letter, i + 1)
            extent = x.shape[i]
            if x.shape[j] != extent:
                raise OnnxError(f"dim {letter} is {extent} and {x.shape[j]} in one operand")
            rest = [axis for axis in range(x.rank) if axis not in (i, j)]
            lead = tuple(x.shape[axis] for axis in rest)
            flat = n.reshape(n.transpose(x, (*rest, i, j)), (*lead, extent * extent))
            starts, steps = (0,) * len(rest), (1,) * len(rest)
            x = n(
                "slice",
                flat,
                starts=(*starts, 0),
                stops=flat.shape,
                steps=(*steps, extent + 1),
            )
            term = "".join(term[axis] for axis in rest) + letter
    return x, term


def _pair(n: Call, a: Value, left: str, b: Value, right: str, later: set[str]) -> tuple[Value, str]:
    """Return two operands contracted over the dims that nothing later needs."""
    for letter in set(left + right) - later:
        if letter not in right or (letter in left and b.shape[right.index(letter)] == 1):
            a, left = _summed(n, a, left, letter) if letter not in right else (a, left)
        elif letter not in left:
            b, right = _summed(n, b, right, letter)
    both = [x for x in left if x in right]
    if any(a.shape[left.index(x)] != b.shape[right.index(x)] for x in both):
        shape = {x: max(a.shape[left.index(x)], b.shape[right.index(x)]) for x in both}
        a = n.broadcast(a, [shape.get(x, e) for x, e in zip(left, a.shape)])
        b = n.broadcast(b, [shape.get(x, e) for x, e in zip(right, b.shape)])
    batch = [x for x in both if x in later]
    inner = [x for x in both if x not in later]
    rows = [x for x in left if x not in right]
    columns = [x for x in right if x not in left]
    extent = dict(zip(left + right, a.shape + b.shape))

    def arranged(value: Value, term: str, *groups: list[str]) -> Value:
        value = n.transpose(value, [term.index(x) for group in groups for x in group])
        lead = [extent[x] for x in groups[0]]
        return n.reshape(value, (*lead, *(math.prod(extent[x] for x in g) for g in groups[1:])))

    x = arranged(a, left, batch, rows, inner)
    y = arranged(b, right, batch, inner, columns)
    made = n("matmul", x, y) if inner else n("mul", x, y)
    term = "".join(batch + rows + columns)
    return n.reshape(made, [extent[x] for x in term]), term


def _summed(n: Call, x: Value, term: str, letter: str) -> tuple[Value, str]:
    axis = term.index(letter)
    summed = n("reduce_sum", x, axes=(axis,), keepdims=False)
    return summed, term.replace(letter, "", 1)
