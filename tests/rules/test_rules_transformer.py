"""The operators of transformers: their forms and laws, exact validation, and evaluation in bulk."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import z3

from soapstone.ir.law import Law
from soapstone.ir.term import Term, parse, subterms
from soapstone.rules.algebra import evaluate
from soapstone.rules.enumeration.engine import enumerate_space
from soapstone.rules.enumeration.real import RealEvaluator
from soapstone.rules.enumeration.space import OperatorUse, Space, inputs
from soapstone.rules.enumeration.transformer_space import transformer
from soapstone.rules.laws import symbolic
from soapstone.rules.laws.element import Elements, Undecided, elements
from soapstone.rules.laws.field import Field
from soapstone.rules.laws.validate import is_polynomial, validate
from soapstone.search.rules import language, shapes

SYMBOLS = (
    *("softmax", "exp", "div", "sub", "sqrt", "rsqrt", "reduce_sum", "reduce_mean", "merge"),
    *("sigmoid", "tanh", "gelu", "layer_norm", "matmul"),
)
LAWS = [law for law in language.laws() if law.source == "operators of transformers"]
REAL = [law for law in LAWS if not is_polynomial(law)]


def types(**given: tuple[int, ...]) -> dict[Term, shapes.Type]:
    return {parse(name): shapes.tensor_type(shape) for name, shape in given.items()}


# Forms


@pytest.mark.parametrize(
    ("text", "oracle"),
    [
        ("exp(x)", np.exp),
        ("sqrt(x)", np.sqrt),
        ("rsqrt(x)", lambda x: 1 / np.sqrt(x)),
        ("sigmoid(x)", lambda x: 1 / (1 + np.exp(-x))),
        ("tanh(x)", np.tanh),
        ("gelu(x)", lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
        ("reduce_sum[-2](x)", lambda x: x.sum(axis=1, keepdims=True)),
        ("reduce_mean[-3](x)", lambda x: x.mean(axis=0, keepdims=True)),
        ("softmax[-2](x)", lambda x: np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)),
        ("merge(x)", lambda x: x.reshape(6, 4)),
        ("sub(x, exp(x))", lambda x: x - np.exp(x)),
        ("div(x, exp(x))", lambda x: x / np.exp(x)),
    ],
)
def test_a_form_computes_what_numpy_does(text: str, oracle: object) -> None:
    x = np.random.default_rng(0).uniform(0.1, 2.0, (2, 3, 4))
    (found,) = evaluate.evaluate([parse(text)], {parse("x"): x}) or (None,)
    np.testing.assert_allclose(found, oracle(x), rtol=1e-12)  # type: ignore[operator]


def test_a_batched_product_broadcasts_and_layer_norm_normalises() -> None:
    rng = np.random.default_rng(1)
    arrays = {parse(n): rng.uniform(-1, 1, s) for n, s in (("x", (2, 3, 4)), ("w", (4, 5)))}
    arrays |= {parse(n): rng.uniform(-1, 1, 4) for n in "gb"}
    x, w, g, b = (arrays[parse(name)] for name in "xwgb")
    terms = [parse("matmul(x, w)"), parse("layer_norm(x, g, b)")]
    product, normal = evaluate.evaluate(terms, arrays) or ()
    np.testing.assert_allclose(product, np.einsum("bmk,kn->bmn", x, w))
    centred = x - x.mean(axis=2, keepdims=True)
    wanted = centred / np.sqrt(x.var(axis=2, keepdims=True) + 1e-5) * g + b
    np.testing.assert_allclose(normal, wanted)


@pytest.mark.parametrize("symbol", SYMBOLS)
def test_a_form_reads_back_the_attributes_it_says(symbol: str) -> None:
    from soapstone.ir.tensor import TensorSpec

    declared = language.forms()[symbol]
    spec, form = declared.spec, declared.form
    shape = {"layer_norm": [(2, 3, 4), (4,), (4,)], "matmul": [(2, 3, 4), (4, 5)]}
    specs = [TensorSpec(s, "float32") for s in shape.get(symbol, [(2, 3, 4)] * form.operands)]
    told = 0
    for values in itertools.product(*form.parameters.values()):
        attributes = form.attributes(values, *specs)
        if attributes is not None:
            told += 1
            assert tuple(values) in list(form.read(spec.normalise(attributes), *specs))
            if symbol != "transpose":
                signature = spec.bind(specs, spec.normalise(attributes))
                plain = tuple(shapes.tensor_type(s.shape) for s in specs)
                typed = shapes.concrete(symbol, tuple(values), plain)
                assert typed is not None and typed.shape == signature.outputs[form.output].shape
    assert told


def test_other_attributes_are_not_read_as_the_form() -> None:
    from soapstone.ir.tensor import TensorSpec

    x = TensorSpec((2, 3, 4), "float32")
    forms = language.forms()
    assert not list(forms["rsqrt"].form.read({"exponent": 0.5}, x))
    assert not list(forms["gelu"].form.read({"approximate": "tanh"}, x))
    assert not list(forms["reduce_sum"].form.read({"axes": (1,), "keepdims": False}, x))
    assert not list(forms["reduce_mean"].form.read({"axes": (0, 1), "keepdims": True}, x))
    assert not list(forms["merge"].form.read({"shape": (2, 12)}, x))
    assert not list(forms["layer_norm"].form.read({"epsilon": 1e-3, "axis": -1}, x))


# Laws


@pytest.mark.parametrize("law", LAWS, ids=[law.name for law in LAWS])
def test_a_law_holds(law: Law) -> None:
    found = validate(law, 2)
    assert found.holds, str(found)


def test_laws_speak_of_every_operator() -> None:
    spoken = {term.symbol for law in LAWS for side in law.sides for term in side.subterms()}
    assert set(SYMBOLS) <= spoken


WRONG = {
    "exp-add": Law("w", "exp(add(x, y)) = add(exp(x), exp(y))", ranks=("x=1 y=1",)),
    "own-axis": Law("w", "softmax[a](concat[a](x, y)) = concat[a](softmax[a](x), softmax[a](y))"),
    "root-of-square": Law("w", "sqrt(mul(x, x)) = x"),
    "square-of-root": Law("w", "mul(sqrt(x), sqrt(x)) = x"),
    "root-of-product": Law("w", "sqrt(mul(x, y)) = mul(sqrt(x), sqrt(y))"),
    "shift": Law("w", "softmax[a](add(x, y)) = softmax[a](x)", ranks=("x=2 y=2",)),
    "mean": Law("w", "reduce_mean[a](exp(x)) = exp(reduce_mean[a](x))", ranks=("x=2",)),
    "quotient": Law("w", "div(x, add(y, z)) = add(div(x, y), div(x, z))", ranks=("x=1 y=1 z=1",)),
    "sigmoid": Law("w", "sigmoid(add(x, y)) = sigmoid(x)", ranks=("x=1 y=1",)),
    "norm": Law("w", "layer_norm(mul(x, x), y, z) = layer_norm(x, y, z)", ranks=("x=2 y=1 z=1",)),
    "sums": Law("w", "reduce_sum[a](exp(x)) = exp(reduce_sum[a](x))", ranks=("x=2",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_law_is_refuted_by_numbers(name: str) -> None:
    found = validate(WRONG[name], 3)
    assert not found.holds
    difference = found.counterexample
    assert isinstance(difference, symbolic.Difference) and difference.numbers is not None
    # The counterexample is one: the operators compute different numbers there.
    left, right = difference.sides
    again = [evaluate.compare([left], [right], difference.types, seed) for seed in range(4)]
    assert any(each is not None for each in again)


def test_what_is_only_true_where_a_divisor_is_not_zero_is_no_law() -> None:
    found = validate(Law("w", "mul(div(x, y), y) = x", ranks=("x=1 y=1",)), 2)
    assert not found.holds
    assert "not decided" in str(found.counterexample)  # numbers at random are never zero


# Exact arithmetic


def test_expressions_agree_with_numbers() -> None:
    """What the field finds equal is equal at random inputs, and what it does not, differs."""
    field = Field()
    x, y = (elements(field, name, (2,)) for name in "xy")
    forms = [
        (x + y) * (x - y) - (x * x - y * y),
        np.exp(x + y) - np.exp(x) * np.exp(y),
        np.exp(2 * x) - np.exp(x) ** 2,
        x / y + y / x - (x * x + y * y) / (x * y),
        np.sqrt(x * x + 1) ** 2 - x * x - 1,
        1 / np.sqrt(x * x + 1) - np.sqrt(x * x + 1) / (x * x + 1),
    ]
    zero = field.number(0)
    for form in forms:
        for element in np.asarray(form):
            assert not field.form(element)[0]  # the numerator has no terms
    for form in (np.exp(x) - x, np.sqrt(x * x) - x, x / y - y / x, np.tanh(x) - x):
        assert not field.equal(np.asarray(form)[0], zero)


def test_a_sign_is_not_decided() -> None:
    x = elements(Field(), "x", (2,))
    for ask in (lambda: x > 0, lambda: np.abs(x), lambda: np.where(x, 1, 0), lambda: float(x[0])):
        with pytest.raises(Undecided):
            ask()
    assert isinstance(x, Elements)


def test_the_domain_is_part_of_a_function() -> None:
    field = Field()
    x, y = (elements(field, name, (1,))[0] for name in "xy")
    assert not field.equal(x * y / y, x)
    assert not field.equal(x.sqrt() * x.sqrt(), x)
    assert field.equal(x / y / x, x / (y * x))
    assert field.equal((x.exp() + y.exp()) / (x.exp() + y.exp()), field.number(1))  # positive


def _z3_agrees(law: Law) -> bool:
    """Return whether Z3 finds no real inputs at which the scalars of a law's sides differ."""
    defined: list[z3.BoolRef] = []
    roots: dict[Term, z3.ArithRef] = {}

    def value(term: Term) -> z3.ArithRef:
        if not term.operands:
            return z3.RealVal(1) if term.symbol == "ones" else z3.Real(term.symbol)
        args = [value(operand) for operand in term.operands]
        match term.symbol:
            case "add":
                return args[0] + args[1]
            case "sub":
                return args[0] - args[1]
            case "mul" | "smul":
                return args[0] * args[1]
            case "div":
                defined.append(args[1] != 0)
                return args[0] / args[1]
            case "sqrt" | "rsqrt":
                root = roots.setdefault(term.operands[0], z3.Real(f"root{len(roots)}"))
                defined.extend([root >= 0, root * root == args[0]])
                if term.symbol == "sqrt":
                    return root
                defined.append(root != 0)
                return 1 / root
        raise AssertionError(term)

    left, right = map(value, law.sides)
    solver = z3.Solver()
    solver.set("timeout", 5000)
    solver.add(*defined, left != right)
    return bool(solver.check() == z3.unsat)


