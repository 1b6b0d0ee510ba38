"""Types of terms: shapes and split trees, of given sizes or of symbolic ones (TASO, section 2.3.1).

One body says when a symbol fits its operands and what type results. Over integers it answers for
one graph (`concrete`, `infer`); over polynomials it states conditions, which `condition.Facts`
assumes, collects, or derives. A split tree is, for each axis, the history of its concatenations;
where two operands meet, what their histories have in common remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Protocol, TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, Value
from soapstone.search.rules import language
from soapstone.search.rules.condition import Condition, IllTyped, holds, number, window_size
from soapstone.search.rules.extents import Dim, window


@dataclass(frozen=True)
class Tree:
    """The most recent concatenation along an axis: the first part's extent, and both histories."""

    left: Tree | None
    right: Tree | None
    at: Dim


@dataclass(frozen=True)
class Type:
    """A shape, and the split tree of each axis."""

    shape: tuple[Dim, ...]
    trees: tuple[Tree | None, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.trees))

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.shape))})"


def extents(type_: Type) -> tuple[int, ...]:
    """Return the shape of a type of given sizes.

    Raises:
        GraphError: an extent is symbolic; names it.
    """
    for extent in type_.shape:
        if not isinstance(extent, int):
            raise GraphError(f"extent {extent} found, a number needed")
    return tuple(extent for extent in type_.shape if isinstance(extent, int))


class Judge(Protocol):
    """Whoever is asked whether extents are equal, and told what must hold."""

    def equal(self, left: Dim, right: Dim) -> bool: ...

    def require(self, condition: Condition) -> None: ...


Rule: TypeAlias = "Callable[[tuple[Value, ...], tuple[Type, ...], Judge], Type]"


def tensor_type(shape: Sequence[Dim]) -> Type:
    """Return the type of a tensor that is no concatenation."""
    return Type(tuple(shape), (None,) * len(shape))


def _rank(type_: Type, rank: int, what: str = "operand") -> None:
    if len(type_.shape) != rank:
        raise IllTyped(f"{what} of rank {len(type_.shape)} found, rank {rank} needed")


def same(left: Dim, right: Dim, judge: Judge) -> None:
    """Require that two extents are equal."""
    if left is not right and left != right:
        judge.require(Condition("equal", (left, right)))


def _axis(value: Value, type_: Type) -> int:
    if not isinstance(value, int) or not -len(type_.shape) <= value < 0:
        raise IllTyped(f"axis {value} found in a tensor of rank {len(type_.shape)}")
    return value + len(type_.shape)


def meet(left: Tree | None, right: Tree | None, judge: Judge) -> Tree | None:
    """Return what two histories of concatenations have in common."""
    if left is None or right is None or not judge.equal(left.at, right.at):
        return None
    if left == right:
        return left
    return Tree(meet(left.left, right.left, judge), meet(left.right, right.right, judge), left.at)


def _broadcast(left: Type, right: Type, judge: Judge) -> Type:
    if left.rank < right.rank:
        left, right = right, left
    missing = left.rank - right.rank
    shape = list(left.shape)
    trees = list(left.trees)
    for position in range(right.rank):
        ours, theirs = left.shape[missing + position], right.shape[position]
        tree, other = left.trees[missing + position], right.trees[position]
        if not judge.equal(ours, theirs):
            if judge.equal(theirs, 1):
                continue
            if judge.equal(ours, 1):
                shape[missing + position], trees[missing + position] = theirs, other
                continue
            judge.require(Condition("equal", (ours, theirs)))
        trees[missing + position] = meet(tree, other, judge)
    return Type(tuple(shape), tuple(trees))


