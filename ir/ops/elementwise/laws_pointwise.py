"""Forms and laws of element-wise operators beyond Table 2.1: exp, roots, quotients, differences.

They hold over the real numbers, and both sides are defined at the same inputs: what is only true
where an element is not zero, or not negative, is no law (`mul(div(x, y), y) = x`). Operands may be
repeated along axes, or have fewer.
"""

from __future__ import annotations

import itertools

from soapstone.ir.law import Form, Law

_TRANSFORMERS = "operators of transformers"


def ranks(names: str, *each: str) -> tuple[str, ...]:
    """Return ranks of variables: `ranks("x y", "32")` is `("x=3 y=2",)`."""
    words = names.split()
    return tuple(" ".join(f"{n}={r}" for n, r in zip(words, digits)) for digits in each)


def any_ranks(names: str) -> tuple[str, ...]:
    """Return all ranks from 1 to 3 of each variable, and 4 of all."""
    count = len(names.split())
    each = ("".join(map(str, r)) for r in itertools.product((1, 2, 3), repeat=count))
    return ranks(names, *each, "4" * count)


def law(name: str, text: str, *ranks: str, where: tuple[str, ...] = ()) -> Law:
    """Return a law of transformers' operators."""
    return Law(name, text, where, ranks, _TRANSFORMERS)


def function_laws(f: str) -> tuple[Law, ...]:
    """Return the laws of a function of each element: it commutes with moving elements."""
    return (
        law(f"{f}-transpose", f"{f}(transpose(x)) = transpose({f}(x))", *ranks("x", *"234")),
        law(f"{f}-concat", f"{f}(concat[a](x, y)) = concat[a]({f}(x), {f}(y))"),
        law(f"{f}-merge", f"{f}(merge(x)) = merge({f}(x))", *ranks("x", "3")),
    )


def moved_laws(f: str) -> tuple[Law, ...]:
    """Return the laws of an operation on two elements: it commutes with moving elements."""
    return (
        law(
            f"{f}-transpose",
            f"{f}(transpose(x), transpose(y)) = transpose({f}(x, y))",
            *ranks("x y", "22", "32", "23", "33", "44"),
        ),
        law(
            f"{f}-concat",
            f"{f}(concat[a](x, y), concat[a](z, w)) = concat[a]({f}(x, z), {f}(y, w))",
            *ranks("x y z w", "1111", "2222", "3333", "3322", "2233"),
        ),
    )


def repeated_laws(f: str, commutative: bool = False) -> tuple[Law, ...]:
    """Return the laws of an operation of which one operand is repeated along an axis."""
    three = ranks("x y z", "111", "221", "222", "331", "332", "333")
    right = (
        law(
            f"{f}-concat-repeated",
            f"{f}(concat[a](x, y), z) = concat[a]({f}(x, z), {f}(y, z))",
            *three,
        ),
        law(
            f"{f}-merge",
            f"{f}(merge(x), merge(y)) = merge({f}(x, y))",
            *ranks("x y", "33"),
        ),
        law(
            f"{f}-merge-repeated",
            f"{f}(merge(x), y) = merge({f}(x, y))",
            *ranks("x y", "31", "32"),
        ),
    )
    left = (
        law(
            f"{f}-repeated-concat",
            f"{f}(z, concat[a](x, y)) = concat[a]({f}(z, x), {f}(z, y))",
            *three,
        ),
        law(
            f"{f}-repeated-merge",
            f"{f}(y, merge(x)) = merge({f}(y, x))",
            *ranks("x y", "31", "32"),
        ),
    )
    return right if commutative else right + left


def with_attributes(symbol: str, **attributes: float | str) -> tuple[Form, ...]:
    """Return the form of a function of each element whose attributes are these."""
    return (
        Form(
            symbol,
            1,
            {},
            lambda parameters, *specs: attributes,
            lambda given, *specs: [()] if given == attributes else [],
        ),
    )


EXP_FORMS = (Form("exp", 1),)
SQRT_FORMS = (Form("sqrt", 1),)
SIGMOID_FORMS = (Form("sigmoid", 1),)
TANH_FORMS = (Form("tanh", 1),)
SUB_FORMS = (Form("sub", 2),)
DIV_FORMS = (Form("div", 2),)
RSQRT_FORMS = with_attributes("rsqrt", exponent=-0.5)
GELU_FORMS = with_attributes("gelu", approximate="none")

