"""What an operator says about itself to those who rewrite graphs: its forms and its laws.

A *form* is a symbol of the language of terms (`ir/term.py`): the operator with its attributes said
by few parameters. Scalar multiplication is the form `smul` of the operator `mul`. A *law* is an
equation of terms that holds for all tensors that fit both sides, under the conditions it names.
Forms and laws are declared with their operator (`OpSpec.forms`, `OpSpec.laws`); laws are validated
by `rules/laws/validate.py`, and nothing is proved from anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from soapstone.ir.term import Term, Value, parse
from soapstone.records import dataclass

if TYPE_CHECKING:
    from soapstone.ir.tensor import Array

Attributes = Mapping[str, Any]
ToAttributes = Callable[..., "Attributes | None"]
FromAttributes = Callable[..., "Iterable[tuple[Value, ...]]"]


@dataclass(frozen=True)
class Form:
    """An operator as terms speak of it.

    Attributes:
        symbol: its name in terms.
        operands: how many tensors it takes.
        parameters: for each parameter, in order, the values that are enumerated and validated.
        attributes: `attributes(parameters, *specs)`, the operator's attributes when the operands
            are these, or None where the form does not take such operands. `split0` and `split1`
            are also given `sizes`, the two extents, by name.
        read: `read(attributes, *specs)`, the ways to say an operator with such attributes on such
            operands in this form: none, one, or several (a 1x1 kernel without padding is both
            `same` and `valid`).
        output: which of the operator's outputs the term is.
    """

    symbol: str
    operands: int
    parameters: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    attributes: ToAttributes = lambda parameters, *specs, **given: {}
    read: FromAttributes = lambda attributes, *specs: [()]
    output: int = 0


@dataclass(frozen=True)
class Constant:
    """A tensor that its shape and parameters determine: `ones`, `identity_matrix`.

    `value(parameters, shape)` is the tensor (float64); None where there is none of that shape.
    """

    symbol: str
    rank: int | None  # None: of any rank
    parameters: Mapping[str, tuple[Value, ...]]
    value: Callable[[Sequence[Value], tuple[int, ...]], Array | None]


@dataclass(frozen=True)
class Law:
    """An equation of terms, true for all tensors and parameters that fit, under its conditions.

    Attributes:
        name: unique among all laws: `matmul-associative`.
        text: `left = right`.
        where: conditions on extents and parameters, such as `dim(y,-4)*h = dim(w,-4)*g` or `odd(k)`
            (`search/rules/condition.py`).
        ranks: the ranks of its tensor variables for which it is said, such as `x=3 y=2`, all of
            which validation covers; none given means all of one rank, from 1 to 4. Constants of
            any rank are named too (`ones=2`).
        source: where it comes from: `Table 2.2`, or why it was added.
        follows: names of laws from which it follows; it is kept since proofs get shorter.
    """

    name: str
    text: str
    where: tuple[str, ...] = ()
    ranks: tuple[str, ...] = ()
    source: str = ""
    follows: tuple[str, ...] = ()

    @cached_property
    def sides(self) -> tuple[Term, Term]:
        """The two sides as terms."""
        left, _, right = self.text.partition(" = ")
        return parse(left), parse(right)

    def __str__(self) -> str:
        condition = f"  where {' and '.join(self.where)}" if self.where else ""
        return f"{self.text}{condition}"