SCALAR = {"add", "sub", "mul", "smul", "div", "sqrt", "rsqrt"}


def test_z3_agrees_on_scalar_identities() -> None:
    spoken = {
        law.name: law
        for law in LAWS
        if all(t.symbol in SCALAR for t in subterms(law.sides) if t.operands)
    }
    assert len(spoken) >= 15
    assert [name for name, law in spoken.items() if not _z3_agrees(law)] == []
    assert not _z3_agrees(WRONG["root-of-square"]) and not _z3_agrees(WRONG["quotient"])


# Evaluation in bulk


def _one(space: Space) -> tuple[RealEvaluator, list[int]]:
    evaluator = RealEvaluator()
    ids = evaluator.begin(space, tuple(range(len(space.inputs))))
    return evaluator, ids.tolist()


def test_equal_values_have_one_id_and_roots_of_negatives_none_else() -> None:
    space = Space("s", inputs("x y batch 2x3x4; c batch 2x3x1"), (OperatorUse("exp"),), 2)
    evaluator, ids = _one(space)
    assert len(set(ids)) == 3
    plain = [shapes.tensor_type(each.shape) for each in space.inputs]

    def node(symbol: str, a: int, b: int = -1, parameters: tuple[int, ...] = ()) -> tuple[int, int]:
        """Return the id of an operator on tensors, and its number once stored."""
        operands = tuple(plain[t] for t in (a, b) if t >= 0)
        type_ = shapes.concrete(symbol, parameters, operands)
        assert type_ is not None
        use = OperatorUse(symbol, parameters, ((("batch",) * (len(operands) + 1)),))
        number = [p.shape for p in plain].index(type_.shape)
        handle = np.array([evaluator.prepare(use, operands, (0 if number < 2 else 2,))])
        args = handle, np.array([a]), np.array([b])
        found = int(evaluator.values(*args)[0, 0])
        evaluator.store(*args)
        plain.append(type_)
        return found, len(plain) - 1

    exp_x, exp_y = node("exp", 0), node("exp", 1)
    total = node("add", 0, 1)
    assert node("exp", total[1])[0] == node("mul", exp_x[1], exp_y[1])[0]
    square = node("mul", 0, 0)
    assert node("sqrt", square[1])[0] != ids[0]  # the absolute value
    root = node("sqrt", 0)
    assert node("mul", root[1], root[1])[0] != ids[0]  # undefined where x is negative
    product = node("mul", 0, 1)
    assert node("div", product[1], 1)[0] != ids[0]  # undefined where y is zero
    shifted = node("sub", 0, 2)
    a = node("softmax", shifted[1], -1, (-1,))[0]
    assert a == node("softmax", 0, -1, (-1,))[0] != node("softmax", 0, -1, (-2,))[0]


