"""The language of terms: texts, matching, instantiation."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.term import (
    Term,
    instantiate,
    is_variable,
    match,
    parameter_variables,
    parse,
    size,
    subterms,
    variables,
)

_values = st.one_of(st.integers(-4, 64), st.sampled_from(["same", "none", "s", "p2", "3x3", "g+h"]))
_leaves = st.one_of(
    st.sampled_from("xyzw").map(Term),
    st.sampled_from(["x1", "w2"]).map(Term),
    st.just(Term("ones")),
    st.just(Term("pool_kernel", ("3x3",))),
)


def _apply(operands: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    return st.builds(
        Term,
        st.sampled_from(["matmul", "add", "concat", "conv2d", "split0", "split1"]),
        st.lists(_values, max_size=3).map(tuple),
        st.lists(operands, min_size=1, max_size=3).map(tuple),
    )


terms = st.recursive(_leaves, _apply, max_leaves=8)


@given(terms)
def test_a_term_is_what_its_text_says(term: Term) -> None:
    assert parse(str(term)) == term
    assert hash(parse(str(term))) == hash(term)


@given(terms)
def test_subterms_come_after_their_operands_each_once(term: Term) -> None:
    order = list(subterms([term]))
    assert len(order) == len(set(order)) and order[-1] == term
    for position, part in enumerate(order):
        assert all(operand in order[:position] for operand in part.operands)


@given(terms, terms)
def test_a_pattern_matches_its_instances(pattern: Term, value: Term) -> None:
    bindings: dict[str, Term | int | str] = dict.fromkeys(variables([pattern]), value)
    bindings |= dict.fromkeys(parameter_variables([pattern]), 3)
    found = match(pattern, instantiate(pattern, bindings), {"g": 3, "h": 3})
    assert found is not None
    assert {name: found[name] for name in bindings} == bindings


@settings(  # which no busy machine changes
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(terms, st.data())
def test_replacing_a_subterm(term: Term, data: st.DataObject) -> None:
    path: list[int] = []
    part = term
    while part.operands and data.draw(st.booleans()):
        path.append(data.draw(st.integers(0, len(part.operands) - 1)))
        part = part.operands[path[-1]]
    assert term.at(path) == part
    new = term.replaced(path, Term("q"))
    assert new.at(path) == Term("q") and new.replaced(path, part) == term


def test_a_variable_stands_for_one_tensor() -> None:
    pattern = parse("add(x, mul(x, y))")
    assert match(pattern, parse("add(a, mul(a, b))"), {}) == {"x": Term("a"), "y": Term("b")}
    assert match(pattern, parse("add(a, mul(b, a))"), {}) is None
    assert match(pattern, parse("add(a, b)"), {}) is None


def test_parameters_bind_and_add_up() -> None:
    left, right = Law(
        "grouping", "concat[-3](conv2d[g,s](x, y), conv2d[h,s](z, w)) = conv2d[g+h,s](x, y)"
    ).sides
    found = match(left, parse("concat[-3](conv2d[1,2](a, b), conv2d[3,2](c, d))"), {})
    assert found is not None
    assert str(instantiate(right, found)) == "conv2d[4,2](a, b)"
    assert match(left, parse("concat[-3](conv2d[1,2](a, b), conv2d[3,1](c, d))"), {}) is None
    assert match(right, parse("conv2d[4,2](a, b)"), {"g": 1, "h": 3}) is not None
    assert match(right, parse("conv2d[4,2](a, b)"), {"g": 1, "h": 2}) is None
    depthwise = match(left, parse("concat[-3](conv2d[depthwise,1](a, b), conv2d[1,1](c, d))"), {})
    assert depthwise is not None
    with pytest.raises(GraphError, match=r"g\+h"):
        instantiate(right, depthwise)


@pytest.mark.parametrize(
    ("text", "operators"),
    [
        ("x", 0),
        ("matmul(x, identity_matrix)", 1),
        ("add(relu(x), relu(x))", 2),
        ("add(split0[-1](concat[-1](x, y)), split1[-1](concat[-1](x, y)))", 3),
        ("add(split0[-1](x), split0[-2](x))", 3),
    ],
)
def test_equal_operators_count_once(text: str, operators: int) -> None:
    assert size([parse(text)]) == operators


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a symbol needed"),
        ("add(x", "'the end' found, ',' or '\\)' needed"),
        ("add(x))", "the end needed"),
        ("conv[1(x)", "',' or '\\]' needed"),
        ("add(x; y)", "';' found at 5"),
        ("f[](x)", "a value needed"),
        ("f[g+](x)", "a variable needed"),
        ("f(" * 200 + "x" + ")" * 200, "nested more than 100 deep"),
    ],
)
def test_texts_that_are_no_terms(text: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        parse(text)


def test_variables_are_single_letters() -> None:
    assert is_variable("x") and is_variable("w12") and not is_variable("ones")
    assert not is_variable("X") and not is_variable(3) and not is_variable("x_")
    term = parse("conv2d[g,s,same,none](x1, concat[a](y, ones))")
    assert variables([term]) == ("x1", "y") and parameter_variables([term]) == ("a", "g", "s")


def test_a_term_of_another_process_is_found() -> None:
    """A hash that was kept is not sent: that of a text is another in every process."""
    term = parse("concat[-1](matmul(x, y), z)")
    assert {term: 1}
    code = (
        "import pickle, sys; from soapstone.ir.term import parse;"
        "term = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print({parse(str(term)): 'found'}.get(term))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code, pickle.dumps(term).hex()],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == "found"
