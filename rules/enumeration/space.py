"""The spaces that are enumerated: input tensors of given shapes, operators with parameter values.

What a space holds is stated in full in the rule file. The spaces follow Table 2.1 of TASO (Jia
et al.) with all extents unequal, since equal ones let wrong rules through, and the published
generator's own inputs. One value of stride and padding is enumerated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.ir.term import SPLITS, Term, Value, parse

Kind: TypeAlias = Literal["scalar", "vector", "matrix", "batch", "image", "kernel"]
Signature: TypeAlias = "tuple[Kind, ...]"  # the operands' kinds, then the result's
DATA: tuple[Kind, ...] = ("vector", "matrix", "batch", "image")


@dataclass(frozen=True)
class Input:
    """A variable or a constant, its shape, and what it is for."""

    term: Term
    shape: tuple[int, ...]
    kind: Kind

    def __str__(self) -> str:
        return f"{self.term}: {self.kind} {'x'.join(map(str, self.shape)) or '1'}"


@dataclass(frozen=True)
class OperatorUse:
    """An operator with parameter values, and the kinds of operands it is applied to.

    Attributes:
        symbol: of a form, or `split`, whose outputs are `split0` and `split1`.
        kinds: the signatures; none given means those usual for the symbol.
        fixed: inputs that follow the one or two operands that are enumerated.
        equal: whether two operands need one shape (no broadcast); None means: if element-wise.
    """

    symbol: str
    parameters: tuple[Value, ...] = ()
    kinds: tuple[Signature, ...] = ()
    fixed: tuple[Term, ...] = ()
    equal: bool | None = None

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        """The symbols of its outputs."""
        return SPLITS if self.symbol == "split" else (self.symbol,)

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """The operands' kinds and the result's, of each way to apply it."""
        return self.kinds or usual(self.symbol, self.parameters)

    @cached_property
    def operands(self) -> int:
        """How many operands are enumerated."""
        return len(self.signatures[0]) - 1

    def result(self, kinds: Sequence[Kind], shapes: Sequence[tuple[int, ...]]) -> Kind | None:
        """Return the kind of the result, or None where the operands are not of its kinds."""
        equal = self.symbol in _ELEMENTWISE if self.equal is None else self.equal
        if equal and any(shape != shapes[0] for shape in shapes):
            return None
        for *operands, kind in self.signatures:
            if operands == list(kinds):
                return kind
        return None

    def __str__(self) -> str:
        parameters = f"[{','.join(map(str, self.parameters))}]" if self.parameters else ""
        fixed = f"(..., {', '.join(map(str, self.fixed))})" if self.fixed else ""
        return f"{self.symbol}{parameters}{fixed}"


_ELEMENTWISE = frozenset({"add", "sub", "mul", "div"})


def _same(kinds: Iterable[Kind], operands: int) -> tuple[Signature, ...]:
    return tuple((kind,) * (operands + 1) for kind in kinds)


def usual(symbol: str, parameters: Sequence[Value] = ()) -> tuple[Signature, ...]:
    """Return the signatures of a symbol: what each kind of tensor is for.

    Kernels are added, scaled, concatenated and enlarged; an axis of an image or a kernel is the
    first or second, of other tensors the last or the one before.
    """
    everything: tuple[Kind, ...] = (*DATA, "kernel")
    special: dict[str, tuple[Signature, ...]] = {
        "add": _same(everything, 2),
        "smul": tuple((kind, "scalar", kind) for kind in everything),
        "transpose": _same(("matrix", "batch"), 1),
        "matmul": (*_same(("matrix", "batch"), 2), ("batch", "matrix", "batch")),
        "conv2d": (("image", "kernel", "image"),),
        "enlarge": (("kernel", "kernel"),),
        "avg_pool2d": (("image", "image"),),
        "max_pool2d": (("image", "image"),),
        "merge": (("batch", "matrix"),),
    }
    if symbol in special:
        return special[symbol]
    if symbol in ("concat", "split"):
        axes: dict[Value, tuple[Kind, ...]] = {
            -1: ("vector", "matrix", "batch"),
            -2: ("matrix", "batch"),
            -3: ("batch", "image", "kernel"),
            -4: ("image", "kernel"),
        }
        return _same(axes[parameters[0]], 2 if symbol == "concat" else 1)
    from soapstone.search.rules.language import forms

    declared = forms().get(symbol)
    if declared is None:
        raise GraphError(f"operator {symbol!r} has no form; forms: {', '.join(sorted(forms()))}")
    return _same(DATA, declared.form.operands)


@dataclass(frozen=True)
class Space:
    """Inputs and operators: all graphs over them of at most so many operators.

    `repeated` says whether both operands of an operator may be one tensor.
    """

    name: str
    inputs: tuple[Input, ...]
    operators: tuple[OperatorUse, ...]
    max_operators: int
    repeated: bool = False

    def with_max_operators(self, count: int) -> Space:
        """Return the space of graphs of at most so many operators."""
        return replace(self, max_operators=count)

    def with_operators(self, names: Iterable[str]) -> Space:
        """Return the space over the operators of these names only.

        A symbol that the space does not have is added with each value of its axes, and the first of
        its other parameters' values.

        Raises:
            GraphError: no form has such a name; lists those that there are.
        """
        chosen: list[OperatorUse] = []
        for name in dict.fromkeys(names):
            symbol = "split" if name in SPLITS else name
            have = [use for use in self.operators if use.symbol == symbol]
            chosen += have or _declared(symbol)
        return replace(self, operators=tuple(chosen))

    def __str__(self) -> str:
        return f"{self.name}: {len(self.inputs)} inputs, {len(self.operators)} operators"


def _declared(symbol: str) -> list[OperatorUse]:
    from soapstone.search.rules.language import forms

    declared = forms().get(SPLITS[0] if symbol == "split" else symbol)
    if declared is None:
        raise GraphError(f"operator {symbol!r} has no form; forms: {', '.join(sorted(forms()))}")
    values = [
        tuple(value for value in given if value in (-1, -2)) if name == "a" else tuple(given)[:1]
        for name, given in declared.form.parameters.items()
    ]
    return [OperatorUse(symbol, tuple(choice)) for choice in itertools.product(*values)]


def inputs(text: str) -> tuple[Input, ...]:
    """Return inputs from text: `x1 x2 matrix 2x3; s scalar; ones matrix 2x3`."""
    words_of_kinds: tuple[Kind, ...] = ("scalar", *DATA, "kernel")
    result = []
    for part in filter(None, map(str.strip, text.split(";"))):
        words = part.split()
        at = next(position for position, word in enumerate(words) if word in words_of_kinds)
        shape = tuple(int(extent) for word in words[at + 1 :] for extent in word.split("x"))
        kind = next(kind for kind in words_of_kinds if kind == words[at])
        result += [Input(parse(word), shape, kind) for word in words[:at]]
    return tuple(result)


def _uses(*texts: str) -> tuple[OperatorUse, ...]:
    terms = [parse(text) for text in texts]
    return tuple(OperatorUse(term.symbol, term.parameters) for term in terms)


_MATRIX = _uses(
    *("add", "mul", "smul", "transpose", "matmul", "relu"),
    *("concat[-2]", "concat[-1]", "split[-2]", "split[-1]"),
)
_IMAGE = _uses(
    *("add", "mul", "smul", "relu", "enlarge[3x3]"),
    *("concat[-4]", "concat[-3]", "split[-4]", "split[-3]"),
    *(f"conv2d[{g},1,same,{c}]" for g in ("1", "2", "depthwise") for c in ("none", "relu")),
    *("avg_pool2d[3x3,1,same,all]", "max_pool2d[3x3,1,same]"),
)


def spaces() -> tuple[Space, ...]:
    """Return the spaces of the paper's operators, the one of size 5, and that of transformers."""
    matrices = Space(
        "matrices",
        inputs(
            "x1 x2 x3 matrix 2x3; w1 w2 matrix 3x4; v matrix 4x5; s1 s2 scalar;"
            "identity_matrix matrix 3x3; ones matrix 2x3"
        ),
        _MATRIX,
        4,
    )
    images = Space(
        "images",
        inputs(
            "x1 x2 image 2x3x4x5; k1 k2 kernel 4x3x3x3; e kernel 4x3x1x3; d kernel 3x1x3x3;"
            "s scalar; pool_kernel[3x3] kernel 3x1x3x3; identity_kernel[3x3] kernel 3x3x3x3"
        ),
        _IMAGE,
        4,
    )
    published = Space(
        "published",
        inputs(
            "x1 x2 x3 matrix 2x4; w1 w2 w3 matrix 4x4; i1 i2 i3 image 2x4x3x5;"
            "k1 k2 k3 kernel 4x4x3x3; e1 e2 e3 kernel 4x4x1x3; f1 f2 f3 kernel 4x4x3x1;"
            "d kernel 4x1x3x3; s scalar; identity_matrix matrix 4x4; ones matrix 4x4;"
            "pool_kernel[3x3] kernel 4x1x3x3; identity_kernel[3x3] kernel 4x4x3x3"
        ),
        tuple(dict.fromkeys((*_MATRIX, *_IMAGE))),
        3,
    )
    large = Space(
        "large",
        inputs("x1 x2 x3 matrix 2x3; w1 w2 matrix 3x4; v matrix 4x5"),
        tuple(use for use in _MATRIX if use.symbol != "smul"),
        5,
    )
    from soapstone.rules.enumeration.transformer_space import transformer

    return matrices, images, published, large, transformer()