def test_the_space_finds_the_rules_of_transformers() -> None:
    """Two graphs of at most two operators are in one group exactly if they are one function."""
    found = enumerate_space(transformer().with_max_operators(2), RealEvaluator())
    group: dict[str, int] = {}
    for number in range(len(found.starts) - 1):
        for graph in range(found.starts[number], found.starts[number + 1]):
            group["; ".join(sorted(str(found.term(t)) for t in found.outputs(graph)))] = number
    for left, right in (
        ("softmax[-1](sub(x1, c))", "softmax[-1](x1)"),
        ("div(x1, sqrt(x2))", "mul(x1, rsqrt(x2))"),
        ("matmul(div(x1, c), w1)", "div(matmul(x1, w1), c)"),
        ("matmul(merge(x1), w1)", "merge(matmul(x1, w1))"),
        ("transpose(softmax[-1](x1))", "softmax[-2](transpose(x1))"),
        ("reduce_sum[-2](matmul(x1, w1))", "matmul(reduce_sum[-2](x1), w1)"),
        ("div(div(x1, c), x2)", "div(x1, mul(x2, c))"),
    ):
        keys = [k for k in (left, right) if k in group]
        assert len(keys) == 2 and group[left] == group[right], (left, right)
    # What cancels is in no group: it would equal whatever else cancels.
    assert not {"sub(x1, sub(x1, c))", "mul(x1, div(c, x1))"} & set(group)
    # What one group holds agrees on other inputs, of other signs.
    given = {each.term: shapes.tensor_type(each.shape) for each in found.space.inputs}
    rng = np.random.default_rng(5)
    for number in rng.choice(len(found.starts) - 1, 60, replace=False):
        first, *rest = range(found.starts[number], found.starts[number + 1])
        one = [found.term(t) for t in found.outputs(first)]
        for graph in rest[:2]:
            other = [found.term(t) for t in found.outputs(graph)]
            orders = itertools.permutations(other)
            assert any(_equal(one, order, given) for order in orders), (one, other)