def _elementwise(_: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    first, *others = operands
    for other in others:
        first = _broadcast(first, other, judge)
    return first


def _smul(_: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    _rank(operands[1], 0, "scalar")
    return operands[0]


def _matmul(_: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    left, right = operands
    if left.rank < 2 or right.rank < 2:
        raise IllTyped(f"operands of rank {left.rank} and {right.rank}, rank 2 or more needed")
    same(left.shape[-1], right.shape[-2], judge)
    batch = _broadcast(
        Type(left.shape[:-2], left.trees[:-2]), Type(right.shape[:-2], right.trees[:-2]), judge
    )
    return Type(
        (*batch.shape, left.shape[-2], right.shape[-1]),
        (*batch.trees, left.trees[-2], right.trees[-1]),
    )


def placed(extent: Dim, size: Dim, stride: Dim, padding: Value, judge: Judge) -> Dim:
    """Return the extent after a window has passed over it."""
    if not isinstance(padding, str):
        raise IllTyped(f"padding {padding!r} found, a word needed")
    judge.require(Condition("fits", (extent, size, padding)))
    return window(extent, size, stride, padding)


def _conv2d(parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    groups, stride, padding, _ = parameters
    image, kernel = operands
    _rank(image, 4, "image")
    _rank(kernel, 4, "kernel")
    n, c, h, w = image.shape
    o, i, kernel_h, kernel_w = kernel.shape
    if groups == "depthwise":
        same(i, 1, judge)
        same(o, c, judge)
    else:
        count = number(groups)
        same(c, count * i, judge)
        if count != 1:
            judge.require(Condition("divides", (count, o)))
    step = number(stride)
    shape = (
        n,
        o,
        placed(h, kernel_h, step, padding, judge),
        placed(w, kernel_w, step, padding, judge),
    )
    return Type(shape, (image.trees[0], kernel.trees[0], None, None))


def _enlarge(parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    (kernel,) = operands
    _rank(kernel, 4, "kernel")
    size = window_size(parameters[0])
    for wanted, found in zip(size, kernel.shape[2:]):
        judge.require(Condition("at_least", (wanted, found)))
        judge.require(Condition("odd", (wanted - found + 1,)))
    return Type((*kernel.shape[:2], *size), (*kernel.trees[:2], None, None))


def _concat(parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    left, right = operands
    _rank(right, left.rank)
    axis = _axis(parameters[0], left)
    shape, trees = list(left.shape), list(left.trees)
    for position in range(left.rank):
        if position != axis:
            same(left.shape[position], right.shape[position], judge)
            trees[position] = meet(left.trees[position], right.trees[position], judge)
    shape[axis] = left.shape[axis] + right.shape[axis]
    trees[axis] = Tree(left.trees[axis], right.trees[axis], left.shape[axis])
    return Type(tuple(shape), tuple(trees))


def _split(part: int) -> Rule:
    def rule(parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
        (whole,) = operands
        axis = _axis(parameters[0], whole)
        tree = whole.trees[axis]
        if tree is None:
            raise IllTyped(f"axis {parameters[0]} is no concatenation")
        shape, trees = list(whole.shape), list(whole.trees)
        shape[axis] = whole.shape[axis] - tree.at if part else tree.at
        trees[axis] = tree.right if part else tree.left
        return Type(tuple(shape), tuple(trees))

    return rule


def _scaled(tree: Tree | None, factor: Dim) -> Tree | None:
    if tree is None:
        return None
    return Tree(_scaled(tree.left, factor), _scaled(tree.right, factor), tree.at * factor)


def _merge(_: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge) -> Type:
    (x,) = operands
    _rank(x, 3)
    b, m, k = x.shape
    return Type((b * m, k), (_scaled(x.trees[0], m), x.trees[2]))


# What does not follow from signatures alone: parameters that say how many channels or how large a
# kernel, and what happens to split trees.
_RULES: dict[str, Rule] = {
    "smul": _smul,
    "matmul": _matmul,
    "conv2d": _conv2d,
    "enlarge": _enlarge,
    "concat": _concat,
    "split0": _split(0),
    "split1": _split(1),
    "merge": _merge,
}


@lru_cache(maxsize=256)
def _rule(symbol: str) -> tuple[Rule, int, int]:
    """Return how a symbol is typed, and how many operands and parameters it has.

    Raises:
        IllTyped: there is no such symbol.
    """
    from soapstone.search.rules import signatures

    declared = language.forms().get(symbol)
    if declared is None:
        raise IllTyped(f"{symbol!r} is no symbol; see `soapstone ops`")
    rule = _RULES.get(symbol, _elementwise if declared.spec.elementwise else None)
    form = declared.form
    return rule or partial(signatures.typed, symbol), form.operands, len(form.parameters)


def result(
    symbol: str, parameters: tuple[Value, ...], operands: tuple[Type, ...], judge: Judge
) -> Type:
    """Return the type of a symbol applied to operands of these types.

    Raises:
        IllTyped: it does not fit them, or a condition that the judge was told is refused.
    """
    rule, count, several = _rule(symbol)
    if len(operands) != count or len(parameters) != several:
        raise IllTyped(
            f"{symbol} has {len(operands)} operands and {len(parameters)} parameters,"
            f" {count} and {several} needed"
        )
    return rule(parameters, operands, judge)


def constant(term: Term, type_: Type, judge: Judge) -> None:
    """Require what the shape of a constant must be.

    Raises:
        IllTyped: there is no such constant of that shape.
    """
    rank = language.constants()[term.symbol].rank
    if rank is not None:
        _rank(type_, rank, term.symbol)
    if term.symbol == "identity_matrix":
        same(type_.shape[0], type_.shape[1], judge)
    elif term.symbol in ("identity_kernel", "pool_kernel"):
        height, width = window_size(term.parameters[0])
        same(type_.shape[2], height, judge)
        same(type_.shape[3], width, judge)
        if term.symbol == "pool_kernel":
            same(type_.shape[1], 1, judge)
        else:
            judge.require(Condition("divides", (type_.shape[1], type_.shape[0])))
            judge.require(Condition("odd", (height,)))
            judge.require(Condition("odd", (width,)))


class _Concrete:
    """A judge of integers: what does not hold is refused."""

    def equal(self, left: Dim, right: Dim) -> bool:
        return left == right

    def require(self, condition: Condition) -> None:
        if not holds(condition):
            raise IllTyped(f"{condition} is needed")


CONCRETE = _Concrete()


@lru_cache(maxsize=1 << 18)
def concrete(symbol: str, parameters: tuple[Value, ...], operands: tuple[Type, ...]) -> Type | None:
    """Return the type of a symbol applied to operands of given sizes, None if it does not fit."""
    try:
        found = result(symbol, parameters, operands, CONCRETE)
    except IllTyped:
        return None
    return found if all(isinstance(e, int) and e > 0 for e in found.shape) else None


def infer(term: Term, types: Mapping[Term, Type]) -> Type | None:
    """Return the type of a term whose variables and constants have these, None if it has none."""
    if not term.operands:
        return types.get(term)
    operands = []
    for operand in term.operands:
        found = infer(operand, types)
        if found is None:
            return None
        operands.append(found)
    return concrete(term.symbol, term.parameters, tuple(operands))
