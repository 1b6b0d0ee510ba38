"""The language of rules: what operators declare, and what of their calls terms can say."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from helpers.rules_calls import PAPER, SIZES, arrays, uses
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.ir.errors import GraphError
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.spec import OpSpec, operator, operators
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Value, parse
from soapstone.rules.algebra.evaluate import apply
from soapstone.search.rules import language

# declarations


def test_the_paper_is_covered() -> None:
    assert set(language.forms()) >= PAPER
    assert set(language.constants()) == {
        *("ones", "identity_matrix", "identity_kernel", "pool_kernel")
    }
    table = [law for law in language.laws() if law.source.startswith("Table 2.2")]
    assert len(table) == 43


def test_laws_are_in_order_and_found_by_name() -> None:
    names = [law.name for law in language.laws()]
    assert names == sorted(set(names))
    associative = language.laws_by_name()["matmul-associative"]
    assert associative.sides[0] == parse("matmul(x, matmul(y, z))")


def test_what_follows_from_other_laws_names_them() -> None:
    names = {law.name for law in language.laws()}
    assert all(set(law.follows) <= names - {law.name} for law in language.laws())


def test_commutative_operators() -> None:
    assert language.commutative() == {"add", "mul"}


def test_concatenation_is_not_associative() -> None:
    """Its value would be, but what a split of it gives would not."""
    forbidden = parse("concat[a](concat[a](x, y), z)"), parse("concat[a](x, concat[a](y, z))")
    for law in language.laws():
        assert set(law.sides) != set(forbidden)


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (Law("bad", "relu(x) = reul(x)"), "symbol 'reul' is not declared"),
        (Law("bad", "relu(x, y) = x"), "2 operands found, 1 needed"),
        (Law("bad", "conv2d[g,s,p](x, y) = x"), "3 parameters found, 4 needed"),
        (Law("bad", "conv2d[g,s,sane,c](x, y) = x"), "parameter p is 'sane'"),
        (Law("bad", "concat[1](x, y) = x"), "parameter a is 1"),
        (Law("bad", "relu(x)"), "`left = right` needed"),
        (Law("bad", "relu(x = x"), "found"),
        (Law("bad", "relu(x) = x", ("dim(y,-1) = 1",)), "y found, a term of the law needed"),
        (Law("bad", "relu(x) = x", ("k = 1",)), "'k' is no parameter"),
        (Law("bad", "relu(x) = x", ("whatever(x)",)), "whatever"),
        (Law("bad", "add(x, y) = x", (), ("x=2",)), "a number for each of x, y needed"),
        (Law("bad", "mul(x, ones) = x", (), ("x=2",)), "a number for each of ones, x needed"),
        (Law("bad", "add(x, y) = add(y, x)"), "law 'add-commutative' says the same"),
        (Law("relu-idempotent", "relu(relu(relu(x))) = relu(x)"), "is declared twice"),
        (Law("bad", "relu(relu(x)) = relu(x)"), "law 'relu-idempotent' says the same"),
    ],
)
def test_a_wrong_declaration_names_operator_and_law(law: Law, message: str) -> None:
    wrong = [
        replace(spec, laws=(*spec.laws, law)) if spec.name == "relu" else spec
        for spec in operators()
    ]
    with pytest.raises(GraphError) as error:
        language.language(wrong)
    assert "operator 'relu'" in str(error.value) and message in str(error.value)


def test_a_symbol_is_declared_once() -> None:
    relu, tanh = operator("relu"), operator("tanh")
    for again in (
        replace(tanh, forms=(Form("relu", 1),)),
        replace(tanh, constants=(Constant("relu", None, {}, lambda parameters, shape: None),)),
    ):
        with pytest.raises(GraphError, match="operator 'tanh': symbol 'relu' is declared twice"):
            language.language([relu, replace(again, laws=())])


def test_laws_are_shown() -> None:
    shown = CliRunner().invoke(app, ["ops", "--json"])
    rows = {row["name"]: row for row in json.loads(shown.stdout)["operators"]}
    assert rows["relu"]["laws"]["relu-idempotent"] == "relu(relu(x)) = relu(x)"
    assert "where dim(y,-4)*h = dim(w,-4)*g" in rows["conv2d"]["laws"]["conv2d-groups"]
    assert rows["conv1d"]["laws"] == {}


# forms


@pytest.mark.parametrize("symbol", sorted(PAPER))
def test_attributes_are_read_back(symbol: str) -> None:
    """What a form says is read as that; every other reading computes the same."""
    declared = language.forms()[symbol]
    fitting = 0
    for parameters, shapes in uses(symbol):
        specs = [TensorSpec(shape, "float64") for shape in shapes]
        given = {"sizes": SIZES} if symbol.startswith("split") else {}
        attributes = declared.form.attributes(parameters, *specs, **given)
        operands = arrays(*shapes)
        result = apply(symbol, parameters, operands, given.get("sizes"))
        if attributes is None:
            assert result is None
            continue
        readings = list(declared.form.read(declared.spec.normalise(attributes), *specs))
        assert parameters in readings
        assert len(readings) == len(set(readings))
        if result is None:  # the operator itself refuses
            continue
        fitting += 1
        for other in readings:
            found = apply(symbol, other, operands, given.get("sizes"))
            assert found is not None
            np.testing.assert_allclose(found, result, rtol=1e-12, atol=1e-12)
    assert fitting >= 2


def test_one_call_may_be_said_in_several_ways() -> None:
    def read(symbol: str, *shapes: tuple[int, ...], **attributes: Any) -> set[tuple[Value, ...]]:
        declared = language.forms()[symbol]
        specs = [TensorSpec(shape) for shape in shapes]
        return set(declared.form.read(declared.spec.normalise(attributes), *specs))

    point = {"groups": 4, "bias": False}
    assert read("conv2d", (1, 4, 5, 5), (4, 1, 1, 1), **point) == {
        (groups, 1, padding, "none") for groups in (4, "depthwise") for padding in ("same", "valid")
    }
    assert read("conv2d", (1, 4, 5, 5), (8, 1, 3, 3), **point) == {(4, 1, "valid", "none")}
    same = {"groups": 1, "bias": False, "padding": (1, 0, 1, 0), "activation": "relu"}
    assert read("conv2d", (1, 4, 5, 5), (8, 4, 3, 1), **same) == {(1, 1, "same", "relu")}
    pool = {"kernel": (2, 3), "stride": (2, 2)}
    assert read("avg_pool2d", (1, 1, 4, 4), **pool) == {
        ("2x3", 2, "valid", "all"),
        ("2x3", 2, "valid", "inside"),
    }
    padded = {"kernel": (3, 3), "padding": (1, 1, 1, 1), "include_pad": False}
    assert read("avg_pool2d", (1, 1, 4, 4), **padded) == {("3x3", 1, "same", "inside")}


@pytest.mark.parametrize(
    ("symbol", "shapes", "attributes"),
    [
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3), (4,)), {"bias": True}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), {"bias": False, "dilation": (2, 2)}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), {"bias": False, "stride": (1, 2)}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), {"bias": False, "padding": (1, 1, 0, 0)}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), {"bias": False, "padding": (2, 2, 2, 2)}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 3, 3)), {"bias": False, "activation": "gelu"}),
        ("conv2d", ((1, 2, 5, 5), (4, 2, 4, 4)), {"bias": False, "padding": (1, 1, 2, 2)}),
        ("avg_pool2d", ((1, 2, 5, 5),), {"kernel": (3, 3), "ceil_mode": True}),
        ("avg_pool2d", ((1, 2, 5, 5),), {"kernel": (3, 3), "stride": (1, 2)}),
        ("max_pool2d", ((1, 2, 5, 5),), {"kernel": (3, 3), "indices": True}),
        ("max_pool2d", ((1, 2, 5, 5),), {"kernel": (3, 3), "padding": (1, 1, 0, 0)}),
        ("max_pool2d", ((1, 2, 5, 5),), {"kernel": (2, 2), "dilation": (2, 2)}),
        ("transpose", ((1, 2, 5),), {"permutation": (1, 0, 2)}),
        ("matmul", ((2, 3), (4, 3)), {"transpose_b": True}),
        ("smul", ((2, 3), (2, 3)), {}),
        ("split0", ((6, 3),), {"axis": 0, "sizes": (1, 2, 3)}),
        (
            "enlarge",
            ((2, 2, 1, 1),),
            {"low": (0, 0, 1, 1), "high": (0, 0, 1, 0), "interior": (0,) * 4},
        ),
        (
            "enlarge",
            ((2, 2, 1, 1),),
            {"low": (0, 1, 1, 1), "high": (0, 1, 1, 1), "interior": (0,) * 4},
        ),
        (
            "enlarge",
            ((2, 2, 1, 1),),
            {"low": (0, 0, 1, 1), "high": (0, 0, 1, 1), "interior": (0,) * 4, "value": 1.0},
        ),
    ],
)
def test_what_a_form_cannot_say_is_not_read(
    symbol: str, shapes: tuple[tuple[int, ...], ...], attributes: dict[str, Any]
) -> None:
    declared = language.forms()[symbol]
    specs = [TensorSpec(shape) for shape in shapes]
    full = declared.spec.normalise(attributes)
    declared.spec.bind(specs, full)  # the operator itself takes it
    assert list(declared.form.read(full, *specs)) == []


def test_specs_have_no_prose_for_laws() -> None:
    for spec in operators():
        assert isinstance(spec, OpSpec) and all(isinstance(law, Law) for law in spec.laws)