def _equal(one: list[Term], other: tuple[Term, ...], given: dict[Term, shapes.Type]) -> bool:
    here = [shapes.infer(term, given) for term in one]
    there = [shapes.infer(term, given) for term in other]
    return here == there and evaluate.compare(one, other, given, seed=7) is None


def test_nothing_false_is_in_one_group() -> None:
    space = Space(
        "roots",
        inputs("x y batch 2x3x4"),
        tuple(OperatorUse(s) for s in ("sqrt", "mul", "div", "exp", "sub")),
        3,
        repeated=True,
    )
    found = enumerate_space(space, RealEvaluator())
    pairs = {}
    for number in range(len(found.starts) - 1):
        for graph in range(found.starts[number], found.starts[number + 1]):
            terms = "; ".join(str(found.term(t)) for t in found.outputs(graph))
            pairs[terms] = number
    assert pairs["exp(sub(x, y))"] == pairs["div(exp(x), exp(y))"]
    assert pairs.get("sqrt(mul(x, y))", -1) != pairs.get("mul(sqrt(x), sqrt(y))", -2)
    collapsed = {str(term): part for term, part in found.collapses}
    assert "mul(div(x, y), y)" not in collapsed and "mul(y, div(x, y))" not in collapsed
    assert "sqrt(mul(x, x))" not in collapsed
    given = {each.term: shapes.tensor_type(each.shape) for each in space.inputs}
    assert collapsed
    for text, term in collapsed.items():
        assert evaluate.compare([parse(text)], [term], given, seed=7) is None, text