_THREE = any_ranks("x y z")
_ONES = any_ranks("x y ones")[:-1]
_SCALED = ranks("x y w", *(f"{x}{y}0" for x in "123" for y in "123"), "440")

EXP_LAWS = (
    law("exp-sum", "exp(add(x, y)) = mul(exp(x), exp(y))", *any_ranks("x y")),
    law("exp-difference", "exp(sub(x, y)) = div(exp(x), exp(y))", *any_ranks("x y")),
    *function_laws("exp"),
)
SQRT_LAWS = function_laws("sqrt")
SIGMOID_LAWS = function_laws("sigmoid")
TANH_LAWS = function_laws("tanh")
GELU_LAWS = function_laws("gelu")
RSQRT_LAWS = (
    law("rsqrt-quotient", "div(x, sqrt(y)) = mul(x, rsqrt(y))", *any_ranks("x y")),
    law("rsqrt-sqrt", "div(sqrt(x), x) = rsqrt(x)", *ranks("x", *"1234")),
    law("sqrt-inverse", "sqrt(div(ones, x)) = rsqrt(x)", *any_ranks("ones x")),
    law("rsqrt-inverse", "rsqrt(div(ones, x)) = mul(x, rsqrt(x))", *any_ranks("ones x")),
    law("inverse-rsqrt", "div(ones, rsqrt(x)) = mul(x, rsqrt(x))", *any_ranks("ones x")),
    law("rsqrt-ones", "div(ones, sqrt(x)) = rsqrt(x)", *any_ranks("ones x")),
    *function_laws("rsqrt"),
)
DIV_LAWS = (
    law("div-sum", "div(add(x, y), z) = add(div(x, z), div(y, z))", *_THREE),
    law("div-difference", "div(sub(x, y), z) = sub(div(x, z), div(y, z))", *_THREE),
    law("div-product", "div(mul(x, y), z) = mul(x, div(y, z))", *_THREE),
    law("div-quotient", "div(div(x, y), z) = div(x, mul(y, z))", *_THREE),
    law("div-ones", "div(x, ones) = x", *any_ranks("x ones")),
    law("div-sum-self", "div(add(x, y), y) = add(div(x, y), ones)", *_ONES),
    law("div-difference-self", "div(sub(x, y), y) = sub(div(x, y), ones)", *_ONES),
    law("div-self-difference", "div(sub(x, y), x) = sub(ones, div(y, x))", *_ONES),
    law("div-smul", "div(smul(x, w), y) = smul(div(x, y), w)", *_SCALED),
    *moved_laws("div"),
    *repeated_laws("div"),
)
SUB_LAWS = (
    law("sub-sum", "sub(add(x, y), z) = add(x, sub(y, z))", *_THREE[:-1]),
    law("sub-difference", "sub(sub(x, y), z) = sub(x, add(y, z))", *_THREE[:-1]),
    law("difference-sub", "sub(x, sub(y, z)) = sub(add(x, z), y)", *_THREE[:-1]),
    law("sub-cancel", "sub(add(x, y), y) = x", *any_ranks("x y")),
    law("sub-cancel-ones", "sub(add(x, y), y) = mul(x, ones)", *_ONES),
    law("sub-plus-self", "sub(x, add(x, y)) = sub(ones, add(y, ones))", *_ONES),
    law("sub-ones", "sub(x, mul(y, ones)) = sub(x, y)", *_ONES),
    law("ones-sub", "sub(mul(x, ones), y) = sub(x, y)", *_ONES),
    law("mul-difference", "mul(sub(x, y), z) = sub(mul(x, z), mul(y, z))", *_THREE[:-1]),
    law("smul-difference", "smul(sub(x, y), w) = sub(smul(x, w), smul(y, w))", *_SCALED),
    *moved_laws("sub"),
    *repeated_laws("sub"),
)

ADD_BROADCAST_LAWS = (*repeated_laws("add", commutative=True),)
MUL_BROADCAST_LAWS = (*repeated_laws("mul", commutative=True),)
